"""The agent with a live unbound."""

import pytest

from lab.nodecache.cluster import LOCAL, Cluster, until
from lab.stage import BUNDLE

pytestmark = pytest.mark.lab
FROM_SOURCE = True


def test_from_start_to_end(cluster: Cluster) -> None:
    assert cluster.by_cluster()
    agent = cluster.agent("-engine", "unbound").serving()
    assert len(cluster.rules()) == 24
    assert cluster.by_cache()
    assert cluster.by_cache(tcp=True)
    assert cluster.by_cache(where=cluster.node)
    assert cluster.by_cache(where=cluster.node, tcp=True)
    assert cluster.by_cache(LOCAL)
    for _ in range(3):
        assert cluster.dig("same.cluster.local").startswith("10.1.2.3")
    assert cluster.asked().count("same.cluster.local") == 1
    assert agent.stop() == 0, agent.log.read_text()
    assert cluster.rules() == []
    assert not cluster.has_link()
    until(lambda: not cluster.servers())
    assert cluster.by_cluster()


@pytest.mark.skipif(not BUNDLE.exists(), reason=f"no bundle at {BUNDLE}: run ./build.sh")
def test_the_bundle_does_it_too(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound", command=[str(BUNDLE), "node-cache"]).serving()
    assert cluster.by_cache() and cluster.by_cache(where=cluster.node)
    assert agent.metric("cni_hostport_nodecache_rules") == 24
    assert agent.stop() == 0, agent.log.read_text()
    assert cluster.rules() == [] and not cluster.has_link()
