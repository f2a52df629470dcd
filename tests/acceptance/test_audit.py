"""The audit at the command line: whatever was done to the file is named, with a daemon and without one."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import StepRecorded
from machines.states import Trigger
from rolloutd.cli.main import main
from rolloutd.store import open_store
from rolloutd.store.sqlite.database import FILE_NAME
from tests.rolloutd.control_environment import ACCOUNTS, PLAN, ControlEnvironment, control_environment

PLAN_TWO = PLAN.replace("name: sysctl", "name: two")

Tamper = Callable[[sqlite3.Connection], None]


def a_byte(connection: sqlite3.Connection) -> None:
    """Change one byte of entry 3."""
    connection.execute("UPDATE audit SET entry = replace(entry, 'olga', 'olgb') WHERE seq = 3")


def a_row(connection: sqlite3.Connection) -> None:
    """Delete entry 3."""
    connection.execute("DELETE FROM audit WHERE seq = 3")


def two_rows(connection: sqlite3.Connection) -> None:
    """Swap entries 3 and 4."""
    for old, new in ((3, -3), (4, 3), (-3, 4)):
        connection.execute("UPDATE audit SET seq = ? WHERE seq = ?", (new, old))


TAMPERINGS: dict[str, Tamper] = {"a byte": a_byte, "a row": a_row, "two rows": two_rows}


def on_disk(tmp_path: Path) -> Any:
    """Return what opens the house's database."""

    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    return sqlite


async def ask(inside: ControlEnvironment, *words: str) -> int:
    """Run rolloutctl against the house."""
    return await asyncio.to_thread(main, ["--socket", str(inside.server._path), *words])


async def test_a_tampered_entry_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with control_environment(tmp_path, store=on_disk(tmp_path)) as inside:
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start")
        await inside.submit(text=PLAN_TWO)
        assert await ask(inside, "audit", "verify") == 0
        file = tmp_path / "state" / FILE_NAME
        for how, tamper in TAMPERINGS.items():
            with tampered(file, tamper):
                capsys.readouterr()
                for words in ((), ("--database", str(file))):
                    assert await ask(inside, "audit", "verify", "--json", *words) == 1
                    verdict = json.loads(capsys.readouterr().out)
                    assert (verdict["ok"], verdict["first_bad"]) == (False, 3), (how, verdict)
                assert await ask(inside, "audit", "verify") == 1
                assert "entry 3" in capsys.readouterr().out
        assert await ask(inside, "audit", "verify") == 0


@contextmanager
def tampered(file: Path, tamper: Tamper) -> Iterator[None]:
    """Tamper with the audit, and restore its rows afterwards."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        rows = connection.execute("SELECT seq, entry, hash FROM audit").fetchall()
        tamper(connection)
        yield
        connection.execute("DELETE FROM audit")
        connection.executemany("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", rows)


async def test_a_cut_tail_is_found_with_the_head_that_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with control_environment(tmp_path, store=on_disk(tmp_path)) as inside:
        await inside.submit()
        assert await ask(inside, "audit", "head") == 0
        head, seq = capsys.readouterr().out.split()
        file = tmp_path / "state" / FILE_NAME
        assert await ask(inside, "audit", "head", "--database", str(file)) == 0
        assert capsys.readouterr().out.split() == [head, seq]
        await inside.submit(text=PLAN_TWO)
        for words in ((), ("--database", str(file))):
            assert await ask(inside, "audit", "verify", "--head", head, *words) == 0
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("DELETE FROM audit WHERE seq >= ?", (int(seq),))
        capsys.readouterr()
        for words in ((), ("--database", str(file))):
            assert await ask(inside, "audit", "verify", *words) == 1, "the tables have more than the audit"
            capsys.readouterr()
            assert await ask(inside, "audit", "verify", "--json", "--head", head, *words) == 1
            assert json.loads(capsys.readouterr().out)["first_bad"] == int(seq)


async def test_an_export_holds_everything_and_no_other_teams_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with control_environment(tmp_path, store=on_disk(tmp_path)) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        for name, team in (("verify.0.reachable", None), ("team.payments.0.ssh", "payments")):
            record = inside.step(rollout, "p1", name, output=f"output of {name}", visible_to=team)
            await inside.commit(StepRecorded(record))
        await inside.transition(rollout, "p1", Trigger.MAINTAINED)
        for who, sees in (("nora", False), ("paul", True), ("adam", True)):
            inside.name_service.current = ACCOUNTS[who]
            place = tmp_path / f"{who}.tar.gz"
            assert await ask(inside, "audit", "export", rollout, "--output", str(place)) == 0
            files = unpacked(place, rollout)
            assert {"rollout.json", "plan.json", "targets.json", "audit.jsonl", "timeline.txt"} <= set(files)
            assert {f"nodes/{node}.{kind}" for node in ("p1", "s2") for kind in ("json", "log")} <= set(files)
            everything = "\n".join(files.values())
            assert "output of verify.0.reachable" in everything
            assert ("output of team.payments.0.ssh" in everything) is sees
            digest = inside.state.index.rollout(rollout).digest.whole
            assert json.loads(files["plan.json"])["digest"] == digest
            assert json.loads(files["rollout.json"])["gates"][0]["votes"][0]["by"] == "olga"
            entries = [json.loads(line) for line in files["audit.jsonl"].splitlines()]
            assert {entry["entry"]["rollout"] for entry in entries} == {rollout}
            assert json.loads(files["audit.json"])["ok"]


def unpacked(place: Path, rollout: str) -> dict[str, str]:
    """Return the files of an archive."""
    with tarfile.open(fileobj=io.BytesIO(place.read_bytes())) as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {
            name.removeprefix(f"{rollout}/"): file.read().decode() for name, file in members.items() if file
        }
