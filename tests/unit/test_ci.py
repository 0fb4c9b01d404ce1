"""In CI a skipped test turns the run red, unless the kernel lacks something."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.calls import ROOT

WAYS = {
    "mark": "@pytest.mark.skip(reason={!r})\ndef test_it(): pass\n",
    "call": "def test_it(): pytest.skip({!r})\n",
    "module": "pytest.skip({!r}, allow_module_level=True)\n",
}


@pytest.mark.parametrize(
    ("reason", "ci", "status"),
    [("no time", "true", 1), ("kernel lacks sctp", "true", 0), ("no time", "", 0)],
)
def test_a_skip(tmp_path, reason, ci, status):
    shutil.copy(os.path.join(ROOT, "tests", "conftest.py"), tmp_path)
    (tmp_path / "test_well.py").write_text("def test_it(): pass\n")
    for name, body in WAYS.items():
        (tmp_path / f"test_{name}.py").write_text("import pytest\n" + body.format(reason))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert done.stdout.count(f": {reason}\n") == (3 if status else 0)
