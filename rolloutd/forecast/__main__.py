"""`python -m rolloutd.forecast`: one forecast, from a request on stdin to JSON on stdout."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from machines.facts.index import Index
from machines.facts.projection import Projection
from machines.forecast.forecast import forecast
from machines.forecast.model import Assumption, AssumptionCode, Assumptions, RolloutForecast
from machines.model.node import NodeHealth, Observation
from machines.model.plan import Plan
from machines.model.reasons import Param
from machines.states import IN_FLIGHT_PHASES, Phase
from rolloutd.errors import Refused, RolloutdError
from rolloutd.forecast.answer import JSON, difference, forecast_answer
from rolloutd.forecast.history import StepHistory, begun_at, failure_rate
from rolloutd.forecast.request import Draft, ForecastRequest
from rolloutd.forecast.what_if import Changed, apply_what_if
from rolloutd.settings.compile import compile_plan
from rolloutd.store import Store, open_store
from rolloutd.texts.formats import suggest_name

NICENESS = 19
"""The lowest priority: a forecast must not slow a run down."""

CPU_LIMIT_S = 300
"""Processor time of one forecast: twice what 100,000 nodes take."""

MEMORY_LIMIT_BYTES = 2 * 1024**3
"""Address space of one forecast: several times what 100,000 nodes take."""

MAX_NODE_DRAWS = 4_000_000
"""Draws of all nodes together, twice those of 10,000 nodes: some ten seconds of processor time."""

MIN_DRAWS = 20
"""Of fewer draws the 90th percentile is one of the two last ones."""

MAX_EXPLAINED_NODES = 20_000
"""Nodes ahead of which the bottleneck is searched: it takes a second walk."""

MAX_DEADLINE_NODES = 1_000
"""Nodes ahead with which a vote's deadline is searched: it takes some fifteen walks."""

DELAYS_S = (3_600.0, 4 * 3_600.0, 12 * 3_600.0, 86_400.0, 3 * 86_400.0, 7 * 86_400.0)
"""Delays of a vote that are tried, the shortest first."""

MIN_COST_S = 1_800.0
"""A vote costs something when the rollout ends by so much later than the vote is late."""

DEADLINE_PRECISION_S = 300.0

NODES_PER_LINE = 200
"""Nodes of one line: the daemon reads it within a millisecond."""

MAX_SAMPLES = 50_000
"""Step records that the durations are taken from, the latest ones."""


