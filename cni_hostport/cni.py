"""The CNI wire format: environment and bytes in, a checked request out; an answer as bytes.

Decides whether a call is well-formed, in the order in which the CNI project's
own library decides it (environment, standard input, name, version, verb), so
that a client sees the same code for the same mistake. Never touches the
machine, and lets out nothing but ``HostPortError``.

Sources: CNI specification 1.1.0, and the library's behaviour where the text is
silent (tests/data/cni_calls.json holds its answers).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from cni_hostport.cni_env import NAME, REQUIRED, check_environment, netns_override, parse_args
from cni_hostport.cni_fields import folded, items, string
from cni_hostport.cni_json import Object, clean, decode_object, encode, fold, kind, shorten, show
from cni_hostport.cni_mappings import check_sources, find_source, parse_mappings
from cni_hostport.cni_options import parse_options
from cni_hostport.cni_result import check_version, read_network, read_prev_result, render_result
from cni_hostport.errors import (
    BadEnvironment,
    DecodeFailure,
    HostPortError,
    IncompatibleVersion,
    InvalidConfig,
    InvalidNetns,
    IOFailure,
)
from cni_hostport.model import Attachment, AttachmentID, PodRef, ReservePorts

SUPPORTED_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
NO_VERSION = "0.1.0"
"""What a configuration without ``cniVersion`` means."""

STDIN_LIMIT = 16 * 1024 * 1024
"""Bytes of standard input that are looked at."""

_TEXT_LIMIT = 4000
"""Characters of an error's text; it travels into an event of the pod."""

_SINCE = {"CHECK": (0, 4, 0), "GC": (1, 1, 0), "STATUS": (1, 1, 0)}
_VERSION_PART = re.compile(r"[+-]?[0-9]{1,18}")
_VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")


@dataclass(frozen=True, slots=True)
class Call:
    """One well-formed call. ``identity`` is None for verbs that are about no attachment.

    ``config`` and ``prev_result`` are as they came; ``fields`` is ``config`` with folded keys.
    """

    command: str
    identity: AttachmentID | None
    netns: str
    args: Mapping[str, str]
    cni_version: str
    network: str
    prev_result: Object | None
    config: Object
    fields: Object = field(repr=False, default_factory=dict)


def parse_call(env: Mapping[str, str], stdin: bytes, same_netns: bool = False) -> Call:
    """Check a call and give it a shape.

    ``same_netns`` says that CNI_NETNS is the namespace the plugin itself runs in. Values of the
    environment may hold bytes as surrogate escapes. Raises a ``HostPortError``: code 4
    (environment), 5 (input too long), 6 (not JSON, or a wrong type), 7 (name, previous result),
    1 (version), 8 (namespace).
    """
    command = env.get("CNI_COMMAND", "")
    if command == "VERSION":
        return Call(command, None, "", {}, SUPPORTED_VERSIONS[-1], "", None, {})
    check_environment(command, env)
    if len(stdin) > STDIN_LIMIT:
        raise IOFailure(f"standard input is longer than {STDIN_LIMIT} bytes")
    config = decode_object(stdin)
    fields = fold(config)
    network = _network_name(fields)
    if command not in REQUIRED:
        raise BadEnvironment(f"unknown CNI_COMMAND: {show(command)}")
    version = _cni_version(fields)
    _check_cni_version(command, version)
    prev_result = None
    if command in ("ADD", "CHECK"):
        prev_result = _chained_result(command, fields, version)
    if same_netns and command in ("ADD", "DEL") and not netns_override(env):
        raise InvalidNetns(
            f"CNI_NETNS {show(env.get('CNI_NETNS', ''))} is the plugin's own network namespace"
        )
    identity = None
    if "CNI_CONTAINERID" in REQUIRED[command]:
        container_id, ifname = env["CNI_CONTAINERID"], env["CNI_IFNAME"]
        # interned: a node's attachments share these words, and remember them each
        network, ifname = sys.intern(network), sys.intern(ifname)
        identity = AttachmentID(network=network, container_id=container_id, ifname=ifname)
    return Call(
        command=command,
        identity=identity,
        netns=env.get("CNI_NETNS", ""),
        args=parse_args(env.get("CNI_ARGS", "")),
        cni_version=version,
        network=network,
        prev_result=prev_result,
        config=config,
        fields=fields,
    )


def _network_name(fields: Object) -> str:
    name = fields.get("name")
    if name is None or name == "":
        raise InvalidConfig("missing network name")
    if not isinstance(name, str):
        raise DecodeFailure(f"name is {kind(name)}, not a string", show(name))
    if not NAME.fullmatch(name):
        raise InvalidConfig("invalid characters in network name", show(name))
    return name


def _cni_version(fields: Object) -> str:
    version = fields.get("cniversion")
    if version is None or version == "":
        return NO_VERSION
    if not isinstance(version, str):
        raise DecodeFailure(f"cniVersion is {kind(version)}, not a string", show(version))
    return version


def _check_cni_version(command: str, version: str) -> None:
    """ADD and DEL compare text; the younger verbs compare numbers first, as the library does."""
    if command in _SINCE:
        number = _version_number(version)
        if number < _SINCE[command]:
            raise IncompatibleVersion(f"config version does not allow {command}", show(version))
        if number > _version_number(SUPPORTED_VERSIONS[-1]):
            raise IncompatibleVersion(f"plugin version does not allow {command}", show(version))
    if version not in SUPPORTED_VERSIONS:
        supported = ", ".join(SUPPORTED_VERSIONS)
        raise IncompatibleVersion(
            "incompatible CNI versions", f"config is {show(version)}, plugin supports {supported}"
        )


