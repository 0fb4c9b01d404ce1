"""Calls a chain of CNI plugins exactly as the reference library does.

What a plugin is given is what libcni gives it: the plugin's entry of the
conflist with ``name``, ``cniVersion``, ``prevResult`` and the part of
``runtimeConfig`` whose capability the entry declares; DEL in reverse with the
final result of ADD. Knows nothing of host ports. Runs plugins in a lab node.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.node import SAFE_PATH, Node

Json = dict[str, Any]

SYSTEM_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")


@dataclass(frozen=True)
class Reply:
    """How one plugin call ended; ``seconds`` is wall time."""

    status: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def json(self) -> Json:
        """The one JSON object on stdout; anything else there is an error of the plugin."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict), self.stdout
        return value

    @property
    def code(self) -> int:
        """The CNI error code, 0 for success."""
        return 0 if self.status == 0 else int(self.json["code"])

    @property
    def text(self) -> str:
        """Message and details of an error in one line."""
        words = self.json
        return f"{words['msg']}: {words.get('details', '')}"


class PluginError(Exception):
    """A plugin of the chain failed; the chain stopped there, as libcni stops."""

    def __init__(self, plugin: str, verb: str, reply: Reply) -> None:
        super().__init__(f"plugin {plugin} {verb}: {reply.stdout!r} {reply.stderr!r}")
        self.plugin, self.verb, self.reply = plugin, verb, reply

    @property
    def code(self) -> int:
        """The CNI error code."""
        return self.reply.code

    @property
    def text(self) -> str:
        """Message and details."""
        return self.reply.text


@dataclass
class Attachment:
    """One pod's interface on one network, with what the runtime remembers of it."""

    container_id: str
    netns: str
    ifname: str = "eth0"
    args: str = ""
    capability_args: Json = field(default_factory=dict)
    result: Json | None = None

    def addresses(self) -> list[str]:
        """Addresses of the result without prefix length."""
        assert self.result is not None
        return [str(entry["address"]).split("/")[0] for entry in self.result["ips"]]

    def address(self, version: int) -> str:
        """The first IPv4 or IPv6 address of the result."""
        return next(a for a in self.addresses() if (":" in a) == (version == 6))


class Runtime:
    """The caller of plugins: binary directories, environment, and one node."""

    def __init__(self, node: Node, plugin_dirs: Sequence[str], env: Mapping[str, str]) -> None:
        self.node = node
        self.path = ":".join([*plugin_dirs, *SYSTEM_PLUGINS])
        self.env = {"PATH": SAFE_PATH, **env}

    def binary(self, plugin: str) -> str:
        """The plugin's executable, the first found in the binary directories."""
        for folder in self.path.split(":"):
            if os.access(self.node.path(f"{folder}/{plugin}"), os.X_OK):
                return f"{folder}/{plugin}"
        raise FileNotFoundError(f"no CNI plugin {plugin!r} in {self.path}")

    def environment(
        self, verb: str, at: Attachment | None, **changes: str | None
    ) -> dict[str, str]:
        """What libcni puts into a plugin's environment; None takes a variable out."""
        env: dict[str, str | None] = {
            **self.env,
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": at.container_id if at else "",
            "CNI_NETNS": at.netns if at else "",
            "CNI_IFNAME": at.ifname if at else "",
            "CNI_ARGS": at.args if at else "",
            "CNI_PATH": self.path,
            **changes,
        }
        return {name: value for name, value in env.items() if value is not None}

    def start(
        self, plugin: str, verb: str, at: Attachment | None, **changes: str | None
    ) -> subprocess.Popen[bytes]:
        """Start a plugin with pipes; the caller feeds and reaps it."""
        return self.node.popen(
            self.binary(plugin),
            env=self.environment(verb, at, **changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def call(
        self,
        plugin: str,
        verb: str,
        config: Json | bytes,
        at: Attachment | None = None,
        *,
        timeout: float = 40.0,
        **changes: str | None,
    ) -> Reply:
        """Run one plugin to its end: environment, stdin, stdout and exit status."""
        data = config if isinstance(config, bytes) else json.dumps(config).encode()
        begin = time.monotonic()
        with self.start(plugin, verb, at, **changes) as process:
            try:
                out, err = process.communicate(data, timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Reply(process.returncode, out, err, time.monotonic() - begin)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


class Chain:
    """One conflist, called as libcni calls it."""

    def __init__(self, runtime: Runtime, conflist: Json) -> None:
        self.runtime = runtime
        self.conflist = conflist

    @classmethod
    def load(cls, runtime: Runtime, path: Path) -> Chain:
        """The chain of a conflist file."""
        return cls(runtime, json.loads(path.read_text()))

    @property
    def name(self) -> str:
        """The network's name."""
        return str(self.conflist["name"])

    def version(self) -> str:
        """The conflist's cniVersion."""
        return str(self.conflist.get("cniVersion", "0.1.0"))

    def config(self, entry: Json, at: Attachment | None, previous: Json | None) -> Json:
        """The stdin of one plugin (libcni ``buildOneConfig`` and ``injectRuntimeConfig``)."""
        config = {**entry, "name": self.name, "cniVersion": self.version()}
        if previous is not None:
            config["prevResult"] = previous
        wanted = entry.get("capabilities", {})
        args = at.capability_args if at else {}
        runtime_config = {key: args[key] for key, on in wanted.items() if on and key in args}
        if runtime_config:
            config["runtimeConfig"] = runtime_config
        return config

    def entry(self, plugin: str) -> Json:
        """The conflist's entry of that type."""
        found = next(e for e in self.conflist["plugins"] if e["type"] == plugin)
        assert isinstance(found, dict)
        return found

    def add(self, at: Attachment) -> Json:
        """ADD of every plugin in order; the final result is kept in the attachment."""
        result: Json | None = None
        for entry in self.conflist["plugins"]:
            reply = self._call(entry, "ADD", at, result)
            result = reply.json
        assert result is not None
        at.result = result
        return result

    def delete(self, at: Attachment) -> None:
        """DEL of every plugin in reverse, with the kept result from 0.4.0 on."""
        previous = at.result if _version(self.version()) >= (0, 4, 0) else None
        for entry in reversed(self.conflist["plugins"]):
            self._call(entry, "DEL", at, previous)
        at.result = None

    def check(self, at: Attachment) -> None:
        """CHECK of every plugin in order, with the kept result."""
        if self.conflist.get("disableCheck"):
            return
        for entry in self.conflist["plugins"]:
            self._call(entry, "CHECK", at, at.result)

    def garbage_collect(self, valid: Sequence[Attachment], plugin: str) -> None:
        """GC of one plugin (the system's others may be too old for the verb)."""
        alive = [{"containerID": at.container_id, "ifname": at.ifname} for at in valid]
        config = self.config(self.entry(plugin), None, None) | {
            "cniVersion": "1.1.0",
            "cni.dev/valid-attachments": alive,
            "cni.dev/attachments": alive,
        }
        reply = self.runtime.call(plugin, "GC", config)
        if reply.status:
            raise PluginError(plugin, "GC", reply)

    def _call(self, entry: Json, verb: str, at: Attachment, previous: Json | None) -> Reply:
        reply = self.runtime.call(entry["type"], verb, self.config(entry, at, previous), at)
        if reply.status:
            raise PluginError(entry["type"], verb, reply)
        return reply
