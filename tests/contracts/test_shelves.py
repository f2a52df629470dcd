"""The contract of ports.Shelf, for its twin, for the directories of runs and for the kept trees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Protocol

import pytest

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.rundir import RunDir
from rolloutd.adapters.ansible.shelf import GONE, RunShelf
from rolloutd.adapters.sources import TreeSources
from rolloutd.errors import NotFound
from rolloutd.packing import pack
from rolloutd.ports import Pinned, Shelf
from tests.contracts.twins.shelf import FakeShelf

NOW = 1_800_000_000.0
PINS = {name: name * 64 for name in ("a", "b")}


class World(Protocol):
    """A shelf, and ways to put something on it; names are as the shelf has them."""

    shelf: Shelf

    def put(self, name: str, at: float) -> str: ...


class Twin:
    """The twin."""

    def __init__(self, directory: Path) -> None:
        self.shelf = FakeShelf()

    def put(self, name: str, at: float) -> str:
        """Keep a thing."""
        self.shelf.things[name] = at
        return name


class Runs:
    """Directories of runs that are over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shelf = RunShelf(directory)

    def put(self, name: str, at: float) -> str:
        """Keep a run that has ended."""
        made = run(self.directory, name)
        made.take_claim()
        made.close_as_cancelled(0.0)
        os.utime(made.path, (at, at))
        return name


class Trees:
    """Trees under their pins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "trees"
        self.shelf = TreeSources(directory)

    def put(self, name: str, at: float) -> str:
        """Keep a tree."""
        place = self.directory / f"tree-{PINS[name]}"
        place.mkdir(parents=True)
        (place / "site.yml").write_text("---\n")
        os.utime(place, (at, at))
        return place.name


@pytest.fixture(params=[Twin, Runs, Trees])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """One world per test."""
    made: World = request.param(tmp_path)
    return made


def run(directory: Path, name: str) -> RunDir:
    """Make the directory of a run that nobody has claimed."""
    made = RunDir(directory / name)
    made.make()
    made.write_facts({"run": name, "node": "n1", "sockets": "/tmp/none"})
    return made


async def test_what_was_not_touched_lately_is_forgotten_for_good(world: World) -> None:
    old, new = world.put("a", NOW - 100.0), world.put("b", NOW)
    assert [(each.name, each.touched_at) for each in await world.shelf.kept()] == [
        (old, NOW - 100.0),
        (new, NOW),
    ]
    assert await world.shelf.forget(old, untouched_since=NOW - 50.0)
    assert not await world.shelf.forget(new, untouched_since=NOW - 50.0)
    assert [each.name for each in await world.shelf.kept()] == [new]


async def test_what_is_not_there_is_gone(world: World) -> None:
    name = world.put("a", NOW)
    assert await world.shelf.forget(name, untouched_since=NOW)
    assert await world.shelf.forget(name, untouched_since=NOW)
    assert await world.shelf.kept() == []


# -- runs ---------------------------------------------------------------------


async def test_a_run_that_goes_on_stays_and_one_that_never_began_cannot_any_more(tmp_path: Path) -> None:
    shelf = RunShelf(tmp_path)
    living, lost, prepared = (run(tmp_path, name) for name in ("living", "lost", "prepared"))
    assert wrapper.claim(str(living.path / "claim"), "run", os.getpid())
    with subprocess.Popen(["true"]) as ended:
        assert wrapper.claim(str(lost.path / "claim"), "run", ended.pid)
    until = lost.path.stat().st_mtime + 1.0
    assert not await shelf.forget("living", untouched_since=until)
    assert await shelf.forget("lost", untouched_since=until)
    # Nobody had claimed this one: its wrapper, should it come after all, finds nothing to begin.
    assert await shelf.forget("prepared", untouched_since=until)
    assert not prepared.path.exists()
    assert [each.name for each in await shelf.kept()] == ["living"]


async def test_a_lost_run_whose_processes_go_on_stays(tmp_path: Path) -> None:
    shelf, lost = RunShelf(tmp_path), run(tmp_path, "lost")
    with subprocess.Popen(["true"]) as ended:
        assert wrapper.claim(str(lost.path / "claim"), "run", ended.pid)
    marks = {"ROLLOUTD_RUN": "lost", "ROLLOUTD_RUN_DIR": str(lost.path)}
    until = lost.path.stat().st_mtime + 1.0
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **marks}) as worker:
        try:
            assert not await shelf.forget("lost", untouched_since=until)
        finally:
            worker.kill()
    assert await shelf.forget("lost", untouched_since=until)


async def test_a_removal_that_was_interrupted_is_ended_by_the_next_look(tmp_path: Path) -> None:
    world = Runs(tmp_path)
    world.put("a", NOW)
    half = tmp_path / f"{GONE}b"
    half.mkdir()
    (tmp_path / ".inventories").mkdir()  # it is no run
    (half / "output").write_text("some")
    assert [each.name for each in await world.shelf.kept()] == ["a"]
    assert not half.exists()


# -- trees --------------------------------------------------------------------


async def test_a_tree_that_is_pinned_again_is_as_new(tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text("---\n")
    archive, sources = pack(tmp_path), TreeSources(tmp_path / "state")
    pinned = await sources.keep_upload(archive)
    place = sources.tree(pinned)
    os.utime(place, (1.0, 1.0))
    await sources.keep_upload(archive)
    assert not await sources.forget(place.name, untouched_since=1.0)
    assert await sources.forget(place.name, untouched_since=place.stat().st_mtime)
    with pytest.raises(NotFound):
        sources.tree(pinned)
    assert await sources.keep_upload(archive) == pinned
    assert sources.tree(pinned).is_dir()


async def test_half_a_removed_tree_is_cleared_at_the_start(tmp_path: Path) -> None:
    half = tmp_path / "trees" / f".staged-gone-tree-{PINS['a']}"
    half.mkdir(parents=True)
    assert await TreeSources(tmp_path).kept() == []
    assert not half.exists()
    with pytest.raises(NotFound):
        TreeSources(tmp_path).tree(Pinned("tree", PINS["a"]))
