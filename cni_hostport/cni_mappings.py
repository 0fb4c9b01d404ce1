"""The work list: where an attachment's port mappings come from and what they say.

Decides which of the three sources counts (the runtime's list, else the static
list of the configuration, else the pod's annotation) and what a valid entry
is. Never knows the node's addresses: that an annotation's hostIP must be one
of them is for the caller to check, who can ask ``Source.is_annotation``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from cni_hostport.cni_fields import boolean, folded, integer, items, refuse, string
from cni_hostport.cni_json import Object, decode_text, show
from cni_hostport.errors import DecodeFailure, InvalidConfig
from cni_hostport.model import IPAddress, PortMapping, Protocol, canonical_ip

PORT_MAX = 65535
ANNOTATIONS_CAPABILITY = "io.kubernetes.cri.pod-annotations"
"""Capability under which containerd and CRI-O pass the pod's annotations."""

_PROTOCOLS = {str(protocol): protocol for protocol in Protocol}
_BROADCAST = canonical_ip("255.255.255.255")
_PORT_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_UNPRIVILEGED = ((1024, PORT_MAX),)
_MISSING = object()


class Source(NamedTuple):
    """A list of raw mappings, the name errors use for it, and whether a pod's owner wrote it."""

    field: str
    entries: object
    is_annotation: bool = False


def find_source(config: Object) -> Source | None:
    """The source that counts, None if there is none. Raises ``InvalidConfig`` (code 7).

    An empty list of the runtime is no list: containerd sends none for a pod
    without ports where cri-dockerd sends an empty one.
    """
    runtime: Object = {}
    if config.get("runtimeconfig") is not None:
        runtime = folded("runtimeConfig", config["runtimeconfig"])
    for field, place in (("runtimeConfig.portMappings", runtime), ("portMappings", config)):
        entries = place.get("portmappings", _MISSING)
        if entries is not _MISSING and items(field, entries):
            return Source(field, entries)
    if config.get("portmappingsannotation") is None:
        return None
    return _annotation(string("portMappingsAnnotation", config["portmappingsannotation"]), runtime)


def check_sources(config: Object) -> None:
    """Refuse a wrong list or name even where the runtime's own list is what counts.

    Such a conflist would fail only for the pods for which the runtime passes none.
    Raises ``InvalidConfig`` (code 7).
    """
    entries = config.get("portmappings", _MISSING)
    if entries is not _MISSING:
        parse_mappings(config, Source("portMappings", entries))
    if config.get("portmappingsannotation") is not None:
        string("portMappingsAnnotation", config["portmappingsannotation"])
    for name, value in folded("capabilities", config.get("capabilities") or {}).items():
        boolean(f"capabilities.{name}", value)


def _annotation(name: str, runtime: Object) -> Source | None:
    values = runtime.get(ANNOTATIONS_CAPABILITY)
    if values is None:
        return None
    if not isinstance(values, dict):
        refuse(f'runtimeConfig."{ANNOTATIONS_CAPABILITY}"', values, "an object")
    text = values.get(name)
    if text is None or text == "":
        return None
    field = f"annotation {name}"
    if not isinstance(text, str):
        refuse(field, text, "a string")
    try:
        entries = decode_text(text)
    except DecodeFailure as error:
        raise InvalidConfig(f"{field}: {show(text)} is not valid JSON", error.details) from None
    return Source(field, entries, is_annotation=True) if items(field, entries) else None


def parse_mappings(config: Object, source: Source | None) -> tuple[PortMapping, ...]:
    """The valid mappings of a source: hostPort 0 skipped, repeats collapsed.

    No two of the result claim the same address, protocol and port. Raises
    ``InvalidConfig`` (code 7) naming the entry's field and value.
    """
    allowed: tuple[tuple[int, int], ...] | None = None
    text = config.get("portmappingsannotationports")
    if text is not None:
        allowed = port_ranges("portMappingsAnnotationPorts", text)
    if source is None:
        return ()
    found: dict[PortMapping, int] = {}
    for index, entry in enumerate(items(source.field, source.entries)):
        mapping = _mapping(f"{source.field}[{index}]", entry)
        if mapping is None:
            continue
        if source.is_annotation:
            _check_allowed(f"{source.field}[{index}].hostPort", mapping.host_port, allowed)
        found.setdefault(mapping, index)
    return tuple(found) if len(found) < 2 else _distinct(source.field, found)


