"""Rules of an agent that was killed together with its DNS server.

Decides whether rules on this node send questions where nobody answers and
nobody watches, and removes them. For a process that lives on when the agent
does not: the helper calls ``clear`` about twice a second. Costs one look into a
folder while there is nothing to do, and never touches rules of a living agent
or of a server that answers.
"""

from __future__ import annotations

import logging
import select
import time
from ipaddress import ip_address
from pathlib import Path

from cni_hostport.host import nodecache_files as files
from cni_hostport.host.nodecache_probe import Prober
from cni_hostport.host.nodecache_tools import ToolError, Tools
from cni_hostport.nodecache import dnsmsg, ruler
from cni_hostport.nodecache.state import Left, StateFile

log = logging.getLogger(__name__)
# Seconds that a server is given to answer one of two questions.
PATIENCE = 0.15


def clear(run_dir: str) -> tuple[str, ...]:
    """Remove the rules of dead agents whose servers are dead or deaf; links concerned."""
    folder = Path(run_dir, "node-cache")
    try:
        found = [p for p in folder.iterdir() if p.suffix == ".json"]
    except OSError:
        return ()
    return tuple(p.stem for p in found if _clear_one(p, str(folder)))


def _clear_one(path: Path, folder: str) -> bool:
    state = StateFile(str(path))
    left = state.read()
    if not left.rules:
        return False
    lock = files.AgentLock(path.stem)
    if not lock.take():
        return False
    # While the name is ours a new agent waits: it finds the rules or their absence, never half.
    try:
        left = state.read()
        if not left.rules or _answers(left):
            return False
        ruler.sweep_others(None, Tools(f"{folder}/xtables.lock"))
        state.write(**{**left.model_dump(), "rules": False})
    except ToolError as error:
        log.error("rules of a dead node-cache agent stay: %s", error)
        return False
    finally:
        lock.release()
    log.warning("removed the rules of %s: its agent and its DNS server are gone", path.stem)
    return True


def _answers(left: Left) -> bool:
    addresses = [ip_address(text) for text in left.addresses]
    prober = Prober(addresses, left.port, dnsmsg.status, dnsmsg.answers)
    # While the rules stand every answer is the node's own server's.
    prober.own_links = None
    try:
        for _ in range(2):
            prober.send(time.monotonic())
            end = time.monotonic() + PATIENCE
            while (rest := end - time.monotonic()) > 0:
                if not select.select(prober.sockets(), [], [], rest)[0]:
                    break
                prober.receive(time.monotonic())
                if any(t.refused for t in prober.targets):
                    return False
                if all(t.answered is not None for t in prober.targets):
                    return True
    finally:
        prober.reset()
    return False
