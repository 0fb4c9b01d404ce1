"""cnitool, the reference client, built from Debian's packages: the demonstration through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "lab" / "demo.py"


@pytest.mark.clients
@pytest.mark.lab
def test_the_whole_life_of_a_host_port_through_cnitool() -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--client", "cnitool"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DID NOT HOLD" not in done.stdout
    assert "every step held" in done.stdout
