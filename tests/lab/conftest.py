"""Fixtures of the lab: a backend, a stage, and the bundle that must be there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.stage import BUNDLE, TYPE, Backend, Stage

EVERY = ["nftables", "iptables-nft", "iptables-legacy"]
DATA_PATH = ("test_matrix", "test_reserve", "test_udp")
# Promises in milliseconds are looked at with nothing else on the cores.
TIMED = ("test_bench", "test_concurrency", "test_continuity", "test_healing", "test_repair")
BACKENDS = os.environ.get("LAB_BACKENDS", "nftables").split(",")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is a lab test: it needs root and the bundle."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.lab)
            if item.path.stem in TIMED:
                item.add_marker(pytest.mark.alone)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="the lab needs root"))
            elif getattr(getattr(item, "module", None), "FROM_SOURCE", False):
                continue  # drives a helper run from source: no bundle needed
            elif not BUNDLE.exists() and BUNDLE.name == TYPE:
                item.add_marker(pytest.mark.skip(reason=f"no bundle at {BUNDLE}: run ./build.sh"))


def _names_its_own(metafunc: pytest.Metafunc) -> bool:
    """Whether a test parametrizes `backend` itself (node-cache's are other ones)."""
    marks = metafunc.definition.iter_markers("parametrize")
    return any("backend" in str(mark.args[0]).split(",") for mark in marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Data path and reservation run with every backend; the rest with the default or LAB_BACKENDS'."""
    if "backend" in metafunc.fixturenames and not _names_its_own(metafunc):
        name = metafunc.module.__name__.rpartition(".")[2]
        chosen = EVERY if name in DATA_PATH and "LAB_BACKENDS" not in os.environ else BACKENDS
        metafunc.parametrize("backend", chosen, indirect=True, scope="module")


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend under test; LAB_BACKENDS names others than the default."""
    return Backend.parse(request.param)


@pytest.fixture
def stage(backend: Backend) -> Iterator[Stage]:
    """A fresh node for one test; bridged packets pass the IP hooks, as on a Kubernetes node."""
    made = Stage(backend)
    try:
        yield made
    finally:
        made.close()
