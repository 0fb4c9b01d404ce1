"""What the tests of the clients need, and the reason where it is not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.stage import BUNDLE, TYPE

from clients.realnode import CACHE, ClientNode


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs root, the bundle and the clients."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.clients)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="the clients need root"))
            elif not BUNDLE.exists() and BUNDLE.name == TYPE:
                item.add_marker(pytest.mark.skip(reason=f"no bundle at {BUNDLE}: run ./build.sh"))


@pytest.fixture(scope="module")
def node() -> Iterator[ClientNode]:
    """A node whose processes cannot outlive it."""
    with ClientNode() as made:
        yield made


def newer(path: str) -> Path:
    """A newer client of the cache; skips with setup.sh's reason where there is none."""
    found = CACHE / path
    if not found.exists():
        why = CACHE / "new/missing"
        pytest.skip(why.read_text() if why.exists() else "run tests/clients/setup.sh")
    return found
