"""What a store must do; the fake, SQLite and a real PostgreSQL pass it.

Longer than 500 lines: one contract, one file.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.facts import apply
from machines.model.configuration import ConfigurationRecord, NodeConfiguration
from machines.model.events import (
    ChangeNeeded,
    ConfigurationPruned,
    DaemonStarted,
    DriftRecorded,
    Event,
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    HoldReleased,
    HoldTaken,
    NodeCleaned,
    NodeOrdered,
    NodesDiscovered,
    NodesRemoved,
    PreparationRecorded,
    RecordsPruned,
    RequestDenied,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    VerdictCleared,
    VerdictRecorded,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.node import NodeKind
from machines.model.plan import Digest, GateName
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Failure, GateOpening, Hold, Interruption, NodeOrder, Target, Verdict
from machines.model.step_record import StepAction, StepState
from machines.model.windows import Freeze
from machines.states import Edge, Outcome, Phase, Trigger, edges
from rolloutd.audit.audit_chain import GENESIS_HASH, hash_entry
from rolloutd.errors import Conflict, LeadershipLost, NotFound, StoreFailed
from rolloutd.ports import ApprovedRollout, AuditBase, BusyTime, KeptForecast, StepDuration
from rolloutd.store import Store
from tests.contracts.store_backends import (
    ALICE,
    BACKENDS,
    BOB,
    DIGEST,
    StoreBackend,
    make_backend,
    moves_to_done,
    node,
    phase_moved,
    plan_of,
    rollout_opened,
    step,
    target,
    vote,
    write,
)

ADMITTED = phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING)
HOLD = Hold("n1", "person", "alice", ALICE, "new disk", 7.0, until=99.0)
FREEZE = Freeze("f1", "team/payments", "sale", "alice", 8.0)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBackend:
    return make_backend(request, tmp_path / "state")


@pytest.fixture
async def store(backend: StoreBackend) -> AsyncIterator[Store]:
    opened_store = await backend.open()
    yield opened_store
    # Whatever a test wrote, the tables follow from the audit.
    assert (await opened_store.verify_audit()).ok
    await opened_store.close()


async def the_target(store: Store, name: str = "n1") -> Target:
    return next(found for found in await store.load_targets("r1") if found.node == name)


# -- what was written is what is loaded -------------------------------------------


async def test_an_empty_store_remembers_nothing(store: Store, backend: StoreBackend) -> None:
    snapshot = await store.load_snapshot()
    assert snapshot.rollouts == snapshot.targets == snapshot.nodes == ()
    assert snapshot.epoch == backend.first_epoch
    assert await store.latest_audit_entry() is None
    assert await store.read_audit() == ()


async def test_a_submit_is_loaded_as_it_was_made(store: Store) -> None:
    event = rollout_opened()
    await write(store, event, actor=ALICE)
    snapshot = await store.load_snapshot()
    assert snapshot.rollouts == (apply.new_rollout(event, plan_of(event.content)),)
    assert snapshot.targets == event.targets
    assert await store.load_plan("r1") == (event.content, event.source)
    assert await store.load_rollout("r1") == snapshot.rollouts[0]


@pytest.mark.parametrize("way", edges(), ids=lambda way: f"{way.trigger}-{way.source}")
async def test_every_edge_of_the_table_is_kept(store: Store, way: Edge) -> None:
    start = target(
        "n1",
        phase=way.source,
        outcome=Outcome.CHANGED if way.source is Phase.DONE else None,
        attempt=2,
        aborted_isolations=3,
        since=3.0,
        isolated=True,
        maybe_current=True,
    )
    await write(store, replace(rollout_opened(), targets=(start,)))
    event = phase_moved(
        "n1",
        way.trigger,
        way.source,
        way.target,
        2 + (way.trigger is Trigger.ADMITTED),
        outcome=min(way.outcomes, default=None),
        rolling_back=way.trigger is Trigger.ROLLBACK_ORDERED,
        not_before=77.0,
        isolated=False,
        text="why it moved",
    )
    await write(store, event)
    assert await the_target(store) == apply.apply_to_target(start, event)
    assert (await store.load_rollout("r1")).failures == ((event.failure,) if event.failure else ())


async def test_a_whole_way_and_back_again(store: Store) -> None:
    expected = rollout_opened().targets[0]
    await write(store, rollout_opened())
    t, p = Trigger, Phase
    way = (
        phase_moved("n1", t.ADMITTED, p.PENDING, p.ISOLATING, 1, at=11.0),
        phase_moved(
            "n1", t.ISOLATION_ABORTED, p.ISOLATING, p.PENDING, 1, at=12.0, not_before=50.0, text="busy"
        ),
        phase_moved("n1", t.ADMITTED, p.PENDING, p.ISOLATING, 2, at=13.0),
        phase_moved("n1", t.FAILED, p.ISOLATING, p.FAILED, 2, at=14.0),
        phase_moved("n1", t.ROLLBACK_ORDERED, p.FAILED, p.ISOLATING, 3, at=15.0, rolling_back=True),
        phase_moved("n1", t.FAILED, p.ISOLATING, p.FAILED, 3, at=16.0),
        phase_moved("n1", t.RETRIED, p.FAILED, p.PENDING, 3, at=17.0),
    )
    for event in way:
        await write(store, event)
        expected = apply.apply_to_target(expected, event)
        assert await the_target(store) == expected
    assert [failure.id for failure in (await store.load_snapshot()).rollouts[0].failures] == ["n1#2", "n1#3"]


async def test_orders_looks_and_amendments_are_kept(store: Store) -> None:
    first, joiner = target("n1", maybe_current=True), target("n3", 9, joined=True, needs_vote_of="search")
    await write(store, replace(rollout_opened(), targets=(first,)))
    events: tuple[Any, ...] = (
        ChangeNeeded("r1", "n1", 30.0, "needs it"),
        NodeOrdered("r1", "n1", NodeOrder.RETURN, BOB, "need it back", 31.0),
        TargetChanged("r1", "n1", "search", ("team/search", "rack/none"), None, 32.0),
        ChangeNeeded("r1", "n1", 33.0),
    )
    expected = first
    for event in events:
        await write(store, event)
        expected = apply.apply_to_target(expected, event)
        assert await the_target(store) == expected
    over = NodeOrdered("r1", "n1", None, BOB, "", 34.0)
    await write(store, TargetsJoined("r1", (joiner,), 35.0), over)
    assert await store.load_targets("r1") == (apply.apply_to_target(expected, over), joiner)
    assert (await store.load_rollout("r1")).amendments == 2


async def test_drift_is_kept_until_node_moves(store: Store) -> None:
    done = target("n1", phase=Phase.DONE, outcome=Outcome.CHANGED, attempt=1)
    await write(store, replace(rollout_opened(), targets=(done,)))
    moved = phase_moved("n1", Trigger.DRIFTED, Phase.DONE, Phase.PENDING, attempt=1)
    expected = done
    for event, since in (
        (DriftRecorded("r1", "n1", 30.0, ("set the limit",)), 30.0),
        (DriftRecorded("r1", "n1", 31.0, ("set the limit", "restart")), 30.0),
        (DriftRecorded("r1", "n1", 32.0, ()), None),
        (DriftRecorded("r1", "n1", 33.0, ("restart",)), 33.0),
        (moved, None),
    ):
        await write(store, event)
        expected = apply.apply_to_target(expected, event)
        assert await the_target(store) == expected
        assert (expected.drift and expected.drift.since) == since
    with pytest.raises(Conflict):
        await write(store, DriftRecorded("r1", "n1", 41.0, ("restart",)))


async def test_votes_gates_and_pauses_are_kept(store: Store) -> None:
    wide = vote("v2", wave="fleet", shown=("n1#1",), nodes=("n2",), more=3, until=200.0)
    await write(store, rollout_opened())
    await write(store, VoteCast("r1", vote()), VoteCast("r1", wide))
    await write(store, VoteWithdrawn("r1", "v1", ALICE, "changed my mind", 40.0))
    await write(
        store, GateOpened("r1", GateName.START, "", 41.0), GateOpened("r1", GateName.CONTINUE, "w", 42.0)
    )
    await write(store, RolloutPaused("r1", BOB, "wait", 43.0))
    found = await store.load_rollout("r1")
    assert found.votes == (replace(vote(), withdrawn_at=40.0), wide)
    assert found.opened == (GateOpening(GateName.START, "", 41.0), GateOpening(GateName.CONTINUE, "w", 42.0))
    assert found.paused == Interruption(BOB, "wait", 43.0)
    await write(store, RolloutResumed("r1", BOB, "go", 44.0))
    assert (await store.load_rollout("r1")).paused is None


async def test_holds_and_freezes_are_kept(store: Store) -> None:
    await write(store, HoldTaken(HOLD), FreezeStarted(FREEZE))
    longer = replace(HOLD, until=None, reason="no disk yet")
    await write(store, HoldTaken(longer), HoldTaken(replace(HOLD, id="other")))
    snapshot = await store.load_snapshot()
    assert set(snapshot.holds) == {longer, replace(HOLD, id="other")}
    assert snapshot.freezes == (FREEZE,)
    await write(store, HoldReleased("n1", "person", "alice", BOB, 9.0), FreezeLifted("f1", ALICE, 9.0))
    snapshot = await store.load_snapshot()
    assert snapshot.holds == (replace(HOLD, id="other"),)
    assert snapshot.freezes == ()


async def test_nodes_come_change_and_go(store: Store) -> None:
    await write(store, NodesDiscovered((node("n1", team="a"), node("n2")), {"n1": {"ansible_host": "::1"}}))
    await write(store, NodesDiscovered((node("n1", team="b"),)))
    assert (await store.load_snapshot()).nodes == (node("n1", team="b"), node("n2"))
    await write(store, NodesRemoved(("n1", "never-seen")))
    assert (await store.load_snapshot()).nodes == (node("n2"),)
    assert await store.load_connections() == {"n2": {}}, "a run must not see a removed node"
    await write(store, NodesDiscovered((node("n1"),), {"n1": {"ansible_port": 22}}))
    assert (await store.load_snapshot()).nodes == (node("n1"), node("n2"))
    assert (await store.load_connections())["n1"] == {"ansible_port": 22}


# -- configurations -----------------------------------------------------------------


async def test_run_gives_a_configuration_that_passes(store: Store) -> None:
    await write(store, rollout_opened(), *moves_to_done("n1")[:2])
    run = step(StepState.INTENDED, step="run.configure", action=StepAction.RUN)
    await write(store, StepRecorded(run, content="hash-1", document={"commit": "a"}))
    await write(store, StepRecorded(replace(run, state=StepState.OK, at=25.0)))
    assert (await the_target(store)).content == "hash-1"
    assert (await store.load_configurations(("n1", "n2"))).records == {}
    await write(store, *moves_to_done("n1")[2:])
    found = await store.load_configurations(("n1", "n2"))
    passed = ConfigurationRecord("hash-1", "r1", 10.0)
    assert found.records == {"n1": NodeConfiguration(current=passed)}
    assert (found.documents["hash-1"], found.changes["r1"]) == ({"commit": "a"}, DIGEST.change)


async def test_configurations_of_gone_nodes_are_pruned_with_their_documents(store: Store) -> None:
    await write(store, NodesDiscovered((node("n1"), node("n2"))), rollout_opened(), *moves_to_done("n1")[:2])
    run = step(StepState.INTENDED, step="run.configure", action=StepAction.RUN)
    await write(store, StepRecorded(run, content="hash-1", document={"commit": "a"}))
    await store.remove_unused_documents()  # the run may still pass
    await write(store, *moves_to_done("n1")[2:], NodesRemoved(("n1",)), at=50.0)
    assert "hash-1" in (await store.load_configurations(("n1",))).documents
    assert [*await store.list_expired_configurations(60.0)] == []  # its rollout is not over
    await write(store, *moves_to_done("n2"), RolloutEnded("r1", 55.0))
    assert [*await store.list_expired_configurations(49.0)] == []
    assert [*await store.list_expired_configurations(50.0)] == ["n1"]
    await store.remove_unused_documents()
    records = await store.load_configurations(("n1",))
    assert records.documents["hash-1"] == {"commit": "a"}
    await write(store, ConfigurationPruned("n1", 10.0, 60.0), at=60.0)
    assert [*await store.list_expired_configurations(60.0)] == []
    assert (await store.load_configurations(("n1",))).records == {}
    await store.remove_unused_documents()
    await write(store, rollout_opened("r2"), *moves_to_done("n1", "r2")[:2])
    await write(store, StepRecorded(replace(run, rollout="r2"), content="hash-1"))
    await write(store, *moves_to_done("n1", "r2")[2:])
    found = await store.load_configurations(("n1",))
    assert ([*found.records], dict(found.documents)) == (["n1"], {})


async def closed_rollout(
    store: Store, rollout: str, nodes: Sequence[str] = ("n1",), at: float = 20.0
) -> None:
    """Write a rollout of one plan that changes nodes, and ends."""
    opened = replace(rollout_opened(rollout, nodes), name="plan")
    await write(store, opened, *(move for each in nodes for move in moves_to_done(each, rollout)))
    await write(store, RolloutEnded(rollout, at))


async def test_rollout_of_latest_change_keeps_its_records(store: Store) -> None:
    await write(store, NodesDiscovered((node("n1"), node("n2"))))
    await closed_rollout(store, "r1", ("n1", "n2"))
    await closed_rollout(store, "r2", ("n1",))
    assert [*await store.list_expired_rollouts(30.0)] == [], "n2 has it from r1, n1 from r2"
    await closed_rollout(store, "r3", ("n2",), at=40.0)
    assert [*await store.list_expired_rollouts(19.0)] == []
    assert [*await store.list_expired_rollouts(30.0)] == ["r1"]
    await write(store, NodesRemoved(("n1",)))
    assert [*await store.list_expired_rollouts(30.0)] == ["r1", "r2"]


async def test_live_rollout_keeps_its_records(store: Store) -> None:
    failed = phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, rollout_opened(nodes=("n1",)), *moves_to_done("n1")[:1], failed)
    await write(store, RolloutCancelled("r1", ALICE, "no", 20.0))
    assert [*await store.list_expired_rollouts(30.0)] == []


async def test_deleted_rollout_loses_its_records(store: Store) -> None:
    await write(store, NodesDiscovered((node("n1"),)))
    await closed_rollout(store, "r1")
    await write(store, RolloutDeleted("r1", ALICE, 21.0))
    assert [*await store.list_expired_rollouts(30.0)] == ["r1"]


async def test_removed_records_leave_other_rollouts(store: Store) -> None:
    nodes = ("n1", "n2", "n3")
    for rollout in ("r1", "r2"):
        await closed_rollout(store, rollout, nodes)
        await write(store, StepRecorded(replace(step(StepState.OK), rollout=rollout)))
    assert [*await store.list_recorded_nodes("r1", 2)] == ["n1", "n2"]
    await write(store, RecordsPruned("r1", ("n1", "n2"), 10.0, 60.0))
    assert [each.node for each in await store.load_targets("r1")] == ["n3"]
    assert [*await store.load_steps("r1", "n1")] == []
    await write(store, RecordsPruned("r1", (), 10.0, 60.0))
    await write(store, RecordsPruned("r1", (), 10.0, 60.0))  # the answer to the first was lost
    assert [each.id for each in await store.list_rollout_records()] == ["r2"]
    assert len(await store.load_targets("r2")) == 3
    assert len(await store.load_steps("r2", "n1")) == 1
    assert [*await store.read_audit(rollout="r1")], "its entries stay"
    assert (await store.verify_audit()).ok


async def test_records_of_open_rollout_cannot_be_removed(store: Store) -> None:
    await write(store, rollout_opened())
    with pytest.raises(Conflict):
        await write(store, RecordsPruned("r1", ("n1",), 10.0, 60.0))


async def test_output_of_steps_removed_in_parts(store: Store) -> None:
    await write(store, rollout_opened())
    for number in (1, 2, 3):
        await write(store, StepRecorded(step(StepState.OK, number=number, output="hello")))
    await store.remove_step_output("r1", 2)
    assert [each.output for each in await store.load_steps("r1", "n1")] == ["", "", "hello"]
    assert await store.has_step_output("r1")
    await store.remove_step_output("r1", 2)
    assert not await store.has_step_output("r1")
    assert (await store.verify_audit()).ok


async def test_documents_of_all_three_records_stay(store: Store) -> None:
    run = step(StepState.INTENDED, step="run.configure", action=StepAction.RUN)
    broken = Failure("n1#1", "n1", 1, "run.configure", "broken", 10.0)
    failed = phase_moved("n1", Trigger.FAILED, Phase.MAINTAINING, Phase.FAILED, rollout="r3", failure=broken)
    for rollout in ("r1", "r2", "r3"):
        moves = moves_to_done("n1", rollout)
        await write(store, rollout_opened(rollout), *moves[:2])
        await write(store, StepRecorded(replace(run, rollout=rollout), content=f"of-{rollout}", document={}))
        await write(store, *((failed,) if rollout == "r3" else moves[2:]), RolloutEnded(rollout, 20.0))
        await write(store, RolloutDeleted(rollout, ALICE, 21.0))
    await store.remove_unused_documents()
    assert (await store.load_configurations(("n1",))).documents.keys() == {"of-r1", "of-r2", "of-r3"}


async def test_configuration_of_present_node_cannot_be_pruned(store: Store) -> None:
    await write(store, NodesDiscovered((node("n1"),)))
    with pytest.raises(Conflict):
        await write(store, ConfigurationPruned("n1", 10.0, 60.0))


async def test_verdict_is_kept_until_cleared_or_passed(store: Store) -> None:
    await write(store, rollout_opened(), *moves_to_done("n1")[:2])
    run = step(StepState.INTENDED, step="run.configure", action=StepAction.RUN)
    await write(store, StepRecorded(run, content="hash-1", document={}))
    first = Verdict("v1", "change-1", "hash-1", {"role": "db"}, "r1", "n1", "verify.0", "broken", 10.0)
    second, third = replace(first, id="v2", content="hash-2", at=11.0), replace(first, id="v3", at=12.0)
    await write(store, *(VerdictRecorded("r1", "n1", each) for each in (third, first, second)))
    assert await store.load_verdicts() == (first, second, third)
    await write(store, VerdictCleared("v3", ALICE, "was the cable", 13.0))
    with pytest.raises(Conflict):
        await write(store, VerdictCleared("v3", ALICE, "again", 13.0))
    assert await store.load_verdicts() == (first, second)
    await write(store, *moves_to_done("n1")[2:])
    assert await store.load_verdicts() == (second,)


# -- steps --------------------------------------------------------------------------


async def test_step_recorded_idempotently(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    prior = {"cordoned": False, "taints": ["a", None]}
    intent = step(StepState.INTENDED, prior=prior, handle="run-1", stage="configure", visible_to="payments")
    result = replace(intent, state=StepState.OK, at=25.0, text="done", output="all of it")
    await write(store, StepRecorded(intent, isolated=True))
    await write(store, StepRecorded(intent))
    assert await store.load_steps("r1", "n1") == (intent,)
    assert (await the_target(store)).isolated
    await write(store, StepRecorded(result))
    await write(store, StepRecorded(replace(result, at=26.0)))
    assert await store.load_steps("r1", "n1") == (replace(result, at=26.0),)
    assert (await the_target(store)).isolated
    await write(store, StepRecorded(step(StepState.OK, number=2), isolated=False))
    assert not (await the_target(store)).isolated


async def test_durations_are_of_the_latest_steps_that_succeeded(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    records = [
        step(StepState.OK, number=1, at=30.0, began_at=20.0),
        step(StepState.FAILED, number=2, at=90.0, began_at=20.0),
        step(
            StepState.OK,
            node="n2",
            step="run.configure",
            action=StepAction.RUN,
            at=60.0,
            began_at=20.0,
            handle="r1.n2.1.configure.1",
            waited_s=15.0,
        ),
    ]
    await write(store, *map(StepRecorded, records))
    stage = Preparation("r1", "n1", "copy", 1, PreparationState.RUNNING, "c", 40.0, 40.0)
    await write(store, PreparationRecorded(stage))
    await write(store, PreparationRecorded(replace(stage, state=PreparationState.DONE, at=45.0)))
    plan = rollout_opened().name
    expected = (
        StepDuration("r1", plan, "n2", "run.configure", StepAction.RUN, 25.0, 60.0, True),
        StepDuration("r1", plan, "n1", "copy", StepAction.RUN, 5.0, 45.0, False),
        StepDuration("r1", plan, "n1", "isolate.0.command", StepAction.APPLY, 10.0, 30.0, False),
    )
    assert tuple(await store.load_step_durations(10)) == expected
    assert tuple(await store.load_step_durations(1)) == expected[:1]


async def test_busy_times_are_those_of_admissions_with_probes(store: Store) -> None:
    await write(store, rollout_opened(), replace(ADMITTED, busy_s=75.5))
    aborted = phase_moved("n1", Trigger.ISOLATION_ABORTED, Phase.ISOLATING, Phase.PENDING)
    await write(store, aborted, replace(ADMITTED, attempt=2))
    expected = (BusyTime("r1", rollout_opened().name, "n1", 75.5),)
    assert tuple(await store.load_busy_times(10)) == expected
    assert tuple(await store.load_busy_times(2)) == ()


async def test_attempts_and_failures_of_a_plan_are_counted(store: Store) -> None:
    plan = rollout_opened().name
    assert await store.count_attempts(plan) == (0, 0)
    failed = phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, rollout_opened(), ADMITTED, failed)
    assert await store.count_attempts(plan) == (1, 1)
    assert await store.count_attempts("other") == (0, 0)


async def test_kept_forecasts_are_bounded_and_go_with_their_rollout(store: Store) -> None:
    await write(store, rollout_opened())
    nodes = [{"node": f"n{number}"} for number in range(401)]
    kept = [KeptForecast("r1", float(at), "gate start", {"nodes": nodes[at:]}) for at in range(25)]
    for each in kept:
        await store.keep_forecast(each)
    await store.keep_forecast(replace(kept[-1], is_missed=True))
    expected = (replace(kept[-1], is_missed=True), *reversed(kept[5:-1]))
    assert tuple(await store.load_forecasts("r1")) == tuple(await store.load_forecasts()) == expected
    assert tuple(await store.load_forecasts("r2")) == ()
    cancelled = RolloutCancelled("r1", ALICE, "because", 8.0)
    await write(store, cancelled, RolloutDeleted("r1", ALICE, 9.0))
    assert tuple(await store.load_forecasts()) == ()


async def test_another_result_for_an_ended_step_is_a_conflict(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    done = step(StepState.OK)
    await write(store, StepRecorded(done))
    for other in (replace(done, state=StepState.FAILED), step(StepState.INTENDED), replace(done, text="no")):
        with pytest.raises(Conflict):
            await write(store, StepRecorded(other))
    assert await store.load_steps("r1", "n1") == (done,)


async def test_what_an_isolator_found_is_never_forgotten(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    await write(store, StepRecorded(step(StepState.INTENDED, prior={"was": "up"}, began_at=1.0)))
    await write(store, StepRecorded(step(StepState.UNKNOWN, began_at=2.0, text="no answer")))
    (kept,) = await store.load_steps("r1", "n1")
    assert kept.prior == {"was": "up"}
    assert kept.began_at == 1.0
    assert kept.text == "no answer"


async def test_steps_come_oldest_first_and_by_attempt(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    records = [step(StepState.OK, number=n, attempt=a) for a, n in ((1, 1), (1, 2), (2, 1))]
    await write(store, *map(StepRecorded, records))
    await write(store, StepRecorded(step(StepState.OK, node="n2")))
    assert list(await store.load_steps("r1", "n1")) == records
    assert list(await store.load_steps("r1", "n1", 2)) == records[2:]


@pytest.mark.parametrize("state", [StepState.INTENDED, StepState.FAILED, StepState.UNKNOWN])
async def test_unfinished_run_reported_until_cleared(store: Store, state: StepState) -> None:
    def ran(number: int, state: StepState) -> StepRecorded:
        run = step(state, number=number, step="run.configure", action=StepAction.RUN)
        return StepRecorded(replace(run, handle="r.1"))

    def checked(number: int, state: StepState) -> StepRecorded:
        check = step(state, number=number, step="verify.0.playbook", action=StepAction.CHECK)
        return StepRecorded(replace(check, handle="c.1"))

    def cleared(number: int, state: StepState) -> StepRecorded:
        return StepRecorded(step(state, number=number, step="clear", action=StepAction.CLEAN_UP))

    await write(store, rollout_opened(), ADMITTED)
    assert not await store.unfinished_runs("n1")
    for number, events, unclean in (
        (1, (ran, StepState.OK), False),
        (2, (ran, state), True),
        (2, (cleared, StepState.FAILED), True),
        (3, (cleared, StepState.OK), False),
        (3, (ran, state), True),
        (4, (cleared, StepState.OK), False),
        (5, (checked, state), state is not StepState.FAILED),
        (5, (cleared, StepState.OK), False),
    ):
        make, ended = events
        await write(store, make(number, ended))
        assert bool(await store.unfinished_runs("n1")) is unclean
        assert not await store.unfinished_runs("n2")


# -- conflicts ------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[Event, ...], Event]] = {
    "moved from another phase": ((ADMITTED,), ADMITTED),
    "moved from another attempt": ((), replace(ADMITTED, attempt=3)),
    "moved, no such node": ((), replace(ADMITTED, node="n9")),
    "moved, no such rollout": ((), replace(ADMITTED, rollout="r9")),
    "opened twice": ((), rollout_opened()),
    "joined twice": ((), TargetsJoined("r1", (target("n1"),), 1.0)),
    "joined to nothing": ((), TargetsJoined("r9", (target("n5", rollout="r9"),), 1.0)),
    "changed, no such node": ((), TargetChanged("r1", "n9", None, (), None, 1.0)),
    "looked at, no such node": ((), ChangeNeeded("r1", "n9", 1.0)),
    "ordered, no such node": ((), NodeOrdered("r1", "n9", None, ALICE, "", 1.0)),
    "step of nobody": ((), StepRecorded(step(StepState.OK, node="n9"))),
    "voted twice": ((VoteCast("r1", vote()),), VoteCast("r1", vote())),
    "voted for nothing": ((), VoteCast("r9", vote())),
    "withdrew nothing": ((), VoteWithdrawn("r1", "v1", ALICE, "", 1.0)),
    "withdrew twice": (
        (VoteCast("r1", vote()), VoteWithdrawn("r1", "v1", ALICE, "", 1.0)),
        VoteWithdrawn("r1", "v1", ALICE, "", 2.0),
    ),
    "opened a gate twice": (
        (GateOpened("r1", GateName.START, "", 1.0),),
        GateOpened("r1", GateName.START, "", 2.0),
    ),
    "paused twice": ((RolloutPaused("r1", ALICE, "", 1.0),), RolloutPaused("r1", BOB, "", 2.0)),
    "resumed what runs": ((), RolloutResumed("r1", ALICE, "", 1.0)),
    "cancelled twice": ((RolloutCancelled("r1", ALICE, "", 1.0),), RolloutCancelled("r1", BOB, "", 2.0)),
    "ended twice": ((RolloutEnded("r1", 1.0),), RolloutEnded("r1", 2.0)),
    "paused what is closed": ((RolloutEnded("r1", 1.0),), RolloutPaused("r1", ALICE, "", 2.0)),
    "deleted what runs": ((), RolloutDeleted("r1", ALICE, 1.0)),
    "released nothing": ((), HoldReleased("n1", "person", "alice", ALICE, 1.0)),
    "froze twice": ((FreezeStarted(FREEZE),), FreezeStarted(FREEZE)),
    "lifted nothing": ((), FreezeLifted("f1", ALICE, 1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_row_differing_from_event_conflicts(store: Store, case: str) -> None:
    before, event = REFUSED[case]
    await write(store, rollout_opened())
    if before:
        await write(store, *before)
    remembered, head = await store.load_snapshot(), await store.latest_audit_entry()
    with pytest.raises(Conflict) as refusal:
        await write(store, HoldTaken(replace(HOLD, id="with it")), event)
    assert str(refusal.value)
    assert await store.load_snapshot() == remembered
    assert await store.latest_audit_entry() == head


async def test_illegal_transition_not_written(store: Store) -> None:
    await write(store, rollout_opened())
    for wrong in (
        phase_moved("n1", Trigger.ISOLATED, Phase.PENDING, Phase.MAINTAINING),
        phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.VERIFYING),
        phase_moved("n1", Trigger.SKIPPED, Phase.PENDING, Phase.DONE, outcome=Outcome.CHANGED),
    ):
        with pytest.raises(StoreFailed, match="nothing was written"):
            await write(store, wrong)
    assert await the_target(store) == rollout_opened().targets[0]


# -- the audit ------------------------------------------------------------------------


async def test_each_entry_is_chained_to_the_one_before(store: Store, backend: StoreBackend) -> None:
    written = [
        *await write(store, rollout_opened(), actor=ALICE),
        *await write(store, ADMITTED, HoldTaken(HOLD)),
    ]
    entries = list(await store.read_audit())
    assert entries == written
    assert await store.latest_audit_entry() == entries[-1]
    previous = GENESIS_HASH
    for number, entry in enumerate(entries, 1):
        assert entry.seq == number == json.loads(entry.text)["seq"]
        assert entry.hash == hash_entry(previous, entry.text)
        previous = entry.hash
    await asyncio.sleep(0)  # the loop tells in its next round
    assert backend.committed_seqs == [1, 2, 3]


async def test_an_entry_says_who_what_when_why(store: Store) -> None:
    await write(store, rollout_opened(), actor=ALICE, at=50.0)
    (entry,) = await write(store, ADMITTED, at=51.0)
    told = json.loads(entry.text)
    assert told["actor"] == {"kind": "daemon", "name": "rolloutd", "uid": None}
    assert (told["at"], told["cause"], told["event"]) == (51.0, "test", "PhaseMoved")
    assert (told["rollout"], told["node"], told["digest"]) == ("r1", "n1", "whole-1")
    assert told["fields"]["target"] == "isolating"
    assert told["fields"]["attempt"] == 1


async def test_audit_supports_paging_and_filters(store: Store) -> None:
    refused = RequestDenied(BOB, "pause", "not a member", 3.0)
    await write(store, rollout_opened(), ADMITTED, HoldTaken(HOLD), refused, DaemonStarted(1, "0", "d", 4.0))
    assert [entry.seq for entry in await store.read_audit(after=1, limit=2)] == [2, 3]
    assert [entry.seq for entry in await store.read_audit(rollout="r1")] == [1, 2]
    assert [entry.seq for entry in await store.read_audit(node="n1")] == [2, 3]
    assert [entry.seq for entry in await store.read_audit(event="RequestDenied")] == [4]
    assert [entry.seq for entry in await store.read_audit(rollout="r1", event="PhaseMoved")] == [2]
    assert await store.read_audit(after=5) == ()
    assert await store.list_changed_nodes("r1", 0) == {"n1"}
    assert await store.list_changed_nodes("r1", 2) == frozenset()
    assert [entry.seq for entry in await store.read_audit(before=5, limit=2)] == [3, 4]
    assert [entry.seq for entry in await store.read_audit(before=4, after=2)] == [3]
    assert [entry.seq for entry in await store.read_audit(before=4, rollout="r1", limit=1)] == [2]
    assert await store.read_audit(before=1) == ()


async def test_no_secret_reaches_the_audit(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    await write(store, NodesDiscovered((node("n1"),), {"n1": {"ansible_password": "hunter2"}}))
    record = step(StepState.OK, prior={"token": "hunter2"}, output="password: hunter2", visible_to="payments")
    await write(store, StepRecorded(record))
    assert not any("hunter2" in entry.text for entry in await store.read_audit())


async def test_many_nodes_are_told_in_entries_of_readable_size(store: Store) -> None:
    nodes = tuple(node(f"n{number}") for number in range(1200))
    entries = await write(store, NodesDiscovered(nodes))
    told = [each["name"] for entry in entries for each in json.loads(entry.text)["fields"]["nodes"]]
    assert told == [each.name for each in nodes]
    assert len(entries) == 3


# -- closed rollouts, and what outlives them -------------------------------------------


async def test_ended_rollout_leaves_snapshot_only(store: Store) -> None:
    await write(store, rollout_opened(nodes=["n1"]), *moves_to_done("n1"), RolloutEnded("r1", 60.0))
    assert (await store.load_snapshot()).rollouts == ()
    (header,) = await store.list_closed_rollouts()
    assert (header.id, header.name, header.ended_at) == ("r1", "plan-r1", 60.0)
    assert header.counts == {"changed": 1}
    assert (await store.load_rollout("r1")).ended_at == 60.0
    assert (await the_target(store)).outcome is Outcome.CHANGED
    await write(store, RolloutDeleted("r1", ALICE, 61.0))
    assert await store.list_closed_rollouts() == ()
    assert await store.find_nodes_with_change("change-1") == {"n1"}
    assert len(await store.read_audit(rollout="r1")) == 7
    for gone in (store.load_rollout, store.load_plan):
        with pytest.raises(NotFound):
            await gone("r1")


async def test_work_on_cluster_known_after_its_rollout(store: Store) -> None:
    await write(store, NodesDiscovered((replace(node("n1"), kind=NodeKind.CLUSTER), node("n2"))))
    await write(store, rollout_opened(nodes=["n1", "n2"]))
    assert (await store.load_snapshot()).worked_on == {}
    await write(store, *moves_to_done("n1"), *moves_to_done("n2"), RolloutEnded("r1", 60.0))
    snapshot = await store.load_snapshot()
    assert (snapshot.rollouts, snapshot.worked_on) == ((), {"n1": 10.0})
    await write(store, NodesRemoved(("n1",)))
    assert (await store.load_snapshot()).worked_on == {"n1": 10.0}, "it may come back"


async def test_a_cancelled_rollout_stays_until_its_nodes_are_home(store: Store) -> None:
    failed = phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, rollout_opened(), ADMITTED, failed, RolloutCancelled("r1", ALICE, "wrong", 50.0))
    (live,) = (await store.load_snapshot()).rollouts
    assert live.cancelled == Interruption(ALICE, "wrong", 50.0)
    assert await store.list_closed_rollouts() == ()
    await write(store, phase_moved("n1", Trigger.SKIPPED, Phase.FAILED, Phase.DONE, outcome=Outcome.SKIPPED))
    assert (await store.load_snapshot()).rollouts == ()
    (header,) = await store.list_closed_rollouts()
    assert header.cancelled == Interruption(ALICE, "wrong", 50.0)
    assert header.counts == {"skipped": 1, "pending": 1}


async def test_closed_rollout_loaded_while_node_held(store: Store) -> None:
    """Its isolation is undone, but the node did not pass: only its return lifts the hold."""
    left = replace(HOLD, source="left", id="r1/n1", until=None)
    strange = replace(left, id="r2/n1")
    await write(
        store,
        rollout_opened(nodes=["n1"]),
        *moves_to_done("n1"),
        RolloutEnded("r1", 60.0),
        HoldTaken(strange),
    )
    assert (await store.load_snapshot()).rollouts == ()
    await write(store, HoldTaken(left))
    assert [rollout.id for rollout in (await store.load_snapshot()).rollouts] == ["r1"]
    assert await store.list_closed_rollouts() == ()
    await write(store, HoldReleased("n1", "left", "r1/n1", ALICE, 61.0))
    assert (await store.load_snapshot()).rollouts == ()


async def test_rollout_record_has_end_after_nodes_returned(store: Store) -> None:
    failed = phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, rollout_opened(), ADMITTED, failed, RolloutCancelled("r1", ALICE, "wrong", 50.0))
    await write(store, rollout_opened("r2"), RolloutEnded("r2", 60.0), rollout_opened("r3"))
    assert [(each.id, each.ended_at, each.deleted) for each in await store.list_rollout_records()] == [
        ("r1", None, False),
        ("r2", 60.0, False),
        ("r3", None, False),
    ]
    skipped = phase_moved("n1", Trigger.SKIPPED, Phase.FAILED, Phase.DONE, outcome=Outcome.SKIPPED)
    await write(store, skipped, RolloutDeleted("r2", ALICE, 61.0))
    first, second, _ = await store.list_rollout_records()
    assert (first.ended_at, second.deleted) == (50.0, True)
    assert first.source == (await store.load_plan("r1"))[1]


async def test_lists_are_latest_first_and_limited(store: Store) -> None:
    for number in range(3):
        await write(store, rollout_opened(f"r{number}"), RolloutEnded(f"r{number}", 9.0))
    assert [header.id for header in await store.list_closed_rollouts(2)] == ["r2", "r1"]


async def test_an_identical_submit_is_found(store: Store) -> None:
    other = Digest("change-1", "scope-2", "policy-2", "whole-2")
    await write(store, rollout_opened("r1"), rollout_opened("r2"), rollout_opened("r3", digest=other))
    key = (DIGEST.change, "selector-1", DIGEST.policy)
    assert await store.find_identical(*key) == "r2"
    await write(store, RolloutCancelled("r2", ALICE, "", 3.0), RolloutEnded("r1", 3.0))
    assert await store.find_identical(*key) == "r1"
    assert await store.find_identical("change-1", "selector-2", "policy-1") is None


async def test_the_nodes_of_an_earlier_same_change_are_known(store: Store) -> None:
    current = phase_moved(
        "n1",
        Trigger.FOUND_CURRENT,
        Phase.PENDING,
        Phase.DONE,
        0,
        outcome=Outcome.ALREADY_CURRENT,
        rollout="r2",
    )
    skipped = phase_moved(
        "n2", Trigger.SKIPPED, Phase.PENDING, Phase.DONE, 0, outcome=Outcome.SKIPPED, rollout="r2"
    )
    await write(
        store,
        rollout_opened("r1", ["n3", "n4"]),
        rollout_opened("r2"),
        *moves_to_done("n3"),
        current,
        skipped,
    )
    assert await store.find_nodes_with_change("change-1") == {"n1", "n3"}
    assert await store.find_nodes_with_change("change-2") == frozenset()


async def test_previous_rollout_was_approved_and_changed_nodes(store: Store) -> None:
    def opened(rollout: str, owner: str = "infra", name: str = "sysctl") -> RolloutOpened:
        content = {"name": name, "metadata": {"owner": owner}}
        return replace(rollout_opened(rollout), name=name, content=content)

    same = opened("r1"), opened("r2"), opened("r3", "payments"), opened("r4", name="kernel")
    await write(store, *same, opened("r5"), opened("r6"))
    for rollout in ("r1", "r2", "r3", "r4", "r6"):
        await write(store, GateOpened(rollout, GateName.START, "", 2.0), *moves_to_done("n1", rollout))
    await write(store, *moves_to_done("n1", "r5"))  # not approved

    async def found(owner: str = "infra") -> str | None:
        previous = await store.find_previous_approved("r6", owner)
        return None if previous is None else previous.id

    assert await store.find_previous_approved("r6", "infra") == ApprovedRollout(
        "r2", *await store.load_plan("r2")
    )
    assert [await found(owner) for owner in ("payments", "search")] == ["r3", None]
    await write(store, RolloutEnded("r2", 60.0), RolloutDeleted("r2", ALICE, 61.0))
    assert await found() == "r1"


async def test_later_changes_of_a_plan_are_found_by_node(store: Store) -> None:
    later = replace(rollout_opened("r3"), name="plan-r1")
    events = rollout_opened("r1"), rollout_opened("r2"), later
    await write(store, *events, *moves_to_done("n1"), *moves_to_done("n2", "r2"), *moves_to_done("n1", "r3"))
    assert await store.find_later_changes("r1") == {"n1": "r3"}
    assert await store.find_later_changes("r3") == {}


async def test_nodes_to_clean_are_those_whose_last_rollout_ended(store: Store) -> None:
    opened = (rollout_opened("r1"), rollout_opened("r2"))
    await write(store, *opened, *moves_to_done("n1"), *moves_to_done("n2"), RolloutEnded("r1", 100.0))
    assert not await store.list_uncleaned_nodes(0.0, 200.0)  # r2 has the same nodes and is not over
    cancelled = RolloutCancelled("r2", ALICE, "over", 110.0)
    await write(store, *moves_to_done("n2", "r2"), cancelled)
    assert [*await store.list_uncleaned_nodes(0.0, 105.0)] == ["n1"]
    assert [*await store.list_uncleaned_nodes(105.0, 200.0)] == ["n2"]
    assert not await store.list_uncleaned_nodes(0.0, 99.0)
    await write(store, NodeCleaned("n2", (), 0, 120.0), at=120.0)
    assert [*await store.list_uncleaned_nodes(0.0, 200.0)] == ["n1"]


async def test_changes_in_effect_are_the_latest_of_a_plan(store: Store) -> None:
    later = replace(rollout_opened("r3"), name="plan-r1")
    await write(store, rollout_opened("r1"), rollout_opened("r2"), later, *moves_to_done("n1"))
    assert await store.find_changes_in_effect("n1", ["r1", "r2", "r9"]) == {"r1": True, "r2": False}
    await write(store, *moves_to_done("n1", "r3"))
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": False, "r3": True}
    rows = [
        Preparation(rollout, "n1", "stage", 1, state, "c", 90.0, 90.0)
        for rollout, state in (("r1", PreparationState.DONE), ("r3", PreparationState.SKIPPED))
    ]
    other = replace(rows[0], content="of an earlier release")
    await write(store, PreparationRecorded(other), PreparationRecorded(rows[1]))
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": False, "r3": True}
    await write(store, PreparationRecorded(rows[0]))
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": True, "r3": True}
    await write(store, RolloutEnded("r3", 100.0), RolloutDeleted("r3", ALICE, 101.0))
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": True, "r3": False}


async def test_node_found_current_has_what_earlier_rollout_staged(store: Store) -> None:
    later = replace(rollout_opened("r3"), name="plan-r1")
    done = {"rollout": "r3", "outcome": Outcome.ALREADY_CURRENT, "attempt": 0}
    found = phase_moved("n1", Trigger.FOUND_CURRENT, Phase.PENDING, Phase.DONE, **done)
    await write(store, rollout_opened("r1"), later, *moves_to_done("n1"), found)
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": True, "r3": False}
    row = Preparation("r3", "n1", "stage", 1, PreparationState.DONE, "c", 90.0, 90.0)
    await write(store, PreparationRecorded(row))
    assert await store.find_changes_in_effect("n1", ["r1", "r3"]) == {"r1": False, "r3": True}


LATER_MOVES = {
    "left": [
        phase_moved("n1", Trigger.DRIFTED, Phase.DONE, Phase.PENDING),
        phase_moved("n1", Trigger.LEFT, Phase.PENDING, Phase.DONE, outcome=Outcome.LEFT),
    ],
    "failed in its soak": [phase_moved("n1", Trigger.SOAK_CHECK_FAILED, Phase.DONE, Phase.FAILED)],
    "rollback that failed": [
        phase_moved(
            "n1", Trigger.ROLLBACK_ORDERED, Phase.DONE, Phase.ISOLATING, attempt=2, rolling_back=True
        ),
        phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED, attempt=2, rolling_back=True),
    ],
}
"""What happens to a node that has its change, and takes nothing of it off."""


@pytest.mark.parametrize("later", LATER_MOVES)
async def test_node_keeps_change_until_it_is_rolled_back(store: Store, later: str) -> None:
    await write(store, rollout_opened("r1"), *moves_to_done("n1"), *LATER_MOVES[later])
    assert await store.find_changes_in_effect("n1", ["r1"]) == {"r1": True}


async def test_change_counts_whose_transition_was_exported(backend: StoreBackend) -> None:
    store = await backend.open()
    failed = [*moves_to_done("n1"), *LATER_MOVES["failed in its soak"]]
    await write(store, rollout_opened("r1"), *failed, rollout_opened("r2"))
    newest = await store.latest_audit_entry()
    assert newest is not None
    await write(store, rollout_opened("r3"), rollout_opened("r4"))
    await store.advance_audit_base(newest.seq - 1, 9.0)
    while backend.removes_entries and await store.remove_exported_entries(9):
        pass
    assert await store.find_changes_in_effect("n1", ["r1"]) == {"r1": True}
    await store.close()


async def test_node_that_waits_after_drift_keeps_its_change(store: Store) -> None:
    done = {"outcome": Outcome.ALREADY_CURRENT, "attempt": 0}
    found = phase_moved("n1", Trigger.FOUND_CURRENT, Phase.PENDING, Phase.DONE, **done)
    row = Preparation("r1", "n1", "stage", 1, PreparationState.DONE, "c", 90.0, 90.0)
    await write(store, rollout_opened("r1"), PreparationRecorded(row))
    assert await store.find_changes_in_effect("n1", ["r1"]) == {"r1": False}
    drifted = phase_moved("n1", Trigger.DRIFTED, Phase.DONE, Phase.PENDING, attempt=0)
    await write(store, found, DriftRecorded("r1", "n1", 95.0, ("set the limit",)), drifted)
    assert await store.find_changes_in_effect("n1", ["r1"]) == {"r1": True}


async def test_daemon_that_was_replaced_has_no_term(backend: StoreBackend) -> None:
    first = await backend.open()
    await first.require_term()
    second = await backend.open()
    with pytest.raises(LeadershipLost):
        await first.require_term()
    await second.require_term()
    for store in (first, second):
        await store.close()


# -- restarts ---------------------------------------------------------------------------


async def test_a_restart_finds_all_and_goes_on_with_the_chain(backend: StoreBackend) -> None:
    first = await backend.open()
    await write(
        first, rollout_opened(), VoteCast("r1", vote()), HoldTaken(HOLD), NodesDiscovered((node("n1"),))
    )
    await write(first, ADMITTED, StepRecorded(step(StepState.INTENDED, prior=[1]), isolated=True))
    remembered, head = await first.load_snapshot(), await first.latest_audit_entry()
    await first.close()
    with pytest.raises(StoreFailed):
        await write(first, phase_moved("n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING))
    second = await backend.open()
    assert await second.load_snapshot() == replace(remembered, epoch=backend.first_epoch + 1)
    assert head is not None
    (entry,) = await write(second, phase_moved("n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING))
    assert entry.seq == head.seq + 1
    assert entry.hash == hash_entry(head.hash, entry.text)
    await second.close()


@pytest.mark.parametrize("seed", range(5))
async def test_any_legal_history_is_loaded_as_the_core_sees_it(backend: StoreBackend, seed: int) -> None:
    draw = random.Random(seed)
    store = await backend.open()
    event = rollout_opened(nodes=[f"n{number}" for number in range(6)])
    await write(store, event)
    expected = {each.node: each for each in event.targets}
    for at in range(100, 220):
        name = draw.choice(sorted(expected))
        before = expected[name]
        way = draw.choice([way for way in edges() if way.source is before.phase])
        begins = way.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
        attempt = before.attempt + begins
        move = phase_moved(
            name,
            way.trigger,
            way.source,
            way.target,
            attempt,
            at=float(at),
            outcome=draw.choice(sorted(way.outcomes)) if way.outcomes else None,
            isolated=draw.choice((None, True, False)),
            rolling_back=draw.random() < 0.2,
            not_before=draw.random(),
            text=draw.choice(("", "why")),
        )
        if move.failure is not None:
            move = replace(move, failure=replace(move.failure, id=f"{name}#{attempt}.{at}"))
        await write(store, move, at=float(at))
        expected[name] = apply.apply_to_target(before, move)
        if draw.random() < 0.05:
            await store.close()
            store = await backend.open()
    assert list(await store.load_targets("r1")) == list(expected.values())
    await store.close()


async def test_foreign_redaction_key_is_refused(backend: StoreBackend) -> None:
    store = await backend.open()
    for _ in range(2):
        await store.require_redaction_key("one")
    await store.close()
    store = await backend.open()
    with pytest.raises(StoreFailed):
        await store.require_redaction_key("two")
    await store.require_redaction_key("one")
    await store.close()


async def test_nodes_with_steps_of_another_machine_are_told(backend: StoreBackend) -> None:
    store = await backend.open()
    assert await store.take_over_runs("a") == frozenset()
    run = step(StepState.INTENDED, step="maintain", action=StepAction.RUN, handle="r1.n1.1.maintain.1@a")
    await write(store, NodesDiscovered((node("n1"),)), rollout_opened(), *moves_to_done("n1")[:2])
    await write(store, StepRecorded(run, isolated=True))
    assert await store.take_over_runs("a") == frozenset()
    for machine in ("b", "c", "a"):  # also the first one: what b and c began may be under way
        assert await store.take_over_runs(machine) == {"n1"}
    await write(store, StepRecorded(replace(run, state=StepState.OK), isolated=True))
    assert await store.take_over_runs("b") == frozenset()
    await write(store, StepRecorded(replace(run, number=2), isolated=True))
    assert await store.take_over_runs("b") == frozenset()
    await store.close()


async def test_exported_entries_are_removed_and_the_chain_continues(backend: StoreBackend) -> None:
    store = await backend.open()
    await write(store, rollout_opened())
    for number in range(6):
        await write(store, HoldTaken(Hold("n1", "test", f"h{number}", ALICE, "busy", 1.0, None)))
    first, *_, newest = entries = await store.read_audit()
    assert await store.load_audit_base() == AuditBase()
    assert not await store.remove_exported_entries(1)
    for too_new in (newest.seq - 1, newest.seq, newest.seq + 1):
        with pytest.raises(StoreFailed):
            await store.advance_audit_base(too_new, 9.0)
    await store.advance_audit_base(4, 9.0)
    base = AuditBase(4, entries[3].hash, first.hash, 9.0)
    assert await store.load_audit_base() == base
    assert (await store.verify_audit()).ok, "what is exported and still there is not read"
    if not backend.removes_entries:
        with pytest.raises(StoreFailed, match="lacks rights"):
            await store.remove_exported_entries(2)
        assert await store.read_audit() == entries
        await store.close()
        return
    while await store.remove_exported_entries(2):
        pass
    assert await store.read_audit() == entries[4:]
    assert (await store.verify_audit(newest.hash)).chain.entries == newest.seq
    await write(store, HoldReleased("n1", "test", "h1", ALICE, 10.0))
    await store.close()
    store = await backend.open()
    assert (await store.load_audit_base(), (await store.verify_audit()).ok) == (base, True)
    await store.advance_audit_base(6, 11.0)
    assert await store.load_audit_base() == AuditBase(6, entries[5].hash, first.hash, 11.0)
    while await store.remove_exported_entries(1):
        pass
    assert [entry.seq for entry in await store.read_audit(limit=1)] == [7]
    assert (await store.verify_audit()).ok
    await store.close()
