"""The process that a lab node lives in: it keeps the namespaces and cleans up.

Started by ``node.py`` as the first process of a fresh mount, net and uts
namespace. Says ``ready`` and waits for the end of its standard input, which
comes when the test run ends in whatever way; then kills every process that
still lives in its mount namespace. Imports only the standard library.
"""

import os
import signal
import sys
from pathlib import Path


def processes_of(namespace: str) -> list[int]:
    """Ids of the processes whose mount namespace is that one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "ns/mnt") == namespace:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main() -> None:
    """Hold the namespaces until standard input ends, then leave nothing behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    mine = os.readlink("/proc/self/ns/mnt")
    for pid in processes_of(mine):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
