"""The words of the project as frozen models; an invalid one cannot exist.

Decides what a port mapping, an attachment and its options are. Never reads a file, a socket or the
clock, and never knows where a value came from: ``cni.py`` turns bytes into
these, ``host/records.py`` stores them.
"""

from __future__ import annotations

import enum
import hashlib
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer

from cni_hostport.address import (
    FAMILIES,
    Family,
    IPAddress,
    IPInterface,
    IPNetwork,
    PodAddress,
    canonical_ip,
    family_of,
)
from cni_hostport.basemodel import Model, model

__all__ = [
    "DEFAULT_EXCLUDED_LINKS",
    "FAMILIES",
    "Attachment",
    "AttachmentID",
    "Family",
    "HostPort",
    "IPAddress",
    "IPInterface",
    "IPNetwork",
    "Model",
    "Options",
    "PodAddress",
    "PodRef",
    "PortMapping",
    "Protocol",
    "ReservePorts",
    "canonical_ip",
    "family_of",
    "model",
]

DEFAULT_EXCLUDED_LINKS = ("kube-ipvs0", "nodelocaldns")


class Protocol(enum.StrEnum):
    """Transport protocols a host port may have (CNI convention: lower case)."""

    TCP = "tcp"
    UDP = "udp"
    SCTP = "sctp"

    @property
    def number(self) -> int:
        """IANA protocol number."""
        return {"tcp": 6, "udp": 17, "sctp": 132}[self.value]


def _host_ip(value: object) -> object:
    if value is None or value == "":
        return None
    return canonical_ip(value) if isinstance(value, str) else value


Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


@model
class PortMapping(Model):
    """One wanted mapping: host port to container port.

    ``host_ip`` None means every local address of both families; the
    unspecified address of a family means every local address of that family.
    """

    host_port: Port
    container_port: Port
    protocol: Protocol = Protocol.TCP
    host_ip: Annotated[IPv4Address | IPv6Address | None, BeforeValidator(_host_ip)] = None

    def applies_to(self, family: Family) -> bool:
        """Whether the mapping asks for addresses of this family."""
        return self.host_ip is None or self.host_ip.version == family

    @property
    def is_wildcard(self) -> bool:
        """Whether the mapping asks for all local addresses of its families."""
        return self.host_ip is None or self.host_ip.is_unspecified

    @property
    def specific(self) -> IPAddress | None:
        """The one address asked for, None for a wildcard."""
        return None if self.is_wildcard else self.host_ip

    def host_port_of(self, family: Family) -> HostPort:
        """What it claims in that family."""
        return HostPort(family, self.specific, self.host_port, self.protocol)

    def __str__(self) -> str:
        host = "*" if self.host_ip is None else str(self.host_ip)
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{self.host_port}/{self.protocol}"


class HostPort(NamedTuple):
    """What one mapping claims in one family: the unit of conflict and of holding.

    ``address`` None is the family's wildcard. A named tuple and no validated model: it
    is made of parts of one, and every call makes, hashes and compares dozens.
    """

    family: Family
    address: IPv4Address | IPv6Address | None
    port: int
    protocol: Protocol

    def overlaps(self, other: HostPort) -> bool:
        """Same family, protocol and port, and the addresses can both be meant."""
        if self.port != other.port or self.family != other.family:
            return False
        if self.protocol != other.protocol:
            return False
        return self.address is None or other.address is None or self.address == other.address

    def __str__(self) -> str:
        any_address = "0.0.0.0" if self.family is Family.V4 else "::"
        host = any_address if self.address is None else str(self.address)
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{self.port}/{self.protocol}"


class ReservePorts(enum.StrEnum):
    """Policy when a port cannot be held (design: option ``reservePorts``)."""

    REQUIRE = "require"
    TRY = "try"
    NO = "no"


