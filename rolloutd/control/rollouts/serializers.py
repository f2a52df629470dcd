"""Serializers from the core's values to the API's JSON shapes.

They decide nothing: instants become RFC 3339, absent becomes null.  A rollout's
status reads running counts, so it costs the same for ten nodes as for ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from heapq import nsmallest
from typing import Any, cast

from machines.facts.counters import PoolCounters, percent_done
from machines.facts.index import Index
from machines.facts.pool_index import Pool
from machines.model.node import natural_sort_key
from machines.model.reasons import Param, Reason
from machines.model.rollout import Rollout, Target
from machines.scheduler.progress import RolloutProgress, rollout_progress
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control import formats
from rolloutd.control.daemons.runner_serializers import current_runner
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.rollouts import coverage, gate_serializers, wire
from rolloutd.control.trains.train_serializers import rollout_train
from rolloutd.engine.state import State, StepProgress
from rolloutd.ports import ClosedRollout
from rolloutd.texts import reason_text
from rolloutd.texts.formats import describe_source

NO_PROGRESS = StepProgress()

INSTANT_PARAMS = frozenset({"at", "since", "until"})
"""Reason params that are instants (epoch seconds), as are all whose name ends in `_at`."""


MAX_KEPT_NODES = 5
"""Nodes of an ended rollout that a status names."""


def kept_slots(index: Index) -> list[wire.KeptSlots]:
    """Return which ended rollouts still hold slots; by their counters, as a status costs no look at nodes."""
    kept = []
    for each in index.rollouts.values():
        counters = index.counters(each.id)
        if each.closed and (nodes := counters.failed | counters.kept_isolated):
            first = nsmallest(MAX_KEPT_NODES, nodes, key=natural_sort_key)
            kept.append(wire.KeptSlots(rollout=each.id, nodes=first, total=len(nodes)))
    return kept


def reason(found: Reason | None) -> wire.Reason | None:
    if found is None:
        return None
    return {
        "code": found.code,
        "text": reason_text.describe(found),
        "since": formats.format_optional_timestamp(found.since),
        "lifted_by": reason_text.lifted_by(found) or None,
        "subject": found.subject,
        "params": _params(found.params),
        "remedy": None
        if found.remedy is None
        else {
            "kind": found.remedy.kind,
            "command": reason_text.command(found.remedy),
            "who": reason_text.describe_who(found.remedy),
            "until": formats.format_optional_timestamp(found.remedy.until),
        },
    }


def _params(params: Mapping[str, Param]) -> dict[str, Any]:
    """Return a reason's params with RFC 3339 instants."""
    return {key: _param(key, value) for key, value in params.items()}


def _param(key: str, value: Param) -> object:
    match value:
        case float() | int() if key in INSTANT_PARAMS or key.endswith("_at"):
            return formats.format_timestamp(value)
        case tuple():
            return [_param(key, each) for each in value]
        case Mapping():
            return _params(value)
        case _:
            return value


def source(pinned: Mapping[str, str]) -> wire.Source:
    return {
        "kind": pinned["kind"],
        "pin": pinned["pin"],
        "requirements": pinned.get("requirements"),
        "url": pinned.get("url"),
        "ref": pinned.get("ref"),
        "ref_kind": pinned.get("ref_kind"),
        "text": describe_source(pinned),
    }


class RolloutRows:
    """The lists of a rollout's last status."""

    def __init__(self) -> None:
        self.in_flight = formats.KeptRows[str, wire.InFlight]()
        self.pools = formats.KeptRows[str, wire.Pool]()
        self.gates: gate_serializers.KeptGates = formats.KeptRows()


class KeptRollouts(dict[str, RolloutRows]):
    """By rollout, the lists of its last status."""


