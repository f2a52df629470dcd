"""The pilot: one node before all others, and votes that are for its evidence."""

from __future__ import annotations

from typing import Any

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, DocumentPilot, OpenGate
from machines.model.events import GateOpened, PhaseMoved, PilotEvidenceAttached, TargetChanged
from machines.model.plan import PILOT_WAVE, GateName, Pilot, VoteRequirement, WaveDef
from machines.model.rollout import PilotEvidence
from machines.rules.gates import gate_view, voting_blocker
from machines.scheduler.decide import decide
from machines.states import Phase, Trigger
from rolloutd.texts.reason_text import describe
from tests.machines.builders import (
    ALICE,
    BOB,
    CANARY,
    FLEET,
    OPEN_GATES,
    T0,
    finish,
    index_of,
    nodes_of,
    reason_of,
    vote,
)
from tests.machines.builders import submit as submit_plan

NODES = nodes_of({"a": ["n1", "n2"], "b": ["n3"]})
WAVES = (WaveDef(PILOT_WAVE, max_parallel=1, gate=GateName.START), CANARY, *FLEET)


def submitted(**changed: Any) -> Projection:
    """Return a rollout whose pilot is n3 of team b; `pilot` asks an owner and team b, `start` an owner."""
    index = index_of(NODES)
    gates = {
        **OPEN_GATES,
        GateName.PILOT: VoteRequirement(owner=1, each_team=1),
        GateName.START: VoteRequirement(owner=1),
    }
    submit_plan(index, opened=False, waves=WAVES, gates=gates, pilot=Pilot("n3"), **changed)
    return index


def pilot_done() -> Projection:
    index = submitted()
    vote(index, GateName.PILOT, BOB, teams=("infra", "b"))
    index.apply(GateOpened("R", GateName.PILOT, "", T0))
    finish(index, "n3")
    return index


def attach(index: Projection, digest: str, since: float | None = None) -> PilotEvidenceAttached:
    pilot_since = index.target("R", "n3").since if since is None else since
    return PilotEvidenceAttached("R", "n3", PilotEvidence({"node": "n3"}, digest, pilot_since, T0))


def gate_state(index: Projection, gate: GateName) -> str:
    return gate_view(index, index.rollout("R"), gate, "", T0).state


def test_pilot_gate_asks_owner_and_team_of_pilot() -> None:
    index = submitted()
    view = gate_view(index, index.rollout("R"), GateName.PILOT, "", T0)
    assert (view.state, view.teams) == ("waiting", (("b", 1, 0),))
    assert reason_of(index, "R", "n3", T0).code == "gate-pilot"
    vote(index, GateName.PILOT, BOB, teams=("infra",))
    assert gate_state(index, GateName.PILOT) == "waiting"
    vote(index, GateName.PILOT, ALICE, teams=("b",))
    assert [each.gate for each in decide(index, T0).of(OpenGate)] == [GateName.PILOT]


def test_pilot_waits_for_no_vote_at_gate_after_it() -> None:
    index = submitted()
    vote(index, GateName.PILOT, BOB, teams=("infra", "b"))
    index.apply(GateOpened("R", GateName.PILOT, "", T0))
    # As after a gate that was recorded open by an altered row, and is closed since the row was settled.
    index.apply(TargetChanged("R", "n3", "a", ("team/a",), "a", T0))
    assert reason_of(index, "R", "n3", T0).code == "starting"


def test_only_pilot_starts_after_pilot_gate() -> None:
    index = submitted()
    index.apply(GateOpened("R", GateName.PILOT, "", T0))
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n3"]
    assert reason_of(index, "R", "n1", T0).code == "earlier-wave"
    admitted = PhaseMoved("R", "n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, T0)
    assert "the start gate is not open" in (violation(index, admitted, T0) or "")


def test_start_not_asked_before_evidence() -> None:
    index = submitted()
    reason = voting_blocker(index, index.rollout("R"), GateName.START, "", T0)
    assert reason is not None
    assert describe(reason) == "start of R: not asked yet; vote when the pilot n3 is done"
    index = pilot_done()
    assert decide(index, T0).of(DocumentPilot) == (DocumentPilot("R"),)
    assert gate_state(index, GateName.START) == "not-asked"
    waits = reason_of(index, "R", "n1", T0)
    assert (waits.code, waits.remedy and waits.remedy.kind) == ("not-asked", "wait-for-node")
    index.apply(attach(index, "with-evidence"))
    assert decide(index, T0).of(DocumentPilot) == ()
    assert gate_state(index, GateName.START) == "waiting"
    assert reason_of(index, "R", "n1", T0).code == "gate-start"


def test_votes_for_other_evidence_do_not_open_start() -> None:
    index = pilot_done()
    index.apply(attach(index, "first"))
    vote(index, GateName.START, digest=index.rollout("R").digest.whole)
    assert gate_state(index, GateName.START) == "waiting"
    vote(index, GateName.START, digest="first")
    assert gate_state(index, GateName.START) == "open"
    index.apply(attach(index, "second"))
    assert gate_state(index, GateName.START) == "waiting"
    assert "cannot open" in (violation(index, GateOpened("R", GateName.START, "", T0), T0) or "")


def test_evidence_of_earlier_attempt_is_collected_again() -> None:
    index = pilot_done()
    index.apply(attach(index, "old", since=T0 - 60.0))
    assert decide(index, T0).of(DocumentPilot) == (DocumentPilot("R"),)
    vote(index, GateName.START, digest="old")
    assert gate_state(index, GateName.START) == "not-asked"
    opened = GateOpened("R", GateName.START, "", T0)
    assert "the evidence of its pilot n3 is not attached" in (violation(index, opened, T0) or "")


def test_waived_pilot_changes_no_wave() -> None:
    index = index_of(NODES)
    submit_plan(index, pilot=Pilot(waived="tried yesterday"))
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n1", "n3"]
