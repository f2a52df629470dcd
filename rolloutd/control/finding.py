"""Which rollout is meant: by its id, the beginning of its id, or its plan's name.

Live rollouts are in the index; closed ones are fetched from the store and put
in an index of their own, so that one way of looking serves both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from machines.projection import Projection
from machines.rollout import Rollout, Target
from rolloutd.errors import NotFound, Refused
from rolloutd.state import State

SHORTEST_PREFIX = 3
"""Characters of an id that may stand for it; fewer are a slip of the finger."""

MOST_CLOSED = 1_000
"""Closed rollouts that are listed and found by their plan's name; older ones are found by their id."""

MOST_NAMED = 5
"""Candidates named in a refusal."""


@dataclass(frozen=True, slots=True)
class Found:
    """A rollout and the index it is in."""

    index: Projection
    rollout: Rollout
    live: bool

    def target(self, node: str) -> Target:
        """Return a node of it; raises NotFound."""
        try:
            return self.index.target(self.rollout.id, node)
        except KeyError:
            raise NotFound(f"{self.rollout.id} has no node {node}") from None


async def find(state: State, named: str) -> Found:
    """Return the rollout that is meant; raises NotFound, or Refused when several could be."""
    there = state.index.rollouts
    if named in there:
        return Found(state.index, there[named], live=True)
    live = [each for each in there.values() if each.plan.name == named and not each.closed]
    live = live or [each for each in there.values() if each.plan.name == named]
    if len(live) == 1:
        return Found(state.index, live[0], live=True)
    closed = await _closed(state)
    candidates = {each.id: each.plan.name for each in live} or {
        rollout: name for rollout, name in closed.items() if rollout == named or name == named
    }
    if not candidates and len(named) >= SHORTEST_PREFIX:
        every = closed | {each.id: each.plan.name for each in there.values()}
        candidates = {rollout: name for rollout, name in every.items() if rollout.startswith(named)}
    if len(candidates) > 1:
        raise _ambiguous(named, candidates)
    return await _found(state, next(iter(candidates), named))


async def find_for_good(state: State, named: str) -> Found:
    """Return the rollout that is meant by what cannot be taken back.

    A plan's name counts where no other rollout, live or closed, has it: the
    live one is not preferred.  Raises as find() does.
    """
    found = await find(state, named)
    if named == found.rollout.plan.name and named != found.rollout.id:
        every = await _closed(state) | {each.id: each.plan.name for each in state.index.rollouts.values()}
        alike = [rollout for rollout, name in every.items() if name == named]
        if len(alike) > 1:
            raise _ambiguous(named, alike)
    return found


async def find_in_audit(state: State, named: str) -> str:
    """Return the id of the rollout that is meant, also of a deleted one, which the audit alone remembers.

    Raises NotFound where the audit has never heard of it, Refused when several could be meant.
    """
    try:
        return (await find(state, named)).rollout.id
    except NotFound:
        if await state.store.audit(limit=1, rollout=named):
            return named
    raise NotFound(
        f"neither a rollout nor the audit has the name {named}: rolloutctl rollouts lists those there are,"
        " and a deleted one is named by its whole id"
    )


async def _closed(state: State) -> dict[str, str]:
    return {each.id: each.name for each in await state.store.closed_rollouts(MOST_CLOSED)}


def _ambiguous(named: str, candidates: Collection[str]) -> Refused:
    named_ids = ", ".join(list(candidates)[:MOST_NAMED])
    return Refused(
        "ambiguous", f"{named} could be {len(candidates)} rollouts ({named_ids}): name one by its id"
    )


async def _found(state: State, rollout: str) -> Found:
    known = state.index.rollouts.get(rollout)
    if known is not None:
        return Found(state.index, known, live=True)
    try:
        closed = await state.store.rollout(rollout)
    except NotFound:
        raise NotFound(f"there is no rollout {rollout}; rolloutctl rollouts lists them") from None
    targets = tuple(await state.store.targets(rollout))
    facts = state.index.snapshot()
    together = replace(facts, rollouts=(*facts.rollouts, closed), targets=(*facts.targets, *targets))
    index = Projection.build(together, state.index.limits)
    index.observed(state.index.observations, state.now())
    return Found(index, closed, live=False)
