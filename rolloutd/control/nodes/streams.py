"""Handlers of streams: events with progress, and the log of a node.

Both can be resumed: events by the store's sequence number, a log by the number
of its next line.  A notification only wakes the stream; the lines are read from
the store and the runner, so a slow reader loses nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from machines.facts.preparations import BUILD_NODE
from machines.model.preparation import Preparation, PreparationState, PrepareKind
from machines.states import Phase
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading, resolve_in_audit
from rolloutd.control.nodes import logs, wire_nodes
from rolloutd.control.requests import EventsQuery, LogQuery
from rolloutd.control.rollouts import serializers, wire
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.errors import NotFound
from rolloutd.texts.formats import pluralize

HEARTBEAT_S = 15.0
"""Silence until a heartbeat is sent; clients give up after three missing ones."""


PROGRESS_INTERVAL_S = 0.2
"""Minimum time between two lines of progress: a person reads no more than five a second."""


LOG_COST_FACTOR = 9
"""Pause after a read of a followed log, in multiples of its duration: a read begins at the first line."""


LOG_POLL_S = 2.0
"""How often a followed log is read without a notification: a run's own output sends none."""


PAGE_SIZE = 500
"""Entries read from the store at once."""


routes = RouteTable()


@routes.add("GET", "/v1/events", on_standby=True)
async def events(services: Services, request: Request[EventsQuery]) -> AsyncGenerator[wire.EventLine, None]:
    """Stream audit entries, and with `follow` the progress of running work."""
    query = request.input
    rollout = None if query.rollout is None else await resolve_in_audit(services.state, query.rollout)
    after = query.after
    if after is None:
        after = services.state.changes.latest_seq if query.follow else 0
    return _event_lines(services, after, rollout, follow=query.follow)


async def _event_lines(
    services: Services, after: int, rollout: str | None, *, follow: bool
) -> AsyncGenerator[wire.EventLine, None]:
    loop = asyncio.get_running_loop()
    feed = services.state.changes
    with feed.subscribe() as changed:
        silent_since, progressed_at, shown_progress = loop.time(), 0.0, -1
        while True:
            # Before the store is read: an entry that is written during the read sets it again.
            changed.clear()
            # Before the page: up to here the filter has seen all, later entries it has not.
            latest_seq = feed.latest_seq
            page = await services.state.store.read_audit(after=after, limit=PAGE_SIZE, rollout=rollout)
            for entry in page:
                after, silent_since = entry.seq, loop.time()
                yield {"seq": entry.seq, "entry": json.loads(entry.text)}
            if len(page) == PAGE_SIZE:
                continue
            after = max(after, latest_seq)
            if not follow:
                return
            now = loop.time()
            if feed.progress_count != shown_progress and now - progressed_at >= PROGRESS_INTERVAL_S:
                shown_progress, progressed_at, silent_since = feed.progress_count, now, now
                yield {"seq": None, "progress": serializers.all_in_flight(services.state, rollout)}
            if now - silent_since >= HEARTBEAT_S:
                silent_since = now
                yield {"seq": None, "heartbeat": after}
            pause = (
                PROGRESS_INTERVAL_S
                if feed.progress_count != shown_progress
                else HEARTBEAT_S - (now - silent_since)
            )
            await _wait_for_change(changed, max(pause, 0.0))


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
    reader = logs.LogReader(services.state.store, services.runner, key, request.identity)

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

    output = logs.RunOutput(services.runner)

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
