"""Notifications: a gate waits, a node failed, a rollout ended or is stalled, an adapter keeps failing.

Events are read from the audit by sequence number, waiting gates from the core.  A slow channel loses
notifications only when its queue is full.  No channel delays a rollout: each has a bounded queue and a task
of its own, and logs each message that it could not send.
It knows ports, never an adapter.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from machines.model.plan import GateName
from machines.model.rollout import Rollout
from machines.model.timefmt import format_duration
from machines.rules import gates
from machines.rules.preparing import preparation_blocker
from machines.scheduler.why import exceptions_reason, why
from machines.states import Trigger
from rolloutd.engine.forecasts import MissedForecast
from rolloutd.engine.state import State
from rolloutd.engine.tasks import wait_for_first
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Message, Notification, Notifier
from rolloutd.ports.guards import adapter_errors
from rolloutd.texts import reason_text
from rolloutd.texts.audit_names import with_current_names
from rolloutd.texts.event_text import failed_step
from rolloutd.texts.vote_text import describe_missing_votes

log = logging.getLogger(__name__)

GATE_WAITS = "gate-waits"
NODE_FAILED = "node-failed"
DISTURBED = "disturbed"
PREPARE_FAILED = "prepare-failed"
ROLLOUT_ENDED = "rollout-ended"
NOTHING_MOVED = "nothing-moved"
ADAPTER_FAILING = "adapter-failing"
FORECAST_MISSED = "forecast-missed"
AUDIT_HEAD = "audit-head"
NOTIFY_EVENTS = (
    GATE_WAITS,
    NODE_FAILED,
    DISTURBED,
    PREPARE_FAILED,
    ROLLOUT_ENDED,
    NOTHING_MOVED,
    ADAPTER_FAILING,
    FORECAST_MISSED,
)
"""The events of a dispatcher that is given none; the audit's head is sent only where it is asked for."""

COALESCE_S = 1.0
"""Changes within this time are read together: people read no faster."""

STALL_CHECK_S = 60.0
"""Interval between checks for stalled rollouts."""

MIN_PAUSE_S = 5.0
"""Pause between two messages of a channel; notifications meanwhile become one message."""

MAX_QUEUED = 200
"""Notifications that wait for a channel; beyond that the oldest are only counted."""

MAX_LISTED = 20
"""Notifications listed in one message; the others are counted."""

INITIAL_BACKOFF_S = 5.0
MAX_BACKOFF_S = 300.0
MAX_TRIES = 10
"""Tries of one message, half an hour in all: a longer outage of a mail server is an incident."""

SEND_TIMEOUT_S = 60.0
"""Time limit of one try: a working service answers within seconds."""

AUDIT_PAGE_SIZE = 500


@dataclass(slots=True)
class _Channel:
    notifier: Notifier
    queue: deque[Notification] = field(default_factory=deque)
    dropped: int = 0
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def adapter(self) -> str:
        """Its name among the adapters."""
        return f"channel {self.notifier.name}"

    def enqueue(self, notification: Notification) -> None:
        if len(self.queue) >= MAX_QUEUED:
            self.queue.popleft()
            self.dropped += 1
        self.queue.append(notification)
        self.wakeup.set()

    def flush(self) -> Message:
        """Return and remove all queued notifications, as one message."""
        notifications, dropped = list(self.queue), self.dropped
        self.queue.clear()
        self.dropped = 0
        self.wakeup.clear()
        listed, omitted = notifications[:MAX_LISTED], dropped + len(notifications[MAX_LISTED:])
        if len(listed) == 1 and not omitted:
            return Message(listed[0].title, listed[0].text, listed)
        lines = [f"{each.title}\n{each.text}".strip() for each in listed]
        if omitted:
            lines.append(f"and {omitted} more: rolloutctl status")
        title = f"rolloutd: {len(listed) + omitted} messages"
        return Message(title, "\n\n".join(lines), listed, omitted)


