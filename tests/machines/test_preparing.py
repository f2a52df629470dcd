"""Preparation: who is prepared next, what a failure stops, and what is never done without a slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.facts.projection import Projection
from machines.invariants.facts import EarlierEvents
from machines.invariants.violations import violation
from machines.model.decision import Admit, CompareStaged, Prepare
from machines.model.events import (
    ArtifactsBuilt,
    FreezeStarted,
    HoldTaken,
    PreparationRecorded,
    RolloutCancelled,
)
from machines.model.limits import Budget
from machines.model.node import Node
from machines.model.plan import PILOT_WAVE, GateName, Pilot, WaveDef
from machines.model.preparation import (
    CLEANUP,
    ArtifactKind,
    ManifestEntry,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
    StagedComparison,
)
from machines.model.rollout import FailureCode, Hold
from machines.model.selector import parse_selector
from machines.model.windows import Freeze, Window
from machines.rules.preparing import preparation_blocker
from machines.scheduler import stage_admission
from machines.scheduler.checks import is_at_work
from machines.scheduler.decide import decide
from machines.scheduler.progress import RolloutState, rollout_progress
from machines.scheduler.stage_admission import may_begin
from machines.states import Phase, Trigger
from machines.workflow import phase_transitions
from tests.machines.builders import (
    ALICE,
    CANARY_THEN_FLEET,
    T0,
    index_of,
    nodes_of,
    reason_of,
    submit,
    transition,
)
from tests.support.snapshot_judge import SnapshotFacts

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")}, arch={"n1": "amd64", "n2": "amd64", "n3": "arm64"})
APP = ManifestEntry("app", "1", ArtifactKind.FILE, 10, "ab" * 32, "app", select=parse_selector("arch"))
COPY = PrepareStage("copy", PrepareKind.COPY, manifest=(APP,), method="sftp", max_parallel=2)
INSTALL = PrepareStage("install", PrepareKind.INSTALL, playbook="i.yml", tolerate=Budget(count=1))
READING = replace(INSTALL, reads=(COPY,))
CLOSED = Window(frozenset(range(7)), 0, 60, ZoneInfo("UTC"))
"""Open until 01:00; T0 is at 08:00."""


def prepared_fleet(*stages: PrepareStage, **plan: Any) -> Projection:
    index = index_of(NODES)
    submit(index, prepare=stages, **plan)
    return index


def record(
    index: Projection, node: str, stage: PrepareStage, state: PreparationState, **changed: Any
) -> Preparation:
    content = stage.content_for(index.nodes[node]) if node else ""
    row = Preparation("R", node, stage.name, 1, state, content, T0, T0, **changed)
    index.apply(PreparationRecorded(row))
    return row


def due(index: Projection, at: float = T0) -> list[tuple[str, str]]:
    return [(each.node, each.stage) for each in decide(index, at).of(Prepare)]


def test_stage_runs_on_matching_nodes_up_to_its_limit() -> None:
    index = prepared_fleet(COPY)
    assert due(index) == [("n1", "copy"), ("n3", "copy")]
    record(index, "n1", COPY, PreparationState.RUNNING)
    assert due(index) == [("n1", "copy"), ("n3", "copy")]
    record(index, "n1", COPY, PreparationState.DONE)
    assert due(index) == [("n3", "copy"), ("n2", "copy")]
    # n4 has no label `arch`, so the stage does nothing there and the node may start.
    assert Admit("R", "n4") in decide(index, T0).of(Admit)


def test_install_runs_first_on_one_node_alone() -> None:
    index = prepared_fleet(INSTALL, waves=CANARY_THEN_FLEET)
    first = index.pending("R", "canary")[0][2]
    assert due(index) == [(first, "install")]
    record(index, first, INSTALL, PreparationState.RUNNING)
    assert due(index) == [(first, "install")]
    record(index, first, INSTALL, PreparationState.DONE)
    assert len(due(index)) == len(NODES) - 1
    record(index, first, INSTALL, PreparationState.RUNNING)  # again, for its labels changed
    assert due(index) == [(first, "install")]


def test_node_starts_only_after_its_last_stage() -> None:
    index = prepared_fleet(COPY, INSTALL)
    assert reason_of(index, "R", "n1", T0).code == "preparing"
    record(index, "n1", COPY, PreparationState.SKIPPED)
    assert ("n1", "install") in due(index)
    assert Admit("R", "n1") not in decide(index, T0).of(Admit)
    moved = phase_transitions.transition(index.target("R", "n1"), Trigger.ADMITTED, T0)
    assert "prepare stage install is not done" in str(violation(index, moved, T0))
    record(index, "n1", INSTALL, PreparationState.DONE)
    assert CompareStaged("R", "n1") in decide(index, T0).of(CompareStaged)
    index.record_comparison(StagedComparison("R", "n1", T0))
    assert Admit("R", "n1") in decide(index, T0).of(Admit)
    assert violation(index, moved, T0) is None


def test_preparation_needs_votes_and_its_own_windows_alone() -> None:
    assert due(prepared_fleet(INSTALL, windows=(CLOSED,))) == [("n1", "install")]
    closed = prepared_fleet(INSTALL, prepare_windows=(CLOSED,))
    assert due(closed) == []
    assert decide(closed, T0).wake_at == T0 + 16 * 3600  # the next midnight
    unopened = index_of(NODES)
    submit(unopened, prepare=(INSTALL,), opened=False)
    assert due(unopened) == []
    frozen = prepared_fleet(INSTALL)
    frozen.apply(FreezeStarted(Freeze("f1", "all", "month's end", "alice", T0)))
    assert due(frozen) == []


def test_failed_node_is_tried_again_after_its_backoff() -> None:
    index = prepared_fleet(replace(INSTALL, tolerate=Budget(count=4)))
    record(index, "n1", INSTALL, PreparationState.FAILED, text="no route", not_before=T0 + 60)
    assert due(index) == []  # the first node is alone until it is done
    assert decide(index, T0).wake_at == T0 + 60
    assert reason_of(index, "R", "n1", T0).code == "prepare-failed"
    assert Prepare("R", "n1", "install", 2) in decide(index, T0 + 60).of(Prepare)


@pytest.mark.parametrize(("tolerate", "stops"), [(Budget(count=0), True), (Budget(count=1), False)])
def test_more_failures_than_tolerated_stop_the_rest(tolerate: Budget, stops: bool) -> None:
    stage = replace(INSTALL, tolerate=tolerate)
    index = prepared_fleet(stage)
    record(index, "n1", stage, PreparationState.DONE)
    record(index, "n2", stage, PreparationState.FAILED, text="no route", not_before=T0 + 60)
    assert (due(index) == []) is stops
    assert (decide(index, T0).of(Admit) == ()) is stops
    state = rollout_progress(index, "R", T0).state
    assert state is (RolloutState.PAUSED if stops else RolloutState.RUNNING)
    # The failed node itself is retried, and then the rest continues.
    assert ("n2", "install") in due(index, T0 + 60)


@pytest.mark.parametrize("max_parallel", [1, 4])
def test_held_node_is_passed_over(max_parallel: int) -> None:
    stage = replace(INSTALL, max_parallel=max_parallel)
    index = prepared_fleet(stage)
    index.apply(HoldTaken(Hold("n1", "person", "alice", ALICE, "disk", T0)))
    assert due(index) == [("n3", "install")]
    assert reason_of(index, "R", "n1", T0).code == "held"
    record(index, "n3", stage, PreparationState.DONE)
    assert len(due(index)) == min(max_parallel, 2)


def test_failed_pilot_is_not_tolerated_without_continue_gate() -> None:
    stage = replace(INSTALL, tolerate=Budget(count=4))
    waves = (WaveDef(PILOT_WAVE, gate=GateName.START), WaveDef("fleet"))
    index = prepared_fleet(stage, waves=waves, pilot=Pilot("n3"))
    record(index, "n3", stage, PreparationState.FAILED, not_before=T0 + 60)
    assert index.target("R", "n3").wave == PILOT_WAVE
    assert preparation_blocker(index, index.rollout("R")) is not None


def test_unprepared_node_names_closed_windows() -> None:
    index = prepared_fleet(INSTALL, prepare_windows=(CLOSED,))
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, reason.params["windows"]) == ("outside-window", "prepare")
    record(index, "n1", INSTALL, PreparationState.RUNNING)
    running = reason_of(index, "R", "n1", T0)
    assert (running.code, running.params["running"]) == ("preparing", True)


def test_failed_canary_is_never_tolerated() -> None:
    index = prepared_fleet(replace(INSTALL, tolerate=Budget(count=4)), waves=CANARY_THEN_FLEET)
    first = index.pending("R", "canary")[0][2]
    record(index, first, INSTALL, PreparationState.FAILED, not_before=T0 + 60)
    assert due(index) == []
    assert decide(index, T0).reasons["R"].code == "prepare-failed"


def test_disturbed_node_fails_and_stops_everything_until_people_act() -> None:
    index = prepared_fleet(INSTALL)
    record(index, "n1", INSTALL, PreparationState.RUNNING)
    row = Preparation("R", "n1", "install", 1, PreparationState.DISTURBED, "c", T0, T0)
    assert "no failure says so" in str(violation(index, PreparationRecorded(row), T0))
    target = index.target("R", "n1")
    moved = phase_transitions.transition(
        target,
        Trigger.DISTURBED,
        T0,
        text="port/tcp/80",
        code=FailureCode.PREPARE_DISTURBED,
        suffix=".install.1",
    )
    assert violation(index, PreparationRecorded(row), T0, EarlierEvents([moved])) is None
    index.apply(moved)
    index.apply(PreparationRecorded(row))
    assert (due(index), decide(index, T0).of(Admit)) == ([], ())
    assert index.target("R", "n1").phase is Phase.FAILED
    assert decide(index, T0).reasons["R"].code == "disturbed"
    transition(index, "n1", Trigger.RETRIED)
    assert due(index) == []  # the failure is not resolved by a retry


def test_node_of_another_rollout_is_not_prepared() -> None:
    index = prepared_fleet(INSTALL)
    submit(index, "S")
    transition(index, "n1", Trigger.ADMITTED, rollout="S")
    assert due(index) == [("n3", "install")]
    other = prepared_fleet(INSTALL)
    submit(other, "S")
    record(other, "n1", INSTALL, PreparationState.RUNNING)
    assert Admit("S", "n1") not in decide(other, T0).of(Admit)
    assert reason_of(other, "S", "n1", T0).code == "preparing"
    moved = phase_transitions.transition(other.target("S", "n1"), Trigger.ADMITTED, T0)
    assert "R prepares it" in str(violation(other, moved, T0))


def test_node_in_stage_is_not_checked() -> None:
    index = prepared_fleet(INSTALL)
    record(index, "n1", INSTALL, PreparationState.RUNNING)
    assert (is_at_work(index, "n1"), is_at_work(index, "n2")) == (True, False)


def test_build_runs_once_before_the_other_stages() -> None:
    build = PrepareStage("build", PrepareKind.BUILD, playbook="b.yml", manifest_file="a.yml")
    copy = replace(COPY, manifest=(), manifest_file="a.yml", built_by="build")
    index = prepared_fleet(build, copy, INSTALL)
    assert due(index) == [("", "build")]
    assert reason_of(index, "R", "n4", T0).code == "preparing"
    early = Preparation("R", "n4", "install", 1, PreparationState.RUNNING, "", T0, T0)
    assert "stage copy is not done" in str(violation(index, PreparationRecorded(early), T0))
    assert decide(index, T0).of(Admit) == ()
    index.apply(ArtifactsBuilt("R", "build", (APP,), T0))
    assert violation(index, PreparationRecorded(early), T0) is None  # nothing was built for it
    record(index, "n4", INSTALL, PreparationState.SKIPPED)
    assert Admit("R", "n4") in decide(index, T0).of(Admit)
    assert due(index)[:2] == [("n1", "copy"), ("n3", "copy")]
    assert index.rollout("R").amendments == 1


def test_build_is_work_on_its_host() -> None:
    build = PrepareStage("build", PrepareKind.BUILD, playbook="b.yml", host="n1")
    index = prepared_fleet(build, INSTALL)
    submit(index, "S")
    submit(index, "T", prepare=(INSTALL, build))
    admitted = phase_transitions.transition(index.target("S", "n1"), Trigger.ADMITTED, T0)
    began = record(index, "", build, PreparationState.RUNNING)
    install = Preparation("T", "n1", "install", 1, PreparationState.RUNNING, "", T0, T0)
    for facts in (index, SnapshotFacts.from_snapshot(index.snapshot(), index.limits, ())):
        assert "R prepares it" in str(violation(facts, admitted, T0))
        for row in (replace(began, rollout="T"), install):
            assert "cannot begin: R prepares it" in str(violation(facts, PreparationRecorded(row), T0))
    decision = decide(index, T0)
    assert Admit("S", "n1") not in decision.of(Admit)
    assert reason_of(index, "S", "n1", T0).code == "preparing"
    # The first node of T is taken, so its install begins on another one.
    assert [(each.node, each.stage) for each in decision.of(Prepare) if each.rollout == "T"] == [
        ("n3", "install")
    ]
    assert not may_begin(index, "T", "n1", "install", T0)
    skipped = replace(install, rollout="R", state=PreparationState.SKIPPED)
    index.apply(PreparationRecorded(skipped))  # needs no beginning, so it may end during the build
    assert list(index.preparing_rollouts("n1")) == ["R"]
    assert list(Projection.build(index.snapshot(), index.limits).preparing_rollouts("n1")) == ["R"]
    record(index, "", build, PreparationState.DONE)
    assert Admit("S", "n1") in decide(index, T0).of(Admit)


def test_build_waits_for_other_work_on_its_host() -> None:
    build = PrepareStage("build", PrepareKind.BUILD, playbook="b.yml", host="n1")
    index = prepared_fleet(build)
    submit(index, "S")
    assert due(index) == [("", "build")]
    transition(index, "n1", Trigger.ADMITTED, rollout="S")
    assert due(index) == []
    assert not may_begin(index, "R", "", "build", T0)
    began = Preparation("R", "", "build", 1, PreparationState.RUNNING, "", T0, T0)
    assert "it is isolating in S" in str(violation(index, PreparationRecorded(began), T0))
    transition(index, "n1", Trigger.ISOLATION_ABORTED, rollout="S")
    assert due(index) == [("", "build")]


def test_label_that_changes_artifacts_prepares_node_again() -> None:
    arm = replace(APP, name="app-arm", sha256="cd" * 32, select=parse_selector("arch=arm64"))
    amd = replace(APP, select=parse_selector("arch=amd64"))
    stage = replace(COPY, manifest=(amd, arm))
    index = prepared_fleet(stage)
    record(index, "n1", stage, PreparationState.DONE)
    assert ("n1", "copy") not in due(index)
    from machines.model.events import NodesDiscovered

    index.apply(NodesDiscovered((Node("n1", labels={"team": "a", "arch": "arm64"}),)))
    assert Prepare("R", "n1", "copy", 2) in decide(index, T0).of(Prepare)


def test_same_file_for_two_selectors_has_two_contents() -> None:
    entries = (replace(APP, select=parse_selector(f"arch={arch}"), path=arch) for arch in ("amd64", "arm64"))
    stage = replace(COPY, manifest=tuple(entries))
    index = prepared_fleet(stage)
    for node in ("n1", "n3"):
        record(index, node, stage, PreparationState.DONE)
    assert due(index) == [("n2", "copy")]


def test_cancelled_rollout_cleans_up_nodes_without_the_change() -> None:
    index = prepared_fleet(INSTALL)
    for node in ("n1", "n2"):
        record(index, node, INSTALL, PreparationState.DONE)
    record(index, "n3", INSTALL, PreparationState.SKIPPED)
    transition(index, "n1", Trigger.ADMITTED)
    index.apply(RolloutCancelled("R", ALICE, "wrong", T0))
    assert due(index) == [("n2", CLEANUP)]
    cleaned = Preparation("R", "n2", CLEANUP, 1, PreparationState.DONE, "", T0, T0)
    index.apply(PreparationRecorded(cleaned))
    assert due(index) == []


def test_cleanup_of_many_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_admission, "DEFAULT_PREPARE_PARALLEL", 2)
    index = prepared_fleet(INSTALL)
    for node in ("n1", "n2", "n3"):
        record(index, node, INSTALL, PreparationState.DONE)
    index.apply(RolloutCancelled("R", ALICE, "wrong", T0))
    assert due(index) == [("n1", CLEANUP), ("n2", CLEANUP)]
    for node, state in (("n1", PreparationState.RUNNING), ("n2", PreparationState.DONE)):
        index.apply(PreparationRecorded(Preparation("R", node, CLEANUP, 1, state, "", T0, T0)))
    assert due(index) == [("n1", CLEANUP), ("n3", CLEANUP)]


def test_index_with_preparations_equals_one_built_again() -> None:
    index = prepared_fleet(COPY, INSTALL)
    record(index, "n1", COPY, PreparationState.DONE)
    record(index, "n1", INSTALL, PreparationState.RUNNING)
    record(index, "n3", COPY, PreparationState.FAILED, not_before=T0 + 60)
    again = Projection.build(index.snapshot(), index.limits)
    again.record_observations(index.observations, T0)
    assert decide(again, T0) == decide(index, T0)


def test_install_content_includes_what_it_reads() -> None:
    newer = replace(READING, reads=(replace(COPY, manifest=(replace(APP, sha256="cd" * 32),)),))
    moved = replace(READING, reads=(replace(COPY, to="/srv"),))
    contents = {stage.content_for(NODES[0]) for stage in (INSTALL, READING, newer, moved)}
    assert len(contents) == 4
    # n4 gets none of the artifacts, so nothing changes there.
    assert READING.content_for(NODES[3]) == newer.content_for(NODES[3]) == INSTALL.content_for(NODES[3])


def test_install_after_build_reads_built_artifacts() -> None:
    built = replace(READING, reads=(replace(COPY, manifest=(), built_by="build"),))
    newer = (replace(APP, sha256="cd" * 32),)
    contents = {built.with_built({"build": made}).content_for(NODES[0]) for made in ((APP,), newer)}
    assert len(contents) == 2
    assert READING.content_for(NODES[0]) in contents
