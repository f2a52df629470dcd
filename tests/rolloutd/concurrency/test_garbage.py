"""Tests of when the garbage collector may run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutd import __main__ as daemon
from rolloutd.concurrency import garbage


class Cycle:
    itself: Cycle


@pytest.fixture(autouse=True)
def _default_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def test_large_computation_leaves_nothing_to_examine() -> None:
    with garbage.uncollected():
        made = [[number] for number in range(2 * garbage.THRESHOLDS[0])]
    assert not [each for each in gc.get_objects() if each is made[0] or each is made[-1]]


def test_cycle_made_beside_large_computation_is_collected_later() -> None:
    with garbage.uncollected():
        cycle = Cycle()
        cycle.itself = cycle
        made = [[number] for number in range(2 * garbage.THRESHOLDS[0])]
    left = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert left() is not None
    garbage.collect_all()
    assert left() is None
    assert not [each for each in gc.get_objects() if each is made[0]]


def test_small_computation_leaves_its_objects_to_the_collector() -> None:
    gc.collect(0)
    with garbage.uncollected():
        made = [["small"]]
    assert [each for each in gc.get_objects() if each is made[0]]


def test_collector_stays_off_until_last_computation_ends() -> None:
    first, second = garbage.uncollected(), garbage.uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_failed_computation_turns_the_collector_on() -> None:
    with pytest.raises(LookupError), garbage.uncollected():
        raise LookupError
    assert gc.isenabled()


def test_daemon_tunes_the_collector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[tuple[int, int, int]] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        found.append(gc.get_threshold())

    monkeypatch.setattr(daemon, "_run_until_exit", run)
    config = tmp_path / "config.yaml"
    config.write_text(f"state_dir: {tmp_path}\nteams: {{}}\n")
    assert daemon.main(["--config", str(config)]) == 0
    assert found == [garbage.THRESHOLDS]
