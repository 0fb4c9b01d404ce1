"""The DNS server as the agent's child: its process, and what is remembered of it.

Decides how it is told apart from another server (command, addresses, start
time) and what is written down for the next agent. When it is started or ended
is the state machine's word.
"""

from __future__ import annotations

import logging
import selectors
from collections.abc import Mapping

from cni_hostport.host import nodecache_server as servers
from cni_hostport.host.nodecache_server import Server
from cni_hostport.nodecache.engines import Engine
from cni_hostport.nodecache.flags import Params
from cni_hostport.nodecache.metrics import Metrics
from cni_hostport.nodecache.state import StateFile

log = logging.getLogger(__name__)


class Child:
    """At most one server; ``server`` is None while none runs."""

    def __init__(
        self,
        engine: Engine,
        directory: str,
        params: Params,
        selector: selectors.BaseSelector,
        metrics: Metrics,
    ) -> None:
        self.server: Server | None = None
        self._engine = engine
        self._directory = directory
        self._selector = selector
        self._metrics = metrics
        self._file = StateFile(f"{directory}/{params.interface_name}.json")
        self._addresses = tuple(str(ip.address) for ip in params.local_ips)
        self._port = params.dns_port
        self._rules = False
        self._starts = 0

    def left_behind(self) -> tuple[Server | None, bool]:
        """A server that an earlier agent left running, and whether it is the one we would run."""
        found = self._file.read()
        server = servers.adopt(found.server_pid, found.server_start) if found.server_pid else None
        same = (found.argv, found.addresses, found.port) == (
            tuple(self._engine.argv()),
            self._addresses,
            self._port,
        )
        return server, same

    def start(self) -> bool:
        """Start it; False where that cannot be done."""
        self._starts += 1
        if self._starts > 1:
            self._metrics.restarts.inc()
        argv = self._engine.argv()
        log.info("starting %s", " ".join(argv))
        try:
            self.attach(servers.start(argv, self._directory))
        except OSError as error:
            log.error("%s cannot be started: %s", argv[0], error.strerror)
            return False
        return True

    def attach(self, server: Server) -> None:
        """Watch a running server from now on."""
        self.server = server
        self._selector.register(server.pidfd, selectors.EVENT_READ)
        self.remember(self._rules)

    def has_ended(self) -> bool:
        """Whether there was one and it has ended by itself."""
        return self.server is not None and self.server.has_ended()

    def bury(self) -> None:
        """Take leave of one that has ended."""
        server = self._release()
        if server is not None:
            log.error("%s, pid %d: %s", self._engine.name, server.pid, server.reap())

    def end(self, grace: float) -> None:
        """End it, by force after ``grace`` seconds."""
        server = self._release()
        if server is not None:
            how = "" if server.end(grace) else " by force"
            log.info("%s, pid %d: ended%s", self._engine.name, server.pid, how)

    def _release(self) -> Server | None:
        server, self.server = self.server, None
        if server is not None:
            self._selector.unregister(server.pidfd)
            self.remember(self._rules)
        return server

    def reload(self, forced: bool) -> bool:
        """Hand it the configuration that was written; False if that is the one it has."""
        if self.server is None or not (self._engine.changed or forced):
            return False
        self._metrics.reloads.inc()
        self._engine.reload(self.server)
        return True

    def statistics(self) -> Mapping[str, float]:
        """The server's own numbers; none while none runs."""
        return self._engine.statistics() if self.server is not None else {}

    def remember(self, rules: bool) -> None:
        """Write down what runs, and whether rules lead questions to it."""
        self._rules = rules
        server = self.server
        self._file.write(
            argv=tuple(self._engine.argv()),
            addresses=self._addresses,
            port=self._port,
            rules=rules,
            fallbacks=self._metrics.fallen_back,
            server_pid=server.pid if server else 0,
            server_start=(servers.started_at(server.pid) or 0) if server else 0,
        )

    def forget(self) -> None:
        """Nothing runs, nothing stands."""
        self._file.remove()
