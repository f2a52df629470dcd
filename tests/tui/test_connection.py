"""The console while the daemon stops, returns, has another history, or is missing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rolloutd.control.client import ApiError, Client
from tests.rolloutd.canned_daemon import serve_canned
from tests.support.replay_server import ReplayServer
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import (
    run_console,
    running_fleet,
    screen_text,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tui.app import Console
from tui.connection.streams import LogReader, Response
from tui.state.fetch_queue import NODES_PER_PAGE, FetchQueue
from tui.state.model import FetchRequest, Model


async def test_reconnection_resumes_with_correct_counts(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, server):
        await pilot.press("enter")
        await wait_for_text(pilot, "4 of 12 changed, 3 in flight")
        server.close()
        await wait_for_text(pilot, "✗ offline", "stale: state of")
        last_seq = fleet.seq
        fleet.move("sea001-01", "done", outcome="changed")
        fleet.at += 5
        fleet.move("sea001-02", "isolating")
        again = ReplayServer(fleet, socket_dir / "s")
        try:
            await wait_for_text(pilot, "● live", "5 of 12 changed, 3 in flight")
            assert app.connection_count == 2
            assert again.stream_offsets == [last_seq], "the stream resumes after the last entry"
            await wait_until(pilot, lambda: app.model.last_received_seq == fleet.seq)
            received = [entry["seq"] for entry in app.model.entries]
            assert received == sorted(set(received))
            assert received[-2:] == [fleet.seq - 1, fleet.seq]
        finally:
            again.close()


@pytest.mark.parametrize(
    "line", [b'{"seq": 1, "ent\n', b"[1]\n", b'{"seq": null, "heartbeat": "soon"}\n', b"\xff\n"]
)
async def test_broken_line_ends_no_listener(socket_dir: Path, line: bytes) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, server):
        await pilot.press("enter")
        await wait_for_text(pilot, "4 of 12 changed, 3 in flight")
        server.broken_lines.append(line)
        server.push_progress()
        await wait_until(pilot, lambda: app.connection_count == 2)
        fleet.move("sea001-01", "done", outcome="changed")
        await wait_for_text(pilot, "● live", "5 of 12 changed")


async def test_change_of_the_status_is_shown(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, server):
        await pilot.press("enter")
        await wait_for_text(pilot, "4 of 12 changed, 3 in flight")
        server.sends_changes = True  # after one more whole status
        fleet.move("sea001-01", "done", outcome="changed")
        await wait_for_text(pilot, "5 of 12 changed, 2 in flight")
        fleet.move("sea001-02", "isolating")
        await wait_for_text(pilot, "5 of 12 changed, 3 in flight")
        assert app.connection_count == 1
        server.status_version += 1  # one that the console never gets
        fleet.move("sea001-02", "maintaining")
        await wait_until(pilot, lambda: app.connection_count == 2)
        await wait_for_text(pilot, "● live", "5 of 12 changed, 3 in flight")


@pytest.mark.parametrize("opened", ["rollout", "node", "nodes"])
async def test_deleted_rollout_is_called_deleted(socket_dir: Path, opened: str) -> None:
    fleet = running_fleet()
    fleet.deleted.add("kernel-gone1")
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        match opened:
            case "rollout":
                app.open_page("rollout", "kernel-gone1")
            case "node":
                app.open_page("node", "kernel-gone1", "sea001-01")
            case _:
                app.open_page("nodes", "kernel-gone1")
        await wait_for_text(pilot, "kernel-gone1 was deleted; the audit keeps its entries")


async def test_rollout_deleted_while_open_leaves_nothing_of_it(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT 3", "team/media")
        fleet.deleted.add(fleet.id)
        fleet.write("RolloutDeleted", rollout=fleet.id)
        await wait_for_text(pilot, "was deleted; the audit keeps its entries")
        assert "team/media" not in screen_text(app)
        for key in ("y", "e", "l", "d", "s", "p"):
            await pilot.press(key)
            await pilot.pause()
            assert type(app.screen).__name__ == "RolloutPage", key


async def test_daemon_with_another_history_is_loaded_again(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, server):
        await wait_for_text(pilot, "kernel-x7k2p")
        server.close()
        await wait_for_text(pilot, "✗ offline")
        other = ReplayedFleet(pools=1, per_pool=1, at=fleet.at, name="firmware")
        again = ReplayServer(other, socket_dir / "s")
        try:
            await wait_for_text(pilot, "● live", "firmware-x7k2p")
            await wait_until(pilot, lambda: "kernel-x7k2p" not in screen_text(pilot.app))
        finally:
            again.close()


async def test_open_page_tracks_its_rollout_in_a_restored_history(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, server):
        await pilot.press("enter")
        await wait_for_text(pilot, "0:50 of ~4:00")
        server.close()
        await wait_for_text(pilot, "✗ offline")
        # The restored history is shorter, and the rollout is in it.
        again = ReplayServer(start_gate_fleet(), socket_dir / "s")
        try:
            await wait_for_text(pilot, "● live")
            await wait_until(pilot, lambda: app.model.rollouts[fleet.id].nodes is not None)
        finally:
            again.close()


async def test_nodes_of_a_large_fleet_are_read_in_pages(socket_dir: Path) -> None:
    fleet = ReplayedFleet(pools=21, per_pool=NODES_PER_PAGE // 20, at=1_800_000_000.0)
    model, server = Model(), ReplayServer(fleet, socket_dir / "s")

    async def call(request: Callable[[], Any]) -> Response[Any]:
        return Response(request())

    try:
        queue = FetchQueue(model, Client(socket_dir / "s"), call, lambda: fleet.at, lambda: 0.0)
        model.apply_status(fleet.status())
        model.track_nodes(fleet.id)
        for fetch in queue.due_fetches():
            await fetch()
    finally:
        server.close()
    assert [*(model.rollouts[fleet.id].nodes or {})] == [*fleet.nodes]
    assert len(fleet.nodes) > NODES_PER_PAGE


@pytest.mark.parametrize(("status", "is_kept"), [(400, False), (429, True), (500, True), (503, True)])
async def test_request_is_repeated_after_trouble_of_the_daemon(status: int, is_kept: bool) -> None:
    model = Model()
    model.request_fetch("status")

    async def call(request: Callable[[], Any]) -> Response[Any]:
        return Response(None, error=ApiError(status, {}))

    queue = FetchQueue(model, Client(Path("s")), call, lambda: 0.0, lambda: 0.0)
    for fetch in queue.due_fetches():
        await fetch()
    assert [each.is_urgent for each in model.fetch_requests.values()] == [False] * is_kept
    assert not [*queue.due_fetches()]


@pytest.mark.parametrize(("took", "pause"), [(0.001, 0.05), (0.02, 0.2), (0.2, 0.5)])
async def test_status_is_repeated_by_its_duration_within_half_a_second(
    monkeypatch: pytest.MonkeyPatch, took: float, pause: float
) -> None:
    clock = [100.0]
    monkeypatch.setattr("tui.state.fetch_queue.time.monotonic", lambda: clock[0])
    model = Model()

    async def call(request: Callable[[], Any]) -> Response[Any]:
        clock[0] += took
        return Response(None, error=ApiError(400, {}))

    queue = FetchQueue(model, Client(Path("s")), call, lambda: 0.0, lambda: 0.0)
    wanted = FetchRequest("status")
    model.fetch_requests["status", ""] = wanted
    (fetch,) = queue.due_fetches()
    assert await fetch() == pytest.approx(pause)
    model.fetch_requests["status", ""] = wanted
    clock[0] += pause * 0.9
    assert not [*queue.due_fetches()]
    clock[0] += pause * 0.2
    assert [*queue.due_fetches()]


@pytest.mark.parametrize("last", [{"offset": 2, "kind": "stdout"}, {"offset": 1, "kind": "heartbeat"}])
async def test_stopped_log_reader_ends_its_thread(socket_dir: Path, last: dict[str, Any]) -> None:
    sent: SimpleQueue[Any] = SimpleQueue()
    was_received = asyncio.Event()
    with serve_canned(socket_dir / "s") as daemon:
        daemon.streams["/v1/rollouts/r/log"] = [iter(sent.get, None)]
        reader = LogReader(
            Client(daemon.socket), ("rollouts", "r", "log"), None, lambda _: was_received.set()
        )
        before = {*threading.enumerate()}
        reader.start()
        (thread,) = (each for each in {*threading.enumerate()} - before if each.name == "log")
        sent.put({"offset": 1, "kind": "stdout"})
        await asyncio.wait_for(was_received.wait(), 20)
        reader.stop()
        sent.put(last)
        await asyncio.to_thread(thread.join, 20)
        is_over = not thread.is_alive()
        sent.put(None)
    assert is_over


async def test_console_waits_for_a_missing_daemon(socket_dir: Path) -> None:
    fleet = running_fleet()
    app = Console(Client(socket_dir / "s"), now=lambda: fleet.at)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "no daemon answers", "waiting for the daemon")
        server = ReplayServer(fleet, socket_dir / "s")
        try:
            await wait_for_text(pilot, "● live", "kernel-x7k2p")
        finally:
            server.close()


async def test_request_that_was_not_sent_has_done_nothing(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, server):
        await pilot.press("p")
        await wait_for_text(pilot, "Pause kernel-x7k2p?")
        server.close()
        await pilot.press(*"why", "enter")
        text = await wait_for_text(pilot, "no daemon answers", "Nothing was done")
        assert "unknown" not in text
