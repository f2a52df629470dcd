"""The API's server: the socket's file, the caller's identity, refusals and faults.

Longer than 500 lines: all tests share one server over one socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from machines.model.events import StepRecorded
from machines.model.step_record import StepAction, StepState
from machines.states import Outcome, Trigger
from rolloutd.control import identity, limits, requests
from rolloutd.control import server as border
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, StreamInterrupted, _read_parts
from rolloutd.control.formats import format_timestamp
from rolloutd.control.identity import Account, CachedNameService, identify, read_peer_uid
from rolloutd.control.limits import MERGE_WINDOW_S, DenialLog
from rolloutd.control.nodes import streams as streams
from rolloutd.control.nodes.logs import LogReader
from rolloutd.control.responses import BadRequest, SharedAnswers
from rolloutd.control.route_table import ROUTES
from rolloutd.control.status_changes import merge
from rolloutd.control.status_feed import StatusFeed
from rolloutd.engine.state import StepProgress
from rolloutd.errors import AlreadyRunning, RunnerUnavailable, StoreFailed
from rolloutd.ports import Host, RunEvent, RunRequest, RunState
from rolloutd.service.listen_socket import CannotListen, adopt_socket, bind
from tests.contracts.fakes.sources import SOURCE
from tests.contracts.fakes.store import MemoryStore
from tests.rolloutd.control_environment import (
    ACCOUNTS,
    PLAN,
    ControlEnvironment,
    control_environment,
    settings_of,
)

FUZZ_SEED = 20261120
FUZZ_REQUESTS = 3_000

# -- the socket's file ----------------------------------------------------------


def test_the_socket_is_for_its_group_alone(tmp_path: Path) -> None:
    bound = bind(tmp_path / "made" / "control.sock")
    try:
        assert stat.S_IMODE(bound.path.stat().st_mode) == 0o660
        assert [each.name for each in bound.path.parent.iterdir()] == ["control.sock"]
        assert bound.is_in_place()
    finally:
        bound.remove()
        bound.sock.close()
    assert not bound.path.exists()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = bind(path)
    with pytest.raises(AlreadyRunning):
        bind(path)
    assert first.is_in_place()
    first.sock.close()
    second = bind(path)
    assert second.is_in_place()
    first.remove()
    assert second.is_in_place()
    second.sock.close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(CannotListen, match="not a socket"):
        bind(path)
    assert path.read_text() == "precious"
    with pytest.raises(CannotListen, match="too long"):
        bind(tmp_path / ("x" * 120))
    with pytest.raises(CannotListen, match="no group"):
        bind(tmp_path / "other.sock", "no-such-group-here")


def test_a_socket_that_was_made_for_us_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, socket.socket() as other:
        made.bind(os.fspath(tmp_path / "s"))
        made.listen()
        with adopt_socket(os.dup(made.fileno())) as ours:
            assert ours.getsockname() == os.fspath(tmp_path / "s")
        with pytest.raises(CannotListen):
            adopt_socket(other.fileno())
        other.detach()


async def test_a_socket_that_vanished_is_made_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        assert not await inside.server.ensure_listening()
        (tmp_path / "run" / "control.sock").unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(DaemonUnreachable):
            await inside.request("nora", "get", "/v1/health")
        assert await inside.server.ensure_listening()
        assert (await inside.request("nora", "get", "/v1/health"))["pid"] == os.getpid()
    assert not (tmp_path / "run" / "control.sock").exists()


# -- who asks -------------------------------------------------------------------


def test_a_peer_is_who_the_kernel_says() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert read_peer_uid(one) == os.getuid()
    assert read_peer_uid(None) is None


def test_groups_and_names_make_members_and_admins() -> None:
    settings = settings_of()
    sara = identify(ACCOUNTS["sara"], settings.teams, settings.admins)
    assert (sara.teams, sara.admin) == (frozenset({"search"}), False)
    adam = identify(ACCOUNTS["adam"], settings.teams, settings.admins)
    assert (adam.teams, adam.admin) == (frozenset(), True)
    pretender = Account(1, "searchers", frozenset({"olga"}))
    assert identify(pretender, settings.teams, settings.admins).teams == frozenset()


async def test_the_name_service_is_asked_again_after_a_while() -> None:
    asked: list[int] = []
    now = [0.0]

    def look(uid: int) -> Account:
        asked.append(uid)
        return Account(uid, f"u{uid}", frozenset())

    names = CachedNameService(lambda: now[0], look)
    for _ in range(3):
        await names.account(7)
    assert asked == [7]
    now[0] = 11.0
    await names.account(7)
    assert asked == [7, 7]


async def test_callers_of_one_user_share_one_lookup() -> None:
    asked: list[int] = []
    answered = Event()

    def look(uid: int) -> Account:
        asked.append(uid)
        answered.wait()
        return Account(uid, f"u{uid}", frozenset())

    names = CachedNameService(lambda: 0.0, look)
    callers = [asyncio.create_task(names.account(uid)) for uid in (7, 7, 8, 7)]
    callers[0].cancel()
    await asyncio.sleep(0)
    answered.set()
    others = await asyncio.gather(*callers[1:])
    assert [account.uid for account in others] == [7, 8, 7]
    assert sorted(asked) == [7, 8]


async def test_caller_without_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LOOKUP_TIMEOUT_S", 0.01)
    asked: list[int] = []
    answered = Event()

    def look(uid: int) -> Account:
        asked.append(uid)
        answered.wait()
        return Account(uid, "olga", frozenset())

    async with control_environment(tmp_path) as inside:
        inside.server._accounts = CachedNameService(inside.clock.now, look)
        try:
            for _ in range(3):
                with pytest.raises(ApiError, match="has not answered for") as refused:
                    await inside.request("olga", "get", "/v1/whoami")
                assert refused.value.status == 503
            assert asked == [os.getuid()], "a caller that comes again adds no lookup"
        finally:
            answered.set()
        monkeypatch.setattr(identity, "LOOKUP_TIMEOUT_S", 60.0)
        assert (await inside.request("olga", "get", "/v1/whoami"))["user"] == "olga"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_process_is_known_by_its_uid(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.server._accounts = CachedNameService(inside.clock.now)
        for place in (tmp_path, *tmp_path.parents[:-2]):
            place.chmod(place.stat().st_mode | 0o055)
        path = tmp_path / "run" / "control.sock"
        path.chmod(0o666)
        speak = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "s.sendall(b'GET /v1/whoami HTTP/1.1\\r\\nHost: x\\r\\nX-User: root\\r\\n')\n"
            "s.sendall(b'Connection: close\\r\\n\\r\\n')\n"
            "sys.stdout.buffer.write(b''.join(iter(lambda: s.recv(65536), b'')))\n"
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", speak, os.fspath(path), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await child.communicate()
        who = json.loads(said.split(b"\r\n\r\n", 1)[1])
        assert (who["uid"], who["admin"], who["teams"]) == (65534, False, [])


# -- refusals are remembered, and do not fill the disk ----------------------------


async def test_a_refused_call_is_audited_once_a_minute(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        for _ in range(20):
            with pytest.raises(ApiError):
                await inside.vote("nora", rollout, "start")
        entries = (await inside.request("nora", "get", "/v1/audit?kind=RequestDenied"))["entries"]
        assert all(format_timestamp(each["entry"]["at"]) == each["at"] for each in entries)
        assert len(entries) == 1
        fields = entries[0]["entry"]["fields"]
        assert (fields["actor"]["name"], fields["actor"]["uid"]) == ("nora", 1007)
        assert fields["call"] == f"POST /v1/rollouts/{rollout}/votes"


async def test_audited_refusal_has_no_control_characters(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        with pytest.raises(ApiError):
            await inside.request("nora", "put", "/v1/teams/x%0Aforged%1B[2J", {"reason": "r"})
        entries = (await inside.request("nora", "get", "/v1/audit?kind=RequestDenied"))["entries"]
        fields = entries[0]["entry"]["fields"]
        assert fields["call"] == "PUT /v1/teams/x?forged?[2J"
        assert "set the rules of x?forged?[2J" in fields["why"]


def test_many_different_refusals_are_merged_too() -> None:
    refusals, who = DenialLog(), ACCOUNTS["nora"]
    actor = identify(who, {}, ()).actor
    recorded = [refusals.record(actor, f"GET /{number}", "no", 100.0) for number in range(1000)]
    assert sum(len(events) for events in recorded) == 10
    number, later = refusals.record(actor, "GET /x", "no", 100.0 + MERGE_WINDOW_S)
    assert (number.call, later.call) == ("990 more requests", "GET /x")


async def test_number_of_merged_refusals_is_audited_when_the_minute_ends(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()

        async def calls() -> list[str]:
            entries = (await inside.request("nora", "get", "/v1/audit?kind=RequestDenied"))["entries"]
            return [each["entry"]["fields"]["call"] for each in entries]

        async def refuse() -> None:
            for _ in range(20):
                with pytest.raises(ApiError):
                    await inside.vote("nora", rollout, "start")

        vote = f"POST /v1/rollouts/{rollout}/votes"
        await refuse()
        await inside.server.record_denial_numbers()
        assert await calls() == [vote]
        inside.clock.advance(MERGE_WINDOW_S)
        await inside.server.record_denial_numbers()
        assert await calls() == [vote, "19 more requests"]
        await refuse()
        await inside.server.record_denial_numbers(is_last=True)
        assert await calls() == [vote, "19 more requests", vote, "19 more requests"]


def test_number_of_a_dropped_window_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TRACKED_USERS", 1)
    refusals = DenialLog()
    nora, olga = (identify(ACCOUNTS[each], {}, ()).actor for each in ("nora", "olga"))
    for _ in range(3):
        refusals.record(nora, "GET /x", "no", 100.0)
    number, _ = refusals.record(olga, "GET /x", "no", 101.0)
    assert (number.actor, number.call) == (nora, "2 more requests")


# -- what is wrong with a request -------------------------------------------------


async def test_a_body_has_a_limit(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        big = {"file": "p", "text": "x" * (border.MAX_BODY_BYTES + 1)}
        with pytest.raises(ApiError) as refused:
            await inside.request("olga", "post", "/v1/plans/validate", big)
        assert refused.value.status == 413
        with pytest.raises(ApiError) as upload:
            await inside.request("olga", "upload", "/v1/uploads", b"x" * (border.MAX_UPLOAD_BYTES + 1))
        assert upload.value.status == 413
        assert (await inside.request("nora", "get", "/v1/health"))["version"] == "0.test"


def test_a_body_says_nothing_twice() -> None:
    """The last value would win, also over the one that somebody has reviewed."""
    with pytest.raises(BadRequest, match="'reason' occurs twice"):
        border._parse_body(requests.ReasonBody, b'{"reason": "one", "reason": "two"}')
    assert border._parse_body(requests.ReasonBody, b'{"reason": "one"}').reason == "one"
    with pytest.raises(BadRequest, match="reason is empty"):
        border._parse_body(requests.ReasonBody, b'{"reason": " "}')


def test_broken_rule_of_a_body_is_named_without_pydantics_words() -> None:
    with pytest.raises(BadRequest, match=r"windows\.0\.days: no day is named"):
        border._parse_body(requests.SetTeamRules, b'{"reason": "one", "windows": [{"days": []}]}')


async def test_a_store_that_cannot_write_is_a_503(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()

        class Full(type(inside.state.store)):  # type: ignore[misc]
            async def commit(self, *args: Any, **named: Any) -> Any:
                raise StoreFailed("the disk is full")

        inside.state.store.__class__ = Full
        with pytest.raises(ApiError) as failed:
            await inside.vote("olga", rollout, "start")
        assert (failed.value.status, failed.value.code) == (503, "store-failed")
        with pytest.raises(ApiError) as refused:
            await inside.vote("nora", rollout, "start")
        assert refused.value.status == 403
        assert (await inside.request("nora", "get", "/v1/status"))["rollouts"][0][
            "state"
        ] == "awaiting-approval"


async def test_no_input_makes_a_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of malformed requests over the real socket: no answer of 500, and the daemon lives."""
    dice = random.Random(FUZZ_SEED)
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        path = tmp_path / "run" / "control.sock"
        seen: Counter[int] = Counter()
        for number in range(FUZZ_REQUESTS):
            inside.name_service.current = dice.choice(list(ACCOUNTS.values()))
            request, whole = malformed(dice, rollout)
            answer = await exchange(path, request, whole=whole)
            status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
            seen[status] += 1
            assert status < 500, (number, request[:400], answer[:600])
            assert status or not whole, (number, request[:400])
        # Had nearly all been turned away at the door, nothing behind it would have been tried.
        assert {200, 400, 403, 404, 405, 409, 422} <= set(seen), seen
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert (await inside.request("nora", "get", "/v1/health"))["trouble"] is None


