"""The running counts of an index, compared with a recount of its facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from machines.facts.projection import Projection
from machines.invariants import vote_recount


def wrong_counts(index: Projection) -> list[str]:
    """Return which running counts are not those of an index that is built again from the same facts."""
    index = index.at(index.now)
    fresh = Projection.build(index.snapshot(), index.limits)
    fresh.record_observations_of(index)
    kept, counted = dict(_counts(index)), dict(_counts(fresh))
    wrong = [
        f"{name} is {kept.get(name)}, not {counted.get(name)}"
        for name in sorted(kept.keys() | counted.keys())
        if kept.get(name) != counted.get(name)
    ]
    for rollout, failures in index.recounted_failures.items():
        if failures != vote_recount.open_failures(fresh, fresh.rollout(rollout)):
            wrong.append(f"open failures of {rollout} for the invariants are {failures}")
    return wrong + list(_wrong_queue(index))


def _counts(index: Projection) -> Iterator[tuple[str, Any]]:
    yield "in flight", index.in_flight()
    yield "full pools", sorted(pool.id for pool in index.full_pools())
    for pool in map(index.pool, index.pool_ids()):
        yield f"pool {pool.id}", (sorted(pool.members), sorted(pool.down), sorted(pool.unknown))
    for rollout in index.rollouts.values():
        counters = index.counters(rollout.id)
        for name in counters.__slots__:
            yield f"{name} of {rollout.id}", _without_zeros(getattr(counters, name))
        yield f"unresolved failures of {rollout.id}", index.unresolved_failures(rollout.id)
        for wave in rollout.plan.waves:
            yield f"pending of {rollout.id}/{wave.name}", list(index.pending(rollout.id, wave.name))


def _without_zeros(value: Any) -> Any:
    """Return counts without those of nothing, which only one that has counted before has."""
    if not isinstance(value, Mapping):
        return value
    return {key: found for key, each in value.items() if (found := _without_zeros(each))}


def _wrong_queue(index: Projection) -> Iterator[str]:
    """Yield the queue groups that are neither ready nor backed off, or are both, or not in their place."""
    groups = index.pending_groups
    for rollout in index.rollouts:
        known = set(groups.of_rollout(rollout))
        waves = {group.wave for group in known}
        entries = [entry for wave in waves for entry in groups.ready(rollout, wave)]
        ready = {group for _, group in entries}
        backed_off = {group for group in known if group in groups._backed_off}
        if len(entries) != len(ready) or ready & backed_off or ready | backed_off != known:
            yield f"groups of {rollout}: {len(known)}, {len(ready)} ready, {len(backed_off)} backed off"
        if any(groups.positions(group)[0] != position for position, group in entries):
            yield f"groups of {rollout} are not at the position of their first node: {entries}"
        for wave in waves:
            if list(groups.ready(rollout, wave)) != sorted(groups.ready(rollout, wave)):
                yield f"groups of {rollout}/{wave} are not in order"
