"""Staged files are compared on a node before it takes a slot: who is compared when, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, CompareStaged, Prepare
from machines.model.events import PreparationRecorded, RolloutCancelled
from machines.model.node import Node
from machines.model.preparation import (
    COMPARISON_MAX_AGE_S,
    COMPARISON_RETRY_S,
    ArtifactKind,
    ManifestEntry,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
    StagedComparison,
)
from machines.scheduler.decide import decide
from machines.states import Trigger
from machines.workflow import phase_transitions
from rolloutd.texts.reason_text import describe
from tests.machines.builders import ALICE, T0, index_of, nodes_of, observed_up, reason_of, submit

APP = ManifestEntry("app", "1", ArtifactKind.FILE, 10, "ab" * 32, "app")
COPY = PrepareStage("copy", PrepareKind.COPY, manifest=(APP,), method="ssh", to="/cache")
NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3",)})


def staged_fleet(stage: PrepareStage = COPY) -> Projection:
    """Return a rollout whose stage is done on all nodes."""
    index = index_of(NODES)
    submit(index, prepare=(stage,))
    for node in NODES:
        record(index, node, stage, PreparationState.DONE)
    return index


def record(
    index: Projection, node: Node, stage: PrepareStage, state: PreparationState, not_before: float = 0.0
) -> None:
    row = Preparation("R", node.name, stage.name, 1, state, stage.content_for(node), T0, T0)
    index.apply(PreparationRecorded(replace(row, text="app 1: it differs", not_before=not_before)))


def compared(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).of(CompareStaged)]


def admitted(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).of(Admit)]


def test_node_starts_only_after_fresh_comparison() -> None:
    index = staged_fleet()
    # One slot in each pool: the second node of a pool cannot start, so it is not compared.
    assert (compared(index), admitted(index)) == (["n1", "n3"], [])
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, describe(reason)) == ("staged-unknown", "the staged files on n1 are being compared")
    moved = phase_transitions.transition(index.target("R", "n1"), Trigger.ADMITTED, T0)
    assert "its staged files were not compared just now" in str(violation(index, moved, T0))
    index.record_comparison(StagedComparison("R", "n1", T0))
    assert (compared(index), admitted(index)) == (["n3"], ["n1"])
    assert violation(index, moved, T0) is None


@pytest.mark.parametrize("age_s", [COMPARISON_MAX_AGE_S, -1.0], ids=["old", "clock-set-back"])
def test_comparison_of_other_time_counts_no_more(age_s: float) -> None:
    index = staged_fleet()
    for node in ("n1", "n3"):
        index.record_comparison(StagedComparison("R", node, T0 - age_s))
    assert (compared(index), admitted(index)) == (["n1", "n3"], [])
    moved = phase_transitions.transition(index.target("R", "n1"), Trigger.ADMITTED, T0)
    assert violation(index, moved, T0) is not None


def test_later_node_does_not_overtake_a_comparison() -> None:
    index = staged_fleet()
    index.record_comparison(StagedComparison("R", "n2", T0))
    assert admitted(index) == []


def test_node_without_answer_yields_and_is_compared_again() -> None:
    index = staged_fleet()
    index.record_comparison(StagedComparison("R", "n1", T0, "n1: no answer"))
    index.record_comparison(StagedComparison("R", "n2", T0))
    decision = decide(index, T0)
    assert [each.node for each in decision.of(Admit)] == ["n2"]
    assert CompareStaged("R", "n1") not in decision.of(CompareStaged)
    assert decision.wake_at == T0 + COMPARISON_RETRY_S
    reason = reason_of(index, "R", "n1", T0)
    assert describe(reason) == "the staged files on n1 cannot be compared: n1: no answer"
    assert reason.remedy is not None
    assert reason.remedy.until == T0 + COMPARISON_RETRY_S
    later = T0 + COMPARISON_RETRY_S
    index.record_observations(observed_up(NODES, later), later)
    # It takes no slot while it is asked once more.
    assert "n1" in compared(index, later)
    assert admitted(index, later) == ["n2"]


def test_stage_without_known_files_needs_no_comparison() -> None:
    for stage in (
        replace(COPY, playbook="copy.yml"),
        PrepareStage("install", PrepareKind.INSTALL, playbook="i.yml"),
    ):
        index = staged_fleet(stage)
        assert (compared(index), admitted(index)) == ([], ["n1", "n3"])


def test_difference_makes_stage_due_again_after_its_pause() -> None:
    index = staged_fleet()
    record(index, NODES[0], COPY, PreparationState.WAITING, not_before=T0 + 30.0)
    decision = decide(index, T0)
    assert (list(decision.of(Prepare)), decision.wake_at) == ([], T0 + 30.0)
    reason = reason_of(index, "R", "n1", T0)
    assert reason.code == "preparing"
    assert describe(reason).endswith(": app 1: it differs")
    assert [each.node for each in decide(index, T0 + 30.0).of(Prepare)] == ["n1"]
    # Set back, the clock delays nothing.
    assert [each.node for each in decide(index, T0 - 60.0).of(Prepare)] == ["n1"]


def test_closed_rollout_forgets_its_comparisons() -> None:
    index = staged_fleet()
    index.record_comparison(StagedComparison("R", "n1", T0))
    index.apply(RolloutCancelled("R", ALICE, "tests", T0))
    index.record_comparison(StagedComparison("R", "n3", T0))
    assert [index.staged_comparison("R", node) for node in ("n1", "n3")] == [None, None]