async def exchange(path: Path, request: bytes, *, whole: bool) -> bytes:
    """Send bytes, close our half if more is expected, and return what comes back."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            if not whole:
                writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                return await reader.read(65_536)
        return b""
    finally:
        writer.close()


JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e400, 2**70, "", "x", "\x00", "\ud800", "é" * 300, "../../etc/passwd", "🙂" * 9),
    *([], {}, [[]], {"a": None}, ["x"] * 2000, "2026-01-01", "9999-12-31T23:59:59Z", "start", "proceed"),
)

KEYS = ("gate", "yes", "reason", "team", "digest", "wave", "shown", "nodes", "more", "until", "node", "id")
MORE_KEYS = ("source", "scope", "file", "text", "upload", "again", "supersede", "put_back", "extra", "")
QUERIES = (
    "",
    "?",
    "?after=1",
    "?after=-1",
    "?after=x",
    "?all=1",
    "?limit=9e9",
    "?%ff=%fe",
    "?a=b&a=c",
    "?head=0",
)
NAMES = ("p1", "x", "..", "%00", "%2e%2e", "%ff%fe", "a%2Fb", "é", "x" * 3000, "")


def malformed(dice: random.Random, rollout: str) -> tuple[bytes, bool]:
    """Return a request that nobody should send, and whether it is whole as HTTP."""
    kind = dice.randrange(10)
    if kind == 0:
        return dice.randbytes(dice.randrange(1, 200)) + b"\r\n\r\n", False
    route = dice.choice([each for each in ROUTES if not each.streams])
    straight = dice.random() < 0.7
    path = route.path.replace("{r}", rollout if straight else dice.choice(NAMES))
    path = path.replace("{n}", "p1" if straight else dice.choice(NAMES))
    odd = ("GET", "PATCH", "DELETE", "BREW", "OPTIONS")
    method = route.method if dice.random() < 0.9 else dice.choice(odd)
    body = _almost_right(dice, route.body_model) if dice.random() < 0.6 else _junk_body(dice)
    length = (
        str(len(body)) if kind != 1 else dice.choice(("-1", "x", "99999999999999", str(len(body) + 5), "1"))
    )
    media = route.upload_type or dice.choice(("application/json", "text/plain", "", "multipart/form-data"))
    query = dice.choice(QUERIES) if dice.random() < 0.3 else ""
    head = f"{method} {path}{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: {media}\r\nContent-Length: {length}\r\n\r\n"
    whole = head.encode("utf-8", "surrogatepass") + body
    if kind == 2:
        return whole[: dice.randrange(1, len(whole))], False
    if kind == 3:
        spot = dice.randrange(len(whole))
        return whole[:spot] + dice.randbytes(3) + whole[spot:], False
    return whole, kind != 1


def _almost_right(dice: random.Random, model: type[Any] | None) -> bytes:
    """Return a body of the right keys, and of values that are not all right."""
    right: dict[str, Any] = {
        "gate": "start",
        "yes": True,
        "reason": "x",
        "node": "p1",
        "file": "p",
        "scope": "all",
        "text": PLAN,
        "team": "infra",
        "put_back": "leave",
        "more": 1,
        "shown": ["p1#1"],
        "nodes": ["p1"],
    }
    known = list(model.model_fields) if model is not None else []
    body = {key: right[key] for key in known if key in right and dice.random() < 0.95}
    for key in dice.sample(known, min(len(known), dice.choice((0, 0, 1, 2)))):
        body[key] = dice.choice(JUNK)
    if dice.random() < 0.2 and isinstance(body.get("text"), str):
        body["text"] = PLAN[: dice.randrange(len(PLAN))]
    return json.dumps(body).encode()


def _junk_body(dice: random.Random) -> bytes:
    kind = dice.randrange(8)
    if kind == 0:
        return b"[" * 50_000
    if kind == 1:
        return dice.randbytes(dice.randrange(100))
    keys = dice.sample((*KEYS, *MORE_KEYS), dice.randrange(8))
    body = {key: dice.choice(JUNK) for key in keys}
    if kind == 2:
        body |= {"gate": "start", "yes": True, "reason": "x"}
    if kind == 3:
        body |= {"file": "p", "text": PLAN[: dice.randrange(len(PLAN))]}
    return json.dumps(body).encode()


# -- streams --------------------------------------------------------------------


async def test_the_event_stream_is_resumable(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start")
        whole = await inside.stream_lines("/v1/events")
        numbers = [line["seq"] for line in whole]
        assert numbers == list(range(1, len(numbers) + 1))
        assert await inside.stream_lines("/v1/events", after=numbers[1]) == whole[2:]
        mine = await inside.stream_lines("/v1/events", rollout=rollout)
        assert {line["entry"]["rollout"] for line in mine} == {rollout}
        assert await inside.stream_lines("/v1/events", after=10**9) == []


async def test_a_follower_is_told_of_what_happens_next(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        told = asyncio.create_task(inside.stream_lines("/v1/events", 2, follow=True))
        while not inside.state.changes._subscribers:
            await asyncio.sleep(0.01)
        await inside.vote("olga", rollout, "start")
        progress, entry = await told
        assert progress == {"seq": None, "progress": []}
        assert (entry["entry"]["event"], entry["entry"]["rollout"]) == ("VoteCast", rollout)


async def test_a_silent_stream_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)
    async with control_environment(tmp_path) as inside:
        latest = inside.state.changes.latest_seq
        told = await inside.stream_lines("/v1/events", 3, follow=True)
        assert told[1:] == [{"seq": None, "heartbeat": latest}] * 2


async def test_progress_is_told_at_most_five_times_a_second(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        inside.state.step_progress[rollout, "p1"] = StepProgress(
            "isolate.0.command", inside.clock.now(), run=RunState(None, 12.34, "a task")
        )
        began_at = asyncio.get_running_loop().time()
        told = asyncio.create_task(inside.stream_lines("/v1/events", 3, follow=True))
        while not told.done():
            inside.state.changes.notify_progress()
            await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - began_at >= 2 / 5, "two more after the first"
        shown = (await told)[-1]["progress"][0]
        assert (shown["node"], shown["rollout"], shown["percent"], shown["task"]) == (
            *("p1", rollout, 12.3, "a task"),
        )


async def test_progress_is_shared_by_resolved_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        services: Any = SimpleNamespace(state=inside.state, answers=SharedAnswers())
        asked = (streams._progress_line(services, each) for each in ("sysctl-older", rollout))
        assert [len(json.loads(line)["progress"]) for line in await asyncio.gather(*asked)] == [0, 1]


async def test_streams_of_consoles_bring_each_entry_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_INTERVAL_S", 1e9)
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        followed = [asyncio.create_task(inside.stream_lines("/v1/events", 3, follow=True, status=True))]
        followed += [asyncio.create_task(inside.stream_lines("/v1/events", 3, follow=True, status=True))]
        while len(inside.state.changes._subscribers) < 2:
            await asyncio.sleep(0.01)
        await inside.vote("olga", rollout, "start")
        for first, *more in [await each for each in followed]:
            assert [each["rollout"] for each in first["status"]["rollouts"]] == [rollout]
            (entry,) = (each["entry"] for each in more if "entry" in each)
            (status,) = (each["status"] for each in more if "status" in each)
            assert (entry["event"], status["seq"]) == ("VoteCast", entry["seq"])
            assert status == await inside.request("olga", "get", "/v1/status")


async def test_idle_stream_brings_a_status_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_INTERVAL_S", 0.01)
    async with control_environment(tmp_path) as inside, asyncio.timeout(60):
        first, second = await inside.stream_lines("/v1/events", 2, follow=True, status=True)
        assert first["version"] < second["version"]


async def test_streams_bring_what_changed_of_one_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_INTERVAL_S", 1e9)
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        query = {"follow": True, "status": True, "changes": True}
        followed = [asyncio.create_task(inside.stream_lines("/v1/events", 3, **query)) for _ in range(2)]
        while len(inside.state.changes._subscribers) < 2:
            await asyncio.sleep(0.01)
        await inside.vote("olga", rollout, "start")
        for first, *more in [await each for each in followed]:
            (later,) = (each for each in more if "change" in each)
            assert later["version"] == first["version"] + 1
            assert {"rollouts", "seq"} <= set(later["change"])
            (changed,) = later["change"]["rollouts"]["items"]
            assert {"rollout", "gates"} <= set(changed)
            assert "digest" not in changed
            whole = merge(first["status"], later["change"])
            assert whole == await inside.request("olga", "get", "/v1/status")


async def test_stream_that_missed_a_version_gets_a_whole_status() -> None:
    feed, answers, seq = StatusFeed(), SharedAnswers(), 0
    # Requests for a whole status have used their share of the loop.
    answers._not_before["/v1/status"] = asyncio.get_running_loop().time() + 3_600

    async def read() -> Any:
        return {"rollouts": [{"rollout": "a", "percent": seq}], "seq": seq}

    with feed.follow():
        first = await asyncio.wait_for(feed.newer(0, answers, read, lambda: seq), 60)
        seq = 1
        second = await feed.newer(first.number, answers, read, lambda: seq)
        assert await feed.newer(first.number, answers, read, lambda: seq) is second
        change, whole = json.loads(await second.line(first.number)), json.loads(await second.line(0))
        assert change["change"] == {"rollouts": {"items": [{"rollout": "a", "percent": 1}]}, "seq": 1}
        assert whole["status"] == await read()
        changes = SimpleNamespace(latest_seq=0, recent_after=lambda after, limit: ())
        services: Any = SimpleNamespace(state=SimpleNamespace(changes=changes), status_feed=feed)
        for has, is_shared in ((first.number, True), (0, False)):
            one, other = [await streams._status_write(services, second, has, 0, None) for _ in range(2)]
            assert one == other
            assert (one is other) is is_shared
        query = requests.EventsQuery(follow=True, status=True)
        assert streams._interval_s(services, query) == streams.STATUS_INTERVAL_S
        feed.followers = 100  # all of them together must leave most of the loop to others
        assert streams._interval_s(services, query) == 100 * streams.STATUS_INTERVAL_PER_STREAM_S
        feed.followers = 1
    assert feed._latest is None


async def test_a_client_that_goes_away_ends_its_stream_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with control_environment(tmp_path) as inside:
        path = tmp_path / "run" / "control.sock"
        for _ in range(20):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET /v1/events?follow=true HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
        async with asyncio.timeout(60):
            while inside.server._limits.streams.held or inside.state.changes._subscribers:
                inside.state.changes.notify_progress()
                await asyncio.sleep(0.01)
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_there_are_only_so_many_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(border, "MAX_STREAMS", 8)
    async with control_environment(tmp_path) as inside, contextlib.AsyncExitStack() as open_streams:
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "run" / "control.sock")
            open_streams.callback(writer.close)
            writer.write(b"GET /v1/events?follow=true HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(ApiError) as refused:
            await inside.stream_lines("/v1/events", follow=True)
        assert refused.value.code == "too-many-streams"


async def test_a_log_tells_steps_and_what_their_runs_said(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        await log_of_a_run(inside, rollout)
        path = f"/v1/rollouts/{rollout}/nodes/p1/log"
        lines = await inside.stream_lines(path)
        assert [line["offset"] for line in lines] == list(range(1, len(lines) + 1))
        assert "install package" in [line["text"] for line in lines]
        assert await inside.stream_lines(path, offset=2) == lines[2:]
        with pytest.raises(ApiError) as strange:
            await inside.stream_lines(path, attempt=9)
        assert strange.value.status == 404


async def log_of_a_run(inside: ControlEnvironment, rollout: str) -> None:
    """Let a run have been on p1, and be recorded."""
    request = RunRequest("run-1", Host("p1"), SOURCE, "site.yml")
    handle = await inside.server._services.runners.start(request)
    await inside.commit(
        StepRecorded(inside.step(rollout, "p1", "run.configure", StepAction.RUN, handle=handle))
    )


async def test_output_of_another_teams_check_is_not_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        step = inside.step(
            rollout, "p1", "team.payments.0.ssh", StepAction.CHECK, output="secret", visible_to="payments"
        )
        await inside.commit(StepRecorded(step))
        for who, shown in (("paul", "secret"), ("sara", None), ("adam", "secret")):
            node = await inside.request(who, "get", f"/v1/rollouts/{rollout}/nodes/p1")
            assert node["steps"][-1]["output"] == shown


# -- the client -----------------------------------------------------------------


def test_no_daemon_is_said_as_such(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no daemon answers"):
        Client(tmp_path / "nobody.sock").get("/v1/health")
    with pytest.raises(DaemonUnreachable):
        list(Client(tmp_path / ("x" * 200)).stream("/v1/events"))


async def test_a_stream_that_breaks_off_is_lost(tmp_path: Path) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}\n{}\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(broken, tmp_path / "s"):
        with pytest.raises(StreamInterrupted):
            await asyncio.to_thread(lambda: list(Client(tmp_path / "s").stream("/v1/events")))


def test_lines_of_one_write_arrive_together() -> None:
    pieces = iter([b'{"n":1}\n{"n"', b":2}\n", b'{"n":3}\n', b'{"n":4}\n{"n":', b""])
    response: Any = SimpleNamespace(read1=lambda size: next(pieces))
    parts: list[Any] = []
    with pytest.raises(StreamInterrupted, match="middle of a line"):
        parts.extend(_read_parts(response, "s"))
    assert parts == [[{"n": 1}, {"n": 2}], [{"n": 3}], [{"n": 4}]]


def test_the_client_imports_lightly() -> None:
    heavy = "asyncio aiohttp pydantic machines.states transitions rich"
    code = f"import sys, rolloutd.control.client; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class CountingStore(MemoryStore):
    """A store that counts its reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reads = Counter[str]()

    async def load_steps(self, *key: Any) -> Any:
        self.reads["steps"] += 1
        return await super().load_steps(*key)

    async def read_audit(self, **query: Any) -> Any:
        self.reads["audit"] += 1
        return await super().read_audit(**query)


