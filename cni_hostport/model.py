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
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
)
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast, dataclass_transform

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass

IPAddress = IPv4Address | IPv6Address
IPInterface = IPv4Interface | IPv6Interface
IPNetwork = IPv4Network | IPv6Network

DEFAULT_EXCLUDED_LINKS = ("kube-ipvs0", "nodelocaldns")


class Family(enum.IntEnum):
    """Address family, numbered as people say it."""

    V4 = 4
    V6 = 6


FAMILIES = _V4, _V6 = (Family.V4, Family.V6)
"""Both families, IPv4 first. A tuple: walking the enumeration itself costs four times as much."""


class Protocol(enum.StrEnum):
    """Transport protocols a host port may have (CNI convention: lower case)."""

    TCP = "tcp"
    UDP = "udp"
    SCTP = "sctp"

    @property
    def number(self) -> int:
        """IANA protocol number."""
        return {"tcp": 6, "udp": 17, "sctp": 132}[self.value]


def family_of(address: IPAddress | IPInterface | IPNetwork | PodAddress) -> Family:
    """Family of an address, interface address or network."""
    return _V4 if address.version == 4 else _V6


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


class Model:
    """Base of all models: frozen, no unknown fields, validated when made.

    A dataclass with slots and not a BaseModel: a node may have ten thousand
    attachments in memory, and a BaseModel's two dicts and set cost each of them
    3 KB. Names of the methods are pydantic's.
    """

    __slots__ = ()

    def model_copy(self, update: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; validated again."""
        return replace(self, **update)  # type: ignore[type-var]

    def model_dump(self, mode: Literal["json", "python"] = "python") -> dict[str, Any]:
        """Fields as a dict; with mode ``json`` only what JSON knows, in clear text."""
        return cast(dict[str, Any], _adapter(type(self)).dump_python(self, mode=mode))

    def model_dump_json(self) -> str:
        """The model as JSON text."""
        return _adapter(type(self)).dump_json(self).decode()

    @classmethod
    def model_validate(cls, value: object) -> Self:
        """From a dict. Raises pydantic.ValidationError, which names every wrong field."""
        return cast(Self, _adapter(cls).validate_python(value))

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """From JSON text. Raises pydantic.ValidationError."""
        return cast(Self, _adapter(cls).validate_json(text))


_CONFIG = ConfigDict(extra="forbid")


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


_T = TypeVar("_T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def model(cls: type[_T]) -> type[_T]:
    """Class decorator: a frozen pydantic dataclass with slots and keyword arguments."""
    made = dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)(cls)
    return cast(type[_T], made)


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
        any_address = "0.0.0.0" if self.family is _V4 else "::"
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


class PodAddress:
    """An address of a pod and the prefix length of its network.

    What ``ipaddress`` calls an interface, in a fifth of the memory.
    """

    __slots__ = ("ip", "prefixlen")

    def __init__(self, ip: IPAddress, prefixlen: int) -> None:
        self.ip = ip
        self.prefixlen = prefixlen

    @classmethod
    def of(cls, value: object) -> PodAddress:
        """From ``10.1.0.5/24``, or from an interface address. Raises ValueError."""
        if isinstance(value, PodAddress):
            return value
        if isinstance(value, str):
            value = ip_interface(value)
        if isinstance(value, IPv4Interface | IPv6Interface):
            return cls(value.ip, value.network.prefixlen)
        raise ValueError(f"not an address with a prefix length: {value!r}")

    @property
    def version(self) -> int:
        """4 or 6."""
        return self.ip.version

    @property
    def max_prefixlen(self) -> int:
        """32 or 128."""
        return self.ip.max_prefixlen

    @property
    def network(self) -> IPNetwork:
        """The network the address is in."""
        host_bits = self.ip.max_prefixlen - self.prefixlen
        return _network(self.ip.version, int(self.ip) >> host_bits << host_bits, self.prefixlen)

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefixlen}"

    def __repr__(self) -> str:
        return f"PodAddress({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PodAddress):
            return NotImplemented
        return self.ip == other.ip and self.prefixlen == other.prefixlen

    def __hash__(self) -> int:
        return hash((self.ip, self.prefixlen))


@lru_cache(maxsize=64)  # a node has few networks, and making one costs more than all else here
def _network(version: int, number: int, prefixlen: int) -> IPNetwork:
    return IPv4Network((number, prefixlen)) if version == 4 else IPv6Network((number, prefixlen))


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
    return base64.b32encode(digest[:10]).decode("ascii").lower()


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
    that have no sandbox (host-side links), in order.
    """

    identity: AttachmentID
    pod: PodRef = PodRef()
    netns: str = ""
    addresses: tuple[_PodAddress, ...]
    mappings: tuple[PortMapping, ...]
    options: Options = Options()
    interfaces: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The identity's key."""
        return self.identity.key

    def address(self, family: Family) -> PodAddress | None:
        """The pod's address of that family, None if it has none."""
        return next((a for a in self.addresses if a.ip.version == family), None)

    def families(self) -> tuple[Family, ...]:
        """Families the pod has an address in, IPv4 first."""
        versions = [a.ip.version for a in self.addresses]
        return tuple([f for f in FAMILIES if f in versions])

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
        [
            HostPort(f, m.specific, m.host_port, m.protocol)
            for m in attachment.mappings
            for f in families
            if m.applies_to(f)
        ]
    )


_asked_last: tuple[Attachment | None, tuple[HostPort, ...]] = (None, ())
"""One call asks a dozen times for the claims of one attachment; kept in each they would be
a node's largest piece of memory. Whatever thread sets it, what it holds is right."""
