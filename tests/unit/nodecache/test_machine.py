"""The one law: rules stand only while the server answers; and never two servers."""

from hypothesis import given
from hypothesis import strategies as st

from cni_hostport.nodecache.machine import BACKOFF, HUNG, STABLE, Action, Event, Phase, State, step

EVENTS = st.lists(st.tuples(st.sampled_from(Event), st.floats(0, 100)), max_size=60)


def run(state: State, *events: tuple[Event, float]) -> tuple[State, list[Action]]:
    done: list[Action] = []
    for event, now in events:
        state, actions = step(state, event, now)
        done += actions
    return state, done


@given(EVENTS, st.booleans())
def test_rules_only_while_serving(events: list[tuple[Event, float]], managed: bool) -> None:
    state, now, installed = State(managed=managed), 0.0, False
    for event, pause in events:
        now += pause
        state, actions = step(state, event, now)
        for action in actions:
            installed = (installed or action is Action.INSTALL) and action is not Action.REMOVE
        assert state.rules == (state.phase is Phase.SERVING and state.rules)
        assert installed == state.rules
        if not managed:
            assert not {Action.START, Action.KILL, Action.RELOAD} & set(actions)


@given(EVENTS)
def test_a_start_needs_a_configuration_and_an_end(events: list[tuple[Event, float]]) -> None:
    state, now, running = State(), 0.0, False
    for event, pause in events:
        if event in (Event.EXITED, Event.ADOPTED) and running is (event is Event.ADOPTED):
            continue
        now += pause
        state, actions = step(state, event, now)
        running = (running or event is Event.ADOPTED) and event is not Event.EXITED
        if Action.START in actions:
            assert state.configured and not running
            running = True


def test_start_order_and_stop_order() -> None:
    state, done = run(State(), (Event.CONFIGURED, 0), (Event.READY, 1), (Event.STOP, 2))
    assert done == [Action.START, Action.INSTALL, Action.REMOVE, Action.KILL]
    assert state.phase is Phase.STOPPED
    assert step(state, Event.CONFIGURED, 3) == (state, ())


def test_a_crash_takes_the_rules_and_backs_off() -> None:
    state, _ = run(State(), (Event.CONFIGURED, 0), (Event.READY, 0))
    now = 10.0
    for pause in (*BACKOFF, 30.0, 30.0):
        state, done = step(state, Event.EXITED, now)
        assert state.retry_at == now + pause
        assert step(state, Event.TICK, now + pause - 0.01)[1] == ()
        state, done = step(state, Event.TICK, now + pause)
        assert done == (Action.START,)
        now += pause
    state, _ = run(state, (Event.READY, now), (Event.TICK, now + STABLE))
    assert state.failures == 0


def test_silence_takes_the_rules_and_an_answer_brings_them_back() -> None:
    state, _ = run(State(), (Event.CONFIGURED, 0), (Event.READY, 0))
    state, done = run(state, (Event.SILENT, 5), (Event.SILENT, 5.1), (Event.ANSWERING, 6))
    assert done == [Action.REMOVE, Action.INSTALL]
    for now in (10, 20, 30):
        state, done = run(state, (Event.SILENT, now), (Event.ANSWERING, now + 0.1))
    assert done == [Action.REMOVE]  # silences in a row: wait until it is calm
    assert run(state, (Event.TICK, 30 + HUNG))[1] == [Action.KILL]


def test_an_adopted_server_keeps_its_rules_until_it_is_silent() -> None:
    state, done = run(State(rules=True), (Event.ADOPTED, 0), (Event.CONFIGURED, 0))
    assert (state.phase, done) == (Phase.SERVING, [Action.RELOAD])
    assert step(state, Event.SILENT, 1)[1] == (Action.REMOVE,)


def test_a_server_that_never_answers_is_started_anew() -> None:
    state, done = run(State(), (Event.CONFIGURED, 0), (Event.TICK, HUNG - 1))
    assert done == [Action.START]
    assert run(state, (Event.TICK, HUNG))[1] == [Action.KILL]
    outside, _ = run(State(managed=False), (Event.CONFIGURED, 0))
    assert run(outside, (Event.TICK, HUNG))[1] == []
