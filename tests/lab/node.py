"""A node of its own in network, mount and uts namespaces, on the real kernel.

A ``Node`` is a long-lived child in fresh namespaces with a private /run and
/var/lib/cni; that network namespace is "the node". Commands run in it by
``nsenter``; sockets are opened in it (or in any namespace named in its
/run/netns) by switching the calling thread for a moment, since a socket stays
in the namespace it was opened in (setns(2)). The test run itself never enters
a namespace for good and never touches the machine's rules, links or files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from lab.holder import processes_of

CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

NODE4, NODE4_SECOND, CLIENT4 = "192.0.2.1", "192.0.2.5", "192.0.2.2"
NODE6, NODE6_SECOND, CLIENT6 = "2001:db8:1::1", "2001:db8:1::5", "2001:db8:1::2"
NODE4_BACK, OTHER4 = "198.51.100.1", "198.51.100.2"
NODE6_BACK, OTHER6 = "2001:db8:2::1", "2001:db8:2::2"

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Private /run and /var/lib/cni first: names, locks, records and leases are the node's own.
_SETUP = """
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock /var/lib/cni
mount -t tmpfs tmpfs /var/lib/cni
hostname "$1"
ip link set lo up
exec "$2" -I -S "$3"
"""

_SYSCTLS = (
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv6/conf/all/forwarding", "1"),
    # A fresh address must answer at once: duplicate address detection loses the first packets.
    ("net/ipv6/conf/all/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_dad", "0"),
)


def wait_for(condition: object, timeout: float = 3.0, step: float = 0.02) -> bool:
    """Poll a callable until it is true; whether it became true within ``timeout`` seconds."""
    assert callable(condition)
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True


class Node:
    """One node with a client on each of two links; close it, or use it as a context."""

    UNSHARE: tuple[str, ...] = ("--net", "--mount", "--uts")
    """Namespaces of the node, as unshare(1) names them."""

    JOIN: tuple[str, ...] = ("--mount=/proc/{pid}/ns/mnt", "--uts=/proc/{pid}/ns/uts")
    """How a command enters them, besides the net namespace, as nsenter(1) names them."""

    def __init__(self, name: str = "node", *, bridge_netfilter: bool | None = None) -> None:
        script = str(Path(__file__).with_name("holder.py"))
        self.name = name
        unshare = ["unshare", *self.UNSHARE, "--propagation", "private"]
        self._holder = subprocess.Popen(
            [*unshare, "sh", "-ec", _SETUP, "sh", name, sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"node {name} did not start (root and unshare are needed)")
        self.pid = self._holder.pid
        self._mount_namespace = os.readlink(f"/proc/{self.pid}/ns/mnt")
        for key, value in _SYSCTLS:
            self.sysctl(key, value)
        self.add_peer("client", "uplink", (f"{NODE4}/24", f"{NODE6}/64"), (CLIENT4, CLIENT6))
        self.add_peer(
            "other", "backlink", (f"{NODE4_BACK}/24", f"{NODE6_BACK}/64"), (OTHER4, OTHER6)
        )
        self.ip(
            f"addr add {NODE4_SECOND}/24 dev uplink", f"addr add {NODE6_SECOND}/64 dev uplink nodad"
        )
        if bridge_netfilter is not None:
            self.set_bridge_netfilter(bridge_netfilter)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- namespaces ---------------------------------------------------------------------------

    def namespace_path(self, netns: str | None = None) -> str:
        """Path, seen from the test run, of the node's own or a named network namespace."""
        if netns is None:
            return f"/proc/{self.pid}/ns/net"
        return f"/proc/{self.pid}/root/run/netns/{netns}"

    @contextlib.contextmanager
    def within(self, netns: str | None = None) -> Iterator[None]:
        """The calling thread is in that network namespace inside the block."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(self.namespace_path(netns), os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(there)
            try:
                yield
            finally:
                _setns(home)
        finally:
            os.close(home)
            os.close(there)

    def add_netns(self, name: str) -> str:
        """Make a named network namespace; its path as the node sees it."""
        self.run("ip", "netns", "add", name)
        self.sysctl("net/ipv6/conf/all/accept_dad", "0", netns=name)
        self.sysctl("net/ipv6/conf/default/accept_dad", "0", netns=name)
        self.ip("link set lo up", netns=name)
        return f"/run/netns/{name}"

    def delete_netns(self, name: str) -> None:
        """Remove a named network namespace (its links die with its last socket)."""
        self.run("ip", "netns", "delete", name)

    def add_peer(
        self, netns: str, link: str, node_side: Sequence[str], peer_side: Sequence[str]
    ) -> None:
        """Another host on a link of the node: routes everything through the node."""
        self.add_netns(netns)
        self.ip(f"link add {link} type veth peer name eth0 netns {netns}")
        self.ip(f"addr add {node_side[0]} dev {link}", f"addr add {node_side[1]} dev {link} nodad")
        self.ip(f"link set {link} up")
        self.ip(
            f"addr add {peer_side[0]}/24 dev eth0",
            f"addr add {peer_side[1]}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {node_side[0].split('/')[0]}",
            f"route add ::/0 via {node_side[1].split('/')[0]}",
            netns=netns,
        )

    # -- doing things in it -------------------------------------------------------------------

    def _enter(self, netns: str | None) -> list[str]:
        command = ["/usr/bin/nsenter", *(option.format(pid=self.pid) for option in self.JOIN)]
        return [*command, f"--net={self.namespace_path(netns)}", "--"]

    def popen(
        self,
        *argv: str,
        netns: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.DEVNULL,
        stderr: int | None = subprocess.DEVNULL,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command in the node (or in a named namespace of it)."""
        return subprocess.Popen(
            self._enter(netns) + list(argv),
            env={"PATH": SAFE_PATH} if env is None else dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            **more,
        )

    def run(
        self,
        *argv: str,
        netns: str | None = None,
        check: bool = True,
        data: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command in the node; with ``check`` its failure is an error with its text."""
        done = subprocess.run(
            self._enter(netns) + list(argv),
            env={"PATH": SAFE_PATH} if env is None else dict(env),
            input=data,
            capture_output=True,
            timeout=timeout,
            check=False,
            cwd="/",
        )
        if check and done.returncode:
            text = (done.stdout + done.stderr).decode(errors="replace")
            raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {text}")
        return done

    def output(self, *argv: str, netns: str | None = None) -> str:
        """Standard output of a command in the node."""
        return self.run(*argv, netns=netns).stdout.decode()

    def ip(self, *lines: str, netns: str | None = None) -> None:
        """Run ``ip`` commands, one a line, in one process."""
        argv = ["ip", "-batch", "-"] if netns is None else ["ip", "-n", netns, "-batch", "-"]
        self.run(*argv, data="".join(f"{line}\n" for line in lines).encode())

    def nft(self, text: str) -> None:
        """Apply nft text in the node."""
        self.run("nft", "-f", "-", data=text.encode())

    def ruleset(self) -> str:
        """The node's rules without counters: nft's, iptables-nft's tables included, and legacy's."""
        text = self.output("nft", "-s", "list", "ruleset")
        for tool in ("iptables-legacy-save", "ip6tables-legacy-save"):
            for line in self.output(tool).splitlines():
                # a table that is only loaded is nothing; its counters neither
                if line.startswith("-") or line.endswith("- [0:0]"):
                    text += f"{line}\n"
        return text

    def sysctl(self, key: str, value: str | None = None, *, netns: str | None = None) -> str:
        """Read, or write, a /proc/sys value of a network namespace."""
        path = Path("/proc/sys") / key
        with self.within(netns):
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()

    def set_bridge_netfilter(self, on: bool) -> None:
        """Whether bridged packets pass the IP hooks (the sysctl is the namespace's own)."""
        for family in ("iptables", "ip6tables"):
            self.sysctl(f"net/bridge/bridge-nf-call-{family}", str(int(on)))

    def path(self, inside: str) -> Path:
        """A file of the node, as the test run can open it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    # -- what lives in it ---------------------------------------------------------------------

    def processes(self) -> dict[int, list[str]]:
        """Command lines of the processes in the node, its own keeper left out."""
        found = {}
        for pid in processes_of(self._mount_namespace):
            if pid == self.pid:
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(words):  # a zombie has no command line
                    found[pid] = [word.decode(errors="replace") for word in words[:-1]]
        return found

    def helpers(self) -> list[int]:
        """Process ids of the running helpers of this node.

        A child that has not yet become its program looks like its parent, and is none.
        """
        found = [pid for pid, argv in self.processes().items() if "helper" in argv[1:]]
        return [pid for pid in found if len(found) == 1 or _parent(pid) not in found]

    def _kill_all(self) -> bool:
        """Kill what lives in the node, what was started meanwhile too; whether nothing does."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def close(self) -> None:
        """Kill what is left in the node and drop its namespaces; nothing may outlive it."""
        gone = wait_for(self._kill_all)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(timeout=10)
        self._holder.stdout.close()
        assert gone, f"node {self.name}: processes outlived it: {self.processes()}"


def _parent(pid: int) -> int:
    """Parent of a process, 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _setns(descriptor: int) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "setns")
