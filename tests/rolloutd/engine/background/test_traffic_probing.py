"""What traffic probes see reaches the core, whom it names and nobody else, and silence is unknown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.model.decision import Admit, ProbeTraffic
from machines.scheduler.decide import decide
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.ports import Busy, Ok, StepContext, Unknown
from rolloutd.texts.reason_text import describe
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.contracts.fakes.traffic import FakeTrafficProbe
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import KUBERNETES_NODES, PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import carry_out, command_jobs

CANARIES = 'canary: {select: "team in (payments,search)", max_parallel: 9}'
PROBED = PLAN.replace("soak: 10m", f"{CANARIES}\n  traffic: [{{kubernetes: {{pods: kind=job}}}}]")


def gear_with(inside: ControlEnvironment, probe: FakeTrafficProbe) -> AdapterSet:
    """Return adapters of which only the probe is asked for anything."""

    return AdapterSet(FakeRunner(inside.run_host), {}, {}, find_source, {"kubernetes": probe})


async def probe_all(inside: ControlEnvironment, probe: FakeTrafficProbe) -> list[str]:
    """Look at whom the core names, and return who starts then."""
    now = inside.state.now()
    asked = decide(inside.state.index, now)
    assert asked.of(Admit) == ()
    async with asyncio.TaskGroup() as tasks:
        jobs = command_jobs(inside.state, gear_with(inside, probe))
        jobs.start(tasks, asked.of(ProbeTraffic) * 2)
    assert sorted(probe.probed_nodes) == sorted(each.node for each in asked.of(ProbeTraffic))
    return sorted(start.node for start in decide(inside.state.index, now).of(Admit))


async def test_idle_nodes_start_and_the_others_say_why_not(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        rollout = await inside.start(text=PROBED)
        probe = FakeTrafficProbe()
        probe.busy["p1"] = "p1 is busy: pod batch/train-7 (Job train) runs there"
        probe.unknown |= {"s1", "s2"}
        assert await probe_all(inside, probe) == ["p2"]
        reasons = {
            node: reason_of(inside.state.index, rollout, node, inside.state.now()) for node in ("p1", "s1")
        }
        assert (reasons["p1"].code, describe(reasons["p1"])) == ("traffic", probe.busy["p1"])
        assert reasons["s1"].code == "traffic-unknown"


class RaisingProbe(FakeTrafficProbe):
    """A probe that answers in no way that its port knows."""

    def __init__(self, trouble: OSError | None) -> None:
        super().__init__()
        self._trouble = trouble

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Raise, or wait for ever."""
        self.probed_nodes.append(ctx.host.name)
        if self._trouble is not None:
            raise self._trouble
        return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (OSError("no route to host"), "probe kubernetes: no route to host"),
        (None, "no answer within 1 s"),
    ],
    ids=["error", "silence"],
)
async def test_an_error_and_silence_are_unknown(tmp_path: Path, trouble: OSError | None, words: str) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        rollout = await inside.start(text=PROBED.replace("pods: kind=job", "pods: kind=job, timeout: 1s"))
        assert await probe_all(inside, RaisingProbe(trouble)) == []
        reason = reason_of(inside.state.index, rollout, "p1", inside.state.now())
        assert (reason.code, describe(reason)) == (
            "traffic-unknown",
            f"p1: traffic is unknown: {words}",
        )


class SlowProbe(FakeTrafficProbe):
    """A probe that is asked by several at once; `most` is how many."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Take a few turns of the loop."""
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(5):
            await asyncio.sleep(0)
        self._now -= 1
        return await super().probe(ctx)


async def test_a_few_are_looked_at_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutd.engine.background.jobs.MAX_OUTSIDE", 3)
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        await inside.start(text=PROBED)
        probe = SlowProbe()
        await probe_all(inside, probe)
        assert (len(probe.probed_nodes), probe.most) == (4, 3)


async def test_a_node_of_a_rollout_that_is_over_is_not_looked_at(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        probe = FakeTrafficProbe()
        await carry_out(inside.state, gear_with(inside, probe), [ProbeTraffic("over", "p1")])
        assert probe.probed_nodes == []
