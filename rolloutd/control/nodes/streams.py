"""Handlers of streams: events with progress, and the log of a node.

Both can be resumed: events by the store's sequence number, a log by the number
of its next line.  A notification only wakes the stream; the lines are read from
the store and the runner, so a slow reader loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from machines.facts.preparations import BUILD_NODE
from machines.model.preparation import Preparation, PreparationState, PrepareKind
from machines.states import Phase
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading, resolve_in_audit
from rolloutd.control.nodes import logs, wire_nodes
from rolloutd.control.requests import EventsQuery, LogQuery, StatusQuery
from rolloutd.control.rollouts import serializers, wire
from rolloutd.control.rollouts.handlers import status
from rolloutd.control.routes import ANONYMOUS, Request, RouteTable, Services, shared_answer
from rolloutd.control.status_feed import StatusVersion
from rolloutd.errors import NotFound
from rolloutd.ports import AuditEntry
from rolloutd.texts.formats import pluralize

HEARTBEAT_S = 15.0
"""Silence until a heartbeat is sent; clients give up after three missing ones."""

FLUSH_INTERVAL_S = 0.05
"""Minimum time between two writes: entries that are committed meanwhile share one."""

PROGRESS_INTERVAL_S = 0.2
"""Minimum time between two lines of progress: a person reads no more than five a second."""

STATUS_INTERVAL_S = 0.065
"""Minimum time between two lines of a status; what making one costs makes it longer in a large fleet.
A little more than between two frames of a console (0.06 s), which therefore draws each at once."""

STATUS_INTERVAL_PER_STREAM_S = 0.004
"""The same for each stream that has one: a line takes the loop 0.2 ms, so all lines take at most 5 %."""

WORK_INTERVAL_S, IDLE_INTERVAL_S = 0.5, 5.0
"""Maximum time between them while nodes are in flight, because the work that is left changes with time, and
while none is, because observations expire without an entry."""

WRITE_BYTES = 2**16
"""Bytes after which a write ends: a page of entries of many nodes has megabytes."""

LOG_COST_FACTOR = 9
"""Pause after a read of a followed log, in multiples of its duration: a read begins at the first line."""

LOG_POLL_S = 2.0
"""How often a followed log is read without a notification: a run's own output sends none."""

PAGE_SIZE = 500
"""Entries read from the store at once."""

Write = tuple[Sequence[bytes], int, bool]
"""Lines in parts, the entry after which the next write begins, and whether there is no later entry yet."""

routes = RouteTable()


@routes.add("GET", "/v1/events", on_standby=True)
async def events(services: Services, request: Request[EventsQuery]) -> AsyncGenerator[wire.EventLine, None]:
    """Stream audit entries, and with `follow` the progress of running work or the status."""
    query = request.input
    rollout = None if query.rollout is None else await resolve_in_audit(services.state, query.rollout)
    after = query.after
    if after is None:
        after = services.state.changes.latest_seq if query.follow else 0
    return _event_lines(services, query, after, rollout)


async def _event_lines(
    services: Services, query: EventsQuery, after: int, rollout: str | None
) -> AsyncGenerator[Any, None]:
    loop, feed = asyncio.get_running_loop(), services.state.changes
    latest_news = partial(_status_news, services) if query.status else lambda: feed.progress_count

    kept = services.status_feed.follow() if query.status else nullcontext()
    with feed.subscribe() as changed, kept:
        silent_since, live_at, version = loop.time(), 0.0, 0
        shown: Hashable = None
        while True:
            # Before the entries are read: one that is written meanwhile sets it again.
            changed.clear()
            write, now, interval_s = None, loop.time(), _interval_s(services, query)
            if query.follow and latest_news() != shown and now - live_at >= interval_s:
                # With the entries, which came while it was made: both reach the screen in one frame.
                if query.status:
                    newer = await _newer_status(services, version)
                    # Not `now`: a stream that began later than others would get each of their versions late.
                    live_at = newer.begun_at
                    write = await _status_write(
                        services, newer, version if query.changes else 0, after, rollout
                    )
                    version, shown = newer.number, newer.news
                else:
                    live_at, shown = now, latest_news()
                    write = await _write(services, await _progress_line(services, rollout), after, rollout)
            parts, after, is_last = write or await _write(services, b"", after, rollout)
            for part in parts:
                silent_since = loop.time()
                yield part
            if not is_last:
                continue
            if not query.follow:
                return
            now = loop.time()
            if now - silent_since >= HEARTBEAT_S:
                silent_since = now
                yield {"seq": None, "heartbeat": after}
            if parts:
                await asyncio.sleep(live_at + interval_s - now if query.status else FLUSH_INTERVAL_S)
            pause = min(HEARTBEAT_S - (now - silent_since), WORK_INTERVAL_S if query.status else HEARTBEAT_S)
            if latest_news() != shown:
                pause = live_at + interval_s - loop.time()
            await _wait_for_change(changed, max(pause, 0.0))


