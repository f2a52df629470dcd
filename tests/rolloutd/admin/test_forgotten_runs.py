"""Runs that ended after a backup, when that backup is restored."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.clusters import run_records as objects
from rolloutd.adapters.kubernetes_jobs import records as jobs
from rolloutd.admin.forgotten_runs import set_aside
from rolloutd.errors import AlreadyRunning, StoreFailed
from rolloutd.ports import Ok
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.store import backup, open_store, restore
from rolloutd.store.sqlite.commit_mark import require_newest
from rolloutd.store.sqlite.database import FILE_NAME
from rolloutd.store.sqlite.lock import StateLock
from tests.support.forked_process import ADMIN, run_forked


def make_run(state_dir: Path, name: str, began_at: float | None) -> None:
    """Make the directory of a run, which has ended if it says when it began."""
    directory = state_dir / "runs" / name
    directory.mkdir(parents=True)
    if began_at is not None:
        status = {"ended": "exit", "code": 0, "began_at": began_at, "duration_s": 1.0, "left": 0}
        (directory / "status").write_text(json.dumps(status))


async def test_restored_daemon_takes_no_result_of_a_forgotten_run(tmp_path: Path) -> None:
    """Its next run of that place has the same name; the node may have been rolled back meanwhile."""
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    store = await open_store(state_dir, compile_plan=TeamPlanCompiler({}))
    await store.commit([RequestDenied(DAEMON, "one", "why", 1.0)], actor=DAEMON, cause="test", at=1.0)
    await store.close()
    backup(state_dir, tmp_path / "copy.sqlite")
    make_run(state_dir, "R.n1.1.configure.1@m", 0.5)
    make_run(state_dir, "R.n2.1.configure.1@m", 2.0)
    make_run(state_dir, "R.n3.1.configure.1@m", None)
    config = tmp_path / "config.yaml"
    config.write_text(f"{{state_dir: {state_dir}, socket: {tmp_path}/s, inventory: []}}")
    words = ["restore", f"--config={config}", f"--file={tmp_path}/copy.sqlite", "--json"]
    done = run_forked(ADMIN, words, timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    restored = json.loads(done.stdout)
    assert restored["forgotten_runs"] == 1
    assert "1 run after the backup: not known, so begun again" in done.stderr
    assert sorted(path.name for path in (state_dir / "runs").iterdir()) == [
        "R.n1.1.configure.1@m",
        f"R.n2.1.configure.1@m.forgotten-{restored['epoch']}",
        "R.n3.1.configure.1@m",
    ]


CHANGES = frozenset({"os.rename", "os.remove", "os.link", "os.mkdir", "os.truncate", "os.chown"})
"""Audit events of the calls that change a directory; files are written between them."""


def restore_until_killed(state_dir: Path, copy: Path, changes: int) -> bool:
    """Restore in a process that is killed before its next change after so many; return whether it ended."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(changes, -1)

        def kill(event: str, _: object) -> None:
            if event in CHANGES and next(left) <= 0:
                os._exit(9)

        try:
            sys.addaudithook(kill)
            restore(state_dir, copy, set_aside)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, 9}
    return code == 0


def test_restore_killed_at_any_step_is_finished_by_another(tmp_path: Path) -> None:
    filled, copy, name = tmp_path / "filled", tmp_path / "copy.sqlite", "R.n1.1.configure.1@m"
    filled.mkdir(mode=0o700)

    async def fill() -> None:
        await (await open_store(filled, compile_plan=TeamPlanCompiler({}))).close()

    asyncio.run(fill())
    backup(filled, copy)
    make_run(filled, name, 2.0)
    make_object(filled / "runners" / "kustomization", "R.n1.1.a.1", Ok("ok"))
    for changes in itertools.count():
        state_dir = Path(shutil.copytree(filled, tmp_path / str(changes)))
        has_ended = restore_until_killed(state_dir, copy, changes)
        if (state_dir / "unfinished-restore").exists():
            assert not has_ended
            with pytest.raises(StoreFailed, match=f"run it again: rolloutctl restore {copy}"):
                require_newest(state_dir / FILE_NAME)
        elif not has_ended:
            assert (state_dir / "runs" / name).exists(), "nothing has changed, and the daemon may start"
        restore(state_dir, copy, set_aside)
        require_newest(state_dir / FILE_NAME)
        (run,), (record,) = (
            (state_dir / "runs").iterdir(),
            (state_dir / "runners" / "kustomization").iterdir(),
        )
        assert ".forgotten-" in run.name
        assert ".forgotten-" in record.name
        if has_ended:
            break
    assert changes > 15


async def test_another_copy_does_not_finish_a_killed_restore(tmp_path: Path) -> None:
    """The runs that the first copy does not know are set aside; another copy may know them."""
    state_dir, copy = tmp_path / "state", tmp_path / "first copy.sqlite"
    state_dir.mkdir(mode=0o700)
    store = await open_store(state_dir, compile_plan=TeamPlanCompiler({}))
    await store.close()
    backup(state_dir, copy)
    backup(state_dir, tmp_path / "second.sqlite")
    make_run(state_dir, "R.n1.1.configure.1@m", 2.0)
    made = 0
    while not restore_until_killed(state_dir, copy, made) and not [
        *(state_dir / "runs").glob("*.forgotten-*")
    ]:
        made += 1
    for other in (tmp_path / "second.sqlite", state_dir / FILE_NAME):
        with pytest.raises(StoreFailed, match=f"run it again: rolloutctl restore '{copy}'"):
            restore(state_dir, other, set_aside)
    with pytest.raises(StoreFailed, match=f"run it again: rolloutctl restore '{copy}'"):
        require_newest(state_dir / FILE_NAME)
    restore(state_dir, copy, set_aside)
    require_newest(state_dir / FILE_NAME)


