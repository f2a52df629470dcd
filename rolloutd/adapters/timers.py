"""What happens at a time, on APScheduler: it pokes the daemon and decides nothing.

A poke says only "look again"; one that is late, doubled or lost costs a moment,
never a decision, so nothing is stored here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

FARTHEST = timedelta(days=366)
"""An instant farther away pokes after a year: whoever asked looks and asks again."""


def make() -> ApschedulerAlarm:
    """Return the daemon's alarm; inside a running event loop."""
    return ApschedulerAlarm()


class ApschedulerAlarm:
    """ports.Alarm; made and used inside one running event loop."""

    def __init__(self) -> None:
        self._open = True
        self._scheduler = AsyncIOScheduler(
            timezone=UTC,
            # A poke is never too late, and several that were missed are one.
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )
        self._scheduler.start()

    def at(self, key: str, instant: float, poke: Callable[[], None]) -> None:
        """Call `poke` at `instant` (epoch seconds), at once if that has passed."""
        now = datetime.now(UTC)
        seconds = min(max(0.0, instant - now.timestamp()), FARTHEST.total_seconds())
        self._add(key, DateTrigger(run_date=now + timedelta(seconds=seconds)), poke)

    def every(self, key: str, seconds: float, poke: Callable[[], None]) -> None:
        """Call `poke` every so many seconds, first after the first of them."""
        self._add(key, IntervalTrigger(seconds=seconds, timezone=UTC), poke)

    def cancel(self, key: str) -> None:
        """Forget the key; unknown keys are fine."""
        try:
            self._scheduler.remove_job(key)
        except JobLookupError:
            return

    def close(self) -> None:
        """Stop; nothing is called any more."""
        if self._open:
            self._open = False
            self._scheduler.remove_all_jobs()
            self._scheduler.shutdown(wait=False)

    def _add(self, key: str, trigger: object, poke: Callable[[], None]) -> None:
        if self._open:
            self._scheduler.add_job(self._poke, trigger, args=[poke], id=key, replace_existing=True)

    async def _poke(self, poke: Callable[[], None]) -> None:
        # A coroutine, because APScheduler would call a plain function in a thread of its own.
        if self._open:
            poke()
