"""Isolation of one node, its return to service, and checks that it stays isolated.

The intent of each action is recorded first, and so is a lost isolation; the core decides from the records
what follows.  While a playbook runs, an inspection without an answer changes nothing: an API server that is
unavailable for a minute is not a loss of isolation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from machines.model import actions
from machines.model.node import Observation
from machines.model.plan import Capability, Plan, StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord
from machines.states import Phase
from machines.workflow import records
from machines.workflow.outage import held_isolators
from machines.workflow.recording import is_isolated_after
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.drivers.traffic_probes import probe_traffic
from rolloutd.engine.tasks import Wakeup
from rolloutd.ports import Busy, Failed, IsolationStatus, Ok, StepContext, StepResult, Unknown

log = logging.getLogger(__name__)

RECHECK_INTERVAL_S = 15.0
"""Interval between inspections while a playbook runs; an observation that changes inspects at once."""

SHARED_TEXT = "left to the other rollouts that hold this isolation"
"""Result of a return to service that only the last holder carries out."""


class Isolation:
    def __init__(self, session: NodeSession, journal: StepJournal, others: OtherAttempts) -> None:
        self._others = others
        self._session = session
        self._state = session.state
        self._journal = journal
        self._recheck_wakeup = Wakeup()
        self._last_report: Observation | None = None
        self._last_observation: object = None

    async def isolate(self, action: actions.Isolate) -> StepResult:
        spec = action.spec
        isolator = self._session.adapters.isolators[spec.kind]
        ctx = await self._session.step_context(
            spec, number=action.number, prior=action.prior, cordon_only=action.cordon_only
        )
        if spec.drain_timeout_s is not None and self._session.target.phase is Phase.ISOLATING:
            ctx = replace(ctx, deadline=min(ctx.deadline, self._session.progress.isolation_deadline))
        record = self._journal.begin(action)
        status = await self._session.capture_errors(isolator.inspect(ctx), of=spec)
        if isinstance(status, Failed | Busy | Unknown):
            # Nothing was changed yet, so only an inspection is recorded.
            await self._journal.finish(replace(record, action=StepAction.INSPECT), status)
            return status
        prior = action.prior if action.is_prior_known else status.prior
        ctx, record = self._with_run(spec, ctx, replace(record, prior=prior))
        await self._journal.write(record, isolated=is_isolated_after(action, None))
        # Skip only an isolation of our own: if another party isolated the node, we must still apply ours.
        is_done = spec.name in self._others.held() or records.completed_since_revert(
            spec.name, self._journal.records
        )
        if status.is_isolated and action.is_prior_known and is_done:
            result: StepResult = Ok(status.text or "still isolated")
        else:
            result = await self._session.capture_errors(isolator.isolate(replace(ctx, prior=prior)), of=spec)
        await self._journal.finish(record, result)
        return result

    async def probe(self, action: actions.Probe) -> None:
        """Probe for traffic once; a probe changes nothing, so it needs no recorded intent."""
        record = self._journal.begin(action)
        result = await self._session.capture_errors(
            probe_traffic(self._session, action.spec, number=action.number)
        )
        await self._journal.finish(record, result)

    async def undo(self, action: actions.Revert) -> None:
        spec = action.spec
        record = self._journal.begin(action)
        ctx = await self._session.step_context(spec, number=action.number, prior=action.prior)
        ctx, record = self._with_run(spec, ctx, record)
        await self._journal.write(record)
        # After the intent is written: of two attempts that leave at once, the later one sees the other leave.
        await self._others.load(again=True)
        result: StepResult
        if spec.name in self._others.held():
            result = Ok(SHARED_TEXT)
        else:
            isolator = self._session.adapters.isolators[spec.kind]
            result = await self._session.capture_errors(isolator.return_to_service(ctx), of=spec)
        await self._journal.finish(record, result, isolated=is_isolated_after(action, result))

    def _with_run(
        self, spec: StepDef, ctx: StepContext, record: StepRecord
    ) -> tuple[StepContext, StepRecord]:
        """Return both with the id of the isolator's run, if it is one, which names where the run begins."""
        if Capability.STARTS_RUN not in spec.capabilities:
            return ctx, record
        recorded = self._journal.recorded_version(record)
        if recorded is not record and not recorded.handle:
            return ctx, record  # an earlier version has begun it, and recorded no id
        ctx = self._session.with_run_id(ctx, recorded.handle, f"{ctx.idempotency_key}.{record.action}")
        return ctx, replace(record, handle=ctx.run_id)

    async def ensure_isolated(self, plan: Plan, *, run_in_progress: bool) -> bool:
        """Inspect the isolation, isolate again where it was lost, and return whether the node is isolated."""
        # Inspect twice: another isolator's part may have been undone just after its inspection.
        for _ in range(2):
            was_lost = await self._reisolate_lost(plan, run_in_progress=run_in_progress)
            if was_lost is None:
                return False
            if not was_lost:
                break
        return True

    async def _reisolate_lost(self, plan: Plan, *, run_in_progress: bool) -> bool | None:
        """Return whether any isolation was lost; None if an inspection or a new isolation failed."""
        was_lost = False
        for spec, prior in records.active_isolations(plan.isolate, self._journal.records):
            status = await self._session.capture_errors(self._inspect(spec, prior), of=spec)
            number = 1 + max(r.number for r in self._journal.records if r.step == spec.name)
            if isinstance(status, Failed | Busy | Unknown):
                if not run_in_progress:
                    await self._journal.finish(self._journal.begin(actions.Probe(spec, number)), status)
                    return None
            elif status.is_isolated is False:
                was_lost = True
                action = actions.Isolate(spec, number, is_prior_known=True, prior=prior)
                if not isinstance(await self.isolate(action), Ok):
                    return None
        return was_lost

    def recheck(self) -> None:
        """Inspect soon, if the node's observation has changed."""
        observation = self._state.index.reported_observation(self._session.node)
        if observation is self._last_report:
            return  # as after most changes: each wakes up all drivers
        self._last_report = observation
        observed = (
            None
            if observation is None
            else (observation.sight, observation.cordoned_by_other, observation.why)
        )
        if observed != self._last_observation:
            self._last_observation = observed
            self._recheck_wakeup.trigger()

    async def wait_until_lost(self, plan: Plan) -> None:
        """Return once an isolator says that the node is not isolated any more."""
        while True:
            await self._recheck_wakeup.wait_for(self._state.clock.sleep(RECHECK_INTERVAL_S))
            for spec, prior in records.active_isolations(plan.isolate, self._journal.records):
                status = await self._session.capture_errors(self._inspect(spec, prior), of=spec)
                if isinstance(status, IsolationStatus) and status.is_isolated is False:
                    log.warning(
                        "%s: isolation was lost while a playbook runs: %s", self._session.subject, status.text
                    )
                    return

    async def _inspect(self, spec: StepDef, prior: Any) -> IsolationStatus | Busy:
        ctx = await self._session.step_context(spec, number=0, prior=prior)
        return await self._session.adapters.isolators[spec.kind].inspect(ctx)


class OtherAttempts:
    """The other targets that hold the isolation of a node, and their records."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session
        self._loaded_for: tuple[object, ...] = ()
        self._holders: list[tuple[Sequence[StepDef], Sequence[StepRecord]]] = []

    async def load(self, *, again: bool = False) -> None:
        """Read the records of the other holders, if they have changed or `again`."""
        holders = self._other_holders()
        key = tuple((each.rollout, each.attempt, each.phase, each.order) for each in holders)
        if key == self._loaded_for and not again:
            return
        state = self._session.state
        self._holders = [
            (
                state.index.rollout(each.rollout).plan.isolate,
                tuple(await state.store.load_steps(each.rollout, each.node)),
            )
            for each in holders
        ]
        self._loaded_for = key

    def held(self) -> Mapping[str, Any]:
        """Return which isolators of this rollout's plan the others hold, with the state before them."""
        return held_isolators(self._session.plan.isolate, self._holders) if self._holders else {}

    def _other_holders(self) -> list[Target]:
        session = self._session
        others = session.state.index.targets_on(session.node)
        found = [each for each in others if each.isolated and each.rollout != session.rollout]
        return sorted(found, key=lambda each: (each.admitted_at, each.rollout))
