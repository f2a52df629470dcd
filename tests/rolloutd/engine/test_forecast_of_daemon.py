"""The forecast beside the daemon that then walks: node by node, to the second.

Both get the same durations; the daemon is the real one, in virtual time.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.forecast.attempt import NodeKey
from machines.forecast.forecast import forecast
from machines.forecast.model import Assumptions, RolloutForecast
from machines.model.events import FreezeStarted, HoldTaken, NodeOrdered
from machines.model.node import NodeKind
from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold, NodeOrder
from machines.model.step_record import StepAction, StepRecord
from machines.model.train import Train, TrainStored
from machines.model.windows import Freeze
from machines.states import Phase
from rolloutd.engine.forecasts import run_starts
from rolloutd.forecast.history import begun_at
from tests.sim.plans import PREPARE, random_cluster_spec
from tests.support.note_change import note_installed
from tests.support.timed_daemon import SUBMITTER, TimedDaemon, run_virtual, timed_daemon

T0 = 1_800_000_000.0
APPROVE_AFTER_S = 600.0

SECOND_S = 1.0
"""What the daemon may differ by: it pauses for 10 ms between two decisions, and these add up."""

AMSTERDAM = "Europe/Amsterdam"


def seconds_of(rollout: str, node: str, step: str, action: StepAction) -> float:
    """Return how long a step of a node takes in these tests."""
    step = step[step.index("verify") :] if step.startswith("after.") else step
    least, most = (100.0, 500.0) if step.startswith("run") else (2.0, 20.0)
    return round(random.Random(f"{node}/{step}/{action}").uniform(least, most), 1)


def labels_of(nodes: int, teams: int) -> dict[str, dict[str, str]]:
    return {
        f"n{number}": {"team": f"t{number % teams}", "rack": f"r{number % 2}"}
        for number in range(1, nodes + 1)
    }


def forecast_now(
    inside: TimedDaemon, records: Mapping[NodeKey, Sequence[StepRecord]] | None = None
) -> dict[str, RolloutForecast]:
    """Return the forecast of all rollouts from now on, with known durations."""
    return forecast(
        inside.index,
        inside.clock.now(),
        lambda *step: (seconds_of(*step),),
        Assumptions(APPROVE_AFTER_S, parallel_runs=inside.state.runners["local"].parallel),
        draws=1,
        random=random.Random(1),
        records=records,
    )


def differences(inside: TimedDaemon, made: RolloutForecast) -> list[str]:
    """Return the nodes that began or ended at another second than was forecast."""
    found, times = [], inside.times(made.rollout)
    assert made.nodes, "nothing was forecast"
    for each in made.nodes:
        for name, said, was in zip(
            ("starts", "ends"), (each.starts_at.p50, each.ends_at.p50), times[each.node], strict=True
        ):
            if said is None or abs(said - was) >= SECOND_S:
                found.append(f"{each.node} {name} at {was}, not {said}")
    ended_at = inside.index.rollout(made.rollout).ended_at
    if ended_at is None or made.ends_at.p50 is None or abs(ended_at - made.ends_at.p50) >= SECOND_S:
        found.append(f"{made.rollout} ended at {ended_at}, not {made.ends_at.p50}")
    return found


def check(
    scenario: Callable[[TimedDaemon], Awaitable[dict[str, RolloutForecast]]],
    labels: Mapping[str, Mapping[str, str]],
    *,
    began_at: float = T0,
    **settings: Any,
) -> dict[str, RolloutForecast]:
    """Run a scenario in a daemon until its rollouts have ended, and compare each with its forecast."""

    async def run() -> dict[str, RolloutForecast]:
        async with timed_daemon(
            labels, seconds_of, began_at=began_at, approve_after_s=APPROVE_AFTER_S, **settings
        ) as inside:
            made = await scenario(inside)
            await inside.until_ended(*made)
            assert [difference for each in made.values() for difference in differences(inside, each)] == []
            return made

    result: dict[str, RolloutForecast] = run_virtual(run)
    return result


def submitted(**spec: Any) -> Callable[[TimedDaemon], Awaitable[dict[str, RolloutForecast]]]:
    """Return the scenario of one rollout, forecast when it is submitted."""

    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        await inside.commit(inside.submit("R1", spec))
        return forecast_now(inside)

    return scenario


@pytest.mark.parametrize("nodes", [60, pytest.param(500, marks=pytest.mark.long)])
def test_daemon_does_what_was_forecast(nodes: int) -> None:
    made = check(submitted(soak="30m", probation="1m"), labels_of(nodes, nodes // 20 * 3), max_parallel=20)
    assert len(made["R1"].nodes) == nodes


@pytest.mark.parametrize("prepare", [(), PREPARE])
def test_runs_wait_for_slot_of_runner(prepare: Any) -> None:
    spec = {"prepare": prepare} if prepare else {}
    made = check(submitted(**spec), labels_of(30, 10), parallel_runs=3)
    assert made["R1"].waits[ReasonCode.RUNNER_FULL] > 1000.0


def test_wait_of_run_is_no_part_of_its_duration() -> None:
    async def run() -> None:
        async with timed_daemon(labels_of(12, 6), seconds_of, began_at=T0, parallel_runs=2) as inside:
            await inside.commit(inside.submit("R1", {"canary": {"select": "rack=none"}}))
            await inside.until_ended("R1")
            store = inside.state.store
            runs = [each for each in await store.load_step_durations(1000) if each.is_run]
            assert len(runs) == 12
            for each in runs:
                expected_s = seconds_of(each.rollout, each.node, each.step, each.action)
                assert each.seconds == pytest.approx(expected_s, abs=SECOND_S)
            waits_s = [step.waited_s for each in runs for step in await store.load_steps("R1", each.node)]
            assert max(waits_s) > 100.0

    run_virtual(run)


def test_runs_that_wait_already_keep_their_order() -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        await inside.commit(inside.submit("R1", {}))
        await inside.until(lambda: inside.index.counters("R1").done >= 14)
        await asyncio.sleep(150.0)
        phases = [each.phase for each in inside.index.needing_driver()]
        assert phases.count(Phase.MAINTAINING) > 2
        return forecast_now(inside, await at_work(inside))

    check(scenario, labels_of(30, 10), parallel_runs=2)


@pytest.mark.parametrize(
    ("zone", "month", "day"),
    [
        (AMSTERDAM, 3, 28),
        (AMSTERDAM, 10, 31),
        ("America/New_York", 3, 14),
        ("America/New_York", 11, 7),
        ("Australia/Lord_Howe", 4, 4),  # by half an hour
        ("Australia/Lord_Howe", 10, 3),
    ],
)
def test_windows_across_daylight_saving(zone: str, month: int, day: int) -> None:
    sunday = datetime(2027, month, day, tzinfo=ZoneInfo(zone))
    # What is lost in spring, or repeated in autumn, is inside the second window.
    windows = [
        {"days": "sat", "from": "22:00", "to": "22:40", "zone": zone},
        {"days": "mon-sun", "from": "01:30", "to": "03:30", "zone": zone},
    ]
    began_at = (sunday - timedelta(hours=2, minutes=30)).timestamp()
    made = check(submitted(soak="5m", windows=windows), labels_of(40, 2), began_at=began_at)
    before = sunday.utcoffset()
    minutes = (sunday.timestamp() + 60.0 * minute for minute in range(240))
    changes_at = next(at for at in minutes if datetime.fromtimestamp(at, sunday.tzinfo).utcoffset() != before)
    starts = [each.starts_at.p50 or 0.0 for each in made["R1"].nodes]
    assert min(starts) < changes_at < max(starts), "the clocks change meanwhile"


def test_freeze_and_hold_that_end_within() -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        now = inside.clock.now()
        await inside.commit(
            inside.submit("R1", {}),
            FreezeStarted(Freeze("f", "team/t1", "fair", "sam", now, now + 2500.0)),
            FreezeStarted(Freeze("g", "node/n9", "fair", "sam", now, now + 9000.0)),
            HoldTaken(Hold("n2", "cli", "h", SUBMITTER, "repair", now, now + 2000.0)),
        )
        return forecast_now(inside)

    check(scenario, labels_of(18, 3))


def test_two_rollouts_share_pools_and_nodes() -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        other = {"targets": "rack=r1", "maintain": {"playbook": "other.yml"}, "max_parallel": 2}
        await inside.commit(inside.submit("R1", {"soak": "5m"}))
        await inside.commit(inside.submit("R2", other))
        return forecast_now(inside)

    made = check(scenario, labels_of(18, 3), max_parallel=4)
    assert set(made) == {"R1", "R2"}


def test_gates_that_ask_each_team() -> None:
    need = {"owner": 1, "each_team": 1}
    check(submitted(soak="5m", gates={"start": need, "continue": need}), labels_of(18, 3))


@pytest.mark.parametrize("strategy", [{"incremental": {"maxUnready": 2}}, {"replace_all": True}])
def test_strategy_over_clusters(strategy: Mapping[str, Any]) -> None:
    with note_installed():
        spec = {**random_cluster_spec(random.Random(1)), "strategy": strategy, "bootstrap": True}
        check(submitted(**spec, keep=False), labels_of(12, 6), kind=NodeKind.CLUSTER)


def test_prepare_stages_before_the_first_node() -> None:
    check(submitted(prepare=PREPARE), labels_of(18, 3))


def in_train(inside: TimedDaemon, *rollouts: str, wait_s: float = 3600.0) -> TrainStored:
    """Return the event of a train of these rollouts, with the approval of all."""
    now, approvals = inside.clock.now(), dict.fromkeys(rollouts, "sam")
    return TrainStored(Train("t", rollouts, wait_s, SUBMITTER, now, approvals), SUBMITTER, "one outage", now)


async def submit_train(inside: TimedDaemon, *specs: Mapping[str, Any], wait_s: float = 3600.0) -> None:
    """Submit plans whose isolators and checks differ, in one train."""
    names = [f"R{number}" for number in range(1, len(specs) + 1)]
    for name, spec in zip(names, specs, strict=True):
        await inside.commit(inside.submit(name, {"maintain": {"playbook": f"{name}.yml"}, **spec}))
    await inside.commit(in_train(inside, *names, wait_s=wait_s))


ALERTS = {"verify": [{"reachable": {}}, {"ssh": {"run": "true", "in_service": True}}]}
"""A plan with a check in service too."""


@pytest.mark.parametrize(
    ("specs", "settings", "at_least"),
    [
        pytest.param(({"probation": "1m"}, ALERTS, {"probation": "3m", **ALERTS}), {}, 32, id="in-service"),
        pytest.param(({}, {"targets": "rack=r1"}, {}), {"parallel_runs": 2}, 8, id="runner-full"),
        pytest.param(({}, {"max_parallel": 1}), {"max_parallel": 6}, 1, id="no-room-to-join"),
    ],
)
def test_train_shares_outages_as_forecast(
    specs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], at_least: int
) -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        seen.append(inside)
        await submit_train(inside, *specs)
        return forecast_now(inside)

    seen: list[TimedDaemon] = []
    made = check(scenario, labels_of(16, 8), **settings)
    joined = [t for name in made for t in seen[0].index.targets(name) if t.joined_outage]
    assert len(joined) >= at_least


async def at_work(inside: TimedDaemon) -> dict[NodeKey, tuple[StepRecord, ...]]:
    """Return the records of the nodes at work."""
    keys = [(each.rollout, each.node) for each in inside.index.needing_driver()]
    started_at = run_starts(inside.state)
    return {key: begun_at(await inside.state.store.load_steps(*key), started_at.get(key)) for key in keys}


def test_nodes_at_work_finish_what_they_began() -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        await inside.commit(inside.submit("R1", {"probation": "1m"}))
        await inside.until(lambda: inside.index.counters("R1").done >= 6)
        await asyncio.sleep(100.0)
        assert {each.phase for each in inside.index.needing_driver()} & {Phase.MAINTAINING}
        return forecast_now(inside, await at_work(inside))

    check(scenario, labels_of(18, 3))


def test_rollback_in_progress() -> None:
    async def scenario(inside: TimedDaemon) -> dict[str, RolloutForecast]:
        await inside.commit(inside.submit("R1", {"rollback": {"playbook": "undo.yml"}}))
        await inside.until(lambda: inside.index.counters("R1").done >= 6)
        done = [each for each in inside.index.targets("R1") if each.phase is Phase.DONE][:3]
        now = inside.clock.now()
        orders = (NodeOrdered("R1", each.node, NodeOrder.ROLLBACK, SUBMITTER, "bad", now) for each in done)
        await inside.commit(*orders)
        await inside.until(lambda: any(each.rolling_back for each in inside.index.needing_driver()))
        return forecast_now(inside, await at_work(inside))

    made = check(scenario, labels_of(18, 3))
    assert sum(1 for each in made["R1"].nodes) > 12


DAEMONS = int(os.environ.get("ROLLOUTD_TEST_FORECAST_DAEMONS", "16"))
"""Daemons whose nodes are judged; each takes a second."""


@pytest.mark.long
@pytest.mark.parametrize(("failure_rate", "parallel_runs"), [(0.0, 100_000), (0.15, 100_000), (0.0, 5)])
def test_random_durations_of_most_nodes_within_p90(failure_rate: float, parallel_runs: int) -> None:
    """Daemons with durations and failures drawn from what the forecast knows."""
    labels, draws = labels_of(36, 9), random.Random(3)
    runs, checks = (tuple(draws.lognormvariate(mu, 0.5) for _ in range(50)) for mu in (5.5, 2.0))

    def samples(rollout: str, node: str, step: str, action: StepAction) -> Sequence[float]:
        return runs if step.startswith("run") else checks

    within: list[float] = []

    async def run(seed: int) -> None:
        def seconds(*step: Any) -> float:
            # Each try takes its own time.
            return world.choice(samples(*step))

        world = random.Random(seed)
        async with timed_daemon(
            labels,
            seconds,
            began_at=T0,
            approve_after_s=APPROVE_AFTER_S,
            parallel_runs=parallel_runs,
            fails=lambda run: random.Random(f"{seed}/{run}").random() < failure_rate,
        ) as inside:
            await inside.commit(inside.submit("R1", {"canary": {"select": "rack=none"}}))
            assumptions = Assumptions(APPROVE_AFTER_S, failure_rate, parallel_runs=parallel_runs)
            now, drawn = inside.clock.now(), random.Random(seed)
            made = forecast(inside.index, now, samples, assumptions, draws=200, random=drawn)["R1"]
            await inside.until_ended("R1")
            times = inside.times("R1")
            came = [times[each.node][1] <= (each.ends_at.p90 or 0.0) for each in made.nodes]
            within.append(sum(came) / len(came))

    for seed in range(DAEMONS):
        run_virtual(lambda seed=seed: run(seed))  # type: ignore[misc]
    assert 0.85 <= sum(within) / len(within) <= 0.95, [f"{each:.0%}" for each in within]
