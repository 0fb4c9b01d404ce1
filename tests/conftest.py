"""What every run obeys: in CI a skipped test is a failed one, unless the kernel lacks something."""

import os

import pytest

ALLOWED = "kernel lacks"


def _reason(report):
    """Why a test was skipped; pytest keeps (file, line, "Skipped: why")."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


class SkipsAreFailures:
    def __init__(self):
        self.skipped = []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report):
        if report.skipped:
            self._note(report)

    def _note(self, report):
        reason = _reason(report)
        if not reason.startswith(ALLOWED):
            self.skipped.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.skipped:
            terminalreporter.section("skipped, which counts as failed here", red=True)
            for line in self.skipped:
                terminalreporter.line(line)


def pytest_configure(config):
    if os.environ.get("CI") == "true":
        config.pluginmanager.register(SkipsAreFailures(), "skips-are-failures")
