"""Streams: what happened and what runs, and what was said on a node.

Both can be resumed: events by the store's sequence number, a log by the number
of its next line.  A bell only wakes; what is told is read from the store and
from the runner, so a slow reader loses nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence

from machines.states import Phase
from rolloutd.control import logs, views, wire
from rolloutd.control.finding import find, find_in_audit
from rolloutd.control.requests import EventsQuery, LogQuery
from rolloutd.control.routes import Call, Desk, Route
from rolloutd.counting import count
from rolloutd.errors import NotFound

HEARTBEAT_S = 15.0
"""Silence after which a sign of life is sent; clients give up after three of these."""

PROGRESS_EVERY_S = 0.2
"""The least time between two lines of progress: five a second is more than an eye follows."""

LOG_LOOK_S = 2.0
"""How often a followed run is looked at though nobody rang: some runs say little."""

PAGE = 500
"""Entries read from the store at once."""


async def events(desk: Desk, call: Call) -> AsyncGenerator[wire.EventLine, None]:
    """Stream audit entries, and with `follow` the progress of what runs."""
    query: EventsQuery = call.query
    rollout = None if query.rollout is None else await find_in_audit(desk.state, query.rollout)
    after = query.after
    if after is None:
        after = desk.state.feed.latest if query.follow else 0
    return _events(desk, after, rollout, follow=query.follow)


async def _events(
    desk: Desk, after: int, rollout: str | None, *, follow: bool
) -> AsyncGenerator[wire.EventLine, None]:
    loop = asyncio.get_running_loop()
    feed = desk.state.feed
    with feed.listening() as bell:
        silent_since, progressed_at, moved = loop.time(), 0.0, -1
        while True:
            bell.clear()
            told_up_to = feed.latest
            page = await desk.state.store.audit(after=after, limit=PAGE, rollout=rollout)
            for entry in page:
                after, silent_since = entry.seq, loop.time()
                yield {"seq": entry.seq, "entry": json.loads(entry.text)}
            if len(page) == PAGE:
                continue
            after = max(after, told_up_to)
            if not follow:
                return
            now = loop.time()
            if feed.moved != moved and now - progressed_at >= PROGRESS_EVERY_S:
                moved, progressed_at, silent_since = feed.moved, now, now
                yield {"seq": None, "progress": views.in_flight_of_all(desk.state, rollout)}
            if now - silent_since >= HEARTBEAT_S:
                silent_since = now
                yield {"seq": None, "heartbeat": after}
            pause = PROGRESS_EVERY_S if feed.moved != moved else HEARTBEAT_S - (now - silent_since)
            await _rung(bell, max(pause, 0.0))


async def log(desk: Desk, call: Call) -> AsyncGenerator[wire.LogLine, None]:
    """Stream what was done and said on a node, in one attempt."""
    query: LogQuery = call.query
    found = await find(desk.state, call.names["r"])
    target = found.target(call.names["n"])
    attempt = target.attempt if query.attempt is None else query.attempt
    if attempt > target.attempt:
        raise NotFound(f"{target.node} has had {count(target.attempt, 'attempt')}, not {attempt}")
    follow = query.follow and found.live
    return _log(desk, call, (target.rollout, target.node), query.attempt, query.offset, follow=follow)


async def _log(
    desk: Desk, call: Call, key: tuple[str, str], attempt: int | None, offset: int, *, follow: bool
) -> AsyncGenerator[wire.LogLine, None]:
    loop = asyncio.get_running_loop()
    with desk.state.feed.listening() as bell:
        reader = logs.Reader(desk.state.store, desk.runner, key, call.who)
        silent_since, follows = loop.time(), attempt
        while True:
            bell.clear()
            more = follow and _goes_on(desk, key, attempt)
            if follows is None:
                follows = _begun(desk, key)
            if follows is not None or not follow:
                async for line in reader.lines(follows or await _latest(desk, key), offset):
                    offset, silent_since = line["offset"], loop.time()
                    yield line
            if not more:
                return
            now = loop.time()
            if now - silent_since >= HEARTBEAT_S:
                silent_since = now
                yield logs.sign_of_life(offset, desk.state.now())
            await _rung(bell, LOG_LOOK_S)


def _begun(desk: Desk, key: tuple[str, str]) -> int | None:
    """Return the node's latest attempt; None before the first."""
    if key[0] not in desk.state.index.rollouts:
        return None
    return desk.state.index.target(*key).attempt or None


async def _latest(desk: Desk, key: tuple[str, str]) -> int:
    steps = await desk.state.store.steps(*key)
    return steps[-1].attempt if steps else 0


def _goes_on(desk: Desk, key: tuple[str, str], attempt: int | None) -> bool:
    """Say whether more may come: the node is at work, or has not begun and may."""
    rollout = desk.state.index.rollouts.get(key[0])
    if rollout is None:
        return False
    target = desk.state.index.target(*key)
    if attempt is not None and attempt < target.attempt:
        return False
    if target.phase is Phase.PENDING:
        return not rollout.closed and target.attempt == 0
    return target.phase not in (Phase.DONE, Phase.FAILED) or target.order is not None


async def _rung(bell: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return


ROUTES: Sequence[Route] = (
    Route(
        "GET",
        "/v1/events",
        events,
        "Stream what happened, resumable by sequence number",
        wire.EventLine,
        query=EventsQuery,
        streams=True,
    ),
    Route(
        "GET",
        "/v1/rollouts/{r}/nodes/{n}/log",
        log,
        "Stream the log of a node",
        wire.LogLine,
        query=LogQuery,
        streams=True,
    ),
)
