"""Nodes as a forecast assumes them: up, with available runners, and free of work that no fact shows."""

from __future__ import annotations

import math
from dataclasses import replace

from machines.facts.projection import Projection
from machines.model.node import NodeHealth, Observation


def assume_healthy(index: Projection, now: float) -> int:
    """Let all nodes be up and stay up without further observations; return how many are not known to be."""
    unknown = [node for node in index.nodes if not _is_known_up(index, node)]
    for work in [work for node in index.nodes for work in index.recorded_work(node)]:
        index.end_work(work)
    index.update_limits(replace(index.limits, observe_within_s=math.inf))
    index.record_sources(())
    index.record_runner_problems({})
    index.record_observations([Observation(node, NodeHealth.UP, now) for node in unknown], now)
    return len(unknown)


def _is_known_up(index: Projection, node: str) -> bool:
    seen = index.observation(node)
    is_fresh = seen is not None and index.now < seen.at + index.limits.observe_within_s
    return seen is not None and is_fresh and seen.sight is NodeHealth.UP and not seen.cordoned_by_other
