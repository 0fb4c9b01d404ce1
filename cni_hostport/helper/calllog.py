"""What the log tells of one call: its whole story in one line. Pure."""

from __future__ import annotations

from cni_hostport import cni
from cni_hostport.errors import HostPortError


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


def _ports(call: cni.Call | None) -> str:
    """Host ports that a call is about; empty where they cannot be read."""
    try:
        mappings = cni.attachment_of(call).mappings if call else ()
    except HostPortError:
        return ""
    return ",".join(map(str, mappings))
