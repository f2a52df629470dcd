"""Gates: required votes, and what a vote covers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, CheckRounds, NextRound, OpenGate
from machines.model.events import GateOpened, RolloutCancelled, RolloutEnded, VoteWithdrawn
from machines.model.plan import GateName, VoteRequirement
from machines.model.rollout import Actor, ActorKind, Failure
from machines.rules.gates import gate_view, voting_blocker
from machines.scheduler.decide import decide
from machines.states import Outcome, Trigger
from rolloutd.texts.reason_text import describe, describe_missing_votes, lifted_by
from tests.machines.builders import (
    ALICE,
    BOB,
    CANARY_THEN_FLEET,
    CAROL,
    T0,
    fail,
    finish,
    index_of,
    nodes_of,
    reason_of,
    submit,
    transition,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")})


def started(need: VoteRequirement, **changed: object) -> Projection:
    index = index_of(NODES)
    submit(index, opened=False, gates={GateName.START: need}, **changed)
    return index


def gate_state(index: Projection, gate: GateName = GateName.START, wave: str = "", now: float = T0) -> str:
    return gate_view(index, index.rollout("R"), gate, wave, now).state


def can_open(index: Projection, now: float = T0) -> list[GateName]:
    return [each.gate for each in decide(index, now).of(OpenGate)]


def test_a_gate_without_needs_opens_by_itself() -> None:
    assert can_open(started(VoteRequirement())) == [GateName.START]


def test_unmentioned_gate_requires_owner() -> None:
    index = index_of(NODES)
    submit(index, opened=False, gates={})
    assert can_open(index) == []
    vote(index, GateName.START)
    assert can_open(index) == [GateName.START]


def test_nothing_starts_before_the_gate_is_opened_and_recorded() -> None:
    index = started(VoteRequirement(owner=1))
    vote(index, GateName.START)
    assert decide(index, T0).of(Admit) == ()
    assert reason_of(index, "R", "n1", T0).code == "gate-start"
    index.apply(GateOpened("R", GateName.START, "", T0))
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n1", "n3"]


def test_no_gate_of_closed_rollout_waits() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index, waves=CANARY_THEN_FLEET, gates={GateName.CONTINUE: VoteRequirement(owner=1)})
    finish(index, "n1")
    assert gate_state(index, GateName.CONTINUE, "canary") == "waiting"
    index.apply(RolloutEnded("R", T0))
    assert gate_state(index, GateName.CONTINUE, "canary") == "not-asked"
    failed = index_of(NODES)
    submit(failed)
    fail(failed, "n1")
    assert gate_state(failed, GateName.PROCEED) == "waiting"
    failed.apply(RolloutCancelled("R", ALICE, "because", T0))
    assert gate_state(failed, GateName.PROCEED) == "not-asked"


def test_owners_are_counted_as_different_people() -> None:
    index = started(VoteRequirement(owner=2))
    vote(index, GateName.START, ALICE)
    vote(index, GateName.START, replace(ALICE, name="alice-again"))
    assert gate_state(index) == "waiting"
    assert "1 of 2 votes of the owner, team infra, is missing" in describe_missing_votes(
        gate_view(index, index.rollout("R"), GateName.START, "", T0).missing
    )
    vote(index, GateName.START, BOB)
    assert gate_state(index) == "open"


def test_who_lacks_the_same_is_named_together() -> None:
    index = started(VoteRequirement(owner=1, each_team=1))
    rollout = index.rollout("R")
    missing = describe_missing_votes(gate_view(index, rollout, GateName.START, "", T0).missing)
    assert missing == "the vote of the owner, team infra, is missing; the votes of teams a and b are missing"
    vote(index, GateName.START, BOB, teams=("a",))
    missing = describe_missing_votes(gate_view(index, index.rollout("R"), GateName.START, "", T0).missing)
    assert missing.endswith("; the vote of team b is missing")
    of_two = started(VoteRequirement(owner=2, each_team=2))
    missing = describe_missing_votes(gate_view(of_two, of_two.rollout("R"), GateName.START, "", T0).missing)
    assert missing.startswith("2 of 2 votes of the owner, team infra, are missing; 2 of 2 votes of each of")


def test_one_person_fills_several_needs_once_each() -> None:
    index = started(VoteRequirement(owner=1, each_team=1))
    vote(index, GateName.START, BOB, teams=("infra", "a"))
    assert gate_state(index) == "waiting"
    vote(index, GateName.START, CAROL, teams=("b",))
    assert gate_state(index) == "open"


def test_four_eyes_excludes_submitter_by_uid() -> None:
    index = started(VoteRequirement(owner=1, four_eyes=True))
    vote(index, GateName.START, Actor(ActorKind.PERSON, "renamed", ALICE.uid))
    assert gate_state(index) == "waiting"
    missing = describe_missing_votes(gate_view(index, index.rollout("R"), GateName.START, "", T0).missing)
    assert missing.endswith(f"is missing (four eyes: the vote of {ALICE.name} does not count)")
    vote(index, GateName.START, BOB)
    assert gate_state(index) == "open"


def test_a_vote_for_another_digest_never_counts() -> None:
    index = started(VoteRequirement(owner=1))
    vote(index, GateName.START, digest="somebody-elses")
    assert gate_state(index) == "waiting"
    opened = GateOpened("R", GateName.START, "", T0)
    assert "cannot open" in (violation(index, opened, T0) or "")


def test_votes_expire_only_before_their_gate_opens() -> None:
    index = started(VoteRequirement(owner=1), vote_ttl_s=60.0)
    vote(index, GateName.START)
    assert gate_state(index, now=T0 + 59.0) == "open"
    assert gate_state(index, now=T0 + 60.0) == "waiting"
    index.apply(GateOpened("R", GateName.START, "", T0 + 59.0))
    assert gate_state(index, now=T0 + 3600.0) == "open"


def test_a_no_rejects_until_it_is_withdrawn() -> None:
    index = started(VoteRequirement(owner=1))
    vote(index, GateName.START, ALICE)
    index.apply(GateOpened("R", GateName.START, "", T0))
    no = vote(index, GateName.CONTINUE, BOB, yes=False, wave="canary")
    told = reason_of(index, "R", "n1", T0)
    assert (told.code, describe(told)) == ("rejected", f"bob said no at continue after canary: {no.reason}")
    assert lifted_by(told) == "bob: rolloutctl withdraw R continue --wave canary --reason ..."
    assert decide(index, T0).of(Admit) == ()
    index.apply(VoteWithdrawn("R", no.id, BOB, "it was a mistake", T0))
    assert decide(index, T0).of(Admit) != ()


def test_where_teams_answer_for_themselves_a_silent_team_waits_alone() -> None:
    index = started(VoteRequirement(owner=1, each_team=1, per_team=True))
    vote(index, GateName.START, ALICE)
    vote(index, GateName.START, BOB, teams=("a",))
    assert gate_state(index) == "open"
    index.apply(GateOpened("R", GateName.START, "", T0))
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n1"]
    assert reason_of(index, "R", "n3", T0).code == "needs-vote"
    vote(index, GateName.START, CAROL, teams=("b",))
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n1", "n3"]


# -- continue


def test_continue_opens_after_canaries_and_soak() -> None:
    index = index_of(NODES)
    submit(
        index,
        waves=CANARY_THEN_FLEET,
        gates={GateName.START: VoteRequirement(), GateName.CONTINUE: VoteRequirement(owner=1)},
    )
    rollout = index.rollout("R")
    early = voting_blocker(index, rollout, GateName.CONTINUE, "canary", T0)
    assert early is not None
    assert "not asked yet" in describe(early)
    finish(index, "n1", at=T0)
    finish(index, "n3", at=T0 + 10.0)
    assert voting_blocker(index, rollout, GateName.CONTINUE, "canary", T0 + 10.0) is None
    assert reason_of(index, "R", "n2", T0 + 10.0).code == "soaking"
    index.record_next_round(NextRound("R", CheckRounds.SOAK, math.inf))
    assert decide(index, T0 + 10.0).wake_at == T0 + 610.0
    assert reason_of(index, "R", "n2", T0 + 610.0).code == "gate-continue"
    vote(index, GateName.CONTINUE, wave="canary", at=T0 + 20.0)
    assert can_open(index, T0 + 20.0) == [GateName.CONTINUE]
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0 + 20.0))
    assert reason_of(index, "R", "n2", T0 + 30.0).code == "soaking"
    index.record_observations([], T0 + 610.0)
    assert reason_of(index, "R", "n2", T0 + 610.0).code == "node-unknown"


def test_a_canary_that_turns_red_shuts_the_fleet_again() -> None:
    index = index_of(NODES)
    submit(index, waves=CANARY_THEN_FLEET)
    finish(index, "n1")
    finish(index, "n3")
    failure = Failure("n1#1.2", "n1", 1, "soak.verify", "turned red", T0 + 5.0)
    transition(index, "n1", Trigger.SOAK_CHECK_FAILED, failure=failure, at=T0 + 5.0)
    assert reason_of(index, "R", "n2", T0 + 5.0).code == "node-failed"


# -- proceed


@pytest.fixture
def failing() -> Projection:
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4"), "c": ("n5", "n6")}))
    submit(index)
    return index


def test_proceed_is_not_asked_without_a_failure(failing: Projection) -> None:
    reason = voting_blocker(failing, failing.rollout("R"), GateName.PROCEED, "", T0)
    assert reason is not None
    assert "not asked yet" in describe(reason)


def test_a_failure_pauses_until_a_vote_that_was_shown_it(failing: Projection) -> None:
    shown = fail(failing, "n1")
    assert decide(failing, T0).of(Admit) == ()
    assert reason_of(failing, "R", "n3", T0).code == "node-failed"
    vote(failing, GateName.PROCEED, shown=("another#1",))
    assert decide(failing, T0).of(Admit) == ()
    vote(failing, GateName.PROCEED, BOB, shown=(shown,))
    assert [start.node for start in decide(failing, T0).of(Admit)] == ["n3", "n5"]
    assert reason_of(failing, "R", "n2", T0).code == "pool-full"


def test_a_retry_alone_resumes_nothing_and_neither_does_a_skip(failing: Projection) -> None:
    fail(failing, "n1")
    transition(failing, "n1", Trigger.RETRIED)
    assert decide(failing, T0).of(Admit) == ()
    transition(failing, "n1", Trigger.SKIPPED, Outcome.SKIPPED, isolated=False)
    assert decide(failing, T0).of(Admit) == ()


def test_a_later_failure_shuts_again_unless_the_vote_reaches_it(failing: Projection) -> None:
    vote(failing, GateName.PROCEED, shown=(fail(failing, "n1"),), nodes=("n5",), at=T0 + 1.0)
    fail(failing, "n5", "another thing", at=T0 + 2.0)
    assert failing.unresolved_failures("R") == ()
    fail(failing, "n3", at=T0 + 3.0)
    assert [each.node for each in failing.unresolved_failures("R")] == ["n3"]


def test_more_covers_similar_failures_until_deadline(failing: Projection) -> None:
    shown = fail(failing, "n1", "task 3 failed on n1")
    vote(failing, GateName.PROCEED, shown=(shown,), more=1, until=T0 + 60.0, at=T0 + 1.0)
    fail(failing, "n3", "disk full", at=T0 + 2.0)
    assert [each.node for each in failing.unresolved_failures("R")] == ["n3"]
    fail(failing, "n5", "task 4 failed on n5", at=T0 + 3.0)
    assert [each.node for each in failing.unresolved_failures("R")] == ["n3"]
    transition(failing, "n5", Trigger.RETRIED, at=T0 + 4.0)
    fail(failing, "n5", "task 4 failed on n5", at=T0 + 5.0)
    assert [each.id for each in failing.unresolved_failures("R")] == ["n3#1", "n5#2"]


def test_until_ends_the_wider_cover_and_not_what_was_shown(failing: Projection) -> None:
    shown = fail(failing, "n1")
    vote(failing, GateName.PROCEED, shown=(shown,), nodes=("n3",), until=T0 + 60.0, at=T0 + 1.0)
    fail(failing, "n3", at=T0 + 61.0)
    assert [each.node for each in failing.unresolved_failures("R")] == ["n3"]


def test_a_withdrawn_yes_no_longer_settles(failing: Projection) -> None:
    cast = vote(failing, GateName.PROCEED, shown=(fail(failing, "n1"),))
    assert failing.unresolved_failures("R") == ()
    failing.apply(VoteWithdrawn("R", cast.id, ALICE, "on second thought", T0))
    assert [each.node for each in failing.unresolved_failures("R")] == ["n1"]
