"""One cluster a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.nodecache.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()
