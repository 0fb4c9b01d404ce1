"""Names and comments of the iptables backend: an on-disk format, pure.

``KUBE-HOSTPORTS`` and ``KUBE-HP-*`` are those of Kubernetes' hostport manager,
so that a node it once served is understood; chains that it does not know are
``HOSTPORT-MANAGER-*``. Whatever comes from a pod becomes a comment here and
nothing else. Never change a name: rules of older helpers would be orphans.
"""

from __future__ import annotations

import base64
import hashlib

from cni_hostport.model import Attachment, PortMapping, Protocol

HOSTPORTS = "KUBE-HOSTPORTS"
MAPPING_PREFIX = "KUBE-HP-"

EXCLUDED = "HOSTPORT-MANAGER-EXCLUDED"
MASQUERADE = "HOSTPORT-MANAGER-MASQ"
SNAT = "HOSTPORT-MANAGER-SNAT"
HELD = "HOSTPORT-MANAGER-HELD"
FORWARD = "HOSTPORT-MANAGER-FORWARD"
OPEN = "HOSTPORT-MANAGER-OPEN"

PORTALS_COMMENT = "kube hostport portals"
MASQUERADE_COMMENT = "hostport-manager masquerade"
HELD_COMMENT = "hostport-manager held ports"
GUARD_COMMENT = "hostport-manager loopback guard"
FORWARD_COMMENT = "hostport-manager open forward"

MARKER = "cni-hostport "
"""First words of the comment that says which attachment a rule belongs to."""

COMMENT_BYTES = 255
"""What the kernel keeps of a comment (XT_MAX_COMMENT_LEN less its NUL)."""


def suffix(container_id: str, host_port: int, protocol: Protocol, host_ip: str) -> str:
    """16 characters of base32(sha256(id + port + PROTOCOL + hostIP))."""
    text = f"{container_id}{host_port}{str(protocol).upper()}{host_ip}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return base64.b32encode(digest).decode("ascii")[:16]


def mapping_chain(attachment: Attachment, mapping: PortMapping) -> str:
    """The chain of one mapping; the same in both families' tables."""
    host_ip = "" if mapping.host_ip is None else str(mapping.host_ip)
    identity = attachment.identity
    return MAPPING_PREFIX + suffix(
        identity.container_id, mapping.host_port, mapping.protocol, host_ip
    )


def mapping_comment(attachment: Attachment, mapping: PortMapping) -> str:
    """``<pod>_<namespace> hostport <port>``; the container ID where no pod is named."""
    pod = attachment.pod
    name = pod.name or attachment.identity.container_id[:12]
    ending = f" hostport {mapping.host_port}"
    return clean(f"{name}_{pod.namespace}", COMMENT_BYTES - len(ending)) + ending


def owner_comment(key: str) -> str:
    """Comment that names the owner of a rule in a shared chain."""
    return MARKER + key


def owner_of(comment: str | None) -> str | None:
    """The key in an owner comment, None in any other."""
    if comment is None or not comment.startswith(MARKER):
        return None
    return comment[len(MARKER) :]


def clean(text: str, limit: int = COMMENT_BYTES) -> str:
    """Text as a comment can carry it: one line, UTF-8, at most ``limit`` bytes."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
