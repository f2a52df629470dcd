"""Checks of the disk: state directory, free space, database and audit.

It only reads files, and knows neither settings nor daemon.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rolloutd.admin.backup import find_damage
from rolloutd.errors import RolloutdError
from rolloutd.ports import AuditReport
from rolloutd.reason_text import describe_differences, describe_mismatch
from rolloutd.store import database
from rolloutd.store.audit_comparison import compare_with_audit

MIN_FREE_BYTES = 512 * 1024 * 1024
"""What a week of a large rollout writes, run logs included, with a reserve."""

ARTIFACT_DIRECTORIES = ("runs", "trees", "git", "artifacts")
"""Directories next to the database that grow; the settings' `keep` limits them."""


MAX_LISTED_MISMATCHES = 5
"""Rows that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check; `text` says what was found and, if it is wrong, what to do."""

    subject: str
    ok: bool
    text: str

    def to_json(self) -> dict[str, str | bool]:
        return {"subject": self.subject, "ok": self.ok, "text": self.text}


def check_state_dir(path: Path) -> Iterator[CheckResult]:
    """Check the directory and the disk that it is on."""
    if not path.is_dir():
        yield CheckResult("state directory", False, f"there is no {path}: start the daemon once, or make it")
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


def check_database(path: Path) -> Iterator[CheckResult]:
    """Check the database and its audit."""
    if not path.exists():
        yield _report_missing_database(path)
        return
    database_files = (Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm"))
    existing = [file for file in database_files if file.exists()]
    inaccessible = [str(file) for file in existing if not os.access(file, os.R_OK | os.W_OK)]
    if inaccessible:
        text = (
            f"the daemon's user may not write {', '.join(inaccessible)}: chown it to the "
            f"owner of {path.parent}"
        )
        yield CheckResult("database", False, text)
        return
    try:
        with closing(database.open_reader(path)) as connection:
            damage = find_damage(connection)
            old = (
                ""
                if database.has_current_schema(connection)
                else "; older than this version: a start brings it up to date"
            )
        report = compare_with_audit(path)
    except RolloutdError as error:
        yield CheckResult("database", False, str(error))
        return
    except database.DATABASE_ERRORS as error:
        yield CheckResult("database", False, str(database.explain_failure(error, path)))
        return
    if damage:
        yield CheckResult("database", False, f"damaged: {damage}; stop the daemon and restore a backup")
    else:
        yield CheckResult("database", True, f"{path}, {path.stat().st_size // 1024} KiB, sound{old}")
    chain = report.chain
    what = chain.message if chain.ok else f"{chain.message}; keep a copy, and compare with a backup"
    yield CheckResult("audit", chain.ok, what)
    yield _check_tables(report)


def _check_tables(report: AuditReport) -> CheckResult:
    """Return whether the tables follow from the audit."""
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


def has_current_database(path: Path) -> bool:
    """Return whether there is a database with the schema of this version."""
    if not path.exists():
        return False
    with closing(database.open_reader(path)) as connection:
        return database.has_current_schema(connection)


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


def _report_missing_database(path: Path) -> CheckResult:
    left = [name for name in ARTIFACT_DIRECTORIES if any((path.parent / name).glob("[!.]*"))]
    if left:
        rest = f"what belongs to it is there ({', '.join(left)})"
        return CheckResult("database", False, f"{path} is gone, and {rest}: put it back, or restore a backup")
    return CheckResult("database", True, "none yet; the daemon makes it when it starts")
