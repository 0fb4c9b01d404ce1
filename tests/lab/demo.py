"""The demonstration: one node, a pod, a client, and the whole life of a host port.

Every step says in plain words what is done and what is seen, and holds or not;
exit status 0 only if every step held. By default the plugins are called by this
program as the CNI reference library calls them; ``--client cnitool`` calls them
through cnitool. Touches nothing outside the namespaces it makes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.chain import Attachment, Chain, Json, PluginError
from lab.node import CLIENT4, NODE4, NODE6, wait_for
from lab.rivals import Rival, rivals, winners
from lab.stage import BUNDLE, TYPE, Backend, Stage, mapping

PORT = 8080
PORTS = [mapping(PORT, 80), mapping(PORT, 80, "udp")]


class Caller(Protocol):
    """Who calls the plugins; each verb raises CallFailed with the plugin's words."""

    def add(self, at: Attachment) -> Json: ...
    def check(self, at: Attachment) -> None: ...
    def delete(self, at: Attachment) -> None: ...


class CallFailed(Exception):
    """A plugin said no."""


class AsLibcni:
    """Calls the chain itself, as libcni does; CHECK only of our plugin (others are old)."""

    def __init__(self, stage: Stage, chain: Chain) -> None:
        self._stage, self._chain = stage, chain

    def add(self, at: Attachment) -> Json:
        """ADD of the chain."""
        try:
            return self._chain.add(at)
        except PluginError as error:
            raise CallFailed(error.text) from error

    def check(self, at: Attachment) -> None:
        """CHECK of our plugin."""
        reply = self._stage.call(
            "CHECK", self._chain.config(self._chain.entry(TYPE), at, at.result), at
        )
        if reply.status:
            raise CallFailed(reply.text)

    def delete(self, at: Attachment) -> None:
        """DEL of the chain."""
        try:
            self._chain.delete(at)
        except PluginError as error:
            raise CallFailed(f"{error.plugin}: {error.text}") from error


class WithCnitool:
    """Calls the chain through cnitool."""

    def __init__(self, stage: Stage, chain: Chain) -> None:
        script = Path(__file__).parents[1] / "clients/get_cnitool.sh"
        done = subprocess.run([str(script)], stdout=subprocess.PIPE, check=True)
        self._tool = done.stdout.decode().strip()
        self._stage, self._name = stage, chain.name
        folder = stage.node.path("/run/net.d")
        folder.mkdir()
        (folder / "10.conflist").write_text(json.dumps(chain.conflist))

    def _run(self, verb: str, at: Attachment) -> bytes:
        runtime = self._stage.runtime
        env = {
            **runtime.env,
            "NETCONFPATH": "/run/net.d",
            "CNI_PATH": runtime.path,
            "CNI_ARGS": at.args,
            "CAP_ARGS": json.dumps(at.capability_args),
        }
        done = self._stage.node.run(self._tool, verb, self._name, at.netns, env=env, check=False)
        if done.returncode:
            raise CallFailed((done.stdout + done.stderr).decode().strip())
        return done.stdout

    def add(self, at: Attachment) -> Json:
        """ADD of the chain."""
        at.result = json.loads(self._run("add", at))
        assert at.result is not None
        return at.result

    def check(self, at: Attachment) -> None:
        """CHECK of the chain."""
        self._run("check", at)

    def delete(self, at: Attachment) -> None:
        """DEL of the chain."""
        self._run("del", at)


