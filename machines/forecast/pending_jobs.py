"""Jobs of a walk outside of its attempts: prepare stages, compliance checks, evidence of pilots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from machines.facts.node_work import NodeWork, WorkKind
from machines.facts.preparations import BUILD_NODE
from machines.facts.projection import Projection
from machines.forecast.agenda import Agenda
from machines.forecast.attempt import Attempt
from machines.forecast.model import StepDurations
from machines.model.decision import CheckIfCurrent, Command, DocumentPilot, Prepare
from machines.model.events import ArtifactsBuilt, ChangeNeeded, PilotEvidenceAttached, PreparationRecorded
from machines.model.plan import PILOT_WAVE
from machines.model.preparation import PrepareKind
from machines.model.rollout import PilotEvidence
from machines.model.step_record import Ok, StepAction
from machines.workflow import prepare_try

CHECK_MODE_STEP = "check-mode"
"""Under this name the durations are asked for a check whether a node needs the change."""


@dataclass(slots=True)
class PendingJobs:
    """The jobs of a walk that no attempt does."""

    index: Projection
    agenda: Agenda
    durations: StepDurations
    _at_work: set[Command] = field(default_factory=set)

    def check_if_current(self, command: CheckIfCurrent, now: float) -> None:
        if command in self._at_work:
            return
        work = NodeWork(WorkKind.CHECK_MODE, command.node)
        self.index.record_work(work)
        self._at_work.add(command)

        def end(now: float) -> bool:
            self.index.end_work(work)
            self._at_work.discard(command)
            self.index.apply(ChangeNeeded(command.rollout, command.node, now))
            return True

        durations = self.durations(command.rollout, command.node, CHECK_MODE_STEP, StepAction.CHECK)
        self.agenda.queue_run(durations, None, end, at=now, now=now, is_slowed=False)

    def document_pilot(self, command: DocumentPilot, now: float) -> None:
        rollout = self.index.rollout(command.rollout)
        since = self.index.wave_end(rollout.id, PILOT_WAVE) or now
        evidence = PilotEvidence({}, f"pilot.{rollout.digest.whole}", since, now)
        self.index.apply(PilotEvidenceAttached(rollout.id, rollout.plan.pilot_node or "", evidence))

    def prepare(self, command: Prepare, now: float) -> bool:
        """Run a stage; return whether its node is at work now."""
        if command in self._at_work:
            return False
        known = self.index.preparations(command.rollout)
        rollout, name = self.index.rollout(command.rollout), command.stage
        if known is None:
            return False
        stage = next((each for each in rollout.prepare_stages if each.name == name), None)
        node = self.index.nodes.get(command.node)
        before = known.rows.get((command.node, name))
        row = prepare_try.intent(command, before, now)
        if row is not before:
            content = stage.playbook_digest if stage is not None else ""
            if stage is not None and node is not None:
                content = known.content(stage, node)
            row = replace(row, content=content)
            self.index.apply(PreparationRecorded(row))
        began_at = row.began_at
        self._at_work.add(command)

        def end(now: float) -> bool:
            self._at_work.discard(command)
            if command.node == BUILD_NODE and stage is not None:
                # What a build makes is not known before: the nodes stage what the plan names.
                self.index.apply(ArtifactsBuilt(command.rollout, name, stage.manifest, now))
            self.index.apply(PreparationRecorded(prepare_try.ended(row, Ok(), now)))
            attempt.ends_at = now
            return True

        place = (command.rollout, command.node)
        attempt = Attempt(*place, name, began_at, is_running=began_at < now)
        self.agenda.begin_attempt(attempt)
        durations = self.durations(*place, name, StepAction.RUN)
        if stage is not None and stage.kind is not PrepareKind.COPY:
            self.agenda.queue_run(durations, attempt, end, at=began_at, now=now, is_slowed=True)
        else:
            self.agenda.begin_step(durations, attempt, end, at=began_at, now=now)
        return True
