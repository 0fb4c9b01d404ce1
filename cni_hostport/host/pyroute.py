"""Imports from pyroute2 without the import of all of it.

``import pyroute2`` loads its database, its IPSet and WireGuard modules and
sqlite: 5 MB and a tenth of a second that a helper which wants addresses pays at
every start. The package is put in place unexecuted; its modules then load as
they are asked for.
"""

from __future__ import annotations

import importlib.util
import sys


def prepare() -> None:
    """Make ``from pyroute2.x import y`` load x and what it needs, nothing else.

    Raises ModuleNotFoundError where pyroute2 is not installed.
    """
    if "pyroute2" in sys.modules:
        return
    spec = importlib.util.find_spec("pyroute2")
    if spec is None:
        raise ModuleNotFoundError("pyroute2 is not installed")
    sys.modules["pyroute2"] = importlib.util.module_from_spec(spec)
