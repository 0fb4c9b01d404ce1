"""Plugin calls of the contract tests: one environment, one standard input, one verdict.

A ``Caller`` runs the plugin with exactly the variables it is given, as a runtime
would, in a lab node; ``expected`` says which code the CNI project's own library
would answer, written down from its documented order of checks and from nothing of
the plugin's code.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lab.chain import Json, Reply
from lab.node import SAFE_PATH, wait_for
from lab.stage import TYPE, Stage

VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
VERBS: Final = ("ADD", "CHECK", "DEL", "GC", "STATUS")
MISSING: Final = object()

ENV: Final = {
    "CNI_CONTAINERID": "ctr-1",
    "CNI_NETNS": "/does/not/exist",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
}


def env_of(verb: str, **changed: str | None) -> dict[str, str]:
    """The environment of a good call; None takes a variable out."""
    env: dict[str, str | None] = {"CNI_COMMAND": verb, **ENV, **changed}
    return {key: value for key, value in env.items() if value is not None}


def result_of(version: str, *, named: bool = True) -> Json:
    """A result as a bridge plugin of that version prints it, one address a family."""
    head: Json = {"cniVersion": version} if named else {}
    if version in ("0.1.0", "0.2.0"):
        return head | {
            "ip4": {"ip": "10.1.0.5/16", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
            "ip6": {"ip": "2001:db8:9::5/64"},
            "dns": {"nameservers": ["10.1.0.1"]},
        }
    ips: list[Json] = [
        {"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 1},
        {"address": "2001:db8:9::5/64", "interface": 1},
    ]
    if not version.startswith("1."):
        for number, entry in zip("46", ips, strict=True):
            entry["version"] = number
    return head | {
        "interfaces": [
            {"name": "cni0", "mac": "aa:bb:cc:dd:ee:ff"},
            {"name": "eth0", "mac": "99:88:77:66:55:44", "sandbox": "/var/run/netns/blue"},
        ],
        "ips": ips,
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {"nameservers": ["10.1.0.1"]},
    }


def conf(verb: str = "ADD", version: str = "1.1.0", **changed: Any) -> Json:
    """A good configuration for that verb; MISSING takes a key out."""
    document: Json = {"cniVersion": version, "name": "net1", "type": TYPE}
    if verb in ("ADD", "CHECK"):
        document["prevResult"] = result_of(version)
    document.update(changed)
    return {key: value for key, value in document.items() if value is not MISSING}


def ports(*entries: Any) -> Json:
    """The part of a configuration that asks for these mappings."""
    return {"runtimeConfig": {"portMappings": list(entries)}}


class Caller:
    """Calls the plugin of a stage with nothing but what it is told."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.binary = stage.runtime.binary(TYPE)

    def __call__(
        self,
        env: Mapping[str, str],
        stdin: Json | bytes | str,
        *,
        path: str | None = SAFE_PATH,
        timeout: float = 40.0,
    ) -> Reply:
        """One call; a document gets the stage's backend, text and bytes go in as they are."""
        if isinstance(stdin, dict):
            stdin = json.dumps(self.document(stdin))
        data = stdin.encode() if isinstance(stdin, str) else stdin
        first = self.stage.runtime.env["PATH"] if path == SAFE_PATH else path
        whole = dict(env) if first is None else {"PATH": first, **env}
        begin = time.monotonic()
        done = self.stage.node.run(self.binary, check=False, data=data, env=whole, timeout=timeout)
        return Reply(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    def document(self, config: Json) -> Json:
        """The configuration with the stage's backend, unless it names one."""
        return {"backend": self.stage.backend.name, **config}

    def verb(self, verb: str, document: Json | None = None, **env: str | None) -> Reply:
        """A good call of that verb, with these differences."""
        return self(env_of(verb, **env), conf(verb) if document is None else document)

    def warm(self, **env: str | None) -> int:
        """Have a helper, however loaded the machine is; its process id."""
        for _ in range(10):
            if self.verb("STATUS", conf("STATUS"), **env).status == 0:
                break
        # one that came second leaves again at once
        assert wait_for(lambda: len(self.stage.node.helpers()) == 1, 10)
        (helper,) = self.stage.node.helpers()
        return helper

    def start(self, env: Mapping[str, str], **popen: Any) -> subprocess.Popen[bytes]:
        """Start a call with pipes; the caller feeds and reaps it."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | popen
        path = self.stage.runtime.env["PATH"]
        return self.stage.node.popen(self.binary, env={"PATH": path, **env}, **pipes)

    def together(self, calls: Sequence[tuple[dict[str, str], Json | bytes]]) -> list[Reply]:
        """Many calls that do not bear on each other, some at a time; their replies in order."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda each: self(*each), calls))


def succeeded(reply: Reply, *, silent: bool = True) -> None:
    """Exit status 0, and stdout empty where the verb has nothing to say."""
    assert reply.status == 0, reply
    assert not (silent and reply.stdout), reply


def failed(reply: Reply, *codes: int, names: str = "") -> Json:
    """Exit status 1 and one error object as the specification has it; returns it."""
    assert reply.status == 1, reply
    error = reply.json
    assert {"cniVersion", "code", "msg"} <= set(error) <= {"cniVersion", "code", "msg", "details"}
    assert error["code"] in codes, reply
    assert error["cniVersion"] in VERSIONS
    assert isinstance(error["msg"], str)
    assert error["msg"].strip(), reply
    assert isinstance(error.get("details", ""), str)
    assert names in reply.text, reply
    swallowed = reply.text.lower()
    assert "not found" not in swallowed, reply
    assert "no such file or directory" not in swallowed, reply
    return error


# -- the reference library's order of checks, written down once more ------------------------------

_NEEDS: Final = {
    "ADD": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"),
    "CHECK": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"),
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"),
    "GC": ("CNI_PATH",),
    "STATUS": ("CNI_PATH",),
}
_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*\Z")
_FIRST: Final = {"CHECK": (0, 4, 0), "GC": (1, 1, 0), "STATUS": (1, 1, 0)}


def _bad_link(name: str) -> bool:
    return (
        len(name.encode()) > 15
        or name in (".", "..")
        or any(c in "/:" or c.isspace() for c in name)
    )


_MALFORMED: Final = {
    "CNI_CONTAINERID": lambda value: not _NAME.match(value),
    "CNI_IFNAME": _bad_link,
}


def expected_environment(env: Mapping[str, str]) -> int:
    """0 or 4: the first malformed value ends it, then everything missing together."""
    missing = False
    for name in _NEEDS.get(env.get("CNI_COMMAND", ""), ()):
        value = env.get(name, "")
        if not value:
            missing = True
        elif name in _MALFORMED and _MALFORMED[name](value):
            return 4
    return 4 if missing else 0


def expected_version(verb: str, version: Any) -> int:
    """0, 1 or 6 for a cniVersion (MISSING where the key is not there)."""
    if version is MISSING or version is None or version == "":
        version = "0.1.0"
    if not isinstance(version, str):
        return 6
    if verb in _FIRST:
        try:
            numbers = [int(part) for part in version.split(".")]
        except ValueError:
            return 6
        if len(numbers) > 3 or not re.fullmatch(r"[-+0-9.]+", version):
            return 6
        triple = tuple([*numbers, 0, 0][:3])
        if triple < _FIRST[verb] or triple > (1, 1, 0):
            return 1
    return 0 if version in VERSIONS else 1
