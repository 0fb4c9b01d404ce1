"""What the tests of the wire format share: a good call, and ways to spoil it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cni_hostport import cni
from cni_hostport.errors import HostPortError
from cni_hostport.model import Attachment

ENV = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "ctr-1",
    "CNI_NETNS": "/var/run/netns/blue",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
}
PREV: dict[str, Any] = {
    "cniVersion": "1.1.0",
    "interfaces": [
        {"name": "cni0", "mac": "aa:bb:cc:dd:ee:ff"},
        {"name": "veth12", "mac": "aa:bb:cc:dd:ee:fe"},
        {"name": "eth0", "mac": "99:88:77:66:55:44", "sandbox": "/var/run/netns/blue"},
    ],
    "ips": [{"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 2}],
    "routes": [{"dst": "0.0.0.0/0"}],
}
MAPPING = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
DUAL = {
    **PREV,
    "ips": [{"address": "10.1.0.5/16", "interface": 2}, {"address": "fd00::5/64", "interface": 2}],
}


def env(command: str = "ADD", **changed: str | None) -> dict[str, str]:
    """The good environment with some variables changed, None to leave one out."""
    values = {**ENV, "CNI_COMMAND": command, **changed}
    return {key: value for key, value in values.items() if value is not None}


def config(*mappings: Any, **keys: Any) -> dict[str, Any]:
    """A good configuration with these mappings and keys; ``drop_`` names keys to leave out."""
    dropped = keys.pop("drop_", ())
    document = {"cniVersion": "1.1.0", "name": "net1", "type": "cni-hostport", "prevResult": PREV}
    if mappings:
        document["runtimeConfig"] = {"portMappings": list(mappings)}
    document.update(keys)
    return {key: value for key, value in document.items() if key not in dropped}


def parse(document: Any, command: str = "ADD", **changed: str | None) -> cni.Call:
    """Parse a call of this configuration (bytes go in as they are)."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return cni.parse_call(env(command, **changed), data)


def attachment(document: Any, **changed: str | None) -> Attachment:
    """The attachment that an ADD of this configuration asks for."""
    return cni.attachment_of(parse(document, **changed))


def refused(document: Any, code: int, *texts: str, **changed: str | None) -> HostPortError:
    """Assert that ADD is refused with this code, and that its words contain all the texts."""
    with pytest.raises(HostPortError) as caught:
        attachment(document, **changed)
    assert_error(caught.value, code, *texts)
    return caught.value


def assert_error(error: HostPortError, code: int, *texts: str) -> None:
    """The error's code, its words, and that it can be printed on one line."""
    assert error.code == code, str(error)
    for text in texts:
        assert text in str(error), str(error)
    printed = json.loads(cni.error_bytes(error, "1.0.0"))
    assert printed["code"] == code
    assert all(str(value).isprintable() for value in printed.values())


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()
