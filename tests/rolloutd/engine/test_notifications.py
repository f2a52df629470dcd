"""Notifications: each event once, also when the channel fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolloutd.engine import notifications
from rolloutd.engine.adapter_failures import REPORTED_AFTER
from rolloutd.engine.notifications import NotificationDispatcher
from rolloutd.service.metrics import MetricsCollector
from tests.contracts.fakes.notifier import FakeNotifier
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

TURNS = 200
"""Turns of the loop in which everything that can happen without time has happened."""


@asynccontextmanager
async def notifying(
    tmp_path: Path, *notifiers: FakeNotifier, **more: Any
) -> AsyncIterator[tuple[ControlEnvironment, Callable[[float], Any]]]:
    """Yield an environment that sends notifications, and a function that lets time pass."""
    async with control_environment(tmp_path) as inside:
        telling = NotificationDispatcher(inside.state, notifiers, **more)
        task = asyncio.create_task(telling.run())

        async def passes(seconds: float) -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            inside.clock.advance(seconds)
            for _ in range(TURNS):
                await asyncio.sleep(0)

        try:
            yield inside, passes
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_gates_failures_and_ends_are_sent_once(tmp_path: Path) -> None:
    people = FakeNotifier()
    async with notifying(tmp_path, people) as (inside, passes):
        rollout = await inside.submit()
        await passes(10)
        title, text = people.sent.pop()
        assert title == f"{rollout} waits at start"
        (notification,) = people.messages[-1].notifications
        assert (notification.event, notification.rollout, notification.gate) == (
            "gate-waits",
            rollout,
            "start",
        )
        assert notification.at == inside.state.now()
        assert text.splitlines() == [
            "the vote of the owner, team infra, is missing",
            f"rolloutctl approve {rollout} start --reason ...",
        ]
        await passes(100)
        assert people.sent == [], "sent once"
        await inside.vote("olga", rollout, "start")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong week"})
        await passes(10)
        assert people.sent == [(f"{rollout} was cancelled by olga", "wrong week")]


async def test_a_failure_says_what_failed_and_that_people_are_asked(tmp_path: Path) -> None:
    people = FakeNotifier()
    async with notifying(tmp_path, people) as (inside, passes):
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await passes(10)
        await passes(10)
        text = "\n".join(f"{title} {text}" for title, text in people.sent)
        assert f"p1 failed in {rollout}" in text
        assert "run.configure: broken" in text
        assert f"{rollout} waits at proceed" in text


async def test_a_channel_that_fails_is_tried_again_and_then_given_up(tmp_path: Path) -> None:
    people, others = FakeNotifier("people"), FakeNotifier("others")
    people.failures = 3
    async with notifying(tmp_path, people, others) as (inside, passes):
        rollout = await inside.submit()
        for _ in range(12):
            await passes(10)
        assert [title for title, _ in people.sent] == [f"{rollout} waits at start"]
        assert people.attempts == 4
        assert len(others.sent) == 1, "the other channel was not held up"
        people.failures = 10_000
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "x"})
        for _ in range(40):
            await passes(300)
        assert people.attempts == 4 + notifications.MAX_TRIES
        assert others.sent[-1][0] == "channel people keeps failing"


async def test_a_burst_becomes_one_message_and_a_queue_has_an_end(tmp_path: Path) -> None:
    people = FakeNotifier()
    people.failures = 1
    async with notifying(tmp_path, people) as (inside, passes):
        for number in range(notifications.MAX_QUEUED + 20):
            await inside.submit(text=PLAN.replace("name: sysctl", f"name: plan-{number}"))
            if number == 0:
                await passes(2)
        for _ in range(20):
            await passes(10)
        assert len(people.sent) == 2
        title, text = people.sent[-1]
        assert title == f"rolloutd: {notifications.MAX_QUEUED + 19} messages"
        assert f"and {notifications.MAX_QUEUED + 19 - notifications.MAX_LISTED} more" in text


async def test_standstill_is_sent_once_with_its_reason(tmp_path: Path) -> None:
    people = FakeNotifier()
    async with notifying(tmp_path, people, events=["nothing-moved"], stall_after_s=3600.0) as (
        inside,
        passes,
    ):
        rollout = await inside.submit()
        for _ in range(70):
            await passes(60)
        assert len(people.sent) == 1
        assert people.sent[0][0].startswith(f"{rollout} has not moved for 1h")
        assert "the start gate waits" in people.sent[0][1]
        await inside.vote("olga", rollout, "start")
        for _ in range(70):
            await passes(60)
        assert len(people.sent) == 2, "it had moved in between"


async def test_failing_adapter_and_its_recovery_are_sent_once(tmp_path: Path) -> None:
    people = FakeNotifier()
    async with notifying(tmp_path, people) as (inside, passes):

        async def fails(times: int) -> None:
            for _ in range(times):
                inside.state.record_try("watch ams", "no route to host")
            await passes(notifications.STALL_CHECK_S)
            await passes(notifications.STALL_CHECK_S)

        await fails(REPORTED_AFTER - 1)
        assert people.sent == []
        await fails(1)
        title, text = people.sent.pop()
        assert title == "watch ams keeps failing"
        assert "5 times in a row since" in text
        await fails(1)
        assert people.sent == []
        metrics = (await MetricsCollector(inside.state, "1").render()).decode()
        assert 'rolloutd_adapter_failures{adapter="watch ams"} 6.0' in metrics
        inside.state.record_try("watch ams")
        await fails(0)
        assert [title for title, _ in people.sent] == ["watch ams answers again"]


async def test_without_a_channel_nothing_is_looked_at(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await NotificationDispatcher(inside.state, []).run()