async def test_killed_restore_of_database_onto_itself_loses_nothing(tmp_path: Path) -> None:
    """Its latest entry is in the WAL only, as after a kill of the daemon."""
    live, killed = tmp_path / "live", tmp_path / "killed"
    live.mkdir(mode=0o700)
    store = await open_store(live, compile_plan=TeamPlanCompiler({}))
    await store.commit([RequestDenied(DAEMON, "one", "why", 1.0)], actor=DAEMON, cause="test", at=1.0)
    shutil.copytree(live, killed, ignore=shutil.ignore_patterns("lock"))
    await store.close()
    for changes in itertools.count():
        state_dir = Path(shutil.copytree(killed, tmp_path / str(changes)))
        has_ended = restore_until_killed(state_dir, state_dir / FILE_NAME, changes)
        note = state_dir / "unfinished-restore"
        copy = Path(note.read_text().strip()) if note.exists() else state_dir / FILE_NAME
        assert restore(state_dir, copy, set_aside).verification.entries == 1, changes
        require_newest(state_dir / FILE_NAME)
        if has_ended:
            break
    assert changes > 10


async def test_database_is_as_it_was_when_runs_cannot_be_set_aside(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    await (await open_store(state_dir, compile_plan=TeamPlanCompiler({}))).close()
    backup(state_dir, tmp_path / "copy.sqlite")
    make_run(state_dir, "R.n1.1.configure.1@m", None)
    (state_dir / "runs" / "R.n1.1.configure.1@m" / "status").write_text('{"other": 1}')
    before = (state_dir / FILE_NAME).stat()
    with pytest.raises(StoreFailed, match="not the status of a run"):
        restore(state_dir, tmp_path / "copy.sqlite", set_aside)
    assert (state_dir / FILE_NAME).stat() == before

    def look(state_dir: Path, **_: object) -> int:
        with pytest.raises(AlreadyRunning):
            StateLock(state_dir).take()
        assert (state_dir / FILE_NAME).stat() == before
        return 7

    assert restore(state_dir, tmp_path / "copy.sqlite", look).forgotten_runs == 7
    assert (state_dir / FILE_NAME).stat() != before


def test_run_that_the_restored_database_knows_keeps_its_name(tmp_path: Path) -> None:
    make_run(tmp_path, "R.n1.1.configure.1@m", 2.0)
    assert set_aside(tmp_path, known={"R.n1.1.configure.1@m"}, since=1.0, epoch=2) == 0
    assert set_aside(tmp_path, known=set(), since=1.0, epoch=2) == 1
    assert set_aside(tmp_path, known=set(), since=1.0, epoch=3) == 0, (
        "set aside before, by a restore or a kill"
    )


def make_job(state_dir: Path, name: str, result: Ok | None) -> jobs.RunRecord:
    path = state_dir / "runners" / "berlin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "place").write_text("https://berlin rolloutd")
    record = jobs.RunRecord(RunDirectory(path))
    record.create(run=name, began_at=2.0)
    if result is not None:
        record.store_result(result)
    return record


def test_ended_runs_in_jobs_are_marked(tmp_path: Path) -> None:
    ended, active = make_job(tmp_path, "R.n1.1.a.1", Ok("ok")), make_job(tmp_path, "R.n2.1.a.1", None)
    assert set_aside(tmp_path, known={"berlin.0a1b2c3d=R.n1.1.a.1"}, since=1.0, epoch=2) == 0
    assert set_aside(tmp_path, known=set(), since=2.0, epoch=2) == 0
    assert set_aside(tmp_path, known=set(), since=1.0, epoch=2) == 1
    assert (ended.is_forgotten, active.is_forgotten) == (True, False)


def make_object(directory: Path, name: str, result: Ok | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    record = objects.RunRecord(directory / f"{name}.json")
    record.write(run=name, began_at=2.0, events=[])
    if result is not None:
        record.store_result(result, 3.0)


def test_ended_changes_of_objects_are_renamed(tmp_path: Path) -> None:
    directory = tmp_path / "runners" / "kustomization"
    directory.mkdir(parents=True)
    for name, result in (("R.n1.1.a.1", Ok("ok")), ("R.n2.1.a.1", None)):
        make_object(directory, name, result)
    assert set_aside(tmp_path, known={"kustomization.0a1b2c3d=R.n1.1.a.1"}, since=1.0, epoch=2) == 0
    assert set_aside(tmp_path, known=set(), since=1.0, epoch=2) == 1
    renamed = directory / "R.n1.1.a.1.forgotten-2.json"
    assert sorted(directory.iterdir()) == [renamed, directory / "R.n2.1.a.1.json"]
    assert objects.RunRecord(renamed).content["run"] == "R.n1.1.a.1.forgotten-2", "for the retention"
    assert set_aside(tmp_path, known=set(), since=1.0, epoch=3) == 0