class NotificationDispatcher:
    """Creates notifications and queues them on all channels; without `stall_after_s` it reports no stalls."""

    def __init__(
        self,
        state: State,
        notifiers: Sequence[Notifier],
        events: Sequence[str] = NOTIFY_EVENTS,
        stall_after_s: float | None = None,
    ) -> None:
        self._state = state
        self._channels = [_Channel(notifier) for notifier in notifiers]
        self._events = frozenset(events)
        self._stall_after_s = stall_after_s
        # Earlier entries were notified by the daemon before this one, or are too old to act on.
        self._last_seq = state.changes.latest_seq
        self._stopped_preparations: set[str] = set()
        self._waiting_gates: set[tuple[str, str, str]] = set()
        self._last_progress_at: dict[str, float] = {}
        self._stalled_rollouts: set[str] = set()
        self._failing_adapters: set[str] = set()

    async def run(self) -> None:
        """Notify until cancelled; return at once without a channel."""
        if not self._channels:
            return
        async with asyncio.TaskGroup() as tasks:
            for channel in self._channels:
                tasks.create_task(self._deliver(channel), name=f"notify {channel.notifier.name}")
            tasks.create_task(self._watch_changes(), name="notify watch")

    def announce_audit_head(self, title: str, line: str) -> None:
        """Queue the audit's latest hash, if the settings ask for it."""
        if AUDIT_HEAD in self._events:
            for channel in self._channels:
                channel.enqueue(Notification(AUDIT_HEAD, title, line, at=self._state.now()))

    def announce_missed_forecast(self, missed: MissedForecast) -> None:
        """Queue that a rollout ends later than a forecast said that people have seen."""
        if FORECAST_MISSED in self._events:
            promised = missed.kept.answer["ends_at"]["p90"]
            ends = f"ends {missed.ends_at}" if missed.ends_at else "does not end as it is"
            cause = f"; most waiting: {missed.waits_for}" if missed.waits_for else ""
            rollout, occasion = missed.kept.rollout, missed.kept.occasion
            text = f"{rollout} {ends}, not by {promised}, as the forecast for {occasion} said{cause}"
            for channel in self._channels:
                channel.enqueue(Notification(f"{rollout} is later than forecast", text))

    # -- detection

    async def _watch_changes(self) -> None:
        with self._state.changes.subscribe() as changed:
            while True:
                changed.clear()
                try:
                    await self._queue_notifications()
                except StoreFailed as failure:
                    log.warning("notifications: the audit cannot be read: %s", failure)
                await self._state.clock.sleep(COALESCE_S)
                # The timeout detects stalls: a stalled rollout has no change that would set the event.
                if not changed.is_set():
                    await wait_for_first(changed.wait(), self._state.clock.sleep(STALL_CHECK_S))

    async def _queue_notifications(self) -> None:
        await self._state.advance()
        for notification in [
            *await self._notifications_from_audit(),
            *self._notifications_for_gates(),
            *self._notifications_for_preparations(),
            *self._notifications_for_stalls(),
            *self._notifications_for_adapters(),
        ]:
            for channel in self._channels:
                # A channel that fails cannot report its own failure.
                if channel.adapter != notification.adapter:
                    channel.enqueue(replace(notification, at=self._state.now()))

    async def _notifications_from_audit(self) -> list[Notification]:
        notifications: list[Notification] = []
        while True:
            page = await self._state.store.read_audit(after=self._last_seq, limit=AUDIT_PAGE_SIZE)
            for entry in page:
                self._last_seq = entry.seq
                fields = with_current_names(json.loads(entry.text))
                # A denied request moves nothing, so it must not end a stall.
                if fields["rollout"] is not None and fields["event"] != "RequestDenied":
                    self._last_progress_at[fields["rollout"]] = fields["at"]
                    self._stalled_rollouts.discard(fields["rollout"])
                notifications += self._notifications_for_entry(fields)
            if len(page) < AUDIT_PAGE_SIZE:
                return notifications

    def _notifications_for_entry(self, entry: Mapping[str, Any]) -> Iterator[Notification]:
        rollout, fields = entry["rollout"], entry["fields"]
        about = partial(Notification, rollout=rollout or "", node=entry["node"] or "")
        match entry["event"]:
            case "PhaseMoved" if fields["trigger"] == Trigger.DISTURBED and DISTURBED in self._events:
                text = f"{failed_step(fields['failure'])}\nrolloutctl status {rollout}"
                yield about(DISTURBED, f"{entry['node']} was disturbed in service by {rollout}", text)
            case "PhaseMoved" if fields["target"] == "failed" and NODE_FAILED in self._events:
                text = f"{failed_step(fields['failure'])}\nrolloutctl status {rollout}"
                what = "the rollback of " if fields.get("rolling_back") else ""
                yield about(NODE_FAILED, f"{what}{entry['node']} failed in {rollout}", text)
            case "RolloutEnded" if ROLLOUT_ENDED in self._events:
                result = self._describe_result(rollout)
                yield about(ROLLOUT_ENDED, f"{rollout} has ended", f"{result}\nrolloutctl status {rollout}")
            case "RolloutCancelled" if ROLLOUT_ENDED in self._events:
                by = entry["actor"]["name"]
                yield about(ROLLOUT_ENDED, f"{rollout} was cancelled by {by}", str(fields.get("reason", "")))

    def _describe_result(self, rollout_id: str) -> str:
        rollout = self._state.index.rollouts.get(rollout_id)
        exceptions = None if rollout is None else exceptions_reason(self._state.index, rollout)
        return "every node is done" if exceptions is None else reason_text.describe(exceptions)

    def _notifications_for_gates(self) -> Iterator[Notification]:
        """Yield a notification for each gate that waits for votes and did not at the last call."""
        if GATE_WAITS not in self._events:
            return
        now, waiting = self._state.now(), set()
        for rollout in self._state.index.rollouts.values():
            for gate, wave in () if rollout.closed else _gates_of(rollout):
                view = gates.gate_view(self._state.index, rollout, gate, wave, now)
                if view.state != "waiting":
                    continue
                key = (rollout.id, gate.value, wave)
                waiting.add(key)
                if key not in self._waiting_gates:
                    after = f" after {wave}" if wave else ""
                    missing = describe_missing_votes(view.missing)
                    text = f"{missing}\nrolloutctl approve {rollout.id} {gate} --reason ..."
                    title = f"{rollout.id} waits at {gate}{after}"
                    yield Notification(GATE_WAITS, title, text, rollout.id, gate=gate.value, wave=wave)
        self._waiting_gates = waiting

    def _notifications_for_preparations(self) -> Iterator[Notification]:
        """Yield a notification for each rollout whose preparation stopped since the last call."""
        if PREPARE_FAILED not in self._events:
            return
        stopped = set()
        for rollout in self._state.index.rollouts.values():
            reason = None if rollout.closed else preparation_blocker(self._state.index, rollout)
            if reason is None:
                continue
            stopped.add(rollout.id)
            if rollout.id not in self._stopped_preparations:
                text = f"{reason_text.describe(reason)}\nrolloutctl prepare {rollout.id}"
                title = f"the preparation of {rollout.id} has stopped"
                yield Notification(PREPARE_FAILED, title, text, rollout.id)
        self._stopped_preparations = stopped

    def _notifications_for_stalls(self) -> Iterator[Notification]:
        """Yield a notification for each stalled rollout, once per stall."""
        if self._stall_after_s is None or NOTHING_MOVED not in self._events:
            return
        now = self._state.now()
        index = self._state.index.at(now)
        for rollout in index.rollouts.values():
            since = self._last_progress_at.setdefault(rollout.id, now)
            if rollout.closed or rollout.id in self._stalled_rollouts or now - since < self._stall_after_s:
                continue
            self._stalled_rollouts.add(rollout.id)
            reason = why(index, rollout, now)
            in_flight = ", ".join(sorted(index.counters(rollout.id).in_flight))
            text = (
                reason_text.describe(reason)
                if reason is not None
                else f"at work: {in_flight}"
                if in_flight
                else "no reason known"
            )
            title = f"{rollout.id} has not moved for {format_duration(now - since)}"
            yield Notification(NOTHING_MOVED, title, f"{text}\nrolloutctl status {rollout.id}", rollout.id)

    def _notifications_for_adapters(self) -> Iterator[Notification]:
        """Yield a notification for each adapter that keeps failing since the last call, or has recovered."""
        if ADAPTER_FAILING not in self._events:
            return
        failing = {each.adapter: each for each in self._state.adapter_failures.reported()}
        for adapter in failing.keys() - self._failing_adapters:
            text = f"{failing[adapter]}\nrolloutctl doctor"
            yield Notification(ADAPTER_FAILING, f"{adapter} keeps failing", text, adapter=adapter)
        for adapter in self._failing_adapters - failing.keys():
            yield Notification(ADAPTER_FAILING, f"{adapter} answers again", adapter=adapter)
        self._failing_adapters = set(failing)

    # -- sending

    async def _deliver(self, channel: _Channel) -> None:
        while True:
            await channel.wakeup.wait()
            await self._send(channel, channel.flush())
            await self._state.clock.sleep(MIN_PAUSE_S)

    async def _send(self, channel: _Channel, message: Message) -> None:
        backoff_s = INITIAL_BACKOFF_S
        for number in range(1, MAX_TRIES + 1):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    with adapter_errors(channel.adapter):
                        await channel.notifier.send(message)
            except (RolloutdError, TimeoutError) as error:
                log.warning("%s: try %d of %d: %s", channel.notifier.name, number, MAX_TRIES, error)
                self._state.record_try(channel.adapter, str(error) or "no answer in time")
            else:
                self._state.record_try(channel.adapter)
                return
            if number < MAX_TRIES:
                await self._state.clock.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
        log.error("%s: given up: %s", channel.notifier.name, message.title)


def _gates_of(rollout: Rollout) -> Iterator[tuple[GateName, str]]:
    yield from rollout.plan.gates_in_order
    yield GateName.PROCEED, ""
