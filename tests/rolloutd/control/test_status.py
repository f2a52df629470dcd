"""The status: what is kept of the last one, and what reaches a stream, after random events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from machines.facts.projection import Projection
from machines.model.events import NodesDiscovered, RolloutCancelled, TargetChanged
from machines.model.limits import RunnerRule
from machines.model.plan import GateName, MaintainStage, VoteRequirement
from machines.model.rows import AuditMismatch, MismatchKind
from machines.model.selector import parse_selector
from machines.states import Outcome, Trigger
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.rollouts import serializers
from rolloutd.control.rollouts.coverage import Coverage
from rolloutd.control.status_changes import difference, merge
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.state import State, StepProgress
from rolloutd.ports import RunnerStatus, RunState
from rolloutd.settings import Settings
from tests.machines.builders import (
    ALICE,
    T0,
    admit,
    fail,
    finish,
    index_of,
    nodes_of,
    submit,
    transition,
    vote,
)
from tests.machines.fleet_simulator import FleetSimulator
from tests.machines.random_fleets import TEAMS
from tests.machines.test_properties import EXAMPLES, SEEDS, rebuilt


class FixedClock:
    """ports.Clock at one instant."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now


def state_of(index: Projection, now: float) -> State:
    unused: Any = None
    return State(index, unused, FixedClock(now), Settings(), ChangeNotifier())  # type: ignore[arg-type]


def status_of(state: State, kept: KeptAnswers) -> Mapping[str, Any]:
    """Return what `GET /v1/status` has of the rollouts."""
    shown = []
    for each in state.index.rollouts.values():
        pinned = replace(each, source={"kind": "git", "pin": "0", "url": "u"})  # the core's tests have none
        covered = Coverage(each.plan, (0, 0), [], [])
        answer = serializers.rollout(state, kept, ResolvedRollout(state.index, pinned, live=True), covered)
        # Nothing of the reason is kept; of several nodes, an index that is built again may name another one.
        shown.append({**answer, "reason": None})
    return {"rollouts": shown}


def change_progress(world: FleetSimulator, state: State) -> None:
    """Let a node in flight begin a step, or go on with it."""
    for target in world.index.needing_driver():
        if world.rng.random() < 0.3:
            live = state.step_progress.setdefault((target.rollout, target.node), StepProgress())
            live.step, live.run = world.rng.choice("abc"), RunState(None, percent=world.rng.uniform(0, 100))


def change_what_gates_count(world: FleetSimulator) -> None:
    """Let votes expire, the audit account for a vote or not, or the settings have other teams."""
    votes = [(each.id, vote.id) for each in world.index.rollouts.values() for vote in each.votes]
    match world.rng.randrange(12):
        case 0:
            world.pass_time(600.0)
        case 1 if votes:
            rollout, vote = world.rng.choice(votes)
            doubt = AuditMismatch(f"vote/{vote}", MismatchKind.ALTERED, f"rollout/{rollout}")
            world.index.record_mismatches(world.rng.choice(((), (doubt,))))
        case 2:
            teams = frozenset(world.rng.sample(TEAMS, 2))
            world.index.update_limits(replace(world.index.limits, teams=teams))
        case 3:
            world.refresh_inventory()


@settings(EXAMPLES, max_examples=8)
@given(SEEDS)
def test_streamed_status_equals_one_made_from_nothing(seed: int) -> None:
    world = FleetSimulator.from_seed(seed)
    state, kept = state_of(world.index, world.now), KeptAnswers()
    last: Mapping[str, Any] = {}
    shown: Mapping[str, Any] = {}
    for _ in range(40):
        world.step()
        change_progress(world, state)
        change_what_gates_count(world)
        # A status of each instant: what changes between two of them must not hide behind the first.
        for decides in (False, True):
            if decides:
                world.decide()
            state.index, state.clock = world.index, FixedClock(world.now)  # type: ignore[assignment]
            state.index.advance(world.now)
            status = status_of(state, kept)
            shown = merge(shown, difference(last, status))
            last = status
            fresh = state_of(rebuilt(world.index), world.now)
            fresh.index.record_mismatches(world.index.mismatches)
            fresh.step_progress = state.step_progress
            assert difference(shown, status_of(fresh, KeptAnswers())) == {}


