"""The contract of ports.Shelf, for its fake, for the directories of runs and for the kept trees."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Protocol

import pytest

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.artifact_store import REMOVING_PREFIX, RunArtifactStore
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.adapters.sources import TreeStore
from rolloutd.errors import NotFound
from rolloutd.files.source_archive import pack_tree
from rolloutd.ports import ArtifactStore, PinnedSource
from tests.acceptance.test_full_disk_and_clock_jumps import small_disk
from tests.contracts.fakes.artifacts import FakeArtifactStore

NOW = 1_800_000_000.0
PINS = {name: name * 64 for name in ("a", "b")}


class ArtifactBackend(Protocol):
    """A shelf, and ways to put something on it; names are as the shelf has them."""

    shelf: ArtifactStore

    def put(self, name: str, at: float) -> str: ...


class FakeBackend:
    """The fake."""

    def __init__(self, directory: Path) -> None:
        self.shelf = FakeArtifactStore()

    def put(self, name: str, at: float) -> str:
        """Keep a thing."""
        self.shelf.artifacts[name] = at
        return name


class RunDirBackend:
    """Directories of runs that are over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shelf = RunArtifactStore(directory)

    def put(self, name: str, at: float) -> str:
        """Keep a run that has ended."""
        made = run(self.directory, name)
        made.take_claim()
        made.record_cancelled(0.0)
        os.utime(made.path, (at, at))
        return name