def _mapping(field: str, entry: object) -> PortMapping | None:
    fields = folded(field, entry)
    for key, name in (("hostport", "hostPort"), ("containerport", "containerPort")):
        if key not in fields:
            raise InvalidConfig(f"{field}.{name}: missing")
    host_port = fields["hostport"]
    if type(host_port) is not int or host_port != 0:
        integer(f"{field}.hostPort", host_port, 1, PORT_MAX)
    protocol = _protocol(f"{field}.protocol", fields.get("protocol"))
    host_ip = _host_ip(f"{field}.hostIP", fields.get("hostip"))
    if host_port == 0:
        return None
    container_port = integer(f"{field}.containerPort", fields["containerport"], 1, PORT_MAX)
    return PortMapping(
        host_port=host_port, container_port=container_port, protocol=protocol, host_ip=host_ip
    )


def _protocol(field: str, value: object) -> Protocol:
    if value is None or value == "":
        return Protocol.TCP
    found = _PROTOCOLS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        refuse(field, value, "tcp, udp or sctp")
    return found


def _host_ip(field: str, value: object) -> IPAddress | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        refuse(field, value, "an IP address")
    try:
        address = canonical_ip(value)
    except ValueError:
        refuse(field, value, "an IP address")
    if address.is_multicast or address == _BROADCAST:
        refuse(field, value, "an address that a node can have")
    return address


def _distinct(field: str, found: dict[PortMapping, int]) -> tuple[PortMapping, ...]:
    """Drop what another entry says as well; refuse one host port with two targets.

    hostIP "" covers 0.0.0.0 and ::, so that 0.0.0.0 beside it says nothing new.
    """
    kept: dict[tuple[Any, ...], PortMapping] = {}
    for mapping in sorted(found, key=lambda m: m.host_ip is not None):
        claim = (mapping.protocol, mapping.host_port)
        other = kept.get((*claim, mapping.host_ip))
        if other is None and mapping.is_wildcard:
            other = kept.get((*claim, None))
        if other is None:
            kept[(*claim, mapping.host_ip)] = mapping
        elif other.container_port != mapping.container_port:
            raise InvalidConfig(
                f"{field}[{found[mapping]}] and {field}[{found[other]}] map host port "
                f"{mapping.host_port}/{mapping.protocol} of the same address to different "
                f"container ports, {mapping.container_port} and {other.container_port}"
            )
    chosen = set(kept.values())
    return tuple(mapping for mapping in found if mapping in chosen)


def _check_allowed(field: str, port: int, allowed: tuple[tuple[int, int], ...] | None) -> None:
    ranges = _UNPRIVILEGED if allowed is None else allowed
    if not any(low <= port <= high for low, high in ranges):
        text = ",".join(f"{low}-{high}" if low != high else str(low) for low, high in ranges)
        raise InvalidConfig(
            f"{field}: {port} is not a port that an annotation may ask for",
            f"portMappingsAnnotationPorts allows {text}",
        )


def port_ranges(field: str, value: object) -> tuple[tuple[int, int], ...]:
    """Ports and ranges out of text like ``80,443,1024-65535``, or a list of such and of numbers.

    Raises ``InvalidConfig`` (code 7) naming the part that is wrong.
    """
    if isinstance(value, str):
        parts: list[Any] = value.split(",")
    else:
        parts = value if isinstance(value, list) else [value]
    found = []
    for part in parts:
        if type(part) is int:
            low = high = part
        else:
            match = _PORT_RANGE.fullmatch(part.strip(" ")) if isinstance(part, str) else None
            if match is None:
                refuse(field, part, "a port or a range of ports")
            low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= PORT_MAX:
            refuse(field, part, f"a port or range within 1..{PORT_MAX}")
        found.append((low, high))
    return tuple(found)
