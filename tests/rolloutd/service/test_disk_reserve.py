"""The reserve on a disk that fills up, on a real small disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from machines.model.decision import Admit, CheckIfCurrent, DryRun
from machines.model.limits import DiskShortage
from machines.model.reasons import ReasonCode
from machines.scheduler.decide import decide
from rolloutd.adapters.ansible import wrapper
from rolloutd.service.disk_reserve import CONDITION, DiskReserve, _report, _report_error
from rolloutd.texts.reason_text import describe, lifted_by
from tests.acceptance.test_full_disk_and_clock_jumps import fill, small_disk
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import control_environment

MEBIBYTE = 2**20


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_reserve_is_given_up_and_taken_again(tmp_path: Path) -> None:
    with small_disk(tmp_path):
        reserve = DiskReserve(tmp_path)
        assert reserve.size == 2 * MEBIBYTE
        assert reserve.update() is None
        fill(tmp_path / "filler")
        free = reserve.update()
        assert free is not None
        assert free >= reserve.size, "what it gave up is free"
        assert reserve.update() is not None, "one file of that size is not enough to begin again"
        (tmp_path / "more").write_bytes(bytes(MEBIBYTE))
        os.truncate(tmp_path / "filler", 95 * MEBIBYTE)
        assert reserve.update() is None
        assert reserve.update() is None


async def test_full_disk_starts_nothing_and_says_why(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as env:
        rollout = await env.start()
        assert decide(env.state.index, env.clock.now()).of(CheckIfCurrent) or decide(
            env.state.index, env.clock.now()
        ).of(Admit)
        _report(env.state, 64 * MEBIBYTE, 5 * MEBIBYTE)
        decision = decide(env.state.index, env.clock.now())
        assert (decision.of(Admit), decision.of(CheckIfCurrent), decision.of(DryRun)) == ((), (), ())
        reason = reason_of(env.state.index, rollout, "p1", env.clock.now())
        assert reason.code is ReasonCode.DISK_FULL
        assert describe(reason) == (
            "the daemon's disk is full: 5 MiB are free, 128 MiB are needed to begin a run"
        )
        assert lifted_by(reason) == "free space on the disk of the state directory"
        assert (await env.request("olga", "get", f"/v1/rollouts/{rollout}"))["state"] == "running"
        assert CONDITION in env.state.conditions
        env.state.index = env.state.index.rebuilt(env.state.index.snapshot())
        assert isinstance(env.state.index.disk_shortage, DiskShortage)
        _report(env.state, 64 * MEBIBYTE, None)
        assert CONDITION not in env.state.conditions
        assert reason_of(env.state.index, rollout, "p1", env.clock.now()).code is ReasonCode.STARTING


async def test_error_of_disk_is_shown_until_next_answer(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as env:
        _report_error(env.state, OSError(errno.EIO, "Input/output error"))
        assert env.state.conditions[CONDITION].endswith(
            "its free space is unknown (Input/output error); check the disk"
        )
        _report(env.state, 64 * MEBIBYTE, None)
        assert CONDITION not in env.state.conditions
        _report(env.state, 64 * MEBIBYTE, 5 * MEBIBYTE)
        _report_error(env.state, OSError(errno.EIO, "Input/output error"))
        _report(env.state, 64 * MEBIBYTE, 6 * MEBIBYTE)
        assert "6 MiB free, nothing starts" in env.state.conditions[CONDITION]


def test_wrapper_waits_for_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "SPACE_RETRY_S", 0.0)
    results: list[object] = [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), "written"]

    def write() -> object:
        result = results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    assert wrapper.wait_for_space(write) == "written"
    results.append(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        wrapper.wait_for_space(write)
