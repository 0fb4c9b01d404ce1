"""The words of the project as frozen models; an invalid one cannot exist.

Decides what a port mapping, an attachment and its options are, and how an
address is canonicalised (once, here). Never reads a file, a socket or the
clock, and never knows where a value came from: ``cni.py`` turns bytes into
these, ``host/records.py`` stores them.
"""

from __future__ import annotations

import base64
import enum
import hashlib
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
)
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

IPAddress = IPv4Address | IPv6Address
IPInterface = IPv4Interface | IPv6Interface
IPNetwork = IPv4Network | IPv6Network

DEFAULT_EXCLUDED_LINKS = ("kube-ipvs0", "nodelocaldns")


class Family(enum.IntEnum):
    """Address family, numbered as people say it."""

    V4 = 4
    V6 = 6


class Protocol(enum.StrEnum):
    """Transport protocols a host port may have (CNI convention: lower case)."""

    TCP = "tcp"
    UDP = "udp"
    SCTP = "sctp"

    @property
    def number(self) -> int:
        """IANA protocol number."""
        return {"tcp": 6, "udp": 17, "sctp": 132}[self.value]


def family_of(address: IPAddress | IPInterface | IPNetwork) -> Family:
    """Family of an address, interface address or network."""
    return Family(address.version)


def canonical_ip(text: str) -> IPAddress:
    """Parse an address; ``::ffff:a.b.c.d`` is IPv4 (RFC 4291 2.5.5.2).

    Raises ValueError when the text is no address or carries a zone.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"address with a zone: {text!r}")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
    return address


def _host_ip(value: object) -> object:
    if value is None or value == "":
        return None
    return canonical_ip(value) if isinstance(value, str) else value


Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


class Model(BaseModel):
    """Base: frozen, no unknown fields, no silent coercion of what we write ourselves."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
        return self.host_ip is None or family_of(self.host_ip) is family

    @property
    def is_wildcard(self) -> bool:
        """Whether the mapping asks for all local addresses of its families."""
        return self.host_ip is None or self.host_ip.is_unspecified

    @property
    def specific(self) -> IPAddress | None:
        """The one address asked for, None for a wildcard."""
        return None if self.is_wildcard else self.host_ip

    def __str__(self) -> str:
        host = "*" if self.host_ip is None else str(self.host_ip)
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{self.host_port}/{self.protocol}"


class HostPort(Model):
    """What one mapping claims in one family: the unit of conflict and of holding.

    ``address`` None is the family's wildcard.
    """

    family: Family
    address: IPv4Address | IPv6Address | None
    port: Port
    protocol: Protocol

    def overlaps(self, other: HostPort) -> bool:
        """Same family, protocol and port, and the addresses can both be meant."""
        if (self.family, self.protocol, self.port) != (other.family, other.protocol, other.port):
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


class AttachmentID(Model):
    """Identity of an attachment: network name, container ID, interface name."""

    network: str
    container_id: str
    ifname: str

    @property
    def key(self) -> str:
        """16 base32 characters: file name of the record, comment of every element."""
        text = "\0".join((self.network, self.container_id, self.ifname))
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        return base64.b32encode(digest).decode("ascii")[:16].lower()


class PodRef(Model):
    """Who the pod is to a human; empty where the runtime did not say."""

    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Attachment(Model):
    """One attachment with everything ADD needs to know about it.

    ``addresses`` holds at most one address of each family, the pod's own, with
    the prefix length of its network. ``interfaces`` are prevResult's interfaces
    that have no sandbox (host-side links), in order.
    """

    identity: AttachmentID
    pod: PodRef = PodRef()
    netns: str = ""
    addresses: tuple[IPv4Interface | IPv6Interface, ...]
    mappings: tuple[PortMapping, ...]
    options: Options = Options()
    interfaces: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The identity's key."""
        return self.identity.key

    def address(self, family: Family) -> IPInterface | None:
        """The pod's address of that family, None if it has none."""
        return next((a for a in self.addresses if family_of(a) is family), None)

    def families(self) -> tuple[Family, ...]:
        """Families the pod has an address in, IPv4 first."""
        return tuple(f for f in Family if self.address(f) is not None)

    def claims(self) -> tuple[HostPort, ...]:
        """Host ports this attachment claims: its mappings in the pod's families."""
        return tuple(
            HostPort(family=f, address=m.specific, port=m.host_port, protocol=m.protocol)
            for m in self.mappings
            for f in self.families()
            if m.applies_to(f)
        )

    def describe(self) -> str:
        """How an error names this attachment as an owner."""
        identity = self.identity
        who = f"pod {self.pod} " if str(self.pod) else ""
        return f"{who}(network {identity.network}, container {identity.container_id})"


def as_jsonable(model: BaseModel) -> dict[str, Any]:
    """A model as JSON-ready dict, fields in clear text."""
    return model.model_dump(mode="json")