class TreeBackend:
    """Trees under their pins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "trees"
        self.shelf = TreeStore(directory).artifact_stores[0]

    def put(self, name: str, at: float) -> str:
        """Keep a tree."""
        place = self.directory / f"tree-{PINS[name]}"
        place.mkdir(parents=True)
        (place / "site.yml").write_text("---\n")
        os.utime(place, (at, at))
        return place.name


@pytest.fixture(params=[FakeBackend, RunDirBackend, TreeBackend])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactBackend:
    """One backend per test."""
    made: ArtifactBackend = request.param(tmp_path)
    return made


def run(directory: Path, name: str) -> RunDirectory:
    """Make the directory of a run that nobody has claimed."""
    made = RunDirectory(directory / name)
    made.create()
    made.write_metadata({"run": name, "node": "n1", "sockets": "/tmp/none"})
    return made


async def test_what_was_not_touched_lately_is_forgotten_for_good(backend: ArtifactBackend) -> None:
    old, new = backend.put("a", NOW - 100.0), backend.put("b", NOW)
    assert [(each.name, each.modified_at) for each in await backend.shelf.list_artifacts()] == [
        (old, NOW - 100.0),
        (new, NOW),
    ]
    assert await backend.shelf.remove(old, unmodified_since=NOW - 50.0)
    assert not await backend.shelf.remove(new, unmodified_since=NOW - 50.0)
    assert [each.name for each in await backend.shelf.list_artifacts()] == [new]


async def test_what_is_not_there_is_gone(backend: ArtifactBackend) -> None:
    name = backend.put("a", NOW)
    assert await backend.shelf.remove(name, unmodified_since=NOW)
    assert await backend.shelf.remove(name, unmodified_since=NOW)
    assert await backend.shelf.list_artifacts() == []


# -- runs ---------------------------------------------------------------------


async def test_live_run_kept_and_unstarted_run_blocked(tmp_path: Path) -> None:
    shelf = RunArtifactStore(tmp_path)
    living, lost, prepared = (run(tmp_path, name) for name in ("living", "lost", "prepared"))
    assert wrapper.take_claim(str(living.path / "claim"), "run", os.getpid())
    with subprocess.Popen(["true"]) as ended:
        assert wrapper.take_claim(str(lost.path / "claim"), "run", ended.pid)
    until = lost.path.stat().st_mtime + 1.0
    assert not await shelf.remove("living", unmodified_since=until)
    assert await shelf.remove("lost", unmodified_since=until)
    # Nobody had claimed this one: its wrapper, should it come after all, finds nothing to begin.
    assert await shelf.remove("prepared", unmodified_since=until)
    assert not prepared.path.exists()
    assert [each.name for each in await shelf.list_artifacts()] == ["living"]


async def test_a_lost_run_whose_processes_go_on_stays(tmp_path: Path) -> None:
    shelf, lost = RunArtifactStore(tmp_path), run(tmp_path, "lost")
    with subprocess.Popen(["true"]) as ended:
        assert wrapper.take_claim(str(lost.path / "claim"), "run", ended.pid)
    marks = {"ROLLOUTD_RUN": "lost", "ROLLOUTD_RUN_DIR": str(lost.path)}
    until = lost.path.stat().st_mtime + 1.0
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **marks}) as worker:
        try:
            assert not await shelf.remove("lost", unmodified_since=until)
        finally:
            worker.kill()
    assert await shelf.remove("lost", unmodified_since=until)


async def test_run_names_its_rollout(tmp_path: Path) -> None:
    run(tmp_path, "net.v2-x.n1.1.configure.1")  # as rolloutd 0.1 left it
    built = run(tmp_path, "net.v2-z.localhost.prepare.build.1")
    built.write_metadata({**built.read_metadata(), "node": "builder1"})
    run(tmp_path, "other").write_metadata({"rollout": "net.v2-y", "node": "n1"})
    RunDirectory(tmp_path / "empty").create()  # the daemon was killed before it wrote the file
    shelf = RunArtifactStore(tmp_path)
    found = {each.name: each.rollout for each in await shelf.list_artifacts()}
    assert found == {
        "net.v2-x.n1.1.configure.1": "net.v2-x",
        "net.v2-z.localhost.prepare.build.1": "net.v2-z",
        "other": "net.v2-y",
        "empty": "",
    }


async def test_interrupted_removal_completed_by_next_scan(tmp_path: Path) -> None:
    backend = RunDirBackend(tmp_path)
    backend.put("a", NOW)
    half = tmp_path / f"{REMOVING_PREFIX}b"
    half.mkdir()
    (half / "output").write_text("some")
    assert [each.name for each in await backend.shelf.list_artifacts()] == ["a"]
    assert not half.exists()


# -- trees --------------------------------------------------------------------


async def test_a_tree_that_is_pinned_again_is_as_new(tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text("---\n")
    archive, sources = pack_tree(tmp_path), TreeStore(tmp_path / "state")
    pinned = await sources.store_upload(archive)
    place = sources.tree_path(pinned)
    os.utime(place, (1.0, 1.0))
    await sources.store_upload(archive)
    trees = sources.artifact_stores[0]
    assert not await trees.remove(place.name, unmodified_since=1.0)
    assert await trees.remove(place.name, unmodified_since=place.stat().st_mtime)
    with pytest.raises(NotFound):
        sources.tree_path(pinned)
    assert await sources.store_upload(archive) == pinned
    assert sources.tree_path(pinned).is_dir()


async def test_rest_of_earlier_removal_does_not_stop_next(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / ".staged-gone-x" / "rest").mkdir(parents=True)
    assert await store.remove("x", unmodified_since=math.inf)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk that keeps a directory in use")
def test_leftover_that_cannot_be_removed_stops_no_start(tmp_path: Path) -> None:
    (tmp_path / ".staged-x").mkdir()
    with small_disk(tmp_path / ".staged-x"):
        DirectoryStore(tmp_path)


async def test_half_a_removed_tree_is_cleared_at_the_start(tmp_path: Path) -> None:
    half = tmp_path / "trees" / f".staged-gone-tree-{PINS['a']}"
    half.mkdir(parents=True)
    assert await TreeStore(tmp_path).artifact_stores[0].list_artifacts() == []
    assert not half.exists()
    with pytest.raises(NotFound):
        TreeStore(tmp_path).tree_path(PinnedSource("tree", PINS["a"]))
