"""Other people's DNAT comes first, whoever was installed first; ours is what is left."""

from __future__ import annotations

import pytest

from lab.node import NODE4, NODE6
from lab.stage import Stage, mapping

PORT = 8080

_NFT = """
table {family} somebody {{
  chain {hook} {{
    type nat hook {hook} priority -100;
    tcp dport {port} dnat to {target}
  }}
}}
"""


def add_rule(stage: Stage, tool: str, hook: str, address: str) -> None:
    """A DNAT rule of somebody else for the port, to port 81 of that address."""
    v6 = ":" in address
    target = f"[{address}]:81" if v6 else f"{address}:81"
    if tool == "nft":
        family = "ip6" if v6 else "ip"
        text = _NFT.format(family=family, hook=hook.lower(), port=PORT, target=target)
        stage.node.nft(text)
        return
    program = tool.replace("iptables", "ip6tables") if v6 else tool
    verb = "-A" if stage.backend.name == "nftables" else "-I"
    stage.node.run(
        program,
        "-t",
        "nat",
        verb,
        hook,
        "-p",
        "tcp",
        "--dport",
        str(PORT),
        "-j",
        "DNAT",
        "--to-destination",
        target,
    )


@pytest.mark.parametrize("when", ["rule before", "rule after"])
@pytest.mark.parametrize("tool", ["iptables-nft", "iptables-legacy", "nft"])
def test_a_dnat_rule_of_somebody_else_wins(stage: Stage, tool: str, when: str) -> None:
    other = stage.pod("elsewhere")
    stage.servers.serve("elsewhere", [("tcp", 81)], netns="elsewhere")
    if when == "rule after":
        stage.pod("web", [mapping(PORT, 80)])
        assert stage.ask(NODE4, PORT).server == "web"
        assert stage.ask(NODE6, PORT).server == "web"
        assert stage.ask(NODE4, PORT, at=None).server == "web"
    for address in (other.ip4, other.ip6):
        add_rule(stage, tool, "PREROUTING", address)
        add_rule(stage, tool, "OUTPUT", address)
    if when == "rule before":
        stage.pod("web", [mapping(PORT, 80)])
        if stage.backend.name == "iptables" and tool != str(stage.backend):
            # both hang at the kernel's fixed -100, where the younger one comes first
            assert stage.ask(NODE4, PORT).server in ("web", "elsewhere")
            return
    assert stage.ask(NODE4, PORT).server == "elsewhere"
    assert stage.ask(NODE6, PORT).server == "elsewhere"
    assert stage.ask(NODE4, PORT, at=None).server == "elsewhere"


def test_connections_that_somebody_else_translated_keep_their_source(stage: Stage) -> None:
    """A neighbour sent to a pod by a cluster rule must not look like the gateway."""
    stage.pod("web", [mapping(PORT, 80)])
    neighbour = stage.pod("neighbour")
    other = stage.pod("elsewhere")
    stage.servers.serve("elsewhere", [("tcp", 81)], netns="elsewhere")
    stage.node.nft(
        "table ip cluster { chain pre { type nat hook prerouting priority -100;\n"
        f"ip daddr 10.96.0.10 tcp dport 80 dnat to {other.ip4}:81\n}}\n}}"
    )
    answer = stage.ask("10.96.0.10", 80, at="neighbour")
    assert (answer.server, answer.source) == ("elsewhere", neighbour.ip4)