class Demo:
    """The steps, in order, each printed with its result."""

    def __init__(self, stage: Stage, caller: Caller) -> None:
        self._stage, self._caller = stage, caller
        self._number = 0
        self.failed = 0
        self._web = stage.attachment("web", PORTS)
        self._rival = stage.attachment("rival", PORTS)

    def step(self, words: str, action: Callable[[], str]) -> None:
        """One step: what is done, then what was seen."""
        self._number += 1
        print(f"\n{self._number}. {words}", flush=True)
        try:
            print(f"   {action()}", flush=True)
        except (AssertionError, CallFailed, OSError, RuntimeError) as error:
            self.failed += 1
            print(f"   DID NOT HOLD: {error}", flush=True)

    def add(self) -> str:
        """ADD the pod."""
        start = time.monotonic()
        result = self._caller.add(self._web)
        self._stage.servers.serve("web", [("tcp", 80), ("udp", 80)], netns="web")
        addresses = ", ".join(entry["address"] for entry in result["ips"])
        return f"done in {time.monotonic() - start:.2f} s; the pod has {addresses}"

    def connect(self) -> str:
        """Every way in."""
        ways = (
            ("a client outside, IPv4", NODE4, "client"),
            ("a client outside, IPv6", NODE6, "client"),
            ("the node by 127.0.0.1", "127.0.0.1", None),
            ("the pod itself by the node's address", NODE4, "web"),
        )
        for who, host, at in ways:
            for kind in ("tcp", "udp"):
                answer = self._stage.ask(host, PORT, "udp" if kind == "udp" else "tcp", at=at)
                assert answer.server == "web", f"{who}, {kind}: {answer.outcome}"
        source = self._stage.ask(NODE4, PORT).source
        assert source == CLIENT4, f"the pod saw {source}"
        names = "; ".join(who for who, _, _ in ways)
        return f"the pod answers TCP and UDP: {names}.\n   It sees the client's address {source}."

    def check(self) -> str:
        """CHECK."""
        self._caller.check(self._web)
        return "sockets, rules and system settings are all there"

    def reserved(self) -> str:
        """Nobody else can have the port."""
        everybody = rivals("0.0.0.0", NODE4, "127.0.0.1", "::", "dual")
        won = winners(self._stage.node, PORT, everybody)
        assert not won, f"could bind: {sorted(won)}"
        return f"{len(everybody)} ways to listen on port {PORT} tried: each one is told EADDRINUSE"

    def conflict(self) -> str:
        """A second pod with the port."""
        try:
            self._caller.add(self._rival)
        except CallFailed as error:
            text = str(error)
        else:
            raise AssertionError("the second pod got the port")
        finally:
            self._caller.delete(self._rival)
        assert "shop/web" in text, text
        assert self._stage.ask(NODE4, PORT).server == "web", "the first pod lost its port"
        return f'refused: "{text}"\n   The first pod still answers.'

    def heal(self) -> str:
        """Flush everything and wait."""
        self._stage.node.run("nft", "flush", "ruleset")
        start = time.monotonic()
        right = wait_for(
            lambda: self._stage.ask(NODE4, PORT, timeout=0.1).server == "web", timeout=2, step=0.005
        )
        assert right, "no answer within 2 s"
        return f"the pod answers again {1000 * (time.monotonic() - start):.0f} ms after the flush"

    def delete(self) -> str:
        """DEL."""
        self._caller.delete(self._web)
        outcome = self._stage.ask(NODE4, PORT).outcome
        assert outcome == "refused", f"the port says: {outcome}"
        return "the client is refused at once"

    def nothing_left(self) -> str:
        """No trace."""
        assert self._stage.records() == {}, "records are left"
        rules = self._stage.node.ruleset()
        assert str(PORT) not in rules, rules
        assert Rival("dual", "plain", "tcp").wins(self._stage.node, PORT), "the port is not free"
        return "no record, no rule of the pod, and the port can be had by any process"

    def run(self) -> None:
        """All steps."""
        self.step(
            "A runtime adds a pod: bridge gives it addresses, then cni-hostport is asked for\n"
            f"   host port {PORT} (TCP and UDP) to its port 80.",
            self.add,
        )
        self.step("Who can reach it?", self.connect)
        self.step("CHECK: is everything as it must be?", self.check)
        self.step("The port is reserved as long as the pod lives.", self.reserved)
        self.step("A second pod asks for the same port.", self.conflict)
        self.step("Somebody flushes all netfilter rules of the node.", self.heal)
        self.step("The pod is deleted.", self.delete)
        self.step("What is left?", self.nothing_left)


def main() -> int:
    """Run the demonstration; 0 if every step held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--client",
        choices=["chain", "cnitool"],
        default="chain",
        help="who calls the plugins (default: this program, as libcni does)",
    )
    client = parser.parse_args().client
    if os.geteuid() != 0:
        print("the demonstration needs root: it makes network namespaces", file=sys.stderr)
        return 1
    if BUNDLE.name == TYPE and not BUNDLE.exists():
        print(f"no bundle at {BUNDLE}: run ./build.sh first", file=sys.stderr)
        return 1
    print(
        "A node of its own is made in network and mount namespaces: addresses "
        f"{NODE4} and {NODE6},\na client beside it at {CLIENT4}, and a namespace for a pod."
    )
    stage = Stage(Backend())
    try:
        # No ipMasq: the flush in step 6 would take the bridge plugin's own rules, which it misses.
        chain = stage.network()
        demo = Demo(
            stage, WithCnitool(stage, chain) if client == "cnitool" else AsLibcni(stage, chain)
        )
        demo.run()
    finally:
        stage.close()
    print(f"\n{'every step held' if not demo.failed else f'{demo.failed} step(s) did not hold'}")
    return 1 if demo.failed else 0


if __name__ == "__main__":
    sys.exit(main())
