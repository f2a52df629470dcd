"""Known bugs of the daemon: the simulation must find every one (`python -m tests.sim.mutants [NAME...]`).

The simulation that finds a bug must pass without it, so that it is the bug that was found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Final

from machines.facts import availability, node_work, votes
from machines.facts.node_work import WorkKind
from machines.invariants import violations
from machines.model.preparation import PrepareStage
from machines.model.rollout import Failure
from machines.rules import parallelism, pools, rollbacks, runners, start_blockers
from machines.scheduler import decided_events, expiry, isolation_aborts, stage_admission
from machines.workflow.isolation_plan import IsolationPlan
from machines.workflow.next_action import _Reconciler
from machines.workflow.outage import Outage
from rolloutd.commands import submit
from rolloutd.configuration import target_values
from rolloutd.engine.background import inventory_conflicts, inventory_identity
from rolloutd.engine.background.audit_monitor import AuditMonitor
from rolloutd.engine.background.dry_runs import _wait_until_unblocked
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.background.inventory_sources import SourceReader
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers import guard_steps
from rolloutd.engine.drivers.driver import Driver
from rolloutd.engine.drivers.isolation import Isolation
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.drivers.run_execution import RunExecution
from rolloutd.engine.preparation import node_stages, staged_files
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.plugin import templates
from rolloutd.store import retention_queries
from rolloutd.store.audit_checkpoint import AuditCheckpoint
from tests.sim.__main__ import run_many, run_one, small_names
from tests.support.mutation import Mutant
from tests.support.note_change import note_installed

_blames_change = Failure.blames_change.fget
_is_shared = Outage.is_shared.fget

MUTANT_SEEDS = 400
"""Seeds within which every bug is found; most are found within twenty."""


def _open_cell(wanted: WorkKind, present: WorkKind) -> Mutant:
    """Return the bug that work of one kind does not wait for that of another."""
    return Mutant(
        f"{wanted}-begun-beside-{present}",
        node_work.conflicts,
        "work.kind not in WAITS_FOR[wanted]",
        f"work.kind not in WAITS_FOR[wanted] or (wanted, work.kind) == ({wanted.value!r}, {present.value!r})",
    )


MUTANTS = (
    Mutant(
        "change-begun-with-an-old-token",
        State.fence_token,
        'f"{self.epoch}.{self.changes.latest_seq} {await self.database_id()} {int(self.now())}"',
        'f"1.1 {await self.database_id()} {int(self.now())}"',
    ),
    Mutant(
        "change-undone-by-what-the-plan-says",
        _Reconciler.start,
        '"" if undone is None else undone.prior',
        '""',
    ),
    Mutant(
        "state-before-a-change-not-recorded",
        RunExecution._with_previous,
        "replace(record, prior=previous)",
        "record",
    ),
    Mutant(
        "more-clusters-started-than-workers",
        runners.runner_blocker,
        "in_flight >= rule.parallel",
        "in_flight > rule.parallel",
    ),
    Mutant(
        "unready-targets-not-counted",
        parallelism.unready_nodes,
        "target.phase is Phase.FAILED or _is_unready(index, target)",
        "target.phase is Phase.FAILED",
    ),
    Mutant(
        "values-read-again-at-the-start",
        target_values.params_for,
        "plan.values.get(host.name)",
        "None",
    ),
    Mutant(
        "target-with-other-values-started",
        start_blockers._values_blocker,
        "index.changed_values.get((rollout.id, target.node))",
        "None",
    ),
    Mutant(
        "values-of-failed-targets-not-compared",
        InventoryRefresher._compare_values,
        "targets = index.targets_by_node(rollout)",
        "targets = {name: each for name, each in index.targets_by_node(rollout).items()"
        " if each.phase.value == 'pending'}",
    ),
    Mutant(
        "cluster-started-before-its-control-plane",
        inventory_conflicts._status_conflicts,
        "value.lower() in ports.OUT_OF_SERVICE",
        "value.lower() == 'offline'",
    ),
    Mutant(
        "bootstrap-refused-by-the-invariants",
        violations._node_violation,
        "_is_new_cluster(facts, target, now)",
        "False",
    ),
    Mutant(
        "broken-cluster-holds-no-slot",
        availability._counted_outage,
        "not worked_at or is_unrelated",
        "True",
    ),
    Mutant(
        "carry-over-judged-before-the-lock",
        Driver._transition,
        "await self._state.commit_decided(decide, cause=text or action.trigger.value)",
        "await self._state.commit(decide(), cause='before the lock')",
    ),
    Mutant(
        "cause-of-an-abort-kept-by-its-driver",
        Driver._next_action,
        "self._state.index.record_abort(self.rollout, self.node, action.causes)",
        "None",
    ),
    Mutant(
        "deadline-extended-by-more-than-downtime",
        expiry.extend_deadlines,
        "target.downtime_s + now - max(silent_since, target.since)",
        "target.downtime_s + now - target.since",
    ),
    Mutant(
        "downtime-counts-against-the-isolation",
        expiry.extend_deadlines,
        "target.downtime_s + now - max(silent_since, target.since)",
        "target.downtime_s",
    ),
    Mutant(
        "install-knows-nothing-of-its-artifacts",
        PrepareStage._staged_for,
        "self.reads",
        "()",
    ),
    Mutant(
        "checkpoint-trusted-without-its-digest",
        AuditCheckpoint.find_difference,
        "self._head_difference(record) or self._rows_difference(record)",
        "self._head_difference(record)",
    ),
    Mutant(
        "clean-forgets-what-a-later-rollout-skipped",
        retention_queries.find_changes_in_effect,
        "_IN_EFFECT",
        "_IN_EFFECT.replace('OR EXISTS', 'AND NOT EXISTS')",
    ),
    Mutant(
        "staged-file-trusted-for-its-checkpoint",
        staged_files.compare_stages,
        "await staged_files.compare(host, wanted, timeout_s=timeout_s)",
        "dict[str, str]()",
    ),
    Mutant("done-stage-prepared-again", node_stages._is_done, "True", "by_this_rollout"),
    Mutant(
        "decision-of-all-rollouts-in-one-commit",
        decided_events.events_of,
        "rollout_of",
        "lambda event: 'all'",
    ),
    Mutant(
        "facts-after-the-listeners",
        State._write,
        """
        await self._apply(events, successor)
        for listener in self.commit_listeners:
            try:
                listener(events, commit_s)
            except Exception as error:
                log.exception("commit listener: %r; it misses a commit", error)
        """,
        """
        for listener in self.commit_listeners:
            listener(events, commit_s)
        await self._apply(events, successor)
        """,
    ),
    Mutant("foreign-cordon-undone", Isolation.undo, "action.prior", "{'isolated': False}"),
    Mutant(
        "forged-rows-not-blocked",
        AuditMonitor._record,
        "[row.mismatch for row in report.mismatches]",
        "()",
    ),
    Mutant(
        "install-not-first-on-one-node-alone",
        stage_admission._is_alone,
        "not known.is_proven(stage)",
        "False",
    ),
    Mutant(
        "job-error-ends-the-daemon",
        BackgroundJobs._run_reported,
        "Exception",
        "KeyError",
    ),
    Mutant(
        "job-needs-its-rollout",
        NodeSession._require_rollout,
        "self.rollout not in self.state.index.rollouts",
        "False",
    ),
    Mutant("job-needs-its-isolator", _wait_until_unblocked, "next(specs, None)", "next(specs)"),
    Mutant("lost-node-condemns-its-content", _blames_change, "self.code in BLAMES_CHANGE", "True"),
    Mutant(
        "outcome-recorded-before-the-act",
        Isolation.undo,
        """
        if spec.name in self._others.held():
            result = Ok(SHARED_TEXT)
        else:
            isolator = self._session.adapters.isolators[spec.kind]
            result = await self._session.capture_errors(isolator.return_to_service(ctx), of=spec)
        await self._journal.finish(record, result, isolated=is_isolated_after(action, result))
        """,
        """
        await self._journal.finish(record, Ok("undone"), isolated=False if action.is_last else None)
        isolator = self._session.adapters.isolators[spec.kind]
        await self._session.capture_errors(isolator.return_to_service(ctx), of=spec)
        """,
    ),
    Mutant(
        "over-budget-reason-kept-for-ever",
        isolation_aborts.record_giving_way,
        "facts.record_over_budget(over_budget)",
        "facts.record_over_budget({**facts._over_budget, **over_budget})",
    ),
    Mutant(
        "over-budget-reason-lost-at-a-restart",
        Daemon.run,
        "record_giving_way(self._state.index, decision)",
        "None",
    ),
    Mutant(
        "over-budget-reason-not-recorded",
        isolation_aborts.record_giving_way,
        "facts.record_over_budget(over_budget)",
        "None",
    ),
    Mutant(
        "processes-left-on-the-node-forgotten",
        RunExecution.clean_up_stale_runs,
        "isinstance(result, Ok)",
        "True",
    ),
    Mutant(
        "restart-forgets-admitted-nodes",
        Daemon._update_drivers,
        "key in self._drivers",
        "key in self._drivers or target.since < self._started_at",
    ),
    Mutant(
        "stage-begun-on-too-many-nodes",
        stage_admission._free_places,
        "stage.max_parallel",
        "stage.max_parallel + 1",
    ),
    _open_cell(WorkKind.ATTEMPT, WorkKind.CHECK_MODE),
    _open_cell(WorkKind.ATTEMPT, WorkKind.RELEASE),
    _open_cell(WorkKind.CHECK_MODE, WorkKind.CHECK_MODE),
    _open_cell(WorkKind.CLEANING, WorkKind.CHECK_MODE),
    _open_cell(WorkKind.CLEANING, WorkKind.HOLD),
    _open_cell(WorkKind.STAGE, WorkKind.HOLD),
    Mutant("dead-node-stops-all-rollbacks", rollbacks._stops_rollbacks, "not is_dead", "True"),
    Mutant(
        "label-unquoted-in-commands",
        templates._in_command,
        "shlex.quote(str(value))",
        "str(value)",
    ),
    Mutant(
        "values-of-sources-rendered",
        SourceReader._valid_node,
        "ports.without_templates(node.connection)",
        "node.connection",
    ),
    Mutant(
        "node-returned-between-two-changes",
        _is_shared,
        "self.peers or self.joiner",
        "self.joiner",
    ),
    Mutant(
        "next-change-begun-before-checks-passed",
        node_work.may_share_outage,
        "not (progress.has_passed and progress.waits)",
        "False",
    ),
    Mutant(
        "slot-of-shared-outage-counted-twice",
        pools.pool_without_slot,
        "len(pool.down) + reserved_count - (node in pool.down)",
        "len(pool.down) + reserved_count",
    ),
    Mutant(
        "slot-given-up-by-the-first-change",
        availability.unavailability,
        "facts.targets_on(node)",
        "tuple(facts.targets_on(node))[:1]",
    ),
    Mutant("rollback-of-oldest-first", rollbacks._in_order, "-target.since", "target.since"),
    Mutant(
        "restored-node-taken-for-confirmed",
        guard_steps._confirmed,
        "report.state is ports.GuardState.CONFIRMED",
        "report.state is not ports.GuardState.NONE",
    ),
    Mutant(
        "slot-freed-on-failure",
        availability._target_code,
        "UnavailabilityCause.FAILED",
        "None",
    ),
    Mutant(
        "successor-opened-before-its-done-nodes",
        submit.opening_events,
        "[*cancelled, opened, *current]",
        "[*cancelled, opened]",
    ),
    Mutant(
        "traffic-not-probed-again",
        IsolationPlan.required_probe,
        "self._first_probe(self.records)",
        "None",
    ),
    Mutant(
        "renamed-node-joins-as-new",
        inventory_identity.with_known_names,
        "{node.id: node for node in before if node.id}",
        "{node.id: node for node in before if node.id and node.name in objects}",
    ),
    Mutant(
        "vanished-node-in-flight-abandoned",
        InventoryRefresher._kept,
        "not is_kept and not self._is_in_flight(node.name)",
        "not is_kept",
    ),
    Mutant(
        "vote-counted-for-another-digest",
        votes.valid_votes,
        "vote.digest == rollout.digest_at(gate)",
        "True",
    ),
)


FOUND_AT: Final = Path(__file__).with_name("found_at.txt")
"""Where each bug was found last, which is tried first: that spares the hundred simulations before."""


def main() -> int:
    """Run the named mutants, or all of them; return 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description="Find planted bugs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to find (default: all)")
    parser.add_argument(
        "--refresh", action="store_true", help=f"write to {FOUND_AT.name} where they are found"
    )
    options = parser.parse_args()
    undetected = []
    for name in options.names or [mutant.name for mutant in MUTANTS]:
        simulation = find(name)
        if simulation is None:
            undetected.append(name)
        elif options.refresh:
            write_found({**read_found(), name: simulation})  # after each: a run of all takes minutes
    for name in undetected:
        print(f"{name}: NOT FOUND")
    return 1 if undetected else 0