def main() -> int:
    """Answer the request; an error is JSON too."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    request: ForecastRequest = pickle.load(sys.stdin.buffer)  # noqa: S301  # our own daemon wrote it
    gc.disable()  # the facts have no cycles that matter, and this process ends at once
    sys.stdout.write(asyncio.run(_answer_from_store(request)))
    return 0


async def _answer_from_store(request: ForecastRequest) -> str:
    try:
        store = await open_store(
            request.state_dir, request.postgresql, compile_plan=compiler_of(request), read_only=True
        )
    except RolloutdError as error:
        return f"{json.dumps({'error': str(error)})}\n"
    try:
        return await answer_text(request, store)
    finally:
        await store.close()


def compiler_of(request: ForecastRequest) -> Callable[[Mapping[str, Any]], Plan]:
    return partial(compile_plan, teams=request.teams)


async def answer_text(request: ForecastRequest, store: Store) -> str:
    """Return the lines that answer a request; an error is a line too."""
    lines: Iterable[JSON]
    try:
        lines = [line for answer in await _answers(request, store) for line in _lines(answer)]
    except Refused as refused:
        lines = [{"refused": {"code": refused.code, "text": refused.text}}]
    except RolloutdError as error:
        lines = [{"error": str(error)}]
    except MemoryError:
        lines = [{"error": "forecast: it needs too much memory; ask for fewer draws"}]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _lines(answer: JSON) -> Iterator[JSON]:
    """Yield an answer without its nodes, then these in slices, because the daemon reads line by line."""
    parts = {"forecast": answer, **({"changed": answer["changed"]} if "changed" in answer else {})}
    nodes = {name: part["nodes"] for name, part in parts.items()}
    for part in parts.values():
        part["nodes"] = []
    yield answer
    for name, every in nodes.items():
        for first in range(0, len(every), NODES_PER_LINE):
            yield {"nodes_of": name, "nodes": every[first : first + NODES_PER_LINE]}


async def _answers(request: ForecastRequest, store: Store) -> list[JSON]:
    """Return the forecasts that are asked for, in the order of the rollouts."""
    index = Projection.build(await store.load_snapshot(), request.limits, compiler_of(request))
    index.advance(request.now)
    names = (node for node in index.nodes if node not in request.not_up)
    index.record_observations([Observation(node, NodeHealth.UP, request.now) for node in names], request.now)
    if request.draft is not None:
        index.load_rollout(request.draft.rollout, request.draft.targets)
        for event in request.draft.train:
            index.apply(event)
    return [await _Answer(store, index, request, each).make() for each in _wanted(index, request)]


def _wanted(index: Projection, request: ForecastRequest) -> list[str]:
    open_rollouts = [each.id for each in index.rollouts.values() if not each.closed]
    if request.draft is not None:
        return [request.draft.rollout.id]
    for name in request.rollouts:
        if name not in open_rollouts:
            action = suggest_name(name, open_rollouts, "see rolloutctl status")
            raise Refused("not-open", f"{name}: it is not open, so nothing is ahead; {action}")
    return list(request.rollouts) or open_rollouts


class _Answer:
    def __init__(self, store: Store, index: Projection, request: ForecastRequest, rollout: str) -> None:
        self._store, self._index, self._request, self._rollout = store, index, request, rollout

    async def make(self) -> JSON:
        request = self._request
        samples = await self._store.load_step_durations(MAX_SAMPLES)
        busy_times = await self._store.load_busy_times(MAX_SAMPLES)
        self._history = StepHistory(self._index, samples, request.host_class, busy_times, request.run_load)
        self._records = await self._load_records()
        rate = request.failure_rate
        if rate is None:
            rate = failure_rate(
                *await self._store.count_attempts(self._index.rollout(self._rollout).plan.name)
            )
        self._assumptions = Assumptions(
            request.approve_after_s,
            rate,
            self._history.busy_s,
            self._history.busy_nodes,
            parallel_runs=request.parallel_runs,
            contention=self._history.contention,
            common_deviation=self._history.common_deviation(self._rollout),
            are_samples=True,
        )
        ahead = _nodes_ahead(self._index)
        self._draws = min(request.draws, max(MIN_DRAWS, MAX_NODE_DRAWS // max(1, ahead)))
        self._explained = self._rollout if ahead <= MAX_EXPLAINED_NODES else ""
        self._omissions: list[Assumption] = []
        if self._draws < request.draws:
            fewer: dict[str, Param] = {"draws": self._draws, "nodes": ahead}
            self._omissions.append(Assumption(AssumptionCode.FEWER_DRAWS, fewer))
        if not self._explained:
            self._omissions.append(Assumption(AssumptionCode.NO_BOTTLENECK, {"nodes": ahead}))
        now = Changed(self._index, request.now, (), frozenset())
        before = self._walk(now)
        answer = forecast_answer(self._index, before, request.seed, self._vote_deadline(before))
        if not request.what_if:
            return answer
        content = await self._content(request.draft)
        changed = apply_what_if(
            self._index, request.what_if, request.teams, self._rollout, content, request.now
        )
        after = self._walk(changed)
        return {
            **answer,
            "changed": forecast_answer(changed.index, after, request.seed),
            "difference": difference((before.ends_at, after.ends_at)),
        }

    def _vote_deadline(self, before: RolloutForecast) -> tuple[float, float] | None:
        """Return until when a yes at the gate that waits now costs nothing, and what one costs after that.

        None if nothing waits for a vote alone, or if no delay within a week costs more than itself.
        """
        if self._request.draft is not None:
            return None  # people vote for what is submitted
        now = self._request.now
        is_asked = any(gate.asked_at.p50 is not None and gate.asked_at.p50 <= now for gate in before.gates)
        is_alone = not self._index.counters(self._rollout).in_flight
        if (
            not is_asked
            or not is_alone
            or before.ends_at.p50 is None
            or len(before.nodes) > MAX_DEADLINE_NODES
        ):
            return None

        def cost_s(delay_s: float) -> float:
            later = self._walk(Changed(self._index, now + delay_s, (), frozenset()), draws=1)
            end, first = later.ends_at.p50, before.ends_at.p50
            assert first is not None
            return float("inf") if end is None else end - first - delay_s

        low, high = 0.0, next((each for each in DELAYS_S if cost_s(each) > MIN_COST_S), None)
        if high is None:
            return None
        costs_s = cost_s(high)
        while high - low > DEADLINE_PRECISION_S:
            middle = (low + high) / 2
            low, high = (low, middle) if cost_s(middle) > MIN_COST_S else (middle, high)
        return (now + low, costs_s) if costs_s != float("inf") else None

    async def _content(self, draft: Draft | None) -> Mapping[str, Any]:
        return draft.content if draft is not None else (await self._store.load_plan(self._rollout))[0]

    async def _load_records(self) -> dict[tuple[str, str], Any]:
        at_work = [target for target in self._index.needing_driver() if target.phase in IN_FLIGHT_PHASES]
        found = {}
        for target in at_work:
            key = (target.rollout, target.node)
            records = await self._store.load_steps(*key, target.attempt)
            found[key] = begun_at(records, self._request.run_starts.get(key))
        return found

    def _walk(self, facts: Changed, draws: int | None = None) -> RolloutForecast:
        found = forecast(
            facts.index,
            facts.now,
            self._history.over(facts.index).durations,
            self._assumptions,
            draws=draws or self._draws,
            random=Random(self._request.seed),  # noqa: S311  # draws, not secrets
            records=self._records,
            explain="" if draws else self._explained,
            later=facts.later,
            failing=facts.failing,
        )
        made = found[self._rollout]
        return replace(made, assumptions=(*made.assumptions, *self._omissions))


def _nodes_ahead(index: Index) -> int:
    """Return how many nodes of all open rollouts are not done, because they are walked together."""
    return sum(
        target.phase is not Phase.DONE
        for rollout in index.rollouts.values()
        if not rollout.closed
        for target in index.targets(rollout.id)
    )


if __name__ == "__main__":
    sys.exit(main())
