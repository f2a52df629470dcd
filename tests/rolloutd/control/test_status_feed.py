"""Versions of the status on several streams."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from rolloutd.control.nodes.streams import STATUS_INTERVAL_S, _event_lines
from rolloutd.control.requests import EventsQuery
from rolloutd.control.responses import SharedAnswers
from rolloutd.control.status_feed import StatusFeed
from rolloutd.engine.change_notifier import ChangeNotifier
from tests.contracts.fakes.leadership import FakeLeadership, Seat
from tests.support.virtual_loop import VirtualLoop


class MovingLoop(VirtualLoop):
    """A virtual loop whose clock moves a little while code runs, as every clock does."""

    def time(self) -> float:
        self.virtual_s = super().time() + 1e-6
        return self.virtual_s


def test_streams_that_began_apart_get_each_version_together() -> None:
    changes, feed, seat = ChangeNotifier(), StatusFeed(), FakeLeadership(Seat())
    arrivals: dict[int, list[float]] = {}

    async def advance() -> None:
        return None

    index: Any = SimpleNamespace(rollouts={}, in_flight=lambda: 0)
    state: Any = SimpleNamespace(changes=changes, index=index, advance=advance, problems=tuple, epoch=1)
    state.settings = SimpleNamespace(name="a")
    services: Any = SimpleNamespace(state=state, status_feed=feed, answers=SharedAnswers(), leadership=seat)
    services.started_at, services.is_standby, services.version = 0.0, False, "1"

    async def follow() -> None:
        query = EventsQuery(follow=True, status=True)
        async for part in _event_lines(services, query, 0, None):
            at = asyncio.get_running_loop().time()
            arrivals.setdefault(json.loads(part)["version"], []).append(at)

    async def follow_twice() -> None:
        tasks = [asyncio.create_task(follow())]
        for number in range(100):
            if number == 10:
                tasks.append(asyncio.create_task(follow()))
            changes.notify_progress()
            await asyncio.sleep(0.01)
        for each in tasks:
            each.cancel()

    with asyncio.Runner(loop_factory=MovingLoop) as runner:
        runner.run(follow_twice())
    of_both = [arrivals[number] for number in sorted(arrivals)[4:-1]]
    assert [len(each) for each in of_both] == [2] * len(of_both)
    assert all(other - one < STATUS_INTERVAL_S / 10 for one, other in of_both)
    assert all(late - early > STATUS_INTERVAL_S * 0.9 for (early, _), (late, _) in pairwise(of_both))
