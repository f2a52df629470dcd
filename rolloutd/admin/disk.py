"""Checks of the disk: state directory, free space, database and audit.

It only reads files, and knows neither settings nor daemon.
"""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from machines.model.timefmt import format_rfc3339
from rolloutd import store
from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import AuditCheckpointReport, AuditReport, PostgresqlAddress, StoredVolume
from rolloutd.texts.formats import pluralize
from rolloutd.texts.reason_text import describe_differences, describe_mismatch

MIN_FREE_BYTES = 512 * 1024 * 1024
"""What a week of a large rollout writes, run logs included, with a reserve."""

ARTIFACT_DIRECTORIES = ("runs", "trees", "git", "artifacts", SEGMENTS_DIRECTORY)
"""Directories next to the database that grow; the settings' `keep` limits all but the segments."""

OLDER_SCHEMA = "the database is older than this version"

MAX_LISTED_MISMATCHES = 5
"""Rows that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check; `text` says what was found and, if it is wrong, what to do."""

    subject: str
    ok: bool
    text: str

    @property
    def line(self) -> str:
        return f"{'ok   ' if self.ok else 'WRONG'} {self.subject}: {' '.join(self.text.split())}"

    def to_json(self) -> dict[str, str | bool]:
        return {"subject": self.subject, "ok": self.ok, "text": self.text}


def check_state_dir(path: Path) -> Iterator[CheckResult]:
    if not path.is_dir():
        yield CheckResult(
            "state directory", False, f"{path}: no such directory; start the daemon once, or make it"
        )
        return
    found = path.stat()
    if found.st_mode & 0o077:
        text = f"{path} is open to others (mode {found.st_mode & 0o777:o}): chmod 700 {path}"
        yield CheckResult("state directory", False, text)
    elif found.st_uid not in (os.geteuid(), 0) or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield CheckResult("state directory", False, f"{path} is {_describe_owner(found.st_uid)}")
    else:
        yield CheckResult("state directory", True, str(path))
    free = shutil.disk_usage(path).free
    used = ", ".join(f"{name} {_directory_size(path / name) // 2**20} MiB" for name in ARTIFACT_DIRECTORIES)
    text = f"{free // 2**20} MiB free below {path} ({used})"
    yield CheckResult(
        "disk", free >= MIN_FREE_BYTES, text if free >= MIN_FREE_BYTES else f"{text}: free some"
    )


def check_database(
    state_dir: Path, postgresql: PostgresqlAddress | None = None, redaction_key_file: Path | None = None
) -> tuple[list[CheckResult], bool]:
    """Check the database and its audit; return also whether this version can load it."""
    backend = store.backend_of(state_dir, postgresql, redaction_key_file=redaction_key_file)
    server: list[CheckResult] = []
    try:
        found = backend.examine()
        if postgresql is not None:
            server = [CheckResult(*each) for each in store.examine_postgresql(postgresql)]
        if not found.exists:
            return [_report_missing_database(state_dir, found.text)], False
        if found.inaccessible:
            text = (
                f"the daemon's user may not write {', '.join(found.inaccessible)}: chown it to the "
                f"owner of {state_dir}"
            )
            return [CheckResult("database", False, text)], False
        checkpoint = _read_checkpoint(backend) if found.is_current else AuditCheckpointReport(OLDER_SCHEMA)
        report = store.compare_with_audit(backend) if checkpoint.problem else None
    except RolloutdError as error:
        return [CheckResult("database", False, str(error))], False
    if found.damage:
        text = f"damaged: {found.damage}; stop the daemon and restore a backup"
    else:
        old = "" if found.is_current else "; older than this version: a start brings it up to date"
        text = f"{found.text}, sound{old}"
    database = CheckResult("database", not found.damage, text)
    is_loadable = found.is_current and not found.damage
    growth = []
    if is_loadable:
        growth = [_describe_growth(backend.read_now(partial(store.measure_volume, backend, now=time.time())))]
    if report is None:
        whole = f"the whole was last verified at {format_rfc3339(checkpoint.verified_at)}"
        trusted = f"entry {checkpoint.seq} and the rows that decisions use are as they were signed; {whole}"
        return [database, *server, *growth, CheckResult("audit", True, trusted)], is_loadable
    chain = report.chain
    what = chain.message if chain.ok else f"{chain.message}; keep a copy, and compare with a backup"
    signed = f"not trusted: {checkpoint.problem}; the next start verifies the whole audit first"
    results = [
        database,
        *server,
        *growth,
        CheckResult("audit checkpoint", True, signed),
        CheckResult("audit", chain.ok, what),
        _check_tables(report),
    ]
    return results, is_loadable


def _describe_growth(volume: StoredVolume) -> CheckResult:
    """Return what the database keeps, why, and how it grows."""
    since = "" if volume.first_entry_at is None else f" since {format_rfc3339(volume.first_entry_at)}"
    entries = "1 audit entry" if volume.entries == 1 else f"{volume.entries} audit entries"
    exported = f"; {volume.exported_entries} older ones in segments" if volume.exported_entries else ""
    closed = pluralize(volume.closed_rollouts, "closed rollout")
    if volume.oldest_end_at is not None:
        closed += f", the oldest ended {format_rfc3339(volume.oldest_end_at)}"
    size, free, growth = (n / 2**20 for n in (volume.file_bytes, volume.free_bytes, volume.bytes_a_day))
    text = (
        f"{entries}{since} (keep.audit){exported}; {closed} (keep.records); {size:.1f} MiB,"
        f" {free:.1f} of them free; it grows by about"
        f" {volume.entries_a_day:.0f} entries and {growth:.1f} MiB a day"
    )
    return CheckResult("growth", True, text)


def _read_checkpoint(backend: store.Backend) -> AuditCheckpointReport:
    try:
        return store.read_audit_checkpoint(backend)
    except StoreFailed as error:
        return AuditCheckpointReport(str(error))


def _check_tables(report: AuditReport) -> CheckResult:
    if not report.compared:
        return CheckResult("tables", True, "not compared with the audit: a start migrates the database first")
    if not report.mismatches and not report.unreadable:
        return CheckResult("tables", True, "every row follows from the audit")
    named = [
        describe_mismatch(row.mismatch.subject, row.mismatch.kind, row.mismatch.columns)
        for row in report.mismatches[:MAX_LISTED_MISMATCHES]
    ]
    differences = describe_differences(
        len(report.mismatches), len(report.unreadable), is_complete=report.is_complete
    )
    text = "; ".join((differences, *named, "see `rolloutctl audit verify`"))
    return CheckResult("tables", False, text)


def _describe_owner(uid: int) -> str:
    """Return the owner of a file of another user, and what to do about it."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}, which is unknown on this machine; chown -R it to the daemon's user"
    return f"{name}'s: run this as root, or as {name}"


def _directory_size(path: Path) -> int:
    """Return the bytes of all files below a directory; a file that is removed meanwhile is ignored."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(directory, name).lstat().st_size
    return total


def _report_missing_database(state_dir: Path, name: str) -> CheckResult:
    left = [each for each in ARTIFACT_DIRECTORIES if any((state_dir / each).glob("[!.]*"))]
    if left:
        rest = f"what belongs to it is there ({', '.join(left)})"
        return CheckResult("database", False, f"{name} is gone, and {rest}: put it back, or restore a backup")
    return CheckResult("database", True, "none yet; the daemon makes it when it starts")
