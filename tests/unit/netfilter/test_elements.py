"""Keys and values of our sets: packed as the kernel wants them, read back, shown."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_hostport.model import Family, Protocol
from cni_hostport.netfilter import elements as e

A4, A6 = ip_address("10.0.0.2"), ip_address("fd00::2")
ports = st.integers(1, 65535)
protocols = st.sampled_from(Protocol)
addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


def test_every_part_of_a_concatenation_is_padded_to_four_bytes() -> None:
    assert e.port_key(Protocol.TCP, 8080) == b"\x06\0\0\0\x1f\x90\0\0"
    assert e.addr_port_key(A4, Protocol.UDP, 53) == b"\x0a\0\0\x02\x11\0\0\0\0\x35\0\0"
    assert e.target(A4, 80) == b"\x0a\0\0\x02\0\x50\0\0"
    assert len(e.addr_port_key(A6, Protocol.SCTP, 1)) == 24


def test_a_single_part_is_not_padded() -> None:
    assert e.service_key(53) == b"\0\x35"
    assert e.addr_key(A4) == b"\x0a\0\0\x02"


@given(protocols, ports)
def test_port_key_reads_back(protocol: Protocol, port: int) -> None:
    assert e.unpack_port_key(e.port_key(protocol, port)) == (protocol, port)


@given(addresses, protocols, ports)
def test_addr_port_key_reads_back(
    address: IPv4Address | IPv6Address, protocol: Protocol, port: int
) -> None:
    key = e.addr_port_key(address, protocol, port)
    assert e.unpack_addr_port_key(key) == (address, protocol, port)


@given(addresses, ports)
def test_target_reads_back(address: IPv4Address | IPv6Address, port: int) -> None:
    assert e.unpack_target(e.target(address, port)) == (address, port)


def test_a_foreign_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="protocol number 1"):
        e.unpack_port_key(b"\x01\0\0\0\0\x35\0\0")


def test_link_net_key_spans_the_network() -> None:
    low, high = e.link_net_key("cni0", ip_network("10.88.0.0/16"))
    assert low == b"cni0".ljust(16, b"\0") + b"\x0a\x58\0\0"
    assert high == b"cni0".ljust(16, b"\0") + b"\x0a\x58\xff\xff"


@pytest.mark.parametrize("name", ["", "sixteen-bytes-xx"])
def test_a_name_no_link_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="interface name"):
        e.link_net_key(name, ip_network("10.0.0.0/8"))


def _element(
    family: Family, key: bytes, data: bytes | None = None, end: bytes | None = None
) -> str:
    return e.describe(e.Element(family, "s", key, data, "owner", end))


V4, V6 = Family.V4, Family.V6
TCP = Protocol.TCP
DESCRIBED = [
    (_element(V4, e.port_key(TCP, 8080), e.target(A4, 80)), "tcp . 8080 : 10.0.0.2 . 80"),
    (_element(V6, e.port_key(TCP, 8080), e.target(A6, 80)), "tcp . 8080 : fd00::2 . 80"),
    (
        _element(V4, e.addr_port_key(A4, Protocol.UDP, 53), e.target(A4, 53)),
        "10.0.0.2 . udp . 53 : 10.0.0.2 . 53",
    ),
    (_element(V6, e.addr_port_key(A6, TCP, 1)), "fd00::2 . tcp . 1"),
    (_element(V4, e.pair_key(A4, A4)), "10.0.0.2 . 10.0.0.2"),
    (_element(V6, e.pair_key(A6, A6)), "fd00::2 . fd00::2"),
    (_element(V4, e.addr_key(A4)), "10.0.0.2"),
    (_element(V6, e.addr_key(A6)), "fd00::2"),
    (_element(V4, e.service_key(53)), "53"),
    (_element(V4, e.addr_service_key(A4, 53)), "10.0.0.2 . 53"),
    (_element(V6, e.addr_service_key(A6, 53)), "fd00::2 . 53"),
    (_element(V4, b"\x01\x02\x03"), "0x010203"),
]


@pytest.mark.parametrize(("shown", "expected"), DESCRIBED)
def test_an_element_reads_as_nft_writes_it(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize("network", ["10.88.0.0/16", "10.1.2.3/32", "fd00:1::/64"])
def test_a_network_reads_as_a_prefix(network: str) -> None:
    net = ip_network(network)
    family = Family(net.version)
    low, high = e.link_net_key("cni0", net)
    expected = f'"cni0" . {network}' if net.num_addresses > 1 else '"cni0" . 10.1.2.3'
    assert _element(family, low, None, high) == expected


def test_a_range_that_is_no_prefix_reads_as_a_range() -> None:
    name = b"x".ljust(16, b"\0")
    shown = _element(V4, name + b"\x0a\0\0\x01", None, name + b"\x0a\0\0\x02")
    assert shown == '"x" . 10.0.0.1-10.0.0.2'


anything = st.binary(max_size=40)


@given(st.sampled_from(Family), anything, st.none() | anything, st.none() | anything)
def test_whatever_the_kernel_holds_can_be_shown(
    family: Family, key: bytes, data: bytes | None, end: bytes | None
) -> None:
    assert isinstance(_element(family, key, data, end), str)


def test_place_is_what_the_kernel_allows_only_once() -> None:
    one = e.Element(V4, "ports", b"k", b"d", "me")
    assert one.place == (V4, "ports", b"k")
    assert one != one._replace(comment="you")
