"""A backend that fails slowly is left alone for a while, and only by what can wait."""

from __future__ import annotations

import pytest

from cni_hostport.errors import NetfilterFailed, TryAgain
from cni_hostport.helper import slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(slow.time, "monotonic", lambda: now[0])
    return now


def fail(backends: slow.SlowBackends, clock: list[float], seconds: float) -> None:
    with pytest.raises(NetfilterFailed), backends.patience("iptables"):
        clock[0] += seconds
        raise NetfilterFailed("hangs", "for ever")


def test_a_slow_failure_is_followed_by_a_rest(clock: list[float]) -> None:
    backends = slow.SlowBackends()
    fail(backends, clock, 10)
    clock[0] += 19
    with pytest.raises(TryAgain, match="hangs"), backends.patience("iptables"):
        pytest.fail("it was bothered")
    with backends.patience("nftables"):
        pass
    clock[0] += 2
    fail(backends, clock, 10)
    backends.forget("iptables")
    with backends.patience("iptables"):
        pass


def test_a_quick_failure_is_tried_again_at_once(clock: list[float]) -> None:
    backends = slow.SlowBackends()
    fail(backends, clock, 0.5)
    with backends.patience("iptables"):
        pass
