"""What a forecast costs: 10,000 nodes in 100 pools, 200 draws with random durations, on one core.

The daemon's forecast of as many nodes runs in its process; measured is the loop's longest pause meanwhile.
Peers, in the same run: a plain event-queue simulation of the same, without rules (as many draws with as many
random numbers, and the same percentiles of each node), and one walk of the scheduler alone.
Prints JSON, then one line for people; with --json only the JSON.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import logging
import random
import resource
import sys
from array import array
from collections import deque
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._scale_fleet import measure_forecast, with_fleet
from bench.decide import T0, submit
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.projection import Projection
from machines.forecast.forecast import forecast, typical
from machines.forecast.model import Assumptions
from machines.forecast.walk import Walk
from machines.model.limits import Limits, PoolRule
from machines.model.node import Node, NodeHealth, Observation
from machines.model.plan import GateName, MaintainStage, Plan, StepDef, VoteRequirement, WaveDef
from machines.model.selector import parse_selector
from machines.model.step_record import StepAction

NODES = 10_000
POOLS = 100
DRAWS = 200
MAX_PARALLEL = 64
AIM_S = 30.0
AIM_MIB = 300.0
AIM_RATIO = 5.0
AIM_PAUSE_MS = 20.0

SOAK_S = 600.0
_samples = random.Random(1)
RUNS = tuple(_samples.uniform(200.0, 600.0) for _ in range(50))
CHECKS = tuple(_samples.uniform(2.0, 20.0) for _ in range(50))
ISOLATE_S = 5.0


def durations(rollout: str, node: str, step: str, action: StepAction) -> tuple[float, ...]:
    """Return what the history says of a step: two of the four vary."""
    return {StepAction.RUN: RUNS, StepAction.CHECK: CHECKS}.get(action, (ISOLATE_S,))


def fleet() -> Projection:
    """Return a fleet with one rollout, whose start gate is open."""
    nodes = tuple(Node(f"n{number}", labels={"team": f"t{number % POOLS}"}) for number in range(NODES))
    limits = Limits(pools={"team": PoolRule()}, max_parallel=MAX_PARALLEL)
    index = Projection.build(FactsSnapshot(nodes=nodes), limits, lambda content: content["plan"])
    index.record_observations([Observation(node.name, NodeHealth.UP, T0) for node in nodes], T0)
    plan = Plan(
        name="bench",
        owner="infra",
        selector=parse_selector(""),
        waves=(WaveDef("canary", soak_s=SOAK_S, gate=GateName.CONTINUE), WaveDef("fleet")),
        stages=(MaintainStage("configure", "site.yml"),),
        isolate=(StepDef("isolate.0.command", "command"),),
        verify=(StepDef("verify.0.reachable", "reachable"),),
        gates={GateName.START: VoteRequirement(), GateName.CONTINUE: VoteRequirement(owner=1)},
    )
    submit(index, "R", plan)
    return index


def plain_draw(drawn: random.Random) -> tuple[array[float], array[float]]:
    """Return one draw by an event queue: pools, a limit, two waves, and nothing else."""
    starts, ends = array("d", bytes(8 * NODES)), array("d", bytes(8 * NODES))
    now = T0
    for first, last in ((0, POOLS), (POOLS, NODES)):
        waiting = [deque(range(first + pool, last, POOLS)) for pool in range(POOLS)]
        ready, busy, free = deque(range(POOLS)), [], MAX_PARALLEL
        while ready or busy:
            while ready and free:
                pool = ready.popleft()
                if not waiting[pool]:
                    continue
                node = waiting[pool].popleft()
                run_s = RUNS[int(drawn.random() * len(RUNS))]
                check_s = CHECKS[int(drawn.random() * len(CHECKS))]
                free -= 1
                starts[node] = now
                heapq.heappush(busy, (now + 2 * ISOLATE_S + run_s + check_s, node, pool))
            if busy:
                now, node, pool = heapq.heappop(busy)
                ends[node] = now
                free += 1
                ready.append(pool)
        now += SOAK_S
    return starts, ends


def plain_simulation(drawn: random.Random) -> float:
    """Return when half of the draws have ended; it finds p50 and p90 of each node, as a forecast does."""
    draws = [plain_draw(drawn) for _ in range(DRAWS)]
    for node in range(NODES):
        percentiles([starts[node] for starts, _ in draws])
        percentiles([ends[node] for _, ends in draws])
    return percentiles([max(ends) for _, ends in draws])[0]


def percentiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2 - 1], ordered[len(ordered) * 9 // 10 - 1]


def main(options: list[str]) -> None:
    """Measure, and print."""
    index = fleet()
    gc.disable()  # as the forecast's process does, and for the peers too
    began = process_time()
    Walk(index.fork(), T0, durations, typical).run()
    walk_s = process_time() - began

    began = process_time()
    plain_end_s = plain_simulation(random.Random(2)) - T0
    plain_s = process_time() - began

    began = process_time()
    made = forecast(index, T0, durations, Assumptions(), draws=DRAWS, random=random.Random(3))["R"]
    forecast_s = process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert made.ends_at.p50 is not None
    gc.enable()
    logging.disable(logging.ERROR)
    pause_ms = asyncio.run(with_fleet(NODES, measure_forecast)).get("loop pause forecast")
    result = {
        "bench": "forecast",
        "nodes": NODES,
        "pools": POOLS,
        "draws": DRAWS,
        "forecast_s": round(forecast_s, 2),
        "one_walk_s": round(walk_s, 2),
        "plain_simulation_s": round(plain_s, 2),
        "ratio": round(forecast_s / plain_s, 2),
        "us_per_node_and_draw": round(forecast_s / NODES / DRAWS * 1e6, 2),
        "max_mib": round(mib),
        "loop_pause_ms": None if pause_ms is None else round(pause_ms, 1),
        "ends_after_s_p50": round(made.ends_at.p50 - T0),
        "plain_ends_after_s_p50": round(plain_end_s),
        "aim_s": AIM_S,
        "aim_mib": AIM_MIB,
        "aim_ratio": AIM_RATIO,
        "aim_pause_ms": AIM_PAUSE_MS,
    }
    print(json.dumps(result))
    if "--json" in options:
        return
    met = forecast_s < AIM_S and mib < AIM_MIB and forecast_s < AIM_RATIO * plain_s
    met = met and pause_ms is not None and pause_ms < AIM_PAUSE_MS
    pause = "not measured (the answer was too late)" if pause_ms is None else f"{pause_ms:.1f} ms"
    print(
        f"forecast: {forecast_s:.1f} s of CPU for {NODES:,} nodes and {DRAWS} draws "
        f"(one walk of the scheduler {walk_s:.1f} s), {forecast_s / plain_s:.1f} times a plain simulation "
        f"({plain_s:.1f} s), {mib:.0f} MiB; the loop's longest pause {pause}; aim {AIM_S:.0f} s, "
        f"{AIM_RATIO:.0f} times, {AIM_MIB:.0f} MiB, {AIM_PAUSE_MS:.0f} ms: {'met' if met else 'missed'}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
