"""All findings of a node, the worst first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cni_hostport.doctor import netfilter, plugins, state
from cni_hostport.doctor.facts import Facts, Finding

ORDER = ("error", "warning", "info")


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, and what is good to know."""
    found = [*plugins.findings(facts), *netfilter.findings(facts), *state.findings(facts)]
    return sorted(found, key=lambda f: ORDER.index(f.level))


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong; what is only good to know does not count."""
    return all(f.level == "info" for f in findings)
