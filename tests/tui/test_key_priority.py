"""The time reserved for the answer to a key."""

from __future__ import annotations

from tui.state.fetch_queue import ANSWER_S, MAX_DELAY_S, KeyPriority


def test_held_key_delays_other_work_for_a_limited_time() -> None:
    at = 0.0
    keys = KeyPriority(lambda: at)
    assert keys.delay() == 0.0
    keys.key_pressed()
    assert keys.delay() == ANSWER_S
    delays = []
    while at < 1.0:
        at += ANSWER_S / 2
        keys.key_pressed()
        delays.append(keys.delay())
    assert delays[0] > 0.9 * ANSWER_S
    assert sum(map(bool, delays)) <= MAX_DELAY_S / (ANSWER_S / 2)
    assert delays[-1] == 0.0
