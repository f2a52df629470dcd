"""Shares of the socket: no user keeps others out, and rights are checked before a body is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control import limits
from rolloutd.control.client import ApiError
from rolloutd.control.limits import Quota, Rank, TooMany
from rolloutd.control.rights import any_user
from rolloutd.control.route_table import ROUTES
from rolloutd.control.routes import Route
from rolloutd.ports import AuditReport, Checkpoint, Host
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.rolloutd.control_environment import ACCOUNTS, REBOOTS, ControlEnvironment, control_environment

STRANGER, OTHER_STRANGER, MEMBER, ADMIN = 1, 2, 3, 4
RANKS = {MEMBER: Rank.MEMBER, ADMIN: Rank.ADMIN}

UNRESTRICTED = {"/v1/plans/validate", "/v1/rollouts/{r}/votes/token"}
"""Calls that change nothing, or whose right is in their body."""


class CountingCheckpoints(FakeCheckpoints):
    """Checkpoints that count the nodes on which they were read."""

    reads = 0

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint]:
        self.reads += 1
        return await super().read(host, timeout_s=timeout_s)


def fill(quota: Quota, uid: int) -> int:
    """Take as many as the user gets."""
    for number in range(quota.total + 1):
        try:
            quota.acquire(uid)
        except TooMany:
            return number
    raise AssertionError("there is no limit")


def test_each_rank_keeps_its_share() -> None:
    quota = Quota("connections", 64, RANKS)
    assert fill(quota, STRANGER) == 4
    strangers = 4 + sum(fill(quota, uid) for uid in range(100, 200))
    assert strangers == 16
    assert fill(quota, MEMBER) == 16
    quota_members = Quota("connections", 64, dict.fromkeys(range(100), Rank.MEMBER) | {ADMIN: Rank.ADMIN})
    assert sum(fill(quota_members, uid) for uid in range(10, 100)) == 56
    assert fill(quota_members, ADMIN) == 8


def test_a_small_quota_has_one_for_each_rank() -> None:
    quota = Quota("uploads", 4, RANKS)
    assert (fill(quota, MEMBER), fill(quota, ADMIN)) == (1, 2)
    quota.release(MEMBER)
    quota.acquire(MEMBER)


async def test_one_verification_per_user_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as env:
        begun, may_end, verify = asyncio.Event(), asyncio.Event(), env.state.store.verify_audit

        async def verify_slowly(head: str | None = None, *, gently: bool = False) -> AuditReport:
            begun.set()
            await may_end.wait()
            return await verify(head)

        monkeypatch.setattr(env.state.store, "verify_audit", verify_slowly)
        first = asyncio.create_task(env.request("nora", "get", "/v1/audit/verify"))
        await begun.wait()
        for who, status in (("nora", 429), ("adam", None)):
            second = asyncio.create_task(env.request(who, "get", "/v1/audit/verify"))
            if status is None:
                may_end.set()
                assert (await second)["ok"]
                continue
            with pytest.raises(ApiError) as refused:
                await second
            assert (refused.value.status, refused.value.body["code"]) == (429, "too-many-verifications")
        assert (await first)["ok"]


async def test_silent_connections_are_limited_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "max_connections", lambda: 64)
    monkeypatch.setattr(limits, "FIRST_REQUEST_TIMEOUT_S", 1.0)
    async with control_environment(tmp_path) as inside:
        path = tmp_path / "run" / "control.sock"
        opened = [await asyncio.open_unix_connection(path) for _ in range(30)]
        for _, writer in opened[:3]:
            writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n")  # headers that never end
        answers = [await reader.read() for reader, _ in opened]
        refused = [answer for answer in answers if answer]
        assert len(refused) == 30 - 4
        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in refused)
        assert json.loads(refused[0].partition(b"\r\n\r\n")[2])["code"] == "too-many-connections"
        for _, writer in opened:
            writer.close()
        assert (await inside.request("nora", "get", "/v1/health"))["version"] == "0.test"
        assert inside.server._limits.connections.held <= 1
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "route",
    [each for each in ROUTES if each.method != "GET" and each.path not in UNRESTRICTED],
    ids=lambda route: f"{route.method} {route.path}",
)
async def test_right_is_checked_before_the_body(tmp_path: Path, route: Route) -> None:
    """A stranger whose body never comes is refused at once, whatever else is wrong with the call."""
    async with control_environment(tmp_path, fleetlock=REBOOTS) as inside:
        rollout = await inside.submit()
        await inside.request("adam", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "over"})
        status = await status_without_body(inside, tmp_path, "nora", route, {"r": rollout})
        assert status == 403
        assert route.access.check is not any_user


@pytest.mark.parametrize(
    "route",
    [each for each in ROUTES if each.access.team == "no"],
    ids=lambda route: f"{route.method} {route.path}",
)
async def test_another_team_is_refused_before_the_state_is_judged(tmp_path: Path, route: Route) -> None:
    async with control_environment(tmp_path, fleetlock=REBOOTS) as inside:
        rollout = await inside.submit()
        await inside.request("adam", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "over"})
        assert await status_without_body(inside, tmp_path, "paul", route, {"r": rollout}) == 403


async def test_release_of_nothing_needs_the_right_to_hold(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        for who in ("nora", "sara"):
            with pytest.raises(ApiError) as refused:
                await inside.request(who, "delete", "/v1/holds", {"node": "p1"})
            assert refused.value.status == 403
        assert await inside.request("paul", "delete", "/v1/holds", {"node": "p1"}) == {"lifted": 0}


async def status_without_body(
    inside: ControlEnvironment, tmp_path: Path, who: str, route: Route, parts: Mapping[str, str]
) -> int:
    """Send the headers of a call that announces a body, and return the status of its answer."""
    inside.name_service.current = ACCOUNTS[who]
    path = route.path
    values = {
        "{r}": parts["r"],
        "{s}": parts["r"],
        "{n}": "p1",
        "{t}": "search",
        "{v}": "v1",
        "{g}": "workers",
    }
    for name, value in values.items():
        path = path.replace(name, value)
    reader, writer = await asyncio.open_unix_connection(tmp_path / "run" / "control.sock")
    media = route.upload_type or "application/json"
    head = f"{route.method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\nContent-Length: 9\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_clean_is_heavy_until_its_stream_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as env:
        begun, may_end, cleaner = asyncio.Event(), asyncio.Event(), env.server._services.cleaner
        clean = cleaner.clean

        async def clean_slowly(*args: Any, **named: Any) -> Any:
            begun.set()
            await may_end.wait()
            return await clean(*args, **named)

        monkeypatch.setattr(cleaner, "clean", clean_slowly)
        call = partial(
            env.stream_lines, "/v1/clean/p1", who="paul", method="POST", body={"reason": "because"}
        )
        first = asyncio.create_task(call())
        await begun.wait()
        with pytest.raises(ApiError) as refused:
            async with asyncio.timeout(30):  # one that is not refused waits for ever
                await call()
        assert refused.value.status == 429
        may_end.set()
        await first
        assert await call()


@pytest.mark.parametrize("path", ["/v1/nodes/p1/checkpoints", "rollout/checkpoints", "rollout/artifacts"])
async def test_stranger_starts_no_logins_on_nodes(tmp_path: Path, path: str) -> None:
    nodes = CountingCheckpoints()
    async with control_environment(tmp_path, checkpoints=nodes) as env:
        path = path.replace("rollout", f"/v1/rollouts/{await env.start()}")
        with pytest.raises(ApiError) as refused:
            await env.request("nora", "get", path)
        assert (refused.value.status, nodes.reads) == (403, 0)
        await env.request("paul", "get", path)
        assert nodes.reads
