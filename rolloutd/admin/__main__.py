"""The admin commands, over files and databases: doctor, backup, store move, what verifies the audit.

Exit codes: 0 (ok), 1 (problem), 2 (usage).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rolloutd.configuration.documents import KEY_FILE as REDACTION_KEY_FILE
from rolloutd.errors import InvalidFile, RolloutdError, StoreFailed
from rolloutd.ports import Leadership
from rolloutd.settings import DEFAULT_CONFIG, Settings, load
from rolloutd.texts.formats import pluralize

VERBS = ("doctor", "verify", "chain", "segments", "backup", "restore", "prepare", "move")

EXIT_OK, EXIT_PROBLEMS, EXIT_USAGE = 0, 1, 2

LEAD_MARGIN_S = 5.0
"""Beyond two leases: no leader has renewed it for one of them, and a look at the counter takes time."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _make_parser().parse_args(argv)
    if options.file is not None:
        # SQLite reads it when it is imported.  Its temporary files are as large as the database, and the
        # usual directory may be in memory.
        os.environ.setdefault("SQLITE_TMPDIR", str(options.file.absolute().parent))
    config = options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    if options.verb == "doctor":
        return _run_doctor(config, as_json=options.json)
    try:
        if options.verb == "verify":
            return _run_verify(options.file, options.head, options.segments)
        if options.verb == "segments":
            return _run_segments(options.segments, options.entry, options.head)
        if options.verb == "chain":
            return _run_chain(options.file, options.head, options.entry)
        if options.verb == "prepare":
            return _run_prepare(options)
        if options.verb == "move":
            return asyncio.run(_run_move(load(options.source), load(options.target), as_json=options.json))
        settings = load(config)
        return _run_backup(settings, options) if options.verb == "backup" else _run_restore(settings, options)
    except InvalidFile as invalid:
        _write_stderr(str(invalid))
        return EXIT_USAGE
    except RolloutdError as error:
        # The command line has other names for the verbs that read a file.
        _write_stderr(str(error) if options.verb in ("verify", "chain") else f"{options.verb}: {error}")
    except PermissionError as error:
        _write_stderr(f"{options.verb}: {error.filename}: {error.strerror}; run this as root")
    except OSError as error:
        _write_stderr(f"{options.verb}: {error.filename or options.file}: {error.strerror or error}")
    return EXIT_PROBLEMS


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rolloutctl", allow_abbrev=False)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--head")
    parser.add_argument("--segments", type=Path)
    parser.add_argument("--entry", type=int, action="append", default=[])
    parser.add_argument("--config", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dsn")
    parser.add_argument("--password-file", type=Path)
    parser.add_argument("--role")
    parser.add_argument("--from", type=Path, dest="source")
    parser.add_argument("--to", type=Path, dest="target")
    return parser


def _run_doctor(config: Path | None, *, as_json: bool) -> int:
    # The doctor imports the adapters, which takes longer than all else that the other commands do.
    from rolloutd.admin.doctor import check_settings, query_daemon, run_checks, switch_to_owner

    results = [check_settings(config)]
    if results[0].ok:
        settings = load(config)
        # Query before switch_to_owner(): the daemon's user may not be in the socket's group.
        report = query_daemon(settings.socket)
        switch_to_owner(settings.state_dir)
        results += asyncio.run(run_checks(settings, report))
    if as_json:
        sys.stdout.write(json.dumps([finding.to_json() for finding in results], indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{finding.line}\n" for finding in results)
    return EXIT_OK if all(finding.ok for finding in results) else EXIT_PROBLEMS


def _run_verify(file: Path, head: str | None, segments: Path | None) -> int:
    """Print the verification of a database file, and of the segments before it, as JSON."""
    from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
    from rolloutd.control.audit.audit_serializers import audit_export, audit_report
    from rolloutd.ports import AuditBase
    from rolloutd.store import SqliteBackend, compare_with_audit

    backend = SqliteBackend(file)
    report = compare_with_audit(backend, head, segments=segments)
    base = backend.read_base() if report.chain.entries else AuditBase()
    exported = audit_export(base, segments or file.absolute().with_name(SEGMENTS_DIRECTORY))
    sys.stdout.write(json.dumps(audit_report(report, exported)) + "\n")
    return EXIT_OK if report.ok else EXIT_PROBLEMS


def _run_chain(file: Path, head: str | None, entries: Sequence[int]) -> int:
    """Print the verification of a file's chain alone, and the hashes of these entries, as JSON."""
    from rolloutd.ports import AuditBase
    from rolloutd.store import SqliteBackend

    backend = SqliteBackend(file)
    verification = backend.verify_chain(head)
    hashes = backend.read_hashes(entries) if verification.ok else {}
    base = backend.read_base() if verification.entries else AuditBase()
    chain = {**asdict(verification), "hashes": hashes, "exported": [base.seq, base.head]}
    sys.stdout.write(json.dumps(chain) + "\n")
    return EXIT_OK if verification.ok else EXIT_PROBLEMS


def _run_segments(directory: Path, entries: Sequence[int], head: str) -> int:
    """Print the verification of segments up to an entry with this hash, and the hashes of the others."""
    from rolloutd.audit.audit_segments import read_segments, verify_segments

    through, *numbers = entries
    verification = verify_segments(directory, through, head)
    wanted = frozenset(numbers)
    found = read_segments(directory, through, head) if verification.ok and wanted else ()
    hashes = {seq: entry_hash for seq, _text, entry_hash in found if seq in wanted}
    sys.stdout.write(json.dumps({**asdict(verification), "hashes": hashes}) + "\n")
    return EXIT_OK if verification.ok else EXIT_PROBLEMS


def _run_backup(settings: Settings, options: argparse.Namespace) -> int:
    from rolloutd.store import backup

    _require_file(settings)
    verification = backup(settings.state_dir, options.file)
    if options.json:
        sys.stdout.write(
            json.dumps({"file": str(options.file), "head": verification.head, "ok": verification.ok}) + "\n"
        )
    else:
        sys.stdout.write(f"{options.file}: {verification.entries} audit entries, head {verification.head}\n")
    _write_stderr(
        f"not in it: the playbooks' trees and the runs' logs, {settings.state_dir}/trees and .../runs"
    )
    if not verification.ok:
        _write_stderr(f"the audit's chain is BROKEN, in the database as in this copy: {verification.message}")
    return EXIT_OK if verification.ok else EXIT_PROBLEMS


def _run_restore(settings: Settings, options: argparse.Namespace) -> int:
    from rolloutd.admin.forgotten_runs import FORGOTTEN, set_aside
    from rolloutd.store import restore

    _require_file(settings)
    result = restore(settings.state_dir, options.file, set_aside)
    forgotten = result.forgotten_runs
    if options.json:
        kept = None if result.previous_database is None else str(result.previous_database)
        sys.stdout.write(
            json.dumps(
                {
                    "head": result.verification.head,
                    "kept": kept,
                    "epoch": result.epoch,
                    "forgotten_runs": forgotten,
                }
            )
            + "\n"
        )
    else:
        sys.stdout.write(
            f"restored {result.verification.entries} audit entries, head {result.verification.head}\n"
        )
    if result.previous_database is not None:
        _write_stderr(f"what was there before is kept as {result.previous_database}")
    _write_stderr(
        "the daemon has forgotten what happened after the backup; inspect every node that was in flight since"
    )
    if forgotten:
        _write_stderr(
            f"{pluralize(forgotten, 'run')} after the backup: not known, so begun again when the rollouts"
            f" continue; their output: {settings.state_dir}/runs/*{FORGOTTEN}{result.epoch}"
        )
    _write_stderr("the playbooks' trees do not come with it: `rolloutctl doctor` says whether any is missing")
    return EXIT_OK


def _run_prepare(options: argparse.Namespace) -> int:
    from rolloutd.store import prepare_postgresql

    done = prepare_postgresql(options.dsn, options.password_file, options.role)
    sys.stdout.write(json.dumps({"done": done}) + "\n" if options.json else f"{done}\n")
    return EXIT_OK


async def _run_move(source: Settings, target: Settings, *, as_json: bool) -> int:
    """Move a store between the databases of two settings files, while this process leads both."""
    from rolloutd.store import backend_of, leadership_of, move_store

    with_runs = source.state_dir.resolve() == target.state_dir.resolve()
    if source.store == target.store and with_runs:
        raise StoreFailed("both files name the same store; name another one with --to")
    _require_same_key(source, target)
    # PostgreSQL's includes the lock of its state directory, which no second process can take.
    settings = [each for each in (source, target) if each.store.postgresql is not None or not with_runs]
    leaderships = [
        leadership_of(each.state_dir, each.store.postgresql, name="store move")
        for each in settings or [source]
    ]
    try:
        for each, leadership in zip(settings or [source], leaderships, strict=True):
            await _lead(each, leadership)
        backends = [
            backend_of(each.state_dir, each.store.postgresql, redaction_key_file=each.redaction_key_file)
            for each in (source, target)
        ]
        result = move_store(*backends, with_runs=with_runs)
    finally:
        for leadership in leaderships:
            await leadership.release()
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        sys.stdout.write(f"moved {result.entries} audit entries, {result.rows} rows, head {result.head}\n")
    if not with_runs:
        _write_stderr(f"not in it: trees, runs and artifacts; copy them from {source.state_dir}")
    return EXIT_OK


async def _lead(settings: Settings, leadership: Leadership) -> None:
    """Lead a store until the move is over; raises StoreFailed if its daemon runs."""
    lease = settings.store.postgresql
    try:
        async with asyncio.timeout(None if lease is None else 2 * lease.lease_s + LEAD_MARGIN_S):
            await leadership.acquire()
    except TimeoutError as error:
        raise StoreFailed("the daemon of this store runs; stop it, and each standby") from error


def _require_same_key(source: Settings, target: Settings) -> None:
    """Raise StoreFailed if the target's daemon could not read the variables that the source has sealed."""
    ours, theirs = (
        each.redaction_key_file or each.state_dir / REDACTION_KEY_FILE for each in (source, target)
    )
    if ours.exists() and (not theirs.exists() or ours.read_bytes() != theirs.read_bytes()):
        raise StoreFailed(f"{theirs}: it is not the key of this store; copy it: cp -p {ours} {theirs}")


def _require_file(settings: Settings) -> None:
    """Raise StoreFailed if the database is no file of ours."""
    if settings.store.postgresql is not None:
        raise StoreFailed("the database is PostgreSQL's; use pg_dump and pg_restore, see docs/postgresql.md")


def _write_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
