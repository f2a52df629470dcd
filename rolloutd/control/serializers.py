"""Serializers from the core's values to the API's JSON shapes.

They decide nothing: instants become RFC 3339, absent becomes null.  A rollout's
status reads running counts, so it costs the same for ten nodes as for ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from machines.facts.availability import observed_unavailability
from machines.facts.counters import percent_done
from machines.facts.index import Index
from machines.model.node import NodeHealth, Observation
from machines.model.plan import Digest
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Failure, Rollout, Target, Verdict
from machines.model.selector import parse_selector
from machines.model.timefmt import format_rfc3339
from machines.rules import trains
from machines.scheduler import decide
from machines.scheduler.progress import PoolProgress, RolloutProgress, rollout_progress, slot_s
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control import coverage, gate_serializers, wire, wire_audit, wire_fleet, wire_plans
from rolloutd.control.requests import NodesQuery, PageQuery
from rolloutd.control.train_serializers import rollout_train
from rolloutd.engine.state import State, StepProgress
from rolloutd.ports import AuditBase, AuditReport, ClosedRollout, RunnerStatus
from rolloutd.service.memory import memory_bytes
from rolloutd.texts import reason_text
from rolloutd.texts.formats import describe_source
from rolloutd.texts.reason_text import describe_differences, describe_mismatch

T = TypeVar("T")

NO_PROGRESS = StepProgress()

INSTANT_PARAMS = frozenset({"at", "since", "until"})
"""Reason params that are instants (epoch seconds), as are all whose name ends in `_at`."""


def format_timestamp(instant: float) -> str:
    """Return an instant (epoch seconds) as `2026-11-20T09:30:00.123Z`."""
    return format_rfc3339(instant, "milliseconds")


def format_optional_timestamp(instant: float | None) -> str | None:
    """Return an instant, or None if there is none; 0.0 means never."""
    return format_timestamp(instant) if instant else None


def reason(found: Reason | None) -> wire.Reason | None:
    if found is None:
        return None
    return {
        "code": found.code,
        "text": reason_text.describe(found),
        "since": format_optional_timestamp(found.since),
        "lifted_by": reason_text.lifted_by(found) or None,
        "subject": found.subject,
        "params": _params(found.params),
        "remedy": None
        if found.remedy is None
        else {
            "kind": found.remedy.kind,
            "command": reason_text.command(found.remedy),
            "who": reason_text.describe_who(found.remedy),
            "until": format_optional_timestamp(found.remedy.until),
        },
    }


def _params(params: Mapping[str, Param]) -> dict[str, Any]:
    """Return a reason's params with RFC 3339 instants."""
    return {key: _param(key, value) for key, value in params.items()}


def _param(key: str, value: Param) -> object:
    match value:
        case float() | int() if key in INSTANT_PARAMS or key.endswith("_at"):
            return format_timestamp(value)
        case tuple():
            return [_param(key, each) for each in value]
        case Mapping():
            return _params(value)
        case _:
            return value


def hashes(digest: Digest) -> wire_plans.Hashes:
    return cast("wire_plans.Hashes", asdict(digest))


def source(pinned: Mapping[str, str]) -> wire.Source:
    return {
        "kind": pinned["kind"],
        "pin": pinned["pin"],
        "url": pinned.get("url"),
        "ref": pinned.get("ref"),
        "ref_kind": pinned.get("ref_kind"),
        "text": describe_source(pinned),
    }


# -- rollouts -----------------------------------------------------------------


def rollout(state: State, resolved: ResolvedRollout, covered: coverage.Coverage) -> wire.Rollout:
    now = state.now()
    current, index = resolved.rollout, resolved.index
    latest = None if current.closed else state.forecasts.get(current.id)
    progress = rollout_progress(index, current.id, now)
    views = list(gate_serializers.gate_views(index, current, now))
    return {
        **_summary(current, progress),
        "source": source(current.source),
        "wave": progress.wave or None,
        "failed": progress.failed,
        "drifted": len(index.counters(current.id).drifted),
        "pending": progress.pending,
        "in_flight": [in_flight(state, target) for target in progress.in_flight],
        "pools": [
            cast("wire.Pool", {name: getattr(pool, name) for name in PoolProgress.__slots__})
            for pool in progress.pools
        ],
        "gates": [gate_serializers.gate(index, current, view, now) for view in views],
        "reason": reason(progress.reason),
        "work": work_left(latest, now),
        "votes_missing": 0 if current.closed else sum(map(gate_serializers.count_missing_votes, views)),
        "eta": None if latest is None else latest["ends_at"]["p90"],
        "forecast": forecast_summary(latest),
        "traffic_probes": coverage.traffic_probes(current.plan),
        "not_probed": covered.not_probed,
        "not_isolated": covered.not_isolated,
        "owner": current.plan.owner,
        "expected_s": index.expected_s(current.id),
        "prepared": None
        if progress.prepared is None
        else {"done": progress.prepared, "total": progress.total - progress.skipped},
        "forced_stages": [
            {"stage": stage.name, "nodes": list(stage.force_nodes)}
            for stage in current.prepare_stages
            if stage.force
        ],
        "minutes": minutes(progress.slot_s, progress.prepare_s),
        "train": rollout_train(index, current.id),
    }


