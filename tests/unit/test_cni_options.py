"""The plugin's options: defaults, values, and what is refused with field and value."""

from __future__ import annotations

from typing import Any

import pytest
from cni_cases import attachment, config, refused, words

from cni_hostport.model import Options


def options(**keys: Any) -> Options:
    return attachment(config(**keys)).options


OPTIONS = words(
    "backend snat masqAll conditionsV4 conditionsV6 markMasqBit externalSetMarkChain reservePorts"
    " nodeAddresses openForward excludeInterfaces"
)


def test_defaults() -> None:
    assert options() == Options()
    assert options(**dict.fromkeys(OPTIONS)) == Options()
    assert options().exclude_interfaces == ("kube-ipvs0", "nodelocaldns")


def test_values() -> None:
    found = options(
        backend="iptables",
        SNAT=False,
        masqall=True,
        conditionsV4=["!", "-s", "10.0.0.0/8"],
        conditionsV6=["-m", "set", "--match-set", "six", "src"],
        markMasqBit=14,
        reservePorts="try",
        nodeAddresses=["10.0.0.1/8", "10.0.0.0/8", "fd00::/8", "::ffff:192.0.2.0/120"],
        openForward=True,
        excludeInterfaces=["kube-ipvs0", "x", "x"],
    )
    assert found.backend == "iptables"
    assert not found.snat
    assert found.masq_all
    assert found.conditions_v4 == ("!", "-s", "10.0.0.0/8")
    assert found.conditions_v6[1] == "set"
    assert found.mark_masq_bit == 14
    assert found.reserve_ports == "try"
    assert [str(n) for n in found.node_addresses] == ["10.0.0.0/8", "fd00::/8", "192.0.2.0/24"]
    assert found.open_forward
    assert found.exclude_interfaces == ("kube-ipvs0", "x")


@pytest.mark.parametrize("key", ["nodeAddresses", "excludeInterfaces", "conditionsV4"])
def test_empty_lists(key: str) -> None:
    found = options(**{key: []})
    assert (found.node_addresses, found.conditions_v4) == ((), ())
    assert (found.exclude_interfaces == ()) is (key == "excludeInterfaces")


BOOLEANS = [(k, v) for k in ("snat", "masqAll", "openForward") for v in ("true", 1, 0, "", [], {})]
BAD_OPTIONS = [
    *BOOLEANS,
    *[("backend", v) for v in ("", "nft", "NFTABLES", "nftables ", "ipvs", 1, True, [], {})],
    *[("reservePorts", v) for v in ("", "yes", "No", "required", False, 0, [], {})],
    *[("markMasqBit", v) for v in (-1, 32, 100, "13", 13.0, True, [], {}, 2**70)],
    *[
        ("externalSetMarkChain", v)
        for v in ("", "-x", "!x", "a b", "a\n", "a;b", 'a"b', "ä", "x" * 29, "ACCEPT", "DROP")
    ],
    *[("externalSetMarkChain", v) for v in ("RETURN", "POSTROUTING", 5, True, [], {})],
    *[("nodeAddresses", v) for v in ("10.0.0.0/8", 5, True, {})],
    *[("excludeInterfaces", v) for v in ("kube-ipvs0", 5, True, {})],
]


@pytest.mark.parametrize(("key", "value"), BAD_OPTIONS)
def test_bad_options(key: str, value: Any) -> None:
    error = refused(config(**{key: value}), 7, " is not ")
    assert error.msg.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "value",
    [
        "10.0.0.1",
        "10.0.0.0/33",
        "fd00::/129",
        "x/8",
        "/8",
        "10.0.0.0/",
        "10.0.0.0/-1",
        "10.0.0.0/ 8",
        "10.0.0.0/255.0.0.0",
        "fe80::%eth0/64",
        "10.0.0.0/8\n",
        "١.0.0.0/8",
        "",
        5,
        None,
        True,
        [],
    ],
)
def test_bad_networks(value: Any) -> None:
    refused(config(nodeAddresses=["10.0.0.0/8", value]), 7, "nodeAddresses[1]: ")


@pytest.mark.parametrize("value", ["", ".", "a/b", "a b", "x" * 16, "a\n", "\0", 5, None, True, []])
def test_bad_links(value: Any) -> None:
    refused(config(excludeInterfaces=["lo", value]), 7, "excludeInterfaces[1]: ")


# --- conditions ----------------------------------------------------------------------------------

IPT = ["!", "-s", "192.0.2.0/24"]
NFT = ["ip", "saddr", "!=", "192.0.2.0/24"]


@pytest.mark.parametrize("key", ["conditionsV4", "conditionsV6"])
@pytest.mark.parametrize(
    "given",
    [
        IPT,
        ["-d", "192.0.2.3"],
        ["-m", "set", "--match-set", "x", "src"],
        ["-i", "eth0", "-m", "comment", "--comment", "hello"],
        ["-m", "mark", "!", "--mark", "0x1/0x1"],
        ["-m", "limit", "--limit", "5/min"],
        ["-m", "recent", "--name", "x", "--set"],
        ["!", "--source", "192.0.2.3"],
    ],
)
def test_conditions_for_iptables(key: str, given: list[str]) -> None:
    found = options(**{key: given})
    assert found.backend == "iptables"
    assert tuple(given) in (found.conditions_v4, found.conditions_v6)
    assert options(**{key: given, "backend": "iptables"}).backend == "iptables"