@model
class Options(Model):
    """The plugin's options as they came with one attachment; never shared."""

    backend: Literal["auto", "nftables", "iptables"] = "auto"
    snat: bool = True
    masq_all: bool = False
    conditions_v4: tuple[str, ...] = ()
    conditions_v6: tuple[str, ...] = ()
    mark_masq_bit: int | None = None
    external_set_mark_chain: str | None = None
    reserve_ports: ReservePorts = ReservePorts.REQUIRE
    node_addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    open_forward: bool = False
    exclude_interfaces: tuple[str, ...] = DEFAULT_EXCLUDED_LINKS


_PodAddress = Annotated[
    InstanceOf[PodAddress],
    BeforeValidator(PodAddress.of),
    PlainSerializer(str, return_type=str),
]


@model
class AttachmentID(Model):
    """Identity of an attachment: network name, container ID, interface name."""

    network: str
    container_id: str
    ifname: str

    @property
    def key(self) -> str:
        """16 base32 characters: file name of the record, comment of every element."""
        return _key_of(self.network, self.container_id, self.ifname)


@lru_cache(maxsize=64)  # asked for a dozen times in one call, and one string then serves all
def _key_of(network: str, container_id: str, ifname: str) -> str:
    text = "\0".join((network, container_id, ifname))
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    number = int.from_bytes(digest[:10], "big")
    return "".join([_PAIRS[number >> bits & 1023] for bits in (70, 60, 50, 40, 30, 20, 10, 0)])


_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _BASE32 for second in _BASE32]
"""Base32 two characters at a time: the library's takes five times as long."""


@model
class PodRef(Model):
    """Who the pod is to a human; empty where the runtime did not say."""

    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@model
class Attachment(Model):
    """One attachment with everything ADD needs to know about it.

    ``addresses`` holds at most one address of each family, the pod's own, with
    the prefix length of its network. ``interfaces`` are prevResult's interfaces
    that have no sandbox (host-side links), in order. ``yielded`` are host ports left
    to another attachment of the same container that has them already: a runtime
    gives a container's ports to each of its networks.
    """

    identity: AttachmentID
    pod: PodRef = PodRef()
    netns: str = ""
    addresses: tuple[_PodAddress, ...]
    mappings: tuple[PortMapping, ...]
    options: Options = Options()
    interfaces: tuple[str, ...] = ()
    yielded: tuple[HostPort, ...] = ()

    @property
    def key(self) -> str:
        """The identity's key."""
        identity = self.identity
        return _key_of(identity.network, identity.container_id, identity.ifname)

    def address(self, family: Family) -> PodAddress | None:
        """The pod's address of that family, None if it has none."""
        return next((a for a in self.addresses if a.ip.version == family), None)

    def families(self) -> tuple[Family, ...]:
        """Families the pod has an address in, IPv4 first."""
        versions = [a.ip.version for a in self.addresses]
        return tuple([f for f in FAMILIES if f in versions])

    def maps(self, mapping: PortMapping, family: Family) -> bool:
        """Whether that mapping of it is translated in that family: applies, not yielded."""
        return mapping.applies_to(family) and (
            not self.yielded or mapping.host_port_of(family) not in self.yielded
        )

    def claims(self) -> tuple[HostPort, ...]:
        """Host ports this attachment claims: its mappings in the pod's families."""
        global _asked_last  # noqa: PLW0603
        last, claims = _asked_last
        if last is not self:
            claims = _claims(self)
            _asked_last = (self, claims)
        return claims

    def describe(self) -> str:
        """How an error names this attachment as an owner."""
        identity = self.identity
        if not str(self.pod):
            return f"container {identity.container_id} (network {identity.network})"
        return f"pod {self.pod} (network {identity.network}, container {identity.container_id})"


def _claims(attachment: Attachment) -> tuple[HostPort, ...]:
    families = attachment.families()
    return tuple(
        [m.host_port_of(f) for m in attachment.mappings for f in families if attachment.maps(m, f)]
    )


_asked_last: tuple[Attachment | None, tuple[HostPort, ...]] = (None, ())
"""One call asks a dozen times for the claims of one attachment; kept in each they would be
a node's largest piece of memory. Whatever thread sets it, what it holds is right."""
