"""``cni-hostport node-cache``: the node-local DNS cache agent.

Reads upstream's command line, answers questions about itself, and runs the
agent. Exit status: 0 ended in good order, 1 it could not begin, 2 a second
interrupt, 3 something of it could not be removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from cni_hostport import __version__
from cni_hostport.nodecache import flags
from cni_hostport.nodecache.goflags import FlagError

DEFAULT_RUN_DIR = "/run/cni-hostport"


def main(argv: Sequence[str]) -> int:
    """Run it; ``argv`` without program and command."""
    try:
        wanted = flags.parse(argv)
    except FlagError as error:
        print(f"node-cache: {error}; see cni-hostport node-cache --help", file=sys.stderr)
        _clear(_run_dir())
        return 1
    if wanted.params is None:
        print(_shown(wanted.show))
        return 0
    return _run(wanted.params)


def _shown(show: str) -> str:
    if show == "help":
        from cni_hostport.nodecache.usage import usage

        return usage()
    if show == "version":
        return f"cni-hostport node-cache {__version__}"
    from cni_hostport.nodecache import unbound

    head = "Corefile directives understood with unbound (with CoreDNS: its own, coredns -plugins):"
    return "\n".join([head, *(f"  {name}" for name in unbound.SUPPORTED)])


def _run(params: flags.Params) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="[%(levelname)s] %(message)s")
    from cni_hostport.nodecache.agent import Agent, FatalError

    log = logging.getLogger(__name__)
    log.info("Starting node-cache image: %s", __version__)
    for note in params.notes:
        log.warning("%s", note)
    run_dir = _run_dir()
    agent = None
    try:
        agent = Agent(params, run_dir)
        return agent.run()
    except (FatalError, OSError) as error:
        log.critical("%s", error)
        if agent is not None:
            agent.lock.release()
        _clear(run_dir)
        return 1


def _run_dir() -> str:
    return os.environ.get("CNI_HOSTPORT_RUN_DIR") or DEFAULT_RUN_DIR


def _clear(run_dir: str) -> None:
    """A start that fails again and again must not keep what a dead agent's rules cut off."""
    from cni_hostport.nodecache import orphan

    with contextlib.suppress(OSError):
        orphan.clear(run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