def work_left(latest: Mapping[str, Any] | None, now: float) -> wire.Work | None:
    """Return the time from now to the end of a forecast; None without one, or where it never ends."""
    if latest is None or latest["ends_at"]["p50"] is None or latest["ends_at"]["p90"] is None:
        return None
    return span(now, latest["ends_at"])


def span(since: float, ends_at: Mapping[str, str]) -> wire.Work:
    """Return the seconds until p50 and p90, at least one: what is left is never nothing."""
    low, high = (datetime.fromisoformat(ends_at[side]).timestamp() - since for side in ("p50", "p90"))
    return {"low_s": max(1.0, round(low)), "high_s": max(1.0, round(high))}


def forecast_summary(latest: Mapping[str, Any] | None) -> wire.ForecastSummary | None:
    """Return a forecast without its nodes."""
    if latest is None:
        return None
    keys = wire.ForecastSummary.__annotations__
    return cast("wire.ForecastSummary", {key: latest[key] for key in keys})


def minutes(slot_s: float, prepare_s: float) -> wire.Minutes:
    return {"slot": round(slot_s / 60.0, 2), "prepare": round(prepare_s / 60.0, 2)}


def rollout_line(state: State, index: Index, each: Rollout, now: float) -> wire.RolloutLine:
    """Return a rollout of the index as a list shows it."""
    summary = _summary(each, rollout_progress(index, each.id, now))
    return {**summary, "ended_at": format_optional_timestamp(ended_at(each))}


def _summary(each: Rollout, progress: RolloutProgress) -> wire.RolloutSummary:
    return {
        "rollout": each.id,
        "plan": each.plan.name,
        "digest": each.digest.whole,
        "state": progress.state.value,
        "percent": round(progress.percent, 2),
        "total": progress.total,
        "done": progress.done,
        "skipped": progress.skipped,
        "rolled_back": progress.rolled_back,
        "submitted_by": each.submitted_by.name,
        "submitted_at": format_timestamp(each.submitted_at),
    }


def closed_rollout_line(each: ClosedRollout) -> wire.RolloutLine:
    """Return a closed rollout, which only the store has, as a list shows it."""
    counts = each.counts
    total = sum(counts.values()) - counts.get(Outcome.LEFT, 0)
    done = sum(counts.get(outcome, 0) for outcome in CARRIES_CHANGE)
    skipped = sum(counts.get(outcome, 0) for outcome in EXCEPTIONS)
    percent = percent_done(done, total, skipped, ended=each.cancelled is None)
    return {
        "rollout": each.id,
        "plan": each.name,
        "digest": each.digest.whole,
        "state": "done" if each.cancelled is None else "cancelled",
        "percent": round(percent, 2),
        "total": total,
        "done": done,
        "skipped": skipped,
        "rolled_back": counts.get(Outcome.ROLLED_BACK, 0),
        "submitted_by": each.submitted_by.name,
        "submitted_at": format_timestamp(each.submitted_at),
        "ended_at": format_optional_timestamp(ended_at(each)),
    }


def in_flight(state: State, target: Target) -> wire.InFlight:
    """Return a node in flight, with its current step."""
    live = state.step_progress.get((target.rollout, target.node), NO_PROGRESS)
    return {
        "node": target.node,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "step": live.step or None,
        "percent": round(live.run.percent, 1) if live.step else None,
        "task": live.run.task or None,
        "since": format_timestamp(target.since),
        "admitted_at": format_optional_timestamp(target.admitted_at),
    }


def all_in_flight(state: State, rollout_id: str | None) -> list[wire.RolloutInFlight]:
    """Return every node in flight, or those of one rollout."""
    return [
        {**in_flight(state, target), "rollout": target.rollout}
        for target in state.index.needing_driver()
        if target.phase in IN_FLIGHT_PHASES and rollout_id in (None, target.rollout)
    ]


def ended_at(each: Rollout | ClosedRollout) -> float | None:
    return each.ended_at if each.cancelled is None else each.cancelled.at


def runs(status: RunnerStatus) -> wire_fleet.Runs:
    """Return the runs on this machine."""
    return {
        "parallel": status.parallel,
        "active": status.active,
        "waiting": len(status.waiting),
        "forks": status.started["fork"],
        "new_processes": status.started["new process"],
        "fork_servers": len(status.servers),
        "fork_servers_bytes": memory_bytes(status.servers),
    }


