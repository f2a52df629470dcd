"""Export of the audit's oldest entries to segments, and their removal from the database.

An entry is removed only after its segment is on disk and was found whole, and after the store has kept what
the entries made of the tables.  After a kill the next pass continues from the segments that are there: the
first of them begins after the store's base, and the last hash of each is that of the database.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from rolloutd.audit.audit_segments import (
    Entry,
    InvalidSegment,
    SegmentFile,
    SegmentWriter,
    list_segments,
    verify_segment,
)
from rolloutd.concurrency import threads
from rolloutd.engine.state import State
from rolloutd.ports import AuditBase

log = logging.getLogger(__name__)

MAX_SEGMENT_ENTRIES = 100_000
"""Entries of one segment: some 50 MB, a tenth of it compressed, which are read in a second."""

MIN_AGE_S = 86_400.0
"""How much older than `keep.audit` the oldest entry gets: one segment a day, not one an hour."""

PAGE_ENTRIES = 500
"""Entries that are read and compressed at once: some milliseconds of the reading connection."""

REMOVED_ENTRIES = 200
"""Entries that one transaction removes and overwrites: some milliseconds, in which other commits wait."""

PAUSE_S = 0.02
"""Pause after each page and each removal: ten million entries of a first export take a quarter of an hour."""

KEPT_ENTRIES = 2
"""Newest entries that stay in any case: the store needs them to continue the chain."""

CONDITION = "audit-export"

_Position = tuple[int, str]
"""Number and hash of the last entry of a segment."""


class AuditExporter:
    """Exports entries that are older than `keep.audit` to segments in a directory; `key` signs them."""

    def __init__(self, state: State, directory: Path, key: bytes) -> None:
        self._state = state
        self._directory = directory
        self._key = key

    async def export_due(self) -> None:
        """Export and remove what is due, and finish what a kill has interrupted; raises StoreFailed.

        A damaged segment or a full disk is a condition, and then nothing is removed.
        """
        try:
            await self._export_due()
        except (InvalidSegment, OSError) as error:
            self._state.conditions[CONDITION] = f"audit segments: nothing is exported: {error}"
            log.error("%s", self._state.conditions[CONDITION])
        else:
            self._state.conditions.pop(CONDITION, None)

    async def _export_due(self) -> None:
        store = self._state.store
        base = await store.load_audit_base()
        files = {file.first: file for file in await threads.FILES.run(list_segments, self._directory)}
        oldest = await store.read_audit(limit=1)
        if oldest and oldest[0].seq <= base.seq:
            await threads.FILES.run(_require_exported, files.values(), oldest[0].seq, base, self._key)
        await self._remove_exported()
        position = (base.seq, base.head)
        while True:
            file = files.get(position[0] + 1)
            if file is None:
                last = await self._last_due(position[0])
                if last <= position[0]:
                    break
                file = await self._write(position, last)
            position = await self._verify(file, position)
        if position[0] > base.seq:
            await store.advance_audit_base(position[0], self._state.now())
            log.info("audit: entries up to %d are exported to %s", position[0], self._directory)
            await self._remove_exported()

    async def _remove_exported(self) -> None:
        # Each is a transaction of its own: another commit waits for one at most.
        while await self._state.store.remove_exported_entries(REMOVED_ENTRIES):
            await self._state.clock.sleep(PAUSE_S)

    async def _last_due(self, exported: int) -> int:
        keep_s = self._state.settings.keep.audit_s
        newest = await self._state.store.latest_audit_entry()
        if keep_s is None or newest is None:
            return exported
        before = self._state.now() - keep_s
        if await self._is_younger(exported + 1, before - min(MIN_AGE_S, keep_s)):
            return exported
        low, high = exported, min(newest.seq - KEPT_ENTRIES, exported + MAX_SEGMENT_ENTRIES)
        # By halves: instants grow with the numbers, but for a clock that was set back.
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if await self._is_younger(middle, before) else (middle, high)
        return low

    async def _is_younger(self, seq: int, before: float) -> bool:
        entries = await self._state.store.read_audit(after=seq - 1, limit=1)
        return not entries or bool(json.loads(entries[0].text)["at"] > before)

    async def _write(self, position: _Position, last: int) -> SegmentFile:
        first = position[0] + 1
        with await threads.FILES.run(
            SegmentWriter, self._directory, first, last, position[1], self._key
        ) as writer:
            async for page in self._pages(position[0], last):
                await threads.FILES.run(writer.add, page)
            return await threads.FILES.run(writer.finish)

    async def _pages(self, after: int, last: int) -> AsyncIterator[list[Entry]]:
        while after < last:
            limit = min(PAGE_ENTRIES, last - after)
            page = await self._state.store.read_audit(after=after, limit=limit)
            if not page:
                return
            yield [(entry.seq, entry.text, entry.hash) for entry in page]
            after = page[-1].seq
            await self._state.clock.sleep(PAUSE_S)

    async def _verify(self, file: SegmentFile, position: _Position) -> _Position:
        """Return the end of a segment that is whole and has the database's entries."""
        head = await threads.FILES.run(verify_segment, file, position[1], self._key)
        entries = await self._state.store.read_audit(after=file.last - 1, limit=1)
        if not entries or (entries[0].seq, entries[0].hash) != (file.last, head):
            raise InvalidSegment(f"{file.path}: the database has other entries; move the file away")
        return file.last, head


def _require_exported(files: Iterable[SegmentFile], seq: int, base: AuditBase, key: bytes) -> None:
    """Raise InvalidSegment unless whole segments have the entries from `seq` to the base."""
    head, following = None, None
    for file in sorted(files, key=lambda each: each.first):
        if file.last < seq or file.last > base.seq:
            continue
        if file.first > (following or seq):
            break
        head, following = verify_segment(file, head, key), file.last + 1
    if (head, following) != (base.head, base.seq + 1):
        raise InvalidSegment(f"entries {seq} to {base.seq} are exported, but not there; restore the segments")
