"""What the log tells of one call: its whole story in one line. Pure."""

from __future__ import annotations

from cni_hostport import cni
from cni_hostport.errors import HostPortError, IOFailure, NetfilterFailed, TryAgain

_OF_THE_NODE = {IOFailure.code, NetfilterFailed.code, TryAgain.code, HostPortError.code}
_SHOWN = 5


def fields(
    call: cni.Call | None,
    verb: str,
    error: HostPortError | None,
    seconds: float,
    detailed: bool,
) -> dict[str, str]:
    """Fields of the line; ``detailed`` adds the ports of a call that succeeded."""
    identity = call.identity if call else None
    args = call.args if call else {}
    pod = "/".join(filter(None, (args.get("K8S_POD_NAMESPACE"), args.get("K8S_POD_NAME"))))
    return {
        "verb": verb,
        "network": call.network if call else "",
        "container": identity.container_id if identity else "",
        "ifname": identity.ifname if identity else "",
        "pod": pod,
        "ms": f"{seconds * 1000:.2f}",
        "ports": _ports(call) if error is not None or detailed else "",
        "code": str(error.code) if error is not None else "",
        "result": "ok" if error is None else str(error),
    }


def asked(call: cni.Call | None, error: HostPortError) -> str:
    """For whom an ADD failed for a reason of the node's: such an error names no port by itself.

    Empty for other verbs, and for errors about the configuration or an owner.
    """
    if call is None or call.command != "ADD" or error.code not in _OF_THE_NODE:
        return ""
    ports = _ports(call).split(",")
    shown = ", ".join(ports[:_SHOWN]) + (
        f" and {len(ports) - _SHOWN} more" if ports[_SHOWN:] else ""
    )
    try:
        who = cni.attachment_of(call).describe()
    except HostPortError:
        return ""
    advice = "" if error.code == TryAgain.code else "; 'cni-hostport doctor' looks the node over"
    return f"asked for host port {shown} by {who}; nothing was changed{advice}"


def _ports(call: cni.Call | None) -> str:
    """Host ports that a call is about; empty where they cannot be read."""
    try:
        mappings = cni.attachment_of(call).mappings if call else ()
    except HostPortError:
        return ""
    return ",".join(map(str, mappings))
