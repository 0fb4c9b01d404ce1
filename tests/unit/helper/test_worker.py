"""Jobs in order, whatever one of them does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from cni_hostport.helper import worker as module
from cni_hostport.helper.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    made.start()
    yield made
    assert made.stop(5)
    os.close(made.bell)


def done(worker: Worker) -> None:
    """Wait until everything submitted so far is."""
    event = threading.Event()
    worker.submit(event.set)
    assert event.wait(10)


def test_jobs_of_many_threads_are_all_done_and_each_threads_in_order(worker: Worker) -> None:
    seen: list[tuple[int, int]] = []

    def submit(thread: int) -> None:
        for number in range(500):
            worker.submit(lambda number=number: seen.append((thread, number)))  # type: ignore[misc]
            if number % 50 == 0:
                time.sleep(0.001)  # so that it falls asleep in between

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done(worker)
    for thread in range(4):
        assert [n for t, n in seen if t == thread] == list(range(500))


def test_a_job_that_fails_is_told_of_and_ends_nothing(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("no")

    worker.submit(fail)
    done(worker)
    assert "job failed" in caplog.text


def test_what_it_does_while_idle_gives_it_jobs(worker: Worker) -> None:
    seen: list[str] = []
    worker.submit(lambda: None)
    plain = worker.idle

    def idle() -> list[object]:
        plain()
        return [lambda: seen.append("found"), lambda: seen.append("and another")]

    worker.idle = idle  # type: ignore[assignment]
    done(worker)
    done(worker)
    assert seen[:2] == ["found", "and another"]


def test_what_was_submitted_goes_before_what_was_found(worker: Worker) -> None:
    seen: list[str] = []
    plain = worker.idle

    def idle() -> object:
        plain()
        worker.submit(lambda: seen.append("submitted"))
        return [lambda: seen.append("found")]

    worker.submit(lambda: None)
    worker.idle = idle  # type: ignore[assignment]
    done(worker)
    done(worker)
    assert seen[:2] == ["submitted", "found"]


def test_it_is_busy_from_its_first_job_on() -> None:
    worker, go, begun = Worker(), threading.Event(), threading.Event()
    worker.submit(lambda: bool(begun.set() or go.wait(10)) and None)
    worker.start()
    assert begun.wait(10)
    time.sleep(0.01)
    assert worker.busy_for() > 0
    go.set()
    assert worker.stop(10)
    os.close(worker.bell)


def test_idling_that_fails_is_tried_again(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    plain, times = worker.idle, iter(range(3))

    def idle() -> object:
        if next(times, None) is not None:
            raise OSError("broken")
        return plain()

    worker.idle = idle  # type: ignore[assignment]
    done(worker)
    done(worker)
    assert "cannot wait for calls" in caplog.text


def test_it_says_how_long_it_has_been_busy(worker: Worker) -> None:
    go, begun = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go.wait(10)

    worker.submit(job)
    assert begun.wait(10)
    first = worker.busy_for()
    time.sleep(0.02)
    assert worker.busy_for() >= first + 0.02
    go.set()
    deadline = time.monotonic() + 10
    while worker.busy_for() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.busy_for() == 0


def test_it_ends_after_what_was_submitted() -> None:
    worker, seen = Worker(), []
    worker.submit(lambda: seen.append(1))
    worker.start()
    worker.submit(lambda: seen.append(2))
    assert worker.stop(10)
    assert seen == [1, 2]


def test_an_end_that_takes_too_long_is_said() -> None:
    worker, go = Worker(), threading.Event()
    worker.start()
    worker.submit(lambda: bool(go.wait(10)) and None)
    assert not worker.stop(0.01)
    go.set()
    assert worker.stop(10)


def test_what_is_owed_is_done_before_it_waits_and_before_it_ends() -> None:
    worker, seen = Worker(), list[str]()
    worker.submit(lambda: worker.owe(lambda: seen.append("owed")))
    worker.start()
    end = time.monotonic() + 10
    while not seen and time.monotonic() < end:
        time.sleep(0.001)
    assert seen == ["owed"]
    worker.submit(lambda: worker.owe(lambda: seen.append("owed at the end")))
    assert worker.stop(10)
    assert seen[1:] == ["owed at the end"]
    os.close(worker.bell)


def test_what_is_owed_does_not_wait_for_a_row_of_calls_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "OWED_AT_MOST", 0.02)
    worker, seen = Worker(), list[int]()

    def fail() -> None:
        raise ValueError("no line")

    def row() -> None:
        for number in range(12):
            worker.owe(fail if number == 0 else partial(seen.append, number))
            time.sleep(0.01)
        seen.append(-1)

    worker.submit(row)
    worker.start()
    assert worker.stop(10)
    assert seen.index(-1) >= 5
    assert sorted(seen) == [-1, *range(1, 12)]
    assert "no line" in caplog.text
    os.close(worker.bell)


def test_what_is_owed_is_done_before_any_other_job_and_counts_as_work() -> None:
    worker, seen = Worker(), list[str]()
    worker.submit(lambda: worker.owe(lambda: seen.append(f"owed {worker.busy_for() > 0}")))
    worker.submit(lambda: seen.append("a hand-over"))
    worker.start()
    assert worker.stop(10)
    assert seen == ["owed True", "a hand-over"]
    worker.settle_here()  # another thread's: nothing
    os.close(worker.bell)


def test_a_slow_log_is_work_although_nobody_waits(worker: Worker) -> None:
    """Else nobody would accept in the worker's place."""
    go, begun = threading.Event(), threading.Event()
    worker.submit(lambda: worker.owe(lambda: bool(begun.set() or go.wait(10)) and None))
    assert begun.wait(10)
    time.sleep(0.01)
    assert worker.busy_for() > 0
    go.set()
    done(worker)