def _interval_s(services: Services, query: EventsQuery) -> float:
    """Return the minimum time between two lines of what is live (seconds)."""
    if not query.status:
        return PROGRESS_INTERVAL_S
    return max(STATUS_INTERVAL_S, STATUS_INTERVAL_PER_STREAM_S * services.status_feed.followers)


async def _status_write(
    services: Services, newer: StatusVersion, version: int, after: int, rollout: str | None
) -> Write:
    """Return what a stream gets that has a version and the entries up to `after`; equal ones share it."""
    if version != newer.number - 1:
        return await _write(services, await newer.line(version), after, rollout)
    key = (after, rollout)
    if key not in newer.writes:
        newer.writes[key] = await _write(services, await newer.line(version), after, rollout)
    write: Write = newer.writes[key]
    return write


async def _write(services: Services, live: bytes, after: int, rollout: str | None) -> Write:
    page, after = await _read_entries(services, after, rollout)
    # Spliced: the text of an entry is JSON in ASCII on one line.
    entries = [b'{"seq":%d,"entry":%s}\n' % (each.seq, each.text.encode()) for each in page]
    return [*_joined([live, *entries])], after, len(page) < PAGE_SIZE


def _status_news(services: Services) -> tuple[int, int, float]:
    """Return what differs when the status may have changed."""
    feed, works = services.state.changes, services.state.index.in_flight() > 0
    passed = asyncio.get_running_loop().time() // (WORK_INTERVAL_S if works else IDLE_INTERVAL_S)
    return feed.progress_count, feed.latest_seq, passed


