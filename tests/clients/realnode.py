"""A node for container engines: as the lab's, and with processes and storage of its own.

Adds to the lab's node a pid and an ipc namespace (an engine's daemons and containers
end with the node, whatever mount namespace they hide in), private container storage,
and one cgroup view that runc and crun both take. Knows how to put the plugin where a
client looks for it, and what the plugin's state is; knows no client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lab.chain import Json
from lab.node import NODE4, SAFE_PATH, Node, wait_for
from lab.stage import BUNDLE, RUN_DIR, TYPE

CACHE: Final = Path(
    os.environ.get("CNI_HOSTPORT_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cni-hostport-lab"
)
SYSTEM_BIN: Final = "/usr/lib/cni"
BIN: Final = "/run/cni-bin"
BUSYBOX: Final = "/bin/busybox"

# On a hybrid layout crun refuses to work: its unified part is hidden from the node.
_STORAGE: Final = """
for d in /var/lib/containers /var/lib/cni; do mkdir -p $d; mount -t tmpfs tmpfs $d; done
umount /sys/fs/cgroup/unified 2>/dev/null || true
"""


class ClientNode(Node):
    """A node in which container engines run."""

    UNSHARE = (
        *("--net", "--mount", "--uts", "--ipc", "--pid"),
        *("--fork", "--kill-child", "--mount-proc"),
    )
    JOIN = (*Node.JOIN, "--ipc=/proc/{pid}/ns/ipc", "--pid=/proc/{pid}/ns/pid_for_children")

    def __init__(self, bin_dirs: Sequence[str] = (SYSTEM_BIN,)) -> None:
        super().__init__("node")
        self.cgroup = f"cni-hostport-test-{self.pid}"
        self.run("sh", "-ec", _STORAGE)
        self.fill_bin(bin_dirs)

    def fill_bin(self, bin_dirs: Sequence[str]) -> None:
        """One folder with the plugin and the main plugins: engines take one only."""
        folder = self.path(BIN)
        folder.mkdir(exist_ok=True)
        for source in bin_dirs:
            for file in Path(source).iterdir():
                link = folder / file.name
                link.unlink(missing_ok=True)
                link.symlink_to(file)
        (folder / TYPE).unlink(missing_ok=True)
        (folder / TYPE).symlink_to(BUNDLE)

    def close(self) -> None:
        """End everything that lives in the node, and drop the cgroups it left."""
        super().close()
        for root, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
            if self.cgroup in root:
                with contextlib.suppress(OSError):
                    os.rmdir(root)

    # -- the plugin -------------------------------------------------------------------------------

    def conflist(self, path: str, *, version: str, dual: bool = False, **options: Any) -> Json:
        """Write a conflist [bridge, cni-hostport] with these options of the plugin."""
        ranges = [[{"subnet": "10.89.7.0/24", "gateway": "10.89.7.1"}]]
        routes = [{"dst": "0.0.0.0/0"}]
        if dual:
            ranges.append([{"subnet": "2001:db8:7::/64"}])
            routes.append({"dst": "::/0"})
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": ranges, "routes": routes},
        }
        plugin = {"type": TYPE, "capabilities": {"portMappings": True}, **options}
        document = {"cniVersion": version, "name": "testnet", "plugins": [bridge, plugin]}
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))
        return document

    def mappings(self) -> list[Json]:
        """What ``cni-hostport status --json`` shows; empty where no helper runs."""
        done = self.run(f"{BIN}/{TYPE}", "status", "--json", check=False)
        return list(json.loads(done.stdout)["mappings"]) if done.stdout else []

    def host_ports(self) -> list[int]:
        """Host ports mapped at present."""
        return sorted({m["hostPort"] for m in self.mappings()})

    def nothing_left(self) -> None:
        """No mapping, no record, no rule, no leased address, and one helper at most."""
        assert self.mappings() == []
        assert list(self.path(f"{RUN_DIR}/records").glob("*.json")) == []
        # what the network's pods shared goes with the tables, some seconds later
        shared = re.compile(r'"\w+" \. 10\.89\.7\.0/24 comment "network"')
        left = re.findall(r"10\.89\.7\.(?!1\b)\d+.*", shared.sub("", self.ruleset()))
        assert left == []
        leases = self.path("/var/lib/cni/networks/testnet")
        addresses = [f.name for f in leases.iterdir()] if leases.exists() else []
        assert [name for name in addresses if name[:1].isdigit()] == []
        assert len(self.helpers()) <= 1

    # -- questions --------------------------------------------------------------------------------

    def get(
        self,
        port: int,
        host: str = NODE4,
        *,
        at: str | None = "client",
        patience: float = 5.0,
    ) -> str:
        """What an HTTP server says; the error's words where there is none in ``patience``."""
        end = time.monotonic() + patience
        while True:
            try:
                return self._http(host, port, at)
            except OSError as error:
                if time.monotonic() >= end:
                    return type(error).__name__
                time.sleep(0.05)

    def _http(self, host: str, port: int, at: str | None) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with self.within(at):
            sock = socket.socket(family, socket.SOCK_STREAM)
        with sock:
            sock.settimeout(1.0)
            sock.connect((host, port))
            sock.sendall(b"GET /index.html HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        return answer.partition(b"\r\n\r\n")[2].decode().strip()

    def closed(self, port: int, host: str = NODE4) -> bool:
        """Whether a client from outside is refused at once."""
        return self.get(port, host, patience=0) == "ConnectionRefusedError"

    def daemon(
        self, *argv: str, log: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a daemon whose output goes to a file of the node."""
        with self.path(log).open("ab") as file:
            descriptor = file.fileno()
            whole = {"PATH": SAFE_PATH, **(env or {})}
            return self.popen(*argv, env=whole, stdout=descriptor, stderr=descriptor)

    def pids(self, word: str) -> list[int]:
        """Processes of the node, seen from here, whose program or first argument that is."""
        found = {
            pid: (os.path.basename(argv[0]), *argv[1:2]) for pid, argv in self.processes().items()
        }
        return [pid for pid, words in found.items() if word in words]


def eventually(condition: object, timeout: float = 10.0) -> None:
    """Fail unless the condition comes true in time."""
    assert wait_for(condition, timeout), "did not come true in time"


def rootfs(folder: Path, text: str) -> None:
    """A root file system with one static busybox and a page to serve."""
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "run", "www"):
        (folder / name).mkdir(parents=True)
    (folder / "bin/busybox").write_bytes(Path(BUSYBOX).read_bytes())
    (folder / "bin/busybox").chmod(0o755)
    for applet in ("sh", "sleep", "httpd", "cat", "echo"):
        (folder / "bin" / applet).symlink_to("busybox")
    (folder / "www/index.html").write_text(text)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
