"""This machine's clock, and timers on APScheduler: they wake the daemon and decide nothing.

A wake-up that is late, doubled or lost costs a moment, never a decision, so nothing is stored here.

APScheduler follows the wall clock only.  After a clock set back by an hour no timer would fire for an hour,
the watchdog's included; after a clock set forward, due timers would fire late.  So the monotonic clock is
compared with it, and after a jump every caller is woken and sets its timers again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

log = logging.getLogger(__name__)

MAX_DELAY = timedelta(days=366)
"""A later instant wakes its caller after a year, which then sets the timer again."""

CLOCK_JUMP_S = 1.0
"""By how much the wall clock must have moved against the monotonic one: what a slewed clock never does."""

CLOCK_CHECK_INTERVAL_S = 5.0
"""How often the two clocks are compared: twelve times within the watchdog's minute."""


class SystemClock:
    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ApschedulerTimers:
    """ports.Timers; made and used inside one running event loop."""

    def __init__(self) -> None:
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._scheduler = AsyncIOScheduler(
            timezone=UTC,
            # A wake-up is never too late, and several that were missed are one.
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )
        self._scheduler.start()
        self._clock_offset_s = self._measure_clock_offset_s()
        self._next_clock_check = self._loop.call_later(CLOCK_CHECK_INTERVAL_S, self._check_clock)

    def call_at(self, key: str, instant: float, callback: Callable[[], None]) -> None:
        now = datetime.now(UTC)
        seconds = min(max(0.0, instant - now.timestamp()), MAX_DELAY.total_seconds())
        self._add(key, DateTrigger(run_date=now + timedelta(seconds=seconds)), callback)

    def call_every(self, key: str, seconds: float, callback: Callable[[], None]) -> None:
        self._add(key, IntervalTrigger(seconds=seconds, timezone=UTC), callback)

    def cancel(self, key: str) -> None:
        with suppress(JobLookupError):
            self._scheduler.remove_job(key)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._next_clock_check.cancel()
            self._scheduler.remove_all_jobs()
            self._scheduler.shutdown(wait=False)

    def _add(self, key: str, trigger: object, callback: Callable[[], None]) -> None:
        if self._is_open:
            self._scheduler.add_job(
                self._run_callback, trigger, args=[callback], id=key, replace_existing=True
            )

    async def _run_callback(self, callback: Callable[[], None]) -> None:
        # A coroutine, because APScheduler would call a plain function in a thread of its own.
        if self._is_open:
            callback()

    def _measure_clock_offset_s(self) -> float:
        return time.time() - self._loop.time()

    def _check_clock(self) -> None:
        """Run every callback if the wall clock was set, or the machine slept, since the last check."""
        before, self._clock_offset_s = self._clock_offset_s, self._measure_clock_offset_s()
        if abs(self._clock_offset_s - before) > CLOCK_JUMP_S:
            log.warning(
                "the clock was set by %+.0f s: everything is inspected again", self._clock_offset_s - before
            )
            for job in self._scheduler.get_jobs():
                job.modify(next_run_time=datetime.now(UTC))
        self._next_clock_check = self._loop.call_later(CLOCK_CHECK_INTERVAL_S, self._check_clock)