# -- nodes --------------------------------------------------------------------


def node(state: State, resolved: ResolvedRollout, target: Target) -> wire.Node:
    """Return a node of a rollout."""
    return _node(state, resolved, target, blocking_reason(state, resolved, target))


def _node(state: State, resolved: ResolvedRollout, target: Target, blocker: Reason | None) -> wire.Node:
    live = state.step_progress.get((target.rollout, target.node), NO_PROGRESS)
    now, known = state.now(), resolved.index.preparations(target.rollout)
    return {
        "node": target.node,
        "team": target.team,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "wave": target.wave,
        "outcome": target.outcome.value if target.outcome is not None else None,
        "attempt": target.attempt,
        "isolated": target.isolated,
        "since": format_optional_timestamp(target.since),
        "step": live.step or None,
        "percent": round(live.run.percent, 1) if live.step else None,
        "reason": reason(blocker),
        "admitted_at": format_optional_timestamp(target.admitted_at),
        "minutes": minutes(
            slot_s(target, now), 0.0 if known is None else known.node_spent_s(target.node, now)
        ),
    }


def nodes(
    state: State,
    resolved: ResolvedRollout,
    query: NodesQuery,
    seq: int,
    among: Collection[str] | None = None,
) -> wire.Nodes:
    """Return nodes of a rollout with their reasons."""
    index, rollout, now = resolved.index, resolved.rollout.id, state.now()
    # Almost in order already, so that sorting 100,000 targets takes some milliseconds.
    in_order = sorted(index.targets(rollout), key=attrgetter("position"))
    begin = 0
    if query.after is not None:
        after = resolved.target(query.after)
        # Two targets may have one position.
        first = bisect_left(in_order, after.position, key=attrgetter("position"))
        begin = in_order.index(after, first) + 1
    selected = (
        each
        for each in islice(in_order, begin, None)
        if (among is None or each.node in among) and _is_selected(index, query, each)
    )
    # One more than the page has: it says whether another page follows.
    some = list(islice(selected, None if query.limit is None else query.limit + 1))
    targets, next_after = page(some, query, lambda target: target.node)
    blockers = decide.explain_rollout_nodes(index, rollout, now, [each.node for each in targets])
    live = {each.node: state.step_progress.get((each.rollout, each.node), NO_PROGRESS) for each in targets}
    reasons = (
        node_reason(index, each, blockers.get(each.node), live[each.node], state.runner_status, now)
        for each in targets
    )
    return {
        "nodes": [_node(state, resolved, each, why) for each, why in zip(targets, reasons, strict=True)],
        "seq": seq,
        "next": next_after,
    }


def _is_selected(index: Index, query: NodesQuery, target: Target) -> bool:
    """Return whether the query asks for the node; a node that left the inventory has no labels."""
    if query.phase is not None and target.phase.value not in query.phase.split(","):
        return False
    if query.pool is not None and query.pool not in target.pools:
        return False
    if query.selector is None:
        return True
    node = index.nodes.get(target.node)
    return parse_selector(query.selector).matches({} if node is None else node.labels)


