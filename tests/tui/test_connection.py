"""The console and a daemon that goes away, comes back, is another one, or is not there yet."""

from __future__ import annotations

from pathlib import Path

from rolloutd.control.client import Client
from tests.support.replay import Voice
from tests.support.replayed import Fleet
from tests.tui.house import console, running, screen, shows, until
from tui.app import Console


async def test_a_lost_daemon_is_said_and_its_return_goes_on_with_the_right_numbers(place: Path) -> None:
    world = running()
    async with console(world, place) as (app, pilot, voice):
        await pilot.press("enter")
        await shows(pilot, "4 of 12 done, 3 in flight")
        voice.close()
        await shows(pilot, "✗ lost", "stale: what is shown is of")
        stood = world.seq
        world.move("sea001-01", "done", outcome="changed")
        world.at += 5
        world.move("sea001-02", "isolating")
        again = Voice(world, place / "s")
        try:
            await shows(pilot, "● live", "5 of 12 done, 3 in flight")
            assert app.connections == 2
            assert again.followed == [stood], "the stream goes on where it stood"
            await until(pilot, lambda: app.model.heard == world.seq)
            heard = [entry["seq"] for entry in app.model.entries]
            assert heard == sorted(set(heard))
            assert heard[-2:] == [world.seq - 1, world.seq]
        finally:
            again.close()


async def test_a_daemon_with_another_history_is_read_anew(place: Path) -> None:
    world = running()
    async with console(world, place) as (_, pilot, voice):
        await shows(pilot, "kernel-x7k2p")
        voice.close()
        await shows(pilot, "✗ lost")
        other = Fleet(pools=1, per_pool=1, at=world.at, name="firmware")
        again = Voice(other, place / "s")
        try:
            await shows(pilot, "● live", "firmware-x7k2p")
            await until(pilot, lambda: "kernel-x7k2p" not in screen(pilot.app))
        finally:
            again.close()


async def test_it_starts_without_a_daemon_and_waits_for_it(place: Path) -> None:
    world = running()
    app = Console(Client(place / "s"), now=lambda: world.at)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "no daemon answers", "waiting for the daemon")
        voice = Voice(world, place / "s")
        try:
            await shows(pilot, "● live", "kernel-x7k2p")
        finally:
            voice.close()
