"""rolloutctl audit where older entries are in segments, with a daemon and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolloutd.audit.audit_segments import SegmentFile, list_segments
from rolloutd.cli.main import main
from rolloutd.store import SqliteBackend
from rolloutd.store.sqlite import database
from tests.rolloutd.audit.test_audit_segments import KEY, chain, write_segments
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.engine.background.test_audit_export import fill, keeper, later

ENTRIES = chain(30)
EXPORTED = {"through": 30, "head": ENTRIES[-1][2], "directory": "/var/lib/rolloutd/audit-segments"}
VERIFIED = {
    "ok": True,
    "entries": 33,
    "head": "f" * 64,
    "first_bad": None,
    "message": "33 entries, each one hashed over the one before",
    "mismatches": [],
    "unreadable": [],
    "compared": True,
    "exported": EXPORTED,
}


@pytest.fixture
def segments(tmp_path: Path) -> list[SegmentFile]:
    return write_segments(tmp_path / "audit-segments", ENTRIES, KEY)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_listing_says_where_older_entries_are(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "audit", {"entries": [], "next": None, "exported": EXPORTED})
    where = "entries up to 30 are in /var/lib/rolloutd/audit-segments (keep.audit); read them with zcat\n"
    assert where in run(capsys, "audit")[2]
    assert where not in run(capsys, "audit", "--after", 30)[2]


def test_segments_and_daemon_are_verified_as_one_chain(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], segments: list[SegmentFile]
) -> None:
    daemon.answer("GET", "audit/verify", VERIFIED)
    verify = ("audit", "verify", "--segments", segments[0].path.parent)
    assert run(capsys, *verify)[:2] == (0, f"intact: {VERIFIED['message']}\nhead {VERIFIED['head']}\n")
    daemon.answer("GET", "audit/verify", {**VERIFIED, "exported": {**EXPORTED, "head": "0" * 64}})
    code, out, _ = run(capsys, *verify)
    assert code == 1
    assert "is not that of the database" in out
    daemon.answer("GET", "audit/verify", VERIFIED)
    segments[1].path.unlink()
    code, out, _ = run(capsys, *verify, "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["first_bad"]) == (1, False, 11)


def test_anchor_is_compared_with_segments_too(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], segments: list[SegmentFile], tmp_path: Path
) -> None:
    daemon.answer("GET", "audit/verify", VERIFIED)
    anchor = tmp_path / "anchor"
    anchor.write_text(f"2027-01-01T00:00:00Z 12 {ENTRIES[11][2]}\n")
    verify = ("audit", "verify", "--anchor", anchor)
    assert run(capsys, *verify)[0] == 0, "without the segments there is nothing to compare"
    assert run(capsys, *verify, "--segments", segments[0].path.parent)[0] == 0
    anchor.write_text(f"2027-01-01T00:00:00Z 12 {ENTRIES[12][2]}\n")
    code, out, _ = run(capsys, *verify, "--segments", segments[0].path.parent)
    assert code == 1
    assert "entry 12, anchored at 2027-01-01T00:00:00Z, has another hash" in out


async def exported_database(state_dir: Path) -> None:
    await fill(state_dir)
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()


async def test_segments_and_file_are_verified_without_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir = tmp_path / "state"
    await exported_database(state_dir)
    file, directory = state_dir / database.FILE_NAME, state_dir / "segments"
    verify = ("audit", "verify", "--database", file, "--segments", directory, "--json")
    code, out, _ = run(capsys, *verify)
    found: dict[str, Any] = json.loads(out)
    base = SqliteBackend(file).read_base()
    assert (code, found["ok"], found["compared"]) == (0, True, True)
    assert found["exported"] == {"through": base.seq, "head": base.head, "directory": str(directory)}
    (first, *_) = list_segments(directory)
    first.path.write_bytes(first.path.read_bytes()[:-9])
    code, out, _ = run(capsys, *verify)
    assert (code, json.loads(out)["ok"]) == (1, False)
    shutil.rmtree(directory)
    code, out, _ = run(capsys, *verify)
    assert (code, json.loads(out)["message"].split(": ")[-1]) == (
        1,
        f"entries 1 to {base.seq} are missing; restore the segments",
    )
