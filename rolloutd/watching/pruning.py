"""Removes from the disk what nobody needs any more: output of ended rollouts, trees that none uses.

Slowly and beside everything else, a few at a time.  The database alone says what
an ended rollout is; the audit is told before anything of one is removed, and
keeps what was done.  Whatever was not removed when the daemon died is removed
the next time.  It knows shelves, and not what lies on them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from machines.events import RunsRemoved
from machines.moments import span
from rolloutd.driving.turn import Turn
from rolloutd.errors import StoreFailed
from rolloutd.ports import Kept, Remembered, Shelf
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.pruning")

EVERY_S = 3600.0
"""How often it is looked for what may go: what is kept for months may wait an hour."""

PORTION = 20
"""Removals in a row: some milliseconds of a disk's work."""

PAUSE_S = 1.0
"""Between two portions; a rollout of 10,000 nodes is gone in ten minutes, and nobody notices."""

LEAST_TREE_S = 3600.0
"""A tree that was pinned less than this ago may be of a plan that is being submitted this moment."""


class Pruning:
    """Tidies the shelf of runs and the shelf of trees as the settings' `keep` says."""

    def __init__(self, state: State, runs: Shelf, trees: Shelf) -> None:
        self._state = state
        self._runs = runs
        self._trees = trees
        self._turn = Turn()
        self._removed = 0

    def wish(self) -> None:
        """Look soon, because something was deleted."""
        self._turn.call()

    async def run(self) -> None:
        """Look now and then until cancelled."""
        while True:
            try:
                await self.prune()
            except (StoreFailed, OSError) as error:
                log.warning("what nobody needs any more could not be removed, later again: %s", error)
            await self._turn.or_after(self._state.clock.sleep(EVERY_S))

    async def prune(self) -> None:
        """Remove all that may go now."""
        self._removed = 0
        remembered = await self._state.store.remembered()
        await self._prune_runs({each.id: each for each in remembered})
        await self._prune_trees(remembered)

    async def _prune_runs(self, remembered: Mapping[str, Remembered]) -> None:
        keep_s = self._state.settings.keep.runs_s
        now = self._state.now()
        for rollout, runs in _by_rollout(await self._runs.kept(), remembered).items():
            known = remembered.get(rollout)
            if known is not None and known.deleted:
                await self._forget(self._runs, [each.name for each in runs], now)
            elif keep_s is not None and (known is None or _is_due(known.ended_at, keep_s, now)):
                old = [each.name for each in runs if each.touched_at + keep_s <= now]
                if known is not None and old:
                    await self._tell(known.id, len(old), keep_s)
                if await self._forget(self._runs, old, now - keep_s) and known is None:
                    log.info("removed %d runs that no rollout of this database had", len(old))

    async def _tell(self, rollout: str, runs: int, keep_s: float) -> None:
        """Let the audit know what is about to go, once for each rollout."""
        if await self._state.store.audit(limit=1, rollout=rollout, event=RunsRemoved.__name__):
            return
        event = RunsRemoved(rollout, runs, keep_s, self._state.now())
        await self._state.commit([event], cause=f"the settings keep what runs said for {span(keep_s)}")

    async def _prune_trees(self, remembered: Sequence[Remembered]) -> None:
        keep_s = self._state.settings.keep.trees_s
        if keep_s is None:
            return
        now = self._state.now()
        used = {
            f"{each.source['kind']}-{each.source['pin']}"
            for each in remembered
            if not each.deleted and not _is_due(each.ended_at, keep_s, now)
        }
        until = now - max(float(keep_s), LEAST_TREE_S)
        kept = await self._trees.kept()
        old = [each.name for each in kept if each.name not in used and each.touched_at <= until]
        await self._forget(self._trees, old, until)

    async def _forget(self, shelf: Shelf, names: Iterable[str], untouched_since: float) -> int:
        """Remove a few at a time; return how many are gone."""
        gone = 0
        for name in names:
            gone += await shelf.forget(name, untouched_since=untouched_since)
            self._removed += 1
            if self._removed % PORTION == 0:
                await self._state.clock.sleep(PAUSE_S)
        return gone


def _is_due(ended_at: float | None, keep_s: float, now: float) -> bool:
    return ended_at is not None and ended_at + keep_s <= now


def _by_rollout(runs: Iterable[Kept], known: Mapping[str, Remembered]) -> dict[str, list[Kept]]:
    """Gather runs by their rollout; those that no rollout names are together under the empty name."""
    found: dict[str, list[Kept]] = {}
    for each in runs:
        found.setdefault(_rollout_of(each.subject, known), []).append(each)
    return found


def _rollout_of(run: str, known: Mapping[str, Remembered]) -> str:
    """Return the rollout whose id a run's name begins with; an id may itself hold dots."""
    words = run.split(".")
    for count in range(len(words) - 1, 0, -1):
        if (rollout := ".".join(words[:count])) in known:
            return rollout
    return ""