async def test_storm_and_rare_entries_need_few_reads(tmp_path: Path) -> None:
    """A followed log is not read again for each commit, nor the audit for each entry of another actor."""
    stores: list[CountingStore] = []

    async def open_counting_store(compiled: Any) -> CountingStore:
        stores.append(CountingStore(compile=compiled))
        return stores[0]

    async with control_environment(tmp_path, store=open_counting_store) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        path = f"/v1/rollouts/{rollout}/nodes/p1/log"
        following = asyncio.create_task(inside.stream_lines(path, follow=True))
        while not stores[0].reads["steps"]:
            await asyncio.sleep(0.001)
        for number in range(200):
            await inside.commit(StepRecorded(inside.step(rollout, "p1", f"isolate.{number}.command")))
            await asyncio.sleep(0.001)
        assert stores[0].reads["steps"] < 20
        await inside.transition(rollout, "p1", Trigger.LEFT, outcome=Outcome.LEFT)
        await following
        stores[0].reads.clear()
        answer = await inside.request("nora", "get", "/v1/audit?limit=1&actor=moritz")
        assert answer["entries"] == []
        assert stores[0].reads["audit"] <= 3


async def test_followed_log_reads_each_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        handle = await inside.server._services.runners.start(
            RunRequest("run-1", Host("p1"), SOURCE, "site.yml")
        )
        step = inside.step(rollout, "p1", "run.configure", StepAction.RUN, handle=handle)
        await inside.commit(StepRecorded(replace(step, state=StepState.INTENDED)))
        runner, read = inside.server._services.runners, list[int]()
        read_all = runner.read_events

        async def count(handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
            async for event in read_all(handle, offset):
                read.append(event.offset)
                yield event

        monkeypatch.setattr(runner, "read_events", count)
        adam = identify(ACCOUNTS["adam"], inside.state.settings.teams, ())
        reader = LogReader(inside.state.store, runner, (rollout, "p1"), adam)
        lines = [line async for line in reader.lines(1, 0)]
        (run,) = inside.run_host.runs.values()
        run.events.append(RunEvent(len(run.events) + 1, 0.0, "output", "and one more"))
        lines += [line async for line in reader.lines(1, lines[-1]["offset"])]
        assert lines[-1]["text"] == "and one more"
        assert [line["offset"] for line in lines] == list(range(1, len(lines) + 1))
        assert read == [event.offset for event in run.events]


async def test_log_says_that_runner_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        step = inside.step(rollout, "p1", "run.configure", StepAction.RUN, handle="run-1")
        await inside.commit(StepRecorded(step))

        async def refuse(handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
            raise RunnerUnavailable("awx: no answer")
            yield

        runner = inside.server._services.runners
        monkeypatch.setattr(runner, "read_events", refuse)
        adam = identify(ACCOUNTS["adam"], inside.state.settings.teams, ())
        reader = LogReader(inside.state.store, runner, (rollout, "p1"), adam)
        texts = [line["text"] async for line in reader.lines(1, 0)]
        assert "the output cannot be read now: awx: no answer" in texts
        assert texts[-1].startswith("run run.configure: ok"), "the rest of the log comes all the same"