def _version_number(version: str) -> tuple[int, ...]:
    parts = version.split(".", 3)
    if len(parts) > 3 or not all(map(_VERSION_PART.fullmatch, parts)):
        raise DecodeFailure("cniVersion is not a version", show(version))
    numbers = [int(part) for part in parts]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _chained_result(command: str, fields: Object, version: str) -> Object:
    prev_result = read_prev_result(fields)
    if prev_result is None:
        raise InvalidConfig(
            "must be called as chained plugin", f"{command} was called without prevResult"
        )
    check_version(prev_result, version)
    return prev_result


def attachment_of(call: Call) -> Attachment:
    """What an ADD asks for. Raises ``InvalidConfig`` (code 7) naming field and value."""
    identity, prev_result = call.identity, call.prev_result
    if identity is None or prev_result is None:
        raise InvalidConfig("must be called as chained plugin", "there is no prevResult")
    check_sources(call.fields)
    source = find_source(call.fields)
    mappings = parse_mappings(call.fields, source)
    options = parse_options(call.fields)
    if source is not None and source.is_annotation:
        # Whoever may annotate a pod must not share or skip the check of a port.
        options = options.model_copy(update={"reserve_ports": ReservePorts.REQUIRE})
    addresses, interfaces = read_network(prev_result, call.cni_version, identity.ifname)
    if mappings and not addresses:
        raise InvalidConfig(
            f"prevResult has no address for CNI_IFNAME {show(identity.ifname)}",
            "port mappings need an address of an interface of that name with a sandbox",
        )
    namespace, name = call.args.get("K8S_POD_NAMESPACE", ""), call.args.get("K8S_POD_NAME", "")
    return Attachment(
        identity=identity,
        pod=PodRef(namespace=sys.intern(namespace), name=name),
        netns=call.netns,
        addresses=addresses,
        mappings=mappings,
        options=options,
        interfaces=interfaces,
    )


def from_annotation(call: Call) -> bool:
    """Whether the mappings come from the pod's annotation.

    Then each hostIP that is no wildcard must be an address of the node, which only the caller
    can know. Raises ``InvalidConfig`` (code 7) as ``attachment_of`` does.
    """
    source = find_source(call.fields)
    return source is not None and source.is_annotation


def wants_mappings(call: Call) -> bool:
    """Whether the call comes with port mappings, valid or not; never raises."""
    try:
        source = find_source(call.fields)
        return source is not None and bool(parse_mappings(call.fields, source))
    except HostPortError:
        return True


def backend_of(call: Call) -> str:
    """The backend that the configuration asks for or needs, ``auto`` where it is no matter."""
    try:
        return parse_options(call.fields).backend
    except HostPortError:
        return "auto"


def all_are_skipped(call: Call) -> bool:
    """Whether no mapping is of a family in which the pod has an address: ADD keeps no record."""
    try:
        return not attachment_of(call).claims()
    except HostPortError:
        return False


def gc_of(call: Call) -> frozenset[tuple[str, str]] | None:
    """Attachments of the network that live, as (container ID, interface name).

    None where the runtime passed no list: then nothing may be removed. ``null`` is an empty
    list, as a Go client writes one. Raises ``InvalidConfig`` (code 7).
    """
    key = next((key for key in _VALID_ATTACHMENTS if key in call.fields), None)
    if key is None:
        return None
    entries = call.fields[key]
    if entries is None:
        return frozenset()
    valid = set()
    for index, entry in enumerate(items(key, entries)):
        fields = folded(f"{key}[{index}]", entry)
        container_id = string(f"{key}[{index}].containerID", fields.get("containerid"))
        valid.add((container_id, string(f"{key}[{index}].ifname", fields.get("ifname"))))
    return frozenset(valid)


def result_bytes(call: Call) -> bytes:
    """The result of an ADD: prevResult with the call's ``cniVersion``, else unchanged.

    Raises ``InvalidConfig`` (code 7) for a call without prevResult.
    """
    if call.prev_result is None:
        raise InvalidConfig("must be called as chained plugin", "there is no prevResult")
    return render_result(call.prev_result, call.cni_version)


def error_bytes(error: BaseException, cni_version: str) -> bytes:
    """An error object as the specification has it; an error not ours is code 999, in one line."""
    if isinstance(error, HostPortError):
        code, msg, details = error.code, error.msg, error.details
    else:
        code, msg = HostPortError.code, "internal error"
        details = f"{type(error).__name__}: {error}"
    document: Object = {"cniVersion": cni_version, "code": code, "msg": _error_text(msg)}
    if details:
        document["details"] = _error_text(details)
    return encode(document)


_SWALLOWED = (
    (re.compile("not found", re.IGNORECASE), "missing"),
    (re.compile("no such file or directory", re.IGNORECASE), "missing file"),
)
"""Words on which go-cni and cri-dockerd take a failed DEL for a success and never retry it."""


def _error_text(text: str) -> str:
    text = clean(shorten(text, _TEXT_LIMIT))
    for words, instead in _SWALLOWED:
        text = words.sub(instead, text)
    return text


def cni_version_of(stdin: bytes) -> str:
    """The version to answer in where a call could not be parsed: its own if known, else ours."""
    try:
        version = _cni_version(fold(decode_object(stdin[: STDIN_LIMIT + 1])))
    except HostPortError:
        return SUPPORTED_VERSIONS[-1]
    return version if version in SUPPORTED_VERSIONS else SUPPORTED_VERSIONS[-1]