def find(name: str) -> str | None:
    """Return the simulation that finds the bug, None unless it finds nothing without the bug."""
    (mutant,) = (each for each in MUTANTS if each.name == name)
    result = None
    if name in (found := read_found()):
        with mutant.applied():
            # In this process: others would begin the search meanwhile, mostly for nothing.
            result = run_one(found[name])
    if result is None or not result.violations:
        searched = _searched()
        with mutant.applied():
            result = next((each for each in run_many(searched) if each.violations), None)
    if result is None:
        return None
    print(f"{name}: {result.name}: {result.violations[0]}", flush=True)
    return None if run_one(result.name).violations else result.name


def _searched() -> list[str]:
    """Return all simulations in which a bug is searched."""
    seeds = (f"seed {seed}" for seed in range(MUTANT_SEEDS))
    # By turns: either kind finds some bugs at once, and others late or never.
    trains = (f"train {seed}" for seed in range(MUTANT_SEEDS))
    clusters = (f"clusters {seed}" for seed in range(MUTANT_SEEDS))
    turns = zip_longest(small_names("some"), seeds, trains, clusters)
    return [name for turn in turns for name in turn if name is not None]


def read_found() -> dict[str, str]:
    """Return the simulation that found each bug last, by the bug's name."""
    lines = (line for line in FOUND_AT.read_text().splitlines() if not line.startswith("#"))
    return dict(line.split(": ", 1) for line in lines)


def write_found(found: Mapping[str, str]) -> None:
    """Write the simulations, without those of bugs that are no longer planted."""
    heading = FOUND_AT.read_text().splitlines()[0]
    planted = {mutant.name for mutant in MUTANTS}
    lines = [f"{name}: {simulation}" for name, simulation in sorted(found.items()) if name in planted]
    FOUND_AT.write_text("\n".join([heading, *lines, ""]))


if __name__ == "__main__":
    with note_installed():  # once: to register a kind builds the models of plans again
        sys.exit(main())
