"""The forecast: when each node of each open rollout starts and is back, and what it waits for.

The scheduler is walked once with typical durations (walk.py); the draws keep its order (replay.py).  What it
assumes is in the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from machines.facts.projection import Projection
from machines.forecast import model
from machines.forecast.attempt import Attempt, NodeKey
from machines.forecast.bottleneck import bottleneck_of
from machines.forecast.replay import Draw, Replay
from machines.forecast.replay_builder import replay_of
from machines.forecast.timeline import Waits, own_bound
from machines.forecast.walk import HORIZON_S, Walk
from machines.model.events import Event
from machines.model.reasons import Param, ReasonCode
from machines.model.rollout import Rollout
from machines.model.step_record import StepRecord
from machines.model.train import TrainRemoved
from machines.states import Phase

Draws = Sequence[Draw]


def typical(durations: Sequence[float]) -> float:
    """Return the median of the durations: one that a step really took."""
    return durations[0] if len(durations) == 1 else sorted(durations)[(len(durations) - 1) // 2]


def forecast(
    index: Projection,
    now: float,
    durations: model.StepDurations,
    assumptions: model.Assumptions,
    *,
    draws: int,
    random: model.RandomSource,
    records: Mapping[NodeKey, Sequence[StepRecord]] | None = None,
    explain: str = "",
    later: Sequence[tuple[float, Event]] = (),
    failing: frozenset[NodeKey] = frozenset(),
) -> dict[str, model.RolloutForecast]:
    """Return a forecast for each open rollout, by its id; it changes nothing of the facts.

    All open rollouts are walked together, because they share pools.  `durations` has at least one value for
    each step; where every step has one, all draws are one.  `records` are the step records of the nodes at
    work, oldest first: without them, what such a node did before `now` is done again.  `explain` names the
    rollout whose bottleneck and train are judged, each by another walk.  `later` are events that happen at an
    instant of the walk, `failing` nodes whose next run fails once.
    """
    before = index.fork()
    before.advance(now)
    walk = Walk(before.fork(), now, durations, typical, assumptions, records or {}, later, failing)
    walk.run()
    replay = replay_of(walk, before)
    is_known = not assumptions.failure_rate and not any(item.drawn for item in replay.items)
    # A known future needs no draw: the walk is the forecast.
    drawn = [replay.walked()] if is_known else [replay.draw(random) for _ in range(draws)]
    found = {}
    for rollout in before.rollouts.values():
        if not rollout.closed:
            made = _forecast_of(before, rollout, walk, replay, drawn, draws)
            if rollout.id == explain and _is_complete(before, walk, rollout):
                bottleneck = bottleneck_of(before, walk, explain)
                made = replace(made, bottleneck=bottleneck, train=_train_forecast(before, walk, explain))
            found[rollout.id] = made
    return found


def _forecast_of(
    before: Projection,
    rollout: Rollout,
    walk: Walk,
    replay: Replay,
    drawn: Draws,
    draws: int,
) -> model.RolloutForecast:
    nodes = []
    total: Waits = {}
    targets = sorted(before.targets(rollout.id), key=lambda each: each.position)
    for target in targets:
        if target.phase is Phase.DONE and (rollout.id, target.node) not in replay.parts:
            continue
        node = _node_forecast(before, walk, replay, drawn, rollout.id, target.node)
        nodes.append(node)
        for code, seconds in node.waits.items():
            total[code] = total.get(code, 0.0) + seconds
    is_complete = _is_complete(before, walk, rollout)
    end = replay.ends[rollout.id]
    ends = [max(end.at(each), before.now) if is_complete else math.inf for _, each in drawn]
    return model.RolloutForecast(
        rollout=rollout.id,
        made_at=before.now,
        draws=draws,
        assumptions=_assumptions(walk, rollout, is_drawn=len(drawn) > 1),
        ends_at=spread(ends),
        work_s=spread([each - before.now for each in ends]),
        nodes=tuple(nodes),
        gates=tuple(
            model.GateForecast(gate, wave, spread([asked.at(each) for _, each in drawn]))
            for (name, gate, wave), asked in replay.gates.items()
            if name == rollout.id
        ),
        waits=total,
        stays_open=rollout.plan.drift_every_s is not None,
    )


def _train_forecast(before: Projection, walk: Walk, rollout: str) -> model.TrainForecast | None:
    """Return what the approved train of a rollout saves, by a walk without it."""
    train = before.train_of(rollout)
    if train is None:
        return None
    without = before.fork()
    without.apply(TrainRemoved(train.name, train.by, "", before.now))
    alone, together = walk.again(without).outages, walk.outages
    return model.TrainForecast(
        train.name, alone.count - together.count, alone.downtime_s - together.downtime_s
    )


def _is_complete(before: Projection, walk: Walk, rollout: Rollout) -> bool:
    targets = walk.index.targets(rollout.id)
    return all(target.phase is Phase.DONE for target in targets if target.node in before.nodes)


def _node_forecast(
    before: Projection,
    walk: Walk,
    replay: Replay,
    drawn: Draws,
    rollout: str,
    node: str,
) -> model.NodeForecast:
    never = model.Spread(None, None)
    if (rollout, node) not in replay.parts:
        target = walk.index.target(rollout, node)
        waits = walk.timeline.final_waits(walk.index, target, walk.now, walk.began_at + HORIZON_S)
        return model.NodeForecast(node, never, never, waits)
    first, last = replay.parts[rollout, node]
    is_done = walk.index.target(rollout, node).phase is Phase.DONE
    return model.NodeForecast(
        node,
        spread([starts[first] for starts, _ in drawn]),
        spread([ends[last] for _, ends in drawn]) if is_done else never,
        _waits(before, replay.items[first].attempt),
    )


def _waits(before: Projection, attempt: Attempt) -> Mapping[ReasonCode, float]:
    """Return what a node waits for: first its own hold, freeze or backoff, then what its group does.

    Then the slots of the runner, for which it waits while it is in flight.
    """
    waits = {} if attempt.is_running else dict(_waits_to_start(before, attempt))
    runner_s = attempt.runner_wait_s(before.now)
    return {**waits, ReasonCode.RUNNER_FULL: runner_s} if runner_s > 0.0 else waits


def _waits_to_start(before: Projection, attempt: Attempt) -> Mapping[ReasonCode, float]:
    until, code = own_bound(before, before.target(*attempt.key), before.now)
    group_s = sum(attempt.waits.values())
    if code is None or not group_s:
        return attempt.waits
    own_s = min(until - before.now, group_s)
    share = (group_s - own_s) / group_s
    waits = {each: seconds * share for each, seconds in attempt.waits.items() if share}
    waits[code] = waits.get(code, 0.0) + own_s
    return waits


def spread(values: Sequence[float]) -> model.Spread:
    """Return the median and the 90th percentile, by nearest rank; infinity is never."""
    ordered = sorted(values)
    ranks = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.9))
    p50, p90 = (None if math.isinf(each) else each for each in ranks)
    return model.Spread(p50, p90)


def _assumptions(walk: Walk, rollout: Rollout, *, is_drawn: bool) -> tuple[model.Assumption, ...]:
    assumed = walk.assumptions
    found = [
        model.Assumption(model.AssumptionCode.APPROVE_AFTER, {"after_s": assumed.approve_after_s}),
        model.Assumption(model.AssumptionCode.FAILURE_RATE, {"rate": assumed.failure_rate}),
    ]
    if not math.isinf(assumed.parallel_runs):
        longer = assumed.contention.stretch(assumed.parallel_runs) - 1.0
        runs: dict[str, Param] = {"runs": assumed.parallel_runs, "longer": longer}
        found.append(model.Assumption(model.AssumptionCode.PARALLEL_RUNS, runs))
    if walk.unhealthy:
        found.append(model.Assumption(model.AssumptionCode.NODES_HEALTHY, {"nodes": walk.unhealthy}))
    if rollout.plan.traffic:
        nodes = [target.node for target in walk.index.targets(rollout.id)]
        is_known = assumed.busy_s is not None and any(
            assumed.busy_s(rollout.id, node) is not None for node in nodes
        )
        history = model.Assumption(model.AssumptionCode.TRAFFIC_HISTORY, {"nodes": assumed.busy_nodes})
        found.append(history if is_known else model.Assumption(model.AssumptionCode.TRAFFIC_IDLE))
    if is_drawn and assumed.common_deviation.share:
        share: dict[str, Param] = {"share": assumed.common_deviation.share}
        found.append(model.Assumption(model.AssumptionCode.COMMON_DEVIATION, share))
    if is_drawn:
        found.append(model.Assumption(model.AssumptionCode.ORDER_OF_ONE_WALK))
    if walk.is_cut_off:
        found.append(model.Assumption(model.AssumptionCode.HORIZON, {"until": walk.began_at + HORIZON_S}))
    return tuple(found)
