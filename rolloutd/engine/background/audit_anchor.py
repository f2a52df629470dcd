"""Anchoring of the audit: its latest hash is written outside, and compared there, on a schedule.

A user who can write the database can also write a new chain; only what is kept elsewhere shows that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rolloutd.audit import audit_anchor
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Anchor
from rolloutd.ports.guards import adapter_errors

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Limit of reading or writing one anchor."""

CONDITION = "anchor"


class AuditAnchor:
    def __init__(self, state: State, anchors: Sequence[Anchor], announce: Callable[[str, str], None]) -> None:
        """`announce` gets a title and the line, for the channels of notifications."""
        self._state = state
        self._anchors = anchors
        self._announce = announce

    async def run(self) -> None:
        """Compare and write now and on the schedule, until cancelled."""
        while True:
            try:
                await self.write()
            except StoreFailed as error:
                log.error("the audit's hash was not kept: %s", error)
            await self._state.clock.sleep(float(self._state.settings.audit.anchor_every_s))

    async def write(self) -> None:
        """Append the latest hash to each anchor that the audit agrees with; report the others."""
        head = await self._state.store.latest_audit_entry()
        if head is None:
            return
        line = audit_anchor.format_line(self._state.now(), head.seq, head.hash)
        self._announce(f"rolloutd: audit head {head.seq}", line)
        problems = [await self._write_to(anchor, line) for anchor in self._anchors]
        self._state.conditions.pop(CONDITION, None)
        if any(problems):
            self._state.conditions[CONDITION] = "; ".join(filter(None, problems))
            log.error("%s", self._state.conditions[CONDITION])

    async def compare(self) -> str:
        """Return how the audit differs from an anchor, the empty string if it does not.

        An anchor that cannot be read is a condition of the daemon, not a difference.
        """
        for anchor in self._anchors:
            try:
                problem = await self._difference(anchor)
            except (RolloutdError, TimeoutError) as error:
                self._state.conditions[CONDITION] = _describe_unreachable(anchor, error)
                continue
            if problem:
                return f"{anchor.name}: {problem}"
        return ""

    async def _write_to(self, anchor: Anchor, line: str) -> str:
        """Return the problem, or the empty string once the line is written."""
        try:
            # Compared before each write: a line after a forged chain would anchor the forgery.
            problem = await self._difference(anchor)
            if problem:
                return f"{anchor.name}: {problem}"
            async with asyncio.timeout(TIMEOUT_S):
                with adapter_errors(anchor.name):
                    await anchor.append(line)
        except (RolloutdError, TimeoutError) as error:
            return _describe_unreachable(anchor, error)
        return ""

    async def _difference(self, anchor: Anchor) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            with adapter_errors(anchor.name):
                anchored = audit_anchor.parse_lines(await anchor.read())
        # What is exported is covered by the hash of each later entry.
        exported = (await self._state.store.load_audit_base()).seq
        anchored = [each for each in anchored if each.seq > exported]
        hashes = {}
        for seq in {each.seq for each in anchored}:
            for entry in await self._state.store.read_audit(after=seq - 1, limit=1):
                hashes[entry.seq] = entry.hash
        return audit_anchor.describe_difference(anchored, hashes)


def _describe_unreachable(anchor: Anchor, error: Exception) -> str:
    text = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
    return f"{anchor.name}: the audit's hash is not kept there: {text}"
