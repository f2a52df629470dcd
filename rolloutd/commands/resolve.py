"""Resolution of a rollout by its id, a prefix of its id, or its plan's name.

Live rollouts are in the index; closed ones are loaded from the store into a
fork of it, so that one code path serves both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from machines.facts.projection import Projection
from machines.model.rollout import Rollout, Target
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute
from rolloutd.errors import NotFound, Refused
from rolloutd.texts.formats import suggest_name

MIN_PREFIX_CHARS = 3
"""Minimum characters of an id's prefix; fewer are probably a typing mistake."""

MAX_CLOSED = 1_000
"""Closed rollouts that are listed and found by their plan's name; older ones need their id."""

MAX_CANDIDATES_NAMED = 5


@dataclass(frozen=True, slots=True)
class ResolvedRollout:
    """A rollout and the index that contains it; `live` is whether that is the daemon's own."""

    index: Projection
    rollout: Rollout
    live: bool

    def target(self, node: str) -> Target:
        """Return a node of the rollout; raises NotFound."""
        try:
            return self.index.target(self.rollout.id, node)
        except KeyError:
            names = (target.node for target in self.index.targets(self.rollout.id))
            action = suggest_name(node, names, f"list them with rolloutctl nodes {self.rollout.id}")
            raise NotFound(f"{self.rollout.id}: no node {node}; {action}") from None


async def resolve_rollout(state: State, name_or_id: str) -> ResolvedRollout:
    """Return the rollout; raises NotFound, or Refused if several match."""
    rollouts = state.index.rollouts
    if name_or_id in rollouts:
        return ResolvedRollout(state.index, rollouts[name_or_id], live=True)
    live = [each for each in rollouts.values() if each.plan.name == name_or_id and not each.closed]
    # An open rollout wins over closed ones of its plan that are still in the index.
    live = live or [each for each in rollouts.values() if each.plan.name == name_or_id]
    if len(live) == 1:
        return ResolvedRollout(state.index, live[0], live=True)
    closed = await _closed_names(state)
    candidates = {each.id: each.plan.name for each in live} or {
        rollout: name for rollout, name in closed.items() if rollout == name_or_id or name == name_or_id
    }
    if not candidates and len(name_or_id) >= MIN_PREFIX_CHARS:
        all_names = closed | {each.id: each.plan.name for each in rollouts.values()}
        candidates = {rollout: name for rollout, name in all_names.items() if rollout.startswith(name_or_id)}
    if len(candidates) > 1:
        raise _ambiguous_name(name_or_id, candidates)
    return await _load(state, next(iter(candidates), name_or_id))


async def resolve_for_reading(state: State, name_or_id: str) -> ResolvedRollout:
    """Return the rollout; of several of one plan the latest, because reading one changes nothing.

    Raises NotFound, or Refused if ids of several plans match.
    """
    try:
        return await resolve_rollout(state, name_or_id)
    except Refused:
        closed = {
            each.id: each.submitted_at
            for each in await state.store.list_closed_rollouts(MAX_CLOSED)
            if each.name == name_or_id
        }
        live = state.index.rollouts.values()
        same_plan = closed | {each.id: each.submitted_at for each in live if each.plan.name == name_or_id}
        if not same_plan:
            raise
        return await _load(state, max(same_plan, key=same_plan.__getitem__))


async def resolve_for_deletion(state: State, name_or_id: str) -> ResolvedRollout:
    """Return the rollout to delete; raises as resolve_rollout does.

    Deletion cannot be undone: a plan's name is ambiguous if any other rollout,
    live or closed, has it.
    """
    resolved = await resolve_rollout(state, name_or_id)
    if name_or_id == resolved.rollout.plan.name and name_or_id != resolved.rollout.id:
        all_names = await _closed_names(state) | {
            each.id: each.plan.name for each in state.index.rollouts.values()
        }
        same_name = [rollout for rollout, name in all_names.items() if name == name_or_id]
        if len(same_name) > 1:
            raise _ambiguous_name(name_or_id, same_name)
    return resolved


async def resolve_in_audit(state: State, name_or_id: str) -> str:
    """Return the rollout's id, also that of a deleted one, which only the audit has.

    Raises NotFound, or Refused if several match.
    """
    try:
        return (await resolve_rollout(state, name_or_id)).rollout.id
    except NotFound:
        if await state.store.read_audit(limit=1, rollout=name_or_id):
            return name_or_id
    raise NotFound(
        f"{name_or_id}: no such rollout in the list or the audit; name a deleted one by its whole id"
    )


async def _closed_names(state: State) -> dict[str, str]:
    return {each.id: each.name for each in await state.store.list_closed_rollouts(MAX_CLOSED)}


def _ambiguous_name(name_or_id: str, candidates: Collection[str]) -> Refused:
    named_ids = ", ".join(list(candidates)[:MAX_CANDIDATES_NAMED])
    return Refused(
        "ambiguous", f"{name_or_id}: {len(candidates)} rollouts match ({named_ids}); name one by its id"
    )


async def _load(state: State, rollout_id: str) -> ResolvedRollout:
    known = state.index.rollouts.get(rollout_id)
    if known is not None:
        return ResolvedRollout(state.index, known, live=True)
    index = state.index.fork()
    try:
        rollout = await _load_closed(state, index, rollout_id)
    except NotFound:
        names = {each.id: each.plan.name for each in state.index.rollouts.values()}
        known_names = [name for pair in (names | await _closed_names(state)).items() for name in pair]
        action = suggest_name(rollout_id, known_names, "list them with rolloutctl rollouts")
        if rollout_id in state.index.nodes:
            action = "it is a node: name its rollout first, then the node"
        raise NotFound(f"{rollout_id}: no such rollout; {action}") from None
    return ResolvedRollout(index, rollout, live=False)


async def ensure_loaded(state: State, rollout_id: str) -> None:
    """Add a closed rollout to the daemon's own index; raises NotFound for a deleted one.

    The caller holds the lock of commits: what was resolved before it may have been deleted meanwhile.
    """
    if rollout_id not in state.index.rollouts:
        await _load_closed(state, state.index, rollout_id)


async def _load_closed(state: State, index: Projection, rollout_id: str) -> Rollout:
    """Load a closed rollout of the store into an index and return it; raises NotFound."""
    closed = await state.store.load_rollout(rollout_id)
    targets = await state.store.load_targets(rollout_id)
    prepared = await state.store.load_preparations(rollout_id) if closed.plan.prepare else ()
    if index is state.index:  # no other thread may change what the loop reads
        index.load_rollout(closed, targets, prepared)
    else:
        # In a thread: ten thousand targets take longer than the loop may pause.
        await compute(index.load_rollout, closed, targets, prepared)
    return closed
