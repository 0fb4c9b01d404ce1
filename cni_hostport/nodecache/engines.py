"""The DNS servers that the agent can run, behind one face.

Decides for each how its configuration is written, how it is started and how it
takes up a change. A server here is a program of others; this file never answers
a question itself.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cni_hostport.host import commands, nodecache_files, nodecache_server
from cni_hostport.host.nodecache_server import Server
from cni_hostport.nodecache import coreparse, unbound, unboundconf
from cni_hostport.nodecache.flags import Params

log = logging.getLogger(__name__)
MAX_THREADS = 4


class EngineError(Exception):
    """The engine cannot be had or cannot take this configuration."""


@dataclass
class CoreDNS:
    """CoreDNS with the Corefile as it is."""

    path: str
    conf: str
    port: int
    quiet: bool = False
    with_signal: bool = False
    name: Literal["coredns"] = "coredns"
    grace: float = 10.0
    serves_endpoints: bool = True
    changed: bool = True
    _has_reload: bool = True
    _fresh_files: bool = False

    def argv(self) -> list[str]:
        """The command to run."""
        quiet = ["-quiet"] if self.quiet else []
        return [self.path, "-conf", self.conf, "-dns.port", str(self.port), *quiet]

    def write(self, text: str) -> tuple[coreparse.Block, ...]:
        """Write the Corefile; its blocks, none where only CoreDNS understands it.

        Raises EngineError.
        """
        try:
            blocks = coreparse.parse(text, os.environ)
        except coreparse.CorefileError as error:
            log.warning("%s: %s; CoreDNS may know better", self.conf, error)
            blocks = ()
        self._has_reload = bool(blocks) and all(b.all("reload") for b in blocks[:1])
        self._fresh_files = not _write(self.conf, text)
        self.changed = True  # at least a file that it names, which only CoreDNS can compare
        return blocks

    def reload(self, server: Server) -> None:
        """Let it take up the file: by its reload plugin, or by SIGUSR1 where that cannot see it.

        The plugin compares the Corefile alone, so a changed resolv.conf needs
        the signal.
        """
        if self.with_signal or not self._has_reload or self._fresh_files:
            server.send(signal.SIGUSR1)

    def statistics(self) -> Mapping[str, float]:
        """CoreDNS serves its own metrics."""
        return {}


@dataclass
class Unbound:
    """unbound with a configuration translated from the Corefile."""

    path: str
    conf: str
    directory: str
    port: int
    own_addresses: frozenset[str]
    name: Literal["unbound"] = "unbound"
    grace: float = 3.0
    serves_endpoints: bool = False
    changed: bool = True
    _notes: tuple[str, ...] = field(default=())

    @property
    def conf_file(self) -> str:
        """Unbound's own configuration."""
        return f"{self.directory}/unbound.conf"

    @property
    def control_socket(self) -> str:
        """Where it takes commands."""
        return f"{self.directory}/unbound.control"

    def argv(self) -> list[str]:
        """The command to run: in the foreground, without a pid file."""
        return [self.path, "-d", "-p", "-c", self.conf_file]

    def write(self, text: str) -> tuple[coreparse.Block, ...]:
        """Write Corefile and unbound.conf; tell what cannot be translated. Raises EngineError."""
        try:
            blocks = coreparse.parse(text, os.environ)
        except coreparse.CorefileError as error:
            raise EngineError(f"Corefile: {error}") from error
        done = unbound.translate(blocks, self._host())
        if done.notes != self._notes:
            for note in done.notes:
                log.warning("not as in the Corefile: %s", note)
            self._notes = done.notes
        candidate = f"{self.conf_file}.new"
        _write(candidate, done.text)
        self._check(candidate)
        self.changed = _write(self.conf_file, done.text)
        if self.conf:
            _write(self.conf, text)
        return blocks

    def reload(self, server: Server) -> None:
        """Re-read the configuration, cache kept."""
        try:
            answer = nodecache_server.control(self.control_socket, "reload_keep_cache")
        except OSError as error:
            log.warning("unbound does not take commands (%s): reloaded by signal", error)
            server.send(signal.SIGHUP)
            return
        if not answer.startswith("ok"):
            log.error("unbound: reload: %s", answer.strip())

    def statistics(self) -> Mapping[str, float]:
        """Its counters since its start; none where it does not answer."""
        try:
            return unboundconf.statistics(
                nodecache_server.control(self.control_socket, "stats_noreset", 1.0)
            )
        except OSError:
            return {}

    def _host(self) -> unboundconf.Host:
        return unboundconf.Host(
            control_socket=self.control_socket,
            directory=self.directory,
            own_addresses=self.own_addresses,
            port=self.port,
            threads=max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)))),
            read_servers=lambda path: unboundconf.resolv_servers(
                Path(path).read_text(encoding="utf-8", errors="replace")
            ),
        )

    def _check(self, candidate: str) -> None:
        checker = f"{self.path}-checkconf"
        if not Path(checker).exists():
            return
        try:
            done = commands.run([checker, candidate])
        except commands.CommandError:
            return
        if done.rc:
            raise EngineError(f"unbound refuses the configuration: {done.words}")


@dataclass
class Foreign:
    """A DNS server that somebody else runs: only link and rules are ours."""

    conf: str
    name: Literal["none"] = "none"
    grace: float = 0.0
    serves_endpoints: bool = False
    changed: bool = False

    def argv(self) -> list[str]:
        """Nothing is run."""
        return []

    def write(self, text: str) -> tuple[coreparse.Block, ...]:
        """Write the Corefile where -conf names one. Raises EngineError."""
        if self.conf:
            _write(self.conf, text)
        try:
            return coreparse.parse(text, os.environ)
        except coreparse.CorefileError:
            return ()

    def reload(self, server: Server) -> None:
        """Whoever runs it sees the file."""

    def statistics(self) -> Mapping[str, float]:
        """Unknown."""
        return {}


Engine = CoreDNS | Unbound | Foreign


def _write(path: str, text: str) -> bool:
    try:
        return nodecache_files.write_atomic(path, text)
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from error


def choose(params: Params, directory: str) -> Engine:
    """The engine that the command line asks for. Raises EngineError where there is none."""
    if params.engine == "none":
        return Foreign(params.conf)
    name, path = _find(params)
    if name == "coredns":
        conf = params.conf or f"{directory}/Corefile"
        return CoreDNS(path, conf, params.dns_port, params.quiet, params.reload_with_signal)
    own = frozenset(str(ip.address) for ip in params.local_ips)
    return Unbound(path, params.conf, directory, params.dns_port, own)


def _find(params: Params) -> tuple[str, str]:
    given = params.engine_path
    if given:
        found = commands.find(given) if "/" not in given else given
        if found is None or not os.access(found, os.X_OK) or not Path(found).is_file():
            raise EngineError(f'invalid value "{given}" for flag -enginepath: no executable there')
        looks = "unbound" if "unbound" in Path(found).name else "coredns"
        return (looks if params.engine == "auto" else params.engine), found
    for name in ("coredns", "unbound") if params.engine == "auto" else (params.engine,):
        found = commands.find(name)
        if found is not None:
            return name, found
    raise EngineError(
        f'invalid value "{params.engine}" for flag -engine: '
        f"{'neither coredns nor unbound' if params.engine == 'auto' else 'no ' + params.engine} "
        "in PATH; install it, or name it with -enginepath"
    )
