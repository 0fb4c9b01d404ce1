"""Documents for the command line's tests."""

from __future__ import annotations

from typing import Any


def mapping(port: int = 8080, **changes: Any) -> dict[str, Any]:
    """One entry of the status document's ``mappings``."""
    return {
        "network": "podnet",
        "containerID": "abcdef0123456789" * 4,
        "ifname": "eth0",
        "namespace": "shop",
        "pod": "web",
        "hostIP": "",
        "hostPort": port,
        "protocol": "tcp",
        "targets": ["10.244.7.2:80"],
        "held": "yes",
        "connections": None,
        **changes,
    }


def document(*mappings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A status document as the helper answers it."""
    return {
        "version": "0.1.0",
        "helper": {
            "pid": 812,
            "uptime": 3725.0,
            "protocol": 1,
            "runDir": "/run/cni-hostport",
            "problem": "",
            "netns": None,
            "instance": "",
        },
        "backend": {"ip": "nftables", "ip6": "nftables"},
        "mappings": list(mappings),
        "repairs": {"count": 0, "lastTime": None, "last": ""},
        "queue": 0,
        "nodeCache": None,
        **changes,
    }
