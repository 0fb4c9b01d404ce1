"""The CNI_* variables of a call.

Decides which variables a verb needs and what their values may be. A variable
that is empty is a missing one; one that the verb does not need is not looked
at, however malformed. Values may hold bytes as surrogate escapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cni_hostport.cni_fields import ifname_error
from cni_hostport.cni_json import replace_surrogates, show
from cni_hostport.errors import BadEnvironment

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Container IDs and network names, of any length; to be matched with ``fullmatch``."""

# The required variables of each verb, in the order in which they are looked at. CNI_PATH is
# never used; the library insists on it, and so do its conformance tests.
_CONTAINER = ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH")
REQUIRED: dict[str, tuple[str, ...]] = {
    "ADD": _CONTAINER,
    "CHECK": _CONTAINER,
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"),
    "GC": ("CNI_PATH",),
    "STATUS": ("CNI_PATH",),
}


def check_environment(command: str, env: Mapping[str, str]) -> None:
    """Raise ``BadEnvironment`` (code 4) unless the verb has what it needs.

    The first malformed value ends it; where none is malformed, all missing ones are named.
    """
    if not command:
        raise BadEnvironment("required env variables [CNI_COMMAND] missing")
    missing = []
    for name in REQUIRED.get(command, ()):
        value = env.get(name, "")
        if not value:
            missing.append(name)
        elif name == "CNI_CONTAINERID" and not NAME.fullmatch(value):
            raise BadEnvironment("invalid characters in CNI_CONTAINERID", show(value))
        elif name == "CNI_IFNAME" and (problem := ifname_error(value)):
            raise BadEnvironment(f"CNI_IFNAME: {problem}", show(value))
        elif name == "CNI_NETNS" and not _is_text(value):
            raise BadEnvironment("CNI_NETNS is not valid UTF-8", show(value))
    if missing:
        raise BadEnvironment(f"required env variables [{','.join(missing)}] missing")


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def netns_override(env: Mapping[str, str]) -> bool:
    """Whether CNI_NETNS may be the plugin's own namespace (the library's tests want that)."""
    value = env.get("CNI_NETNS_OVERRIDE", "")
    return value == "1" or value.lower() == "true"


def parse_args(text: str) -> dict[str, str]:
    """CNI_ARGS, ``K=V;K=V``, read leniently: no text is an error, the last of a key counts.

    Bytes that are no UTF-8 become U+FFFD.
    """
    pairs = (part.partition("=") for part in replace_surrogates(text).split(";"))
    return {key: value for key, equals, value in pairs if key and equals}