def page(rest: Sequence[T], query: PageQuery, name_of: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """Return the first items up to the limit, and the name of the last one if more follow."""
    if query.limit is None or len(rest) <= query.limit:
        return rest, None
    return rest[: query.limit], name_of(rest[query.limit - 1])


def why(state: State, resolved: ResolvedRollout, target: Target) -> wire.NodeReason:
    """Return why a node does not move."""
    return {
        "node": target.node,
        "phase": target.phase.value,
        "reason": reason(blocking_reason(state, resolved, target)),
        "trouble": "; ".join(state.problems()) or None,
    }


def blocking_reason(state: State, resolved: ResolvedRollout, target: Target) -> Reason | None:
    """Return why a node does not move; None if it moves or is done."""
    now = state.now()
    blocker = decide.explain_node(resolved.index, resolved.rollout.id, target.node, now)
    live = state.step_progress.get((target.rollout, target.node), NO_PROGRESS)
    return node_reason(resolved.index, target, blocker, live, state.runner_status, now)


_OUTCOME_CODES = frozenset(ReasonCode(outcome.value) for outcome in Outcome)
"""Reasons of done nodes that wait for nothing."""


def node_reason(
    index: Index,
    target: Target,
    blocker: Reason | None,
    live: StepProgress,
    runner: RunnerStatus,
    now: float,
) -> Reason | None:
    """Return why the node waits; None for a node that moves or is done.

    The core knows why nodes do not start (`blocker`).  A node in flight waits for its
    isolators, its checks, its next observation, or for another run on this machine.
    """
    awaits_rollback = (
        target.phase is Phase.DONE and blocker is not None and blocker.code not in _OUTCOME_CODES
    )
    if target.phase in (Phase.PENDING, Phase.FAILED) or target.drift is not None or awaits_rollback:
        found = blocker
    else:
        is_in_flight = target.phase in IN_FLIGHT_PHASES
        found = _in_flight_reason(index, target, live, runner, now) if is_in_flight else None
    if found is None or found.remedy is None or found.remedy.until is None or found.remedy.until > now:
        return found
    # The instant has passed, and what was due then is under way.
    return replace(found, remedy=replace(found.remedy, until=None))


def _in_flight_reason(
    index: Index, target: Target, live: StepProgress, runner: RunnerStatus, now: float
) -> Reason | None:
    if live.awaited_sources:
        awaited, answer = {"sources": live.awaited_sources}, Remedy(RemedyKind.WAIT_FOR_INVENTORY)
        return Reason(ReasonCode.INVENTORY_AWAITED, target.node, awaited, live.since, answer)
    if target.node in runner.waiting:
        runs = {"active": runner.active, "parallel": runner.parallel}
        end_of_run = Remedy(RemedyKind.WAIT_FOR_RUN)
        return Reason(ReasonCode.RUNNER_FULL, target.node, runs, runner.waiting[target.node], end_of_run)
    if (shared := trains.outage_reason(index, target, now)) is not None:
        return shared
    params: dict[str, Param]
    isolation = Remedy(RemedyKind.WAIT_FOR_ISOLATION, until=live.isolation_deadline)
    if live.awaited_slot is not None:
        return replace(live.awaited_slot, remedy=isolation)
    if live.api_problem:
        params = {"detail": live.api_problem}
        remedy = isolation if target.phase is Phase.ISOLATING else Remedy(RemedyKind.WAIT_FOR_API)
        return Reason(ReasonCode.AWAITING_API, target.node, params, live.api_problem_since, remedy)
    if (waits := live.repeated_try) is not None:
        params = {"detail": waits.text, "tries": waits.tries}
        code = ReasonCode.NOT_RETURNED_YET if waits.is_return else ReasonCode.NOT_ISOLATED_YET
        deadline = isolation if target.phase is Phase.ISOLATING and not waits.is_return else None
        return Reason(code, target.node, params, waits.since, deadline)
    if live.failing_check:
        checks = {"step": live.step, "detail": live.failing_check}
        remedy = Remedy(RemedyKind.WAIT_FOR_CHECK, until=live.failing_check_until)
        return Reason(ReasonCode.NOT_PASSED_YET, target.node, checks, live.since, remedy)
    seen = observed_unavailability(index, target.node)
    if seen is None or not isinstance(seen.cause, Observation) or seen.cause.sight is not NodeHealth.UNKNOWN:
        return None
    return Reason(ReasonCode.NODE_UNKNOWN, seen.node, seen.params, seen.since, seen.remedy)


def failure(found: Failure) -> wire.Failure:
    return {
        "id": found.id,
        "node": found.node,
        "attempt": found.attempt,
        "step": found.step,
        "message": found.message,
        "at": format_timestamp(found.at),
        "code": found.code.value,
    }


def audit_export(base: AuditBase, directory: Path) -> wire_audit.AuditExport | None:
    return {"through": base.seq, "head": base.head, "directory": str(directory)} if base.seq else None


def audit_report(
    report: AuditReport, exported: wire_audit.AuditExport | None
) -> wire_audit.AuditVerification:
    chain, rows = report.chain, report.mismatches
    message = chain.message
    if chain.ok and report.anchor_problem:
        message = report.anchor_problem
    elif chain.ok and not report.ok:
        message = describe_differences(len(rows), len(report.unreadable), is_complete=report.is_complete)
    return {
        "ok": report.ok,
        "entries": chain.entries,
        "head": chain.head,
        "first_bad": chain.first_bad,
        "message": message,
        "mismatches": [
            {
                "subject": row.mismatch.subject,
                "kind": row.mismatch.kind.value,
                "scope": row.mismatch.scope,
                "columns": list(row.mismatch.columns),
                "restorable": row.is_restorable,
                "text": describe_mismatch(row.mismatch.subject, row.mismatch.kind, row.mismatch.columns),
            }
            for row in rows
        ],
        "unreadable": list(report.unreadable),
        "compared": report.compared,
        "exported": exported,
    }


def verdict(found: Verdict) -> wire_plans.Verdict:
    return {
        "id": found.id,
        "change": found.change,
        "class": ",".join(f"{key}={value}" for key, value in found.host_class.items()) or "all",
        "rollout": found.rollout,
        "node": found.node,
        "step": found.step,
        "text": found.text,
        "at": format_timestamp(found.at),
    }