async def _read_entries(
    services: Services, after: int, rollout: str | None
) -> tuple[Sequence[AuditEntry], int]:
    """Return a page of entries, and the number after which the next page begins."""
    feed = services.state.changes
    # Before the page: up to here the filter has seen all, later entries it has not.
    latest_seq = feed.latest_seq
    page = feed.recent_after(after, PAGE_SIZE) if rollout is None else None
    if page is None:
        page = await services.state.store.read_audit(after=after, limit=PAGE_SIZE, rollout=rollout)
    if len(page) == PAGE_SIZE:
        return page, page[-1].seq
    return page, max(after, latest_seq, *(each.seq for each in page[-1:]))


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines in as few parts as WRITE_BYTES allow."""
    part = bytearray()
    for line in lines:
        part += line
        if len(part) >= WRITE_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


async def _progress_line(services: Services, rollout: str | None) -> bytes:
    """Return the line of the work in flight, which streams share."""

    async def progress(services: Services, request: Request) -> list[wire.RolloutInFlight]:
        return serializers.all_in_flight(services.state, rollout)

    request = Request(ANONYMOUS, "progress", {}, rollout)
    return b'{"seq":null,"progress":%s}\n' % await shared_answer(services, "/v1/events", progress, request)


async def _newer_status(services: Services, version: int) -> StatusVersion:
    async def read() -> wire.Status:
        await services.state.advance()
        found: wire.Status = await status(services, Request(ANONYMOUS, "status", {}, StatusQuery()))
        return found

    return await services.status_feed.newer(version, services.answers, read, partial(_status_news, services))


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}/log")
async def log(services: Services, request: Request[LogQuery]) -> AsyncGenerator[wire_nodes.LogLine, None]:
    """Stream the steps and output of one attempt on a node."""
    query, node = request.input, request.path_params["n"]
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    follow = query.follow and resolved.live
    if query.stage is not None:
        return _stage_log(services, resolved, node, query.stage, query, follow=follow)
    target = resolved.target(node)
    if (query.attempt or 0) > target.attempt:
        had = pluralize(target.attempt, "attempt")
        raise NotFound(f"{target.node}: attempt {query.attempt} does not exist; it has {had}")
    return _node_log(services, request, (target.rollout, target.node), follow=follow)


def _node_log(
    services: Services, request: Request[LogQuery], key: tuple[str, str], *, follow: bool
) -> AsyncGenerator[wire_nodes.LogLine, None]:
    """Stream an attempt on a node; following the latest one begins with the first attempt."""
    query, attempt = request.input, request.input.attempt
    reader = logs.LogReader(services.state.store, services.runners, key, request.identity)

    async def read(offset: int) -> AsyncIterator[wire_nodes.LogLine]:
        nonlocal attempt
        if attempt is None and key[0] in services.state.index.rollouts:
            attempt = services.state.index.target(*key).attempt or None
        if attempt is not None or not follow:
            steps = () if attempt else await services.state.store.load_steps(*key)
            async for line in reader.lines(attempt or (steps[-1].attempt if steps else 0), offset):
                yield line

    def may_grow() -> bool:
        return follow and _may_produce_more(services, key, query.attempt)

    return _follow_log(services, query.offset, read, may_grow)


def _stage_log(
    services: Services, resolved: ResolvedRollout, node: str, name: str, query: LogQuery, *, follow: bool
) -> AsyncGenerator[wire_nodes.LogLine, None]:
    """Stream a prepare stage's log; following ends with the stage's attempt."""
    rollout = resolved.rollout
    stage = next((each for each in rollout.prepare_stages if each.name == name), None)
    if stage is None:
        known = ", ".join(each.name for each in rollout.prepare_stages) or "none"
        raise NotFound(f"{rollout.id}: no prepare stage {name}; its stages: {known}")
    if stage.kind is PrepareKind.BUILD:
        node = BUILD_NODE
    else:
        resolved.target(node)

    def find_row() -> Preparation | None:
        index = services.state.index if rollout.id in services.state.index.rollouts else resolved.index
        return index.preparation(rollout.id, node, name)

    output = logs.RunOutput(services.runners)

    async def read(offset: int) -> AsyncIterator[wire_nodes.LogLine]:
        if (row := find_row()) is not None:
            async for line in logs.stage_lines(output, row, query.attempt or row.attempt, offset):
                yield line

    def may_grow() -> bool:
        row = find_row()
        return follow and (row is None or row.state is PreparationState.RUNNING)

    return _follow_log(services, query.offset, read, may_grow)


async def _follow_log(
    services: Services,
    offset: int,
    read: Callable[[int], AsyncIterator[wire_nodes.LogLine]],
    may_grow: Callable[[], bool],
) -> AsyncGenerator[wire_nodes.LogLine, None]:
    """Yield the lines from an offset on, and heartbeats, until the log cannot grow."""
    loop = asyncio.get_running_loop()
    silent_since = loop.time()
    with services.state.changes.subscribe() as changed:
        while True:
            changed.clear()
            # Asked before the lines are read, so that the last ones are not missed.
            is_over = not may_grow()
            began = loop.time()
            async for line in read(offset):
                offset, silent_since = line["offset"], loop.time()
                yield line
            if is_over:
                return
            if loop.time() - silent_since >= HEARTBEAT_S:
                silent_since = loop.time()
                yield logs.heartbeat(offset, services.state.now())
            # Every commit of the daemon ends the next wait: a storm of them would read the log without end.
            await asyncio.sleep(
                min(max(PROGRESS_INTERVAL_S, LOG_COST_FACTOR * (loop.time() - began)), LOG_POLL_S)
            )
            await _wait_for_change(changed, LOG_POLL_S)


def _may_produce_more(services: Services, key: tuple[str, str], attempt: int | None) -> bool:
    """Return whether more lines may come: the node is in progress, or may still begin."""
    rollout = services.state.index.rollouts.get(key[0])
    if rollout is None:
        return False
    target = services.state.index.target(*key)
    if attempt is not None and attempt < target.attempt:
        return False
    if target.phase is Phase.PENDING:
        return not rollout.closed and target.attempt == 0
    return target.phase not in (Phase.DONE, Phase.FAILED) or target.order is not None


async def _wait_for_change(changed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return
