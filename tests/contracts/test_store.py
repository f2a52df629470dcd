"""The contract of the Store port: the twin and SQLite pass it alike.

Longer than 400 lines: one contract, one file.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import changes
from machines.events import (
    CallRefused,
    DaemonStarted,
    Event,
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    LookedCurrent,
    NodeOrdered,
    NodesGone,
    NodesSeen,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutPaused,
    RolloutResumed,
    StepAction,
    StepRecorded,
    StepState,
    TargetChanged,
    TargetsJoined,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.plan import Digest, GateName
from machines.rollout import Hold, Opened, Order, Pause, Target
from machines.states import TABLE, Edge, Outcome, Phase, Trigger
from machines.windows import Freeze
from rolloutd.chain import GENESIS, entry_hash
from rolloutd.errors import Conflict, NotFound, StoreFailed
from rolloutd.ports import Store
from tests.contracts.store_worlds import (
    ALICE,
    BOB,
    DIGEST,
    Inline,
    InMemory,
    OnDisk,
    World,
    moved,
    node,
    opened,
    plan_of,
    step,
    target,
    vote,
    whole_way,
    write,
)

ADMITTED = moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING)
HOLD = Hold("n1", "person", "alice", ALICE, "new disk", 7.0, until=99.0)
FREEZE = Freeze("f1", "team/payments", "sale", "alice", 8.0)


@pytest.fixture(params=[InMemory, OnDisk, Inline])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    made: World = request.param(tmp_path / "state")
    return made


@pytest.fixture
async def store(world: World) -> AsyncIterator[Store]:
    opened_store = await world.open()
    yield opened_store
    await opened_store.close()


async def the_target(store: Store, name: str = "n1") -> Target:
    return next(found for found in await store.targets("r1") if found.node == name)


# -- what was written is what is loaded -------------------------------------------


async def test_an_empty_store_remembers_nothing(store: Store) -> None:
    snapshot = await store.load()
    assert snapshot.rollouts == snapshot.targets == snapshot.nodes == ()
    assert snapshot.epoch == 1
    assert await store.head() is None
    assert await store.audit() == ()


async def test_a_submit_is_loaded_as_it_was_made(store: Store) -> None:
    event = opened()
    await write(store, event, actor=ALICE)
    snapshot = await store.load()
    assert snapshot.rollouts == (changes.opened(event, plan_of(event.content)),)
    assert snapshot.targets == event.targets
    assert await store.content("r1") == (event.content, event.source)
    assert await store.rollout("r1") == snapshot.rollouts[0]


@pytest.mark.parametrize("way", TABLE, ids=lambda way: f"{way.trigger}-{way.source}")
async def test_every_edge_of_the_table_is_kept(store: Store, way: Edge) -> None:
    start = target(
        "n1",
        phase=way.source,
        outcome=Outcome.CHANGED if way.source is Phase.DONE else None,
        attempt=2,
        put_backs=3,
        since=3.0,
        isolated=True,
        maybe_current=True,
    )
    await write(store, replace(opened(), targets=(start,)))
    event = moved(
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
    assert await the_target(store) == changes.target_after(start, event)
    assert (await store.rollout("r1")).failures == ((event.failure,) if event.failure else ())


async def test_a_whole_way_and_back_again(store: Store) -> None:
    expected = opened().targets[0]
    await write(store, opened())
    t, p = Trigger, Phase
    way = (
        moved("n1", t.ADMITTED, p.PENDING, p.ISOLATING, 1, at=11.0),
        moved("n1", t.PUT_BACK, p.ISOLATING, p.PENDING, 1, at=12.0, not_before=50.0, text="busy"),
        moved("n1", t.ADMITTED, p.PENDING, p.ISOLATING, 2, at=13.0),
        moved("n1", t.FAILED, p.ISOLATING, p.FAILED, 2, at=14.0),
        moved("n1", t.ROLLBACK_ORDERED, p.FAILED, p.ISOLATING, 3, at=15.0, rolling_back=True),
        moved("n1", t.FAILED, p.ISOLATING, p.FAILED, 3, at=16.0),
        moved("n1", t.RETRIED, p.FAILED, p.PENDING, 3, at=17.0),
    )
    for event in way:
        await write(store, event)
        expected = changes.target_after(expected, event)
        assert await the_target(store) == expected
    assert [failure.id for failure in (await store.load()).rollouts[0].failures] == ["n1#2", "n1#3"]


async def test_orders_looks_and_amendments_are_kept(store: Store) -> None:
    first, joiner = target("n1", maybe_current=True), target("n3", 9, joined=True, needs_vote_of="search")
    await write(store, replace(opened(), targets=(first,)))
    events: tuple[Any, ...] = (
        LookedCurrent("r1", "n1", 30.0, "needs it"),
        NodeOrdered("r1", "n1", Order.RETURN, BOB, "need it back", 31.0),
        TargetChanged("r1", "n1", "search", ("team/search", "rack/none"), None, 32.0),
        LookedCurrent("r1", "n1", 33.0),
    )
    expected = first
    for event in events:
        await write(store, event)
        expected = changes.target_after(expected, event)
        assert await the_target(store) == expected
    over = NodeOrdered("r1", "n1", None, BOB, "", 34.0)
    await write(store, TargetsJoined("r1", (joiner,), 35.0), over)
    assert await store.targets("r1") == (changes.target_after(expected, over), joiner)
    assert (await store.rollout("r1")).amendments == 2


async def test_votes_gates_and_pauses_are_kept(store: Store) -> None:
    wide = vote("v2", wave="fleet", shown=("n1#1",), nodes=("n2",), more=3, until=200.0)
    await write(store, opened())
    await write(store, VoteCast("r1", vote()), VoteCast("r1", wide))
    await write(store, VoteWithdrawn("r1", "v1", ALICE, "changed my mind", 40.0))
    await write(
        store, GateOpened("r1", GateName.START, "", 41.0), GateOpened("r1", GateName.CONTINUE, "w", 42.0)
    )
    await write(store, RolloutPaused("r1", BOB, "wait", 43.0))
    found = await store.rollout("r1")
    assert found.votes == (replace(vote(), withdrawn_at=40.0), wide)
    assert found.opened == (Opened(GateName.START, "", 41.0), Opened(GateName.CONTINUE, "w", 42.0))
    assert found.paused == Pause(BOB, "wait", 43.0)
    await write(store, RolloutResumed("r1", BOB, "go", 44.0))
    assert (await store.rollout("r1")).paused is None


async def test_holds_and_freezes_are_kept(store: Store) -> None:
    await write(store, HoldTaken(HOLD), Frozen(FREEZE))
    longer = replace(HOLD, until=None, reason="no disk yet")
    await write(store, HoldTaken(longer), HoldTaken(replace(HOLD, id="other")))
    snapshot = await store.load()
    assert set(snapshot.holds) == {longer, replace(HOLD, id="other")}
    assert snapshot.freezes == (FREEZE,)
    await write(store, HoldReleased("n1", "person", "alice", BOB, 9.0), Unfrozen("f1", ALICE, 9.0))
    snapshot = await store.load()
    assert snapshot.holds == (replace(HOLD, id="other"),)
    assert snapshot.freezes == ()


async def test_nodes_come_change_go_and_stay_reachable(store: Store) -> None:
    await write(store, NodesSeen((node("n1", team="a"), node("n2")), {"n1": {"ansible_host": "::1"}}))
    await write(store, NodesSeen((node("n1", team="b"),)))
    assert (await store.load()).nodes == (node("n1", team="b"), node("n2"))
    await write(store, NodesGone(("n1", "never-seen")))
    assert (await store.load()).nodes == (node("n2"),)
    assert await store.connections() == {"n1": {"ansible_host": "::1"}, "n2": {}}
    await write(store, NodesSeen((node("n1"),), {"n1": {"ansible_port": 22}}))
    assert (await store.load()).nodes == (node("n1"), node("n2"))
    assert (await store.connections())["n1"] == {"ansible_port": 22}


# -- steps --------------------------------------------------------------------------


async def test_a_step_is_intended_then_ended_and_may_be_told_twice(store: Store) -> None:
    await write(store, opened(), ADMITTED)
    prior = {"cordoned": False, "taints": ["a", None]}
    intent = step(StepState.INTENDED, prior=prior, handle="run-1", stage="configure", visible_to="payments")
    result = replace(intent, state=StepState.OK, at=25.0, text="done", output="all of it")
    await write(store, StepRecorded(intent, isolated=True))
    await write(store, StepRecorded(intent))
    assert await store.steps("r1", "n1") == (intent,)
    assert (await the_target(store)).isolated
    await write(store, StepRecorded(result))
    await write(store, StepRecorded(replace(result, at=26.0)))
    assert await store.steps("r1", "n1") == (replace(result, at=26.0),)
    assert (await the_target(store)).isolated
    await write(store, StepRecorded(step(StepState.OK, number=2), isolated=False))
    assert not (await the_target(store)).isolated


async def test_another_result_for_an_ended_step_is_a_conflict(store: Store) -> None:
    await write(store, opened(), ADMITTED)
    done = step(StepState.OK)
    await write(store, StepRecorded(done))
    for other in (replace(done, state=StepState.FAILED), step(StepState.INTENDED), replace(done, text="no")):
        with pytest.raises(Conflict):
            await write(store, StepRecorded(other))
    assert await store.steps("r1", "n1") == (done,)


async def test_what_an_isolator_found_is_never_forgotten(store: Store) -> None:
    await write(store, opened(), ADMITTED)
    await write(store, StepRecorded(step(StepState.INTENDED, prior={"was": "up"}, began_at=1.0)))
    await write(store, StepRecorded(step(StepState.UNKNOWN, began_at=2.0, text="no answer")))
    (kept,) = await store.steps("r1", "n1")
    assert kept.prior == {"was": "up"}
    assert kept.began_at == 1.0
    assert kept.text == "no answer"


async def test_steps_come_oldest_first_and_by_attempt(store: Store) -> None:
    await write(store, opened(), ADMITTED)
    records = [step(StepState.OK, number=n, attempt=a) for a, n in ((1, 1), (1, 2), (2, 1))]
    await write(store, *map(StepRecorded, records))
    await write(store, StepRecorded(step(StepState.OK, node="n2")))
    assert list(await store.steps("r1", "n1")) == records
    assert list(await store.steps("r1", "n1", 2)) == records[2:]


@pytest.mark.parametrize("state", [StepState.INTENDED, StepState.FAILED, StepState.UNKNOWN])
async def test_a_node_is_unclean_from_a_run_without_a_good_end_to_the_next_clear(
    store: Store, state: StepState
) -> None:
    def ran(number: int, state: StepState) -> StepRecorded:
        return StepRecorded(step(state, number=number, step="run.configure", action=StepAction.RUN))

    def cleared(number: int, state: StepState) -> StepRecorded:
        return StepRecorded(step(state, number=number, step="clear", action=StepAction.CLEAR))

    await write(store, opened(), ADMITTED)
    assert not await store.unclean("n1")
    for number, events, unclean in (
        (1, (ran, StepState.OK), False),
        (2, (ran, state), True),
        (2, (cleared, StepState.FAILED), True),
        (3, (cleared, StepState.OK), False),
        (3, (ran, state), True),
    ):
        make, ended = events
        await write(store, make(number, ended))
        assert await store.unclean("n1") is unclean
        assert not await store.unclean("n2")


# -- conflicts ------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[Event, ...], Event]] = {
    "moved from another phase": ((ADMITTED,), ADMITTED),
    "moved from another attempt": ((), replace(ADMITTED, attempt=3)),
    "moved, no such node": ((), replace(ADMITTED, node="n9")),
    "moved, no such rollout": ((), replace(ADMITTED, rollout="r9")),
    "opened twice": ((), opened()),
    "joined twice": ((), TargetsJoined("r1", (target("n1"),), 1.0)),
    "joined to nothing": ((), TargetsJoined("r9", (target("n5", rollout="r9"),), 1.0)),
    "changed, no such node": ((), TargetChanged("r1", "n9", None, (), None, 1.0)),
    "looked at, no such node": ((), LookedCurrent("r1", "n9", 1.0)),
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
    "froze twice": ((Frozen(FREEZE),), Frozen(FREEZE)),
    "lifted nothing": ((), Unfrozen("f1", ALICE, 1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_row_that_is_not_as_the_event_says_is_a_conflict(store: Store, case: str) -> None:
    before, event = REFUSED[case]
    await write(store, opened())
    if before:
        await write(store, *before)
    remembered, head = await store.load(), await store.head()
    with pytest.raises(Conflict) as refusal:
        await write(store, HoldTaken(replace(HOLD, id="with it")), event)
    assert str(refusal.value)
    assert await store.load() == remembered
    assert await store.head() == head


async def test_a_move_that_is_not_in_the_table_is_never_written(store: Store) -> None:
    await write(store, opened())
    for wrong in (
        moved("n1", Trigger.ISOLATED, Phase.PENDING, Phase.MAINTAINING),
        moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.VERIFYING),
        moved("n1", Trigger.SKIPPED, Phase.PENDING, Phase.DONE, outcome=Outcome.CHANGED),
    ):
        with pytest.raises(StoreFailed, match="nothing was written"):
            await write(store, wrong)
    assert await the_target(store) == opened().targets[0]


# -- the audit ------------------------------------------------------------------------


async def test_each_entry_is_chained_to_the_one_before(store: Store, world: World) -> None:
    written = [*await write(store, opened(), actor=ALICE), *await write(store, ADMITTED, HoldTaken(HOLD))]
    entries = list(await store.audit())
    assert entries == written
    assert await store.head() == entries[-1]
    previous = GENESIS
    for number, entry in enumerate(entries, 1):
        assert entry.seq == number == json.loads(entry.text)["seq"]
        assert entry.hash == entry_hash(previous, entry.text)
        previous = entry.hash
    await asyncio.sleep(0)  # the loop tells in its next round
    assert world.told == [1, 2, 3]


async def test_an_entry_says_who_what_when_why(store: Store) -> None:
    await write(store, opened(), actor=ALICE, at=50.0)
    (entry,) = await write(store, ADMITTED, at=51.0)
    told = json.loads(entry.text)
    assert told["actor"] == {"kind": "daemon", "name": "rolloutd", "uid": None}
    assert (told["at"], told["cause"], told["event"]) == (51.0, "test", "PhaseMoved")
    assert (told["rollout"], told["node"], told["digest"]) == ("r1", "n1", "whole-1")
    assert told["fields"]["target"] == "isolating"
    assert told["fields"]["attempt"] == 1


async def test_the_audit_is_read_in_parts_and_by_what_it_is_about(store: Store) -> None:
    refused = CallRefused(BOB, "pause", "not a member", 3.0)
    await write(store, opened(), ADMITTED, HoldTaken(HOLD), refused, DaemonStarted(1, "0", "d", 4.0))
    assert [entry.seq for entry in await store.audit(after=1, limit=2)] == [2, 3]
    assert [entry.seq for entry in await store.audit(rollout="r1")] == [1, 2]
    assert [entry.seq for entry in await store.audit(node="n1")] == [2, 3]
    assert [entry.seq for entry in await store.audit(event="CallRefused")] == [4]
    assert [entry.seq for entry in await store.audit(rollout="r1", event="PhaseMoved")] == [2]
    assert await store.audit(after=5) == ()


async def test_no_secret_reaches_the_audit(store: Store) -> None:
    await write(store, opened(), ADMITTED)
    await write(store, NodesSeen((node("n1"),), {"n1": {"ansible_password": "hunter2"}}))
    record = step(StepState.OK, prior={"token": "hunter2"}, output="password: hunter2", visible_to="payments")
    await write(store, StepRecorded(record))
    assert not any("hunter2" in entry.text for entry in await store.audit())


async def test_many_nodes_are_told_in_entries_of_readable_size(store: Store) -> None:
    nodes = tuple(node(f"n{number}") for number in range(1200))
    entries = await write(store, NodesSeen(nodes))
    told = [each["name"] for entry in entries for each in json.loads(entry.text)["fields"]["nodes"]]
    assert told == [each.name for each in nodes]
    assert len(entries) == 3


# -- closed rollouts, and what outlives them -------------------------------------------


async def test_an_ended_rollout_leaves_the_snapshot_and_stays_in_the_lists(store: Store) -> None:
    await write(store, opened(nodes=["n1"]), *whole_way("n1"), RolloutEnded("r1", 60.0))
    assert (await store.load()).rollouts == ()
    (header,) = await store.closed_rollouts()
    assert (header.id, header.name, header.ended_at) == ("r1", "plan-r1", 60.0)
    assert header.tally == {"changed": 1}
    assert (await store.rollout("r1")).ended_at == 60.0
    assert (await the_target(store)).outcome is Outcome.CHANGED
    await write(store, RolloutDeleted("r1", ALICE, 61.0))
    assert await store.closed_rollouts() == ()
    assert await store.done_before("change-1") == {"n1"}
    assert len(await store.audit(rollout="r1")) == 7
    for gone in (store.rollout, store.content):
        with pytest.raises(NotFound):
            await gone("r1")


async def test_a_cancelled_rollout_stays_until_its_nodes_are_home(store: Store) -> None:
    failed = moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, opened(), ADMITTED, failed, RolloutCancelled("r1", ALICE, "wrong", 50.0))
    (live,) = (await store.load()).rollouts
    assert live.cancelled == Pause(ALICE, "wrong", 50.0)
    assert await store.closed_rollouts() == ()
    await write(store, moved("n1", Trigger.SKIPPED, Phase.FAILED, Phase.DONE, outcome=Outcome.SKIPPED))
    assert (await store.load()).rollouts == ()
    (header,) = await store.closed_rollouts()
    assert header.cancelled == Pause(ALICE, "wrong", 50.0)
    assert header.tally == {"skipped": 1, "pending": 1}


async def test_a_closed_rollout_stays_while_a_node_that_it_left_is_held_for_it(store: Store) -> None:
    """Its isolation is undone, but the node did not pass: only its return lifts the hold."""
    left = replace(HOLD, source="left", id="r1/n1", until=None)
    strange = replace(left, id="r2/n1")
    await write(store, opened(nodes=["n1"]), *whole_way("n1"), RolloutEnded("r1", 60.0), HoldTaken(strange))
    assert (await store.load()).rollouts == ()
    await write(store, HoldTaken(left))
    assert [rollout.id for rollout in (await store.load()).rollouts] == ["r1"]
    assert await store.closed_rollouts() == ()
    await write(store, HoldReleased("n1", "left", "r1/n1", ALICE, 61.0))
    assert (await store.load()).rollouts == ()


async def test_every_rollout_is_remembered_with_its_end_once_all_of_it_is_home(store: Store) -> None:
    failed = moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED)
    await write(store, opened(), ADMITTED, failed, RolloutCancelled("r1", ALICE, "wrong", 50.0))
    await write(store, opened("r2"), RolloutEnded("r2", 60.0), opened("r3"))
    assert [(each.id, each.ended_at, each.deleted) for each in await store.remembered()] == [
        ("r1", None, False),
        ("r2", 60.0, False),
        ("r3", None, False),
    ]
    skipped = moved("n1", Trigger.SKIPPED, Phase.FAILED, Phase.DONE, outcome=Outcome.SKIPPED)
    await write(store, skipped, RolloutDeleted("r2", ALICE, 61.0))
    first, second, _ = await store.remembered()
    assert (first.ended_at, second.deleted) == (50.0, True)
    assert first.source == (await store.content("r1"))[1]


async def test_lists_are_latest_first_and_limited(store: Store) -> None:
    for number in range(3):
        await write(store, opened(f"r{number}"), RolloutEnded(f"r{number}", 9.0))
    assert [header.id for header in await store.closed_rollouts(2)] == ["r2", "r1"]


async def test_an_identical_submit_is_found(store: Store) -> None:
    other = Digest("change-1", "scope-2", "policy-2", "whole-2")
    await write(store, opened("r1"), opened("r2"), opened("r3", digest=other))
    key = (DIGEST.change, "selector-1", DIGEST.policy)
    assert await store.find_identical(*key) == "r2"
    await write(store, RolloutCancelled("r2", ALICE, "", 3.0), RolloutEnded("r1", 3.0))
    assert await store.find_identical(*key) == "r1"
    assert await store.find_identical("change-1", "selector-2", "policy-1") is None


async def test_the_nodes_of_an_earlier_same_change_are_known(store: Store) -> None:
    current = moved(
        "n1",
        Trigger.FOUND_CURRENT,
        Phase.PENDING,
        Phase.DONE,
        0,
        outcome=Outcome.ALREADY_CURRENT,
        rollout="r2",
    )
    skipped = moved(
        "n2", Trigger.SKIPPED, Phase.PENDING, Phase.DONE, 0, outcome=Outcome.SKIPPED, rollout="r2"
    )
    await write(store, opened("r1", ["n3", "n4"]), opened("r2"), *whole_way("n3"), current, skipped)
    assert await store.done_before("change-1") == {"n1", "n3"}
    assert await store.done_before("change-2") == frozenset()


# -- restarts ---------------------------------------------------------------------------


async def test_a_restart_finds_all_and_goes_on_with_the_chain(world: World) -> None:
    first = await world.open()
    await write(first, opened(), VoteCast("r1", vote()), HoldTaken(HOLD), NodesSeen((node("n1"),)))
    await write(first, ADMITTED, StepRecorded(step(StepState.INTENDED, prior=[1]), isolated=True))
    remembered, head = await first.load(), await first.head()
    await first.close()
    with pytest.raises(StoreFailed):
        await write(first, moved("n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING))
    second = await world.open()
    assert await second.load() == replace(remembered, epoch=2)
    assert head is not None
    (entry,) = await write(second, moved("n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING))
    assert entry.seq == head.seq + 1
    assert entry.hash == entry_hash(head.hash, entry.text)
    await second.close()


@pytest.mark.parametrize("seed", range(5))
async def test_any_legal_history_is_loaded_as_the_core_sees_it(world: World, seed: int) -> None:
    draw = random.Random(seed)
    store = await world.open()
    event = opened(nodes=[f"n{number}" for number in range(6)])
    await write(store, event)
    expected = {each.node: each for each in event.targets}
    for at in range(100, 220):
        name = draw.choice(sorted(expected))
        before = expected[name]
        way = draw.choice([way for way in TABLE if way.source is before.phase])
        begins = way.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
        attempt = before.attempt + begins
        move = moved(
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
        expected[name] = changes.target_after(before, move)
        if draw.random() < 0.05:
            await store.close()
            store = await world.open()
    assert list(await store.targets("r1")) == list(expected.values())
    await store.close()
