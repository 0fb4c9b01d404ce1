"""What the agent does next: the state machine of DNS server and rules.

Decides, from what happened, whether the server is to be started, stopped or
reloaded and whether the rules may stand. The one law: rules stand only while
the server answers. Never looks at the clock or the machine; ``agent.py``
carries the actions out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

# Pause before the n-th start in a row that failed, in seconds; the last repeats.
BACKOFF = (0.05, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A server that served this long, in seconds, has its earlier failures forgiven.
STABLE = 60.0
# A server that is silent this long, in seconds, or from its start on, is restarted.
HUNG = 30.0
# Rules after a silence wait for this long, in seconds, when silences come in a row.
CALM = (0.0, 0.0, 2.0, 5.0, 10.0, 30.0)


class Phase(enum.Enum):
    """Where the DNS server is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    DEAF = "deaf"
    STOPPED = "stopped"


class Event(enum.Enum):
    """What happened."""

    CONFIGURED = "configured"
    ADOPTED = "adopted"
    TICK = "tick"
    EXITED = "exited"
    READY = "ready"
    ANSWERING = "answering"
    SILENT = "silent"
    STOP = "stop"


class Action(enum.Enum):
    """What is to be done, in the order given."""

    START = "start"
    KILL = "kill"
    RELOAD = "reload"
    INSTALL = "install"
    REMOVE = "remove"


@dataclass(frozen=True)
class State:
    """Phase, since when, and how often in a row things went wrong.

    ``managed`` is False with an engine that somebody else runs: then nothing is
    ever started or killed. ``rules`` says whether the rules are meant to stand.
    """

    managed: bool = True
    phase: Phase = Phase.WAITING
    since: float = 0.0
    retry_at: float = 0.0
    failures: int = 0
    silences: int = 0
    configured: bool = False
    rules: bool = False


Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now: float) -> Step:
    """The next state and what to do for it."""
    if state.phase is Phase.STOPPED:
        return state, ()
    return _HANDLERS[event](state, now)


def _enter(state: State, phase: Phase, now: float) -> State:
    return replace(state, phase=phase, since=now)


def _configured(state: State, now: float) -> Step:
    known = replace(state, configured=True)
    if state.phase is Phase.WAITING:
        return _tick(known, now)
    return known, (Action.RELOAD,) if state.managed else ()


def _adopted(state: State, now: float) -> Step:
    # Whether it answers is known within a third of a second; until then the
    # rules that it was found with stay.
    return _enter(state, Phase.SERVING if state.rules else Phase.STARTING, now), ()


def _tick(state: State, now: float) -> Step:
    if state.phase is Phase.WAITING and state.configured and now >= state.retry_at:
        return _enter(state, Phase.STARTING, now), (Action.START,) if state.managed else ()
    silent = state.phase in (Phase.DEAF, Phase.STARTING)
    if silent and state.managed and now - state.since >= HUNG:
        return state, (Action.KILL,)
    if state.phase is Phase.SERVING and now - state.since >= STABLE:
        return replace(state, failures=0, silences=0), ()
    return state, ()


def _exited(state: State, now: float) -> Step:
    pause = BACKOFF[min(state.failures, len(BACKOFF) - 1)]
    after = replace(
        _enter(state, Phase.WAITING, now),
        retry_at=now + pause,
        failures=state.failures + 1,
        rules=False,
    )
    return after, (Action.REMOVE,) if state.rules else ()


def _ready(state: State, now: float) -> Step:
    if state.phase is not Phase.STARTING:
        return state, ()
    return replace(_enter(state, Phase.SERVING, now), rules=True), (Action.INSTALL,)


def _answering(state: State, now: float) -> Step:
    calm = CALM[min(state.silences, len(CALM) - 1)]
    if state.phase is not Phase.DEAF or now - state.since < calm:
        return state, ()
    return replace(_enter(state, Phase.SERVING, now), rules=True), (Action.INSTALL,)


def _silent(state: State, now: float) -> Step:
    if state.phase is not Phase.SERVING:
        return state, ()
    after = replace(_enter(state, Phase.DEAF, now), rules=False, silences=state.silences + 1)
    return after, (Action.REMOVE,)


def _stop(state: State, now: float) -> Step:
    after = replace(_enter(state, Phase.STOPPED, now), rules=False)
    return after, (Action.REMOVE, Action.KILL) if state.managed else (Action.REMOVE,)


_HANDLERS = {
    Event.CONFIGURED: _configured,
    Event.ADOPTED: _adopted,
    Event.TICK: _tick,
    Event.EXITED: _exited,
    Event.READY: _ready,
    Event.ANSWERING: _answering,
    Event.SILENT: _silent,
    Event.STOP: _stop,
}
