"""The agent: carries out what the state machine decides, on this node.

Decides the order of things that happen at once, how often is looked for changes
of others, and what the end of the agent leaves behind: rules first, then the
server, then the link; where the rules cannot be removed, server and link stay,
so that whoever the rules send here is answered. One thread does all of it.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cni_hostport.host import nodecache_files as files
from cni_hostport.host import nodecache_links as links
from cni_hostport.host.nodecache_signals import Signals
from cni_hostport.host.nodecache_tools import ToolError, Tools
from cni_hostport.nodecache import corefile, coreparse, diagnose, engines, machine, ruler, unbound
from cni_hostport.nodecache.child import Child
from cni_hostport.nodecache.config import Configuration
from cni_hostport.nodecache.flags import Params
from cni_hostport.nodecache.keeper import Keeper
from cni_hostport.nodecache.listeners import Listeners
from cni_hostport.nodecache.machine import Action, Event, Phase
from cni_hostport.nodecache.metrics import Metrics
from cni_hostport.nodecache.watch import Watch

log = logging.getLogger(__name__)
# Seconds between the end of the rules and that of the server: answers under way get out.
LAMEDUCK = 0.2
FILES_PERIOD = 1.0
WAIT_PERIOD = 0.05
_REASONS = {Event.EXITED: "exited", Event.SILENT: "silent", Event.STOP: "stopped"}


class FatalError(Exception):
    """The agent cannot work here; the text says why and what to do."""


def _engine(params: Params, directory: str) -> engines.Engine:
    try:
        return engines.choose(params, directory)
    except engines.EngineError as error:
        raise FatalError(str(error)) from error


class Agent:
    """One agent, from its start to its exit status."""

    def __init__(self, params: Params, run_dir: str) -> None:
        self.params = params
        self.directory = f"{run_dir}/node-cache"
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        addresses = tuple(ip.address for ip in params.local_ips)
        self.metrics = Metrics(self._statistics, self._rules_present)
        self.link = links.CacheLink(params.interface_name, params.interface_kind, addresses)
        self.engine = _engine(params, self.directory)
        self.config = Configuration(params, os.environ, lambda: self.metrics.error("configmap"))
        self.tools = Tools(f"{self.directory}/xtables.lock")
        self.keeper = Keeper(params, self.link, self.tools, self.metrics)
        self.watch = Watch(
            addresses, params.dns_port, lambda: links.links_with(addresses), self.keeper.accept
        )
        self.keeper.on_link = self.watch.link_changed
        self.listeners = Listeners(params, self.metrics, lambda: self.state.phase is Phase.SERVING)
        self.lock = files.AgentLock(params.interface_name)
        self.state = machine.State(managed=self.engine.name != "none")
        self.selector = selectors.DefaultSelector()
        self.child = Child(self.engine, self.directory, params, self.selector, self.metrics)
        self.signals = Signals()
        self._files_at = 0.0
        self._forced = False

    def run(self) -> int:
        """Work until a signal ends it. Raises FatalError where it cannot begin."""
        self.signals.install(self.selector)
        if not self._wait_for_turn():
            return 0
        self._begin()
        try:
            while not self.signals.stop:
                self._turn()
        except BaseException as error:
            # A mistake of ours must not leave a node without DNS.
            log.error("ending because of an error: %r", error)
            self._end()
            raise
        log.info("ending: %s", self.signals.stop)
        return self._end()

    def _wait_for_turn(self) -> bool:
        told = False
        while not self.lock.take():
            if not told:
                log.warning("another node-cache works on %s: waiting for its end", self.link.name)
                told = True
            if self.signals.wait(self.selector, WAIT_PERIOD):
                return False
        return True

    def _begin(self) -> None:
        self.listeners.start_metrics()
        try:
            self.keeper.choose_backend()
            self.config.poll(time.monotonic())
            self.keeper.first_link()
        except (ruler.NoBackend, corefile.ServiceUnknown, links.LinkError) as error:
            raise FatalError(str(error)) from error
        self.keeper.listen(self.selector)
        self._take_over()
        if self.config.text is not None:
            self._configure()

    def _turn(self) -> None:
        now = time.monotonic()
        due = [self._files_at, self.keeper.due(self.state.rules)]
        if self.state.phase in (Phase.STARTING, Phase.SERVING, Phase.DEAF):
            due.append(self.watch.due(self.state.phase))
        if self.state.phase is Phase.WAITING and self.state.configured:
            due.append(self.state.retry_at)
        probes = self.watch.prober.sockets()
        for sock in probes:
            self.selector.register(sock, selectors.EVENT_READ)
        for key, _ in self.selector.select(max(0.0, min(due) - now)):
            self.signals.drain(key)
            self.keeper.notice(key)
        for sock in probes:
            self.selector.unregister(sock)
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        if self.child.has_ended():
            self._ended()
        if self.state.phase in (Phase.STARTING, Phase.SERVING, Phase.DEAF):
            event = self.watch.poll(self.state.phase, self.state.since, now)
            if event is not None:
                self._feed(event)
        if now >= self._files_at or self.signals.reload:
            self._files_at = now + FILES_PERIOD
            self._read_files(now)
        self._feed(Event.TICK)
        self.keeper.work(self.state.rules, now)

    def _read_files(self, now: float) -> None:
        self._forced, self.signals.reload = self.signals.reload, False
        try:
            if self.config.poll(now, force=self._forced):
                self._configure()
        except corefile.ServiceUnknown as error:
            raise FatalError(str(error)) from error
        self.listeners.retry(now)

    def _configure(self) -> None:
        """Hand the rendered Corefile to the engine; on an error the last good one stays."""
        assert self.config.text is not None
        try:
            blocks = self.engine.write(self.config.text)
        except engines.EngineError as error:
            self.config.failed(str(error), time.monotonic())
            return
        self.config.named_files = unbound.forward_files(blocks)
        if blocks:
            self.watch.zone = coreparse.zone_of(blocks[0].keys[0])
        if not self.engine.serves_endpoints:
            self.listeners.serve(unbound.endpoints(blocks))
        log.info("configuration written, %d blocks", len(blocks))
        self._feed(Event.CONFIGURED)

    def _feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = machine.step(before, event, time.monotonic())
        # Written down before the rules come and after they went: whoever clears up
        # after a kill at any instant finds too much rather than too little.
        if self.state.rules and not before.rules:
            self._remember_rules()
        for action in actions:
            if action is Action.REMOVE and before.rules:
                self.metrics.fallback(_REASONS[event])
            _ACTIONS[action](self)
        if self.state.phase is not before.phase:
            log.info("server %s -> %s", before.phase.value, self.state.phase.value)
            self.metrics.up.set(self.state.phase is Phase.SERVING)
            if self.state.phase is Phase.STARTING and not self.state.managed:
                self.watch.begin()
        if before.rules and not self.state.rules:
            self._remember_rules()

    def _remember_rules(self) -> None:
        self.child.remember(self.state.rules and self.params.setup_iptables)

    def _take_over(self) -> None:
        """What an earlier agent left: its server where it is the one we would run, else nothing."""
        server, same = self.child.left_behind()
        adopted = server is not None and same and self.state.managed
        if not adopted:
            self.keeper.remove(ruler.TEARDOWN_PATIENCE)
            if server is not None:
                log.info("ending the earlier agent's server, pid %d", server.pid)
                time.sleep(LAMEDUCK)
                server.end(self.engine.grace)
        self.keeper.sweep()
        if server is not None and adopted:
            log.info("taking over %s, pid %d", self.engine.name, server.pid)
            self.state = replace(self.state, rules=self.keeper.present() > 0)
            self.watch.begin()
            self.child.attach(server)
            self._remember_rules()
            self._feed(Event.ADOPTED)

    def _start(self) -> None:
        self.watch.begin()
        if not self.child.start():
            self._feed(Event.EXITED)

    def _ended(self) -> None:
        never_answered = self.state.phase is Phase.STARTING
        # The rules go before anything else is done about it.
        self._feed(Event.EXITED)
        self.child.bury()
        if never_answered:
            for line in diagnose.port_users(self.link.addresses, self.params.dns_port):
                log.error("%s", line)

    def _kill(self) -> None:
        if self.child.server is None:
            return
        self.child.end(self.engine.grace if self.signals.stop else 0.5)
        if not self.signals.stop:
            self._feed(Event.EXITED)

    def _reload(self) -> None:
        if self.child.reload(self._forced):
            self.watch.reloading(time.monotonic())

    def _install(self) -> None:
        self.keeper.install()
        self.watch.prober.forget_questions()
        if self.params.pidfile:
            try:
                files.write_atomic(self.params.pidfile, f"{os.getpid()}\n")
            except OSError as error:
                log.error("-pidfile %s cannot be written: %s", self.params.pidfile, error.strerror)

    def _remove(self) -> None:
        self.keeper.remove(ruler.FALLBACK_PATIENCE)

    def _statistics(self) -> Mapping[str, float]:
        return self.child.statistics()

    def _rules_present(self) -> float:
        return float(self.keeper.present())

    def _end(self) -> int:
        """Rules, server, link; the exit status."""
        with suppress(OSError):
            if self.params.pidfile:
                Path(self.params.pidfile).unlink(missing_ok=True)
        if self.params.skip_teardown:
            log.info("-skipteardown: rules, server and link stay")
            return 0
        log.info("Tearing down")
        had_rules = self.state.rules
        try:
            self.keeper.remove_for_good()
        except ToolError as error:
            log.error("the rules stay, and so do server and link: %s", error)
            return 3
        if had_rules:
            self.metrics.fallback("stopped")
            time.sleep(LAMEDUCK)
        self.signals.stop = self.signals.stop or "error"
        self._kill()
        self.state = replace(self.state, phase=Phase.STOPPED, rules=False)
        self.child.forget()
        status = 0
        if self.params.setup_interface:
            try:
                self.link.remove()
            except links.LinkError as error:
                log.error("%s", error)
                status = 3
        self.lock.release()
        return status


_ACTIONS: dict[Action, Callable[[Agent], None]] = {
    Action.START: Agent._start,
    Action.KILL: Agent._kill,
    Action.RELOAD: Agent._reload,
    Action.INSTALL: Agent._install,
    Action.REMOVE: Agent._remove,
}
