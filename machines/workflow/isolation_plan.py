"""Isolation with traffic probes: cordon, probe again, drain.

Traffic may reach a node between the probe that admitted it and its isolation.  So every isolator that can
cordon does only that first: it keeps new work away and evicts nothing.  Then the probes run again.  Traffic
that they find aborts the isolation; otherwise the isolators run in full.  A probe runs directly before an
isolator that cannot cordon, and once more before the playbook: traffic that an isolator did not keep away
aborts the isolation as well.

All of it is read from the records of the attempt, so a daemon that was killed in between continues here.
Whether a recorded APPLY was a cordon or a full isolation follows from its place before or after the probe
that found the node idle.  A rollback is a person's order and is not probed; after an aborted isolation it
waits and is probed like any node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machines.model.actions import Action, Probe, retry_wait
from machines.model.causes import Causes, said
from machines.model.plan import Capability, Plan, StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.workflow.records import isolated_in_earlier_attempt
from machines.workflow.steps import UNKNOWN_MAX_TRIES, UNKNOWN_RETRY_S

PROBE_MAX_AGE_S = 15.0
"""Maximum age of a probe result when work is evicted: the next step follows within a second, or some on a
slow day.
"""

REPROBE_S = 30.0
"""Delay before the next probe of a busy node that must stay isolated."""


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """One attempt at one node; without `probes` the node counts as idle.

    `records` are those of the attempt, oldest first.  `must_stay_isolated`: the node failed in an earlier
    attempt and must not return to service; its traffic is waited for instead.
    """

    probes: Sequence[StepDef]
    records: Sequence[StepRecord]
    now: float
    must_stay_isolated: bool

    @classmethod
    def from_records(
        cls, plan: Plan, target: Target, records: Sequence[StepRecord], now: float
    ) -> IsolationPlan:
        is_ordered_rollback = target.rolling_back and not target.aborted_isolations
        probes = () if is_ordered_rollback else plan.traffic
        attempt_records = [record for record in records if probes and record.attempt == target.attempt]
        must_stay_isolated = bool(probes) and isolated_in_earlier_attempt(plan.isolate, target, records)
        return cls(probes, attempt_records, now, must_stay_isolated)

    def is_cordon_due(self) -> bool:
        """Return whether the isolators that can cordon do only that, until the node was found idle."""
        return not self._was_idle_before(len(self.records))

    def is_cordon_only(self, record: StepRecord) -> bool:
        """Return whether this APPLY came before the probe, and so evicted nothing."""
        return bool(self.probes) and not self._was_idle_before(self.records.index(record))

    def traffic_found(self) -> Causes:
        """Return the traffic for which the isolation is aborted, nothing for none."""
        if self.must_stay_isolated:
            return ()
        for probe in self.probes:
            results = self._probe_records(probe)
            if results and (results[-1].state is StepState.BUSY or _are_retries_exhausted(results)):
                return said(results[-1].text)
        return ()

    def final_probe(self) -> Action | None:
        """Return the probe that must run between the last isolator and the playbook, None when none must."""
        applied = [n for n, record in enumerate(self.records) if record.action is StepAction.APPLY]
        return self._first_probe(self.records[applied[-1] :] if applied else self.records)

    def required_probe(self, spec: StepDef) -> Action | None:
        """Return the probe that must run before this isolator, None when none must."""
        if Capability.CORDON_ONLY in spec.capabilities and self._is_evicting(spec):
            return None
        return self._first_probe(self.records)

    def _first_probe(self, valid: Sequence[StepRecord]) -> Action | None:
        actions = (self._next_probe(probe, valid) for probe in self.probes)
        return next((action for action in actions if action is not None), None)

    def _next_probe(self, probe: StepDef, valid: Sequence[StepRecord]) -> Action | None:
        """Return what a probe needs until one of the `valid` records says that the node is idle now."""
        results = self._probe_records(probe)
        if not results:
            return Probe(probe, 1)
        latest = results[-1]
        if latest.state is StepState.OK:
            # One from the future is from before the clock was set back: its age is unknown.
            is_fresh = 0.0 <= self.now - latest.at < PROBE_MAX_AGE_S and latest in valid
            return None if is_fresh else Probe(probe, latest.number + 1)
        is_conclusive = latest.state is StepState.BUSY or _are_retries_exhausted(results)
        delay_s = REPROBE_S if is_conclusive else UNKNOWN_RETRY_S
        return retry_wait(latest, delay_s, self.now) or Probe(probe, latest.number + 1)

    def _is_evicting(self, spec: StepDef) -> bool:
        """Return whether this isolator has answered since the probe: eviction has already begun."""
        return any(
            record.step == spec.name
            and record.action is StepAction.APPLY
            and record.state is not StepState.INTENDED
            and not self.is_cordon_only(record)
            for record in self.records
        )

    def _was_idle_before(self, position: int) -> bool:
        """Return whether every probe had found the node idle before this position of the records."""
        idle = {r.step for r in self.records[:position] if r.state is StepState.OK}
        return all(probe.name in idle for probe in self.probes)

    def _probe_records(self, probe: StepDef) -> list[StepRecord]:
        return [r for r in self.records if r.step == probe.name and r.action is StepAction.INSPECT]


def _are_retries_exhausted(results: Sequence[StepRecord]) -> bool:
    """Return whether the last probes all gave no answer, as often as a retry is worth it."""
    last = results[-UNKNOWN_MAX_TRIES:]
    inconclusive = (StepState.UNKNOWN, StepState.FAILED)
    return len(last) == UNKNOWN_MAX_TRIES and all(record.state in inconclusive for record in last)