@pytest.mark.parametrize(
    "given", [NFT, ["iifname", "eth0*"], ["ip6", "saddr", "@my_set"], ["meta", "mark", "0x1"]]
)
def test_conditions_for_nftables(given: list[str]) -> None:
    assert options(conditionsV4=given).backend == "nftables"
    assert options(conditionsV4=given, backend="nftables").conditions_v4 == tuple(given)


EVERYWHERE = words(
    "accept drop jump goto dnat snat masquerade redirect return queue reject continue tproxy"
    " ACCEPT Drop MASQUERADE DNAT NFQUEUE"
)
BAD_WORDS = [
    "a\nb",
    "\n",
    "a;b",
    ";",
    "{",
    "}",
    "a{b",
    "#",
    "a#b",
    '"',
    "'",
    "`",
    "\\",
    "$x",
    "a b",
]
BAD_WORDS += ["\t", "a\0b", "\x1b", "ä", "\xa0", "x" * 257, "", "a\u2028b"]
NOT_IPTABLES = words(
    "-j -g --jump --goto --jum --j --go --g -jACCEPT -gX -fj -j=X --jump=ACCEPT --goto=X -A -D -I"
    " -t --table -M --modprobe --modprobe=/bin/sh --mo -- - -s10.0.0.0/8 -4j"
)
NOT_NFTABLES = words("set vmap notrack update add delete 80drop 80,accept drop,80 drop: -j --jump")


@pytest.mark.parametrize("key", ["conditionsV4", "conditionsV6"])
@pytest.mark.parametrize(
    ("given", "index"),
    [([*IPT, w], 3) for w in (*EVERYWHERE, *BAD_WORDS, *NOT_IPTABLES)]
    + [([*NFT, w], 4) for w in (*EVERYWHERE, *BAD_WORDS, *NOT_NFTABLES)]
    + [([w], 0) for w in (*EVERYWHERE, *BAD_WORDS, *NOT_IPTABLES)]
    + [([*IPT, w], 3) for w in (5, None, True, [], {})],
)
def test_words_that_are_no_condition(key: str, given: list[Any], index: int) -> None:
    error = refused(config(**{key: given}), 7)
    assert error.msg.startswith(f"{key}[{index}]: ")


def test_every_word_is_looked_at_wherever_it_stands() -> None:
    for index in range(4):
        given: list[Any] = ["ip", "saddr", "10.0.0.1"]
        given.insert(index, "accept")
        refused(config(conditionsV4=given), 7, f'conditionsV4[{index}]: "accept"')


@pytest.mark.parametrize("value", ["-s 1.2.3.4", 5, True, {}])
def test_conditions_that_are_no_list(value: Any) -> None:
    refused(config(conditionsV6=value), 7, "conditionsV6: ", "is not a list")


def test_too_many_words() -> None:
    refused(config(conditionsV4=["ip"] * 65), 7, "conditionsV4", "65", "64")


# --- which backend -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, "auto"),
        ({"backend": "auto"}, "auto"),
        ({"backend": "nftables"}, "nftables"),
        ({"backend": "nftables", "markMasqBit": 5}, "nftables"),
        ({"markMasqBit": 5}, "auto"),
        ({"conditionsV4": []}, "auto"),
        ({"externalSetMarkChain": "KUBE-MARK-MASQ"}, "iptables"),
        ({"externalSetMarkChain": "X", "conditionsV4": IPT}, "iptables"),
        ({"conditionsV4": NFT, "conditionsV6": NFT}, "nftables"),
        ({"backend": "auto", "conditionsV6": IPT}, "iptables"),
    ],
)
def test_backend(keys: dict[str, Any], wanted: str) -> None:
    assert options(**keys).backend == wanted


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"backend": "nftables", "conditionsV4": IPT}, ["backend", "conditionsV4"]),
        ({"backend": "nftables", "conditionsV6": IPT}, ["backend", "conditionsV6"]),
        ({"backend": "iptables", "conditionsV4": NFT}, ["backend", "conditionsV4"]),
        ({"backend": "iptables", "conditionsV6": NFT}, ["backend", "conditionsV6"]),
        ({"backend": "nftables", "externalSetMarkChain": "X"}, ["backend", "externalSetMarkChain"]),
        (
            {"backend": "nftables", "externalSetMarkChain": "X", "conditionsV4": IPT},
            ["backend", "externalSetMarkChain", "conditionsV4"],
        ),
        ({"conditionsV4": IPT, "conditionsV6": NFT}, ["conditionsV4", "conditionsV6"]),
        (
            {"externalSetMarkChain": "X", "conditionsV6": NFT},
            ["externalSetMarkChain", "conditionsV6"],
        ),
        ({"markMasqBit": 0, "externalSetMarkChain": "X"}, ["markMasqBit", "externalSetMarkChain"]),
    ],
)
def test_options_that_exclude_each_other(keys: dict[str, Any], names: list[str]) -> None:
    refused(config(**keys), 7, *names)
