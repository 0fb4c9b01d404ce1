"""The node-local DNS cache as ``status`` shows it."""

import json
import socket

import pytest

from cni_hostport.helper.nodecachestate import node_cache


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "node-cache").mkdir()
    return tmp_path


def test_none(tmp_path, folder):
    assert node_cache(tmp_path / "elsewhere") is None
    assert node_cache(folder) is None


def test_what_the_agent_left(folder):
    state = {
        "argv": ["/usr/sbin/unbound", "-d"],
        "addresses": ["169.254.20.10", "fd00::10"],
        "port": 5353,
        "rules": True,
        "fallbacks": 2,
    }
    (folder / "node-cache/test-link.json").write_text(json.dumps(state))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind("\0cni-hostport-node-cache-test-link")
        assert node_cache(folder) == {
            "link": "test-link",
            "addresses": state["addresses"],
            "port": 5353,
            "engine": "unbound",
            "agent": True,
            "rules": True,
            "fallbacks": 2,
        }
    assert node_cache(folder)["agent"] is False


@pytest.mark.parametrize("text", ["", "[]", "{", '{"argv": 5, "addresses": "x", "port": null}'])
def test_a_damaged_file_is_no_reason_to_fail(folder, text):
    (folder / "node-cache/x.json").write_text(text)
    found = node_cache(folder)
    assert (found["engine"], found["addresses"], found["rules"]) == ("none", [], False)
    assert found["port"] == 53