def rollout(
    state: State, answers: KeptAnswers, resolved: ResolvedRollout, covered: coverage.Coverage
) -> wire.Rollout:
    now = state.now()
    current, index = resolved.rollout, resolved.index
    latest = None if current.closed else _forecast_ahead(state.forecasts.get(current.id), now)
    progress = rollout_progress(index, current.id, now)
    kept = _kept_rows(state, answers.of(KeptRollouts), current.id)
    gates = gate_serializers.gates_of(kept.gates, index, current, now)
    return {
        **_summary(current, progress),
        "source": source(current.source),
        "wave": progress.wave or None,
        "failed": progress.failed,
        "drifted": len(index.counters(current.id).drifted),
        "pending": progress.pending,
        "in_flight": _in_flight(state, index.at(now), kept, current.id),
        "pools": _pools(index.at(now), kept, current.id),
        "gates": [gate for gate, _ in gates],
        "reason": reason(progress.reason),
        "work": work_left(latest, now),
        "votes_missing": 0 if current.closed else sum(missing for _, missing in gates),
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


def _kept_rows(state: State, kept: KeptRollouts, rollout: str) -> RolloutRows:
    """Return the lists of the rollout's last status; a rollout that only the store has keeps none."""
    if rollout not in state.index.rollouts:
        return RolloutRows()
    if rollout not in kept:
        for gone in kept.keys() - state.index.rollouts.keys():
            del kept[gone]
    return kept.setdefault(rollout, RolloutRows())


def _in_flight(state: State, index: Index, kept: RolloutRows, rollout: str) -> list[wire.InFlight]:
    targets, nodes, sources = index.targets_by_node(rollout), state.index.nodes, {}
    current = state.index.rollouts.get(rollout)
    # What the runner of a row depends on, with the node's labels.
    runners = (current and current.plan, state.index.limits.runners, len(state.runners) > 1)
    for node in formats.in_natural_order(kept.in_flight.keys(), index.counters(rollout).in_flight):
        live = _step_progress(state, target := targets[node])
        sources[node] = (target, live.step, live.run, nodes.get(node), runners)
    return kept.in_flight.update(sources, lambda node: in_flight(state, targets[node]))


def _pools(index: Index, kept: RolloutRows, rollout: str) -> list[wire.Pool]:
    counters = index.counters(rollout).pools
    pools = {name: index.pool(name) for name in sorted(counters)}
    sources = {name: (counters[name].version, pool.version) for name, pool in pools.items()}
    return kept.pools.update(sources, lambda name: _pool(index, counters[name], pools[name]))


def _pool(index: Index, counts: PoolCounters, pool: Pool) -> wire.Pool:
    return formats.fill(
        wire.Pool,
        counts,
        pool=pool.id,
        down=len(pool.down) + len(pool.unknown),
        unobserved=len(pool.unknown),
        max_unavailable=index.budget(pool),
    )


def _forecast_ahead(latest: Mapping[str, Any] | None, now: float) -> Mapping[str, Any] | None:
    """Return a forecast, None once its end has passed.

    On a busy machine the next one may take minutes, and an end in the past says nothing of what is left.
    """
    if latest is None or latest["ends_at"]["p90"] is None:
        return latest
    return latest if datetime.fromisoformat(latest["ends_at"]["p90"]).timestamp() > now else None


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
    if latest is None:
        return None
    keys = wire.ForecastSummary.__annotations__
    return cast("wire.ForecastSummary", {key: latest[key] for key in keys})


def minutes(slot_s: float, prepare_s: float) -> wire.Minutes:
    return {"slot": round(slot_s / 60.0, 2), "prepare": round(prepare_s / 60.0, 2)}


def rollout_line(index: Index, each: Rollout, now: float) -> wire.RolloutLine:
    summary = _summary(each, rollout_progress(index, each.id, now))
    return {**summary, "ended_at": formats.format_optional_timestamp(ended_at(each))}


def _summary(each: Rollout, progress: RolloutProgress) -> wire.RolloutSummary:
    return formats.fill(
        wire.RolloutSummary,
        progress,
        rollout=each.id,
        plan=each.plan.name,
        digest=each.digest.whole,
        percent=round(progress.percent, 2),
        submitted_by=each.submitted_by.name,
        submitted_at=formats.format_timestamp(each.submitted_at),
    )


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
        "submitted_at": formats.format_timestamp(each.submitted_at),
        "ended_at": formats.format_optional_timestamp(ended_at(each)),
    }


def in_flight(state: State, target: Target) -> wire.InFlight:
    live = _step_progress(state, target)
    return {
        "node": target.node,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "step": live.step or None,
        "percent": round(live.run.percent, 1) if live.step else None,
        "task": live.run.task or None,
        "runner": current_runner(state, target, live.step),
        "since": formats.format_timestamp(target.since),
        "admitted_at": formats.format_optional_timestamp(target.admitted_at),
    }


def _step_progress(state: State, target: Target) -> StepProgress:
    return state.step_progress.get((target.rollout, target.node), NO_PROGRESS)


def all_in_flight(state: State, rollout_id: str | None) -> list[wire.RolloutInFlight]:
    return [
        {**in_flight(state, target), "rollout": target.rollout}
        for target in state.index.needing_driver()
        if target.phase in IN_FLIGHT_PHASES and rollout_id in (None, target.rollout)
    ]


def ended_at(each: Rollout | ClosedRollout) -> float | None:
    return each.ended_at if each.cancelled is None else each.cancelled.at