def test_unchanged_rows_are_kept() -> None:
    index = index_of(nodes_of({"a": ("n10", "n1"), "b": ("n2",), "c": ("n3",)}))
    submit(index)
    state, kept = state_of(index, T0), KeptAnswers()
    for node in ("n10", "n2"):
        admit(index, node)
    (before,) = status_of(state, kept)["rollouts"]
    finish(index, "n3")
    (after,) = status_of(state, kept)["rollouts"]
    assert [each["node"] for each in after["in_flight"]] == ["n2", "n10"]
    figures = [(each["pool"], each["total"], each["in_flight"], each["down"]) for each in after["pools"]]
    assert figures == [("team/a", 2, 1, 1), ("team/b", 1, 1, 1), ("team/c", 1, 0, 0)]
    for name in ("in_flight", "pools", "gates"):
        same = [new is old for old, new in zip(before[name], after[name], strict=True)]
        assert same == [each["pool"] != "team/c" if name == "pools" else True for each in after[name]]


def test_row_in_flight_follows_runner_of_its_node() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    plan = submit(index)
    admit(index, "n1")
    state, kept = state_of(index, T0), KeptAnswers()
    state.step_progress["R", "n1"] = StepProgress(step="run.configure")

    def runner() -> str | None:
        runner: str | None = status_of(state, kept)["rollouts"][0]["in_flight"][0]["runner"]
        return runner

    assert runner() is None
    state.runners = {"awx": RunnerStatus(), "local": RunnerStatus()}
    rules = (RunnerRule("awx", parse_selector("team=a")), RunnerRule("local"))
    index.update_limits(replace(index.limits, runners=rules))
    assert runner() == "awx"
    index.apply(NodesDiscovered((replace(index.nodes["n1"], labels={"team": "b"}),)))
    assert runner() == "local"
    index.update_limits(replace(index.limits, runners=(RunnerRule("awx"), RunnerRule("local"))))
    assert runner() == "awx"
    state.runners = {"awx": RunnerStatus()}
    assert runner() is None
    noted = replace(plan, stages=(MaintainStage("configure", "", kind="note"),))
    index.update_limits(index.limits, {"R": noted})
    assert runner() == "note"


def test_gates_follow_teams_and_expired_votes() -> None:
    index = index_of(nodes_of({"a": ("n1",), "b": ("n2",)}))
    need = VoteRequirement(owner=2, each_team=1)
    submit(index, opened=False, gates={GateName.START: need}, vote_ttl_s=500.0)
    vote(index, GateName.START)
    state, kept = state_of(index, T0), KeptAnswers()

    def start_gate() -> tuple[list[str], list[bool]]:
        gate = status_of(state, kept)["rollouts"][0]["gates"][0]
        return [each["team"] for each in gate["needs"]["teams"]], [each["counts"] for each in gate["votes"]]

    assert start_gate() == (["a", "b"], [True])
    index.apply(TargetChanged("R", "n2", "c", ("team/c",), None, T0))
    assert start_gate() == (["a", "c"], [True])
    transition(index, "n2", Trigger.LEFT, Outcome.LEFT)
    assert start_gate() == (["a"], [True])
    state.clock = FixedClock(T0 + 500.0)  # type: ignore[assignment]
    assert start_gate() == (["a"], [False])


def test_ended_rollout_names_nodes_that_hold_slots() -> None:
    names = [f"n{number}" for number in range(1, 11)]
    index = index_of(nodes_of({"search": names}))
    submit(index)
    for name in ("n10", *names[:7]):
        fail(index, name)
    transition(index, "n1", Trigger.SKIPPED, Outcome.SKIPPED, isolated=False)
    transition(index, "n2", Trigger.SKIPPED, Outcome.SKIPPED)  # a person left it isolated
    admit(index, "n9")  # it goes to its end
    assert serializers.kept_slots(index) == []
    index.apply(RolloutCancelled("R", ALICE, "old", T0))
    nodes = ["n2", "n3", "n4", "n5", "n6"]
    assert serializers.kept_slots(index) == [{"rollout": "R", "nodes": nodes, "total": 7}]
