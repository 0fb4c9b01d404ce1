"""What a container's helper becomes when another one has taken over: nothing, until told to end.

Not for people: ``cni-hostport helper --linger`` executes it. If the process ended
instead, the container would be started anew and take the ports back from its
successor.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Wait for TERM, INT or HUP."""
    del argv
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    print("cni-hostport: a successor serves this node; waiting to be ended", flush=True)
    signal.sigwait(ends)
    return 0
