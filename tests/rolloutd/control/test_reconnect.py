"""The loop that connects a client's stream again."""

from __future__ import annotations

from collections.abc import Generator
from threading import Event

import pytest

from rolloutd.control import reconnect
from rolloutd.control.client import StreamInterrupted

GIVE_UP_AFTER_S = 120.0


def test_heartbeat_of_silent_stream_ends_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(reconnect, "RECONNECT_DELAYS_S", (0.0,))
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    streams = iter((([1], None), ([], None), ([2],)))
    reports: list[bool] = []

    def connect() -> Generator[list[int], None, None]:
        for lines in next(streams):
            clock[0] += 2 * GIVE_UP_AFTER_S
            if lines is None:
                raise StreamInterrupted("the daemon restarts")
            yield lines

    parts = reconnect.read_with_reconnect(
        connect,
        lambda problem: reports.append(problem is None),
        stop=Event(),
        is_finite=True,
        give_up_after_s=GIVE_UP_AFTER_S,
    )
    assert [*parts] == [[1], [], [2]]
    assert reports == [False, True, False, True]


@pytest.mark.parametrize("part", [[1], []], ids=["lines", "heartbeats"])
def test_stop_closes_stream_at_its_next_part(part: list[int]) -> None:
    stop, closed = Event(), Event()

    def connect() -> Generator[list[int], None, None]:
        try:
            while True:
                yield part
        finally:
            closed.set()

    parts = reconnect.read_with_reconnect(connect, lambda _: None, stop=stop, is_finite=True)
    assert next(parts) == part
    stop.set()
    assert next(parts, None) is None
    assert closed.is_set()
