"""The command line of upkeep: `doctor`, `backup`, `restore`; it exits 0 (well), 1 (not well), 2 (usage)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.settings import DEFAULT_CONFIG, Settings, load
from rolloutd.upkeep.doctor import ask_daemon, become_owner, examine, settings_finding
from rolloutd.upkeep.finding import Finding

WELL, NOT_WELL, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Do one piece of upkeep and return its exit code."""
    options = _parser().parse_args(argv)
    config = options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    if options.verb == "doctor":
        return _doctor(config, as_json=options.json)
    try:
        settings = load(config)
        return _backup(settings, options) if options.verb == "backup" else _restore(settings, options)
    except InvalidFile as invalid:
        _say(str(invalid))
        return USAGE
    except RolloutdError as error:
        _say(f"{options.verb}: {error}")
    except PermissionError as error:
        _say(f"{options.verb}: {error.filename}: {error.strerror}; run this as root")
    except OSError as error:
        _say(f"{options.verb}: {error.filename or options.file}: {error.strerror or error}")
    return NOT_WELL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rolloutctl", allow_abbrev=False)
    parser.add_argument("verb", choices=("doctor", "backup", "restore"))
    parser.add_argument("--file", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


def _doctor(config: Path | None, *, as_json: bool) -> int:
    findings = [settings_finding(config)]
    if findings[0].ok:
        settings = load(config)
        # Before we are the daemon's user: the socket is for people, and he is none of its group.
        told = ask_daemon(settings.socket)
        become_owner(settings.state_dir)
        findings += asyncio.run(examine(settings, told))
    if as_json:
        sys.stdout.write(json.dumps([finding.content() for finding in findings], indent=2) + "\n")
    else:
        sys.stdout.writelines(map(_line, findings))
    return WELL if all(finding.ok for finding in findings) else NOT_WELL


def _line(finding: Finding) -> str:
    return f"{'ok   ' if finding.ok else 'WRONG'} {finding.subject}: {' '.join(finding.text.split())}\n"


def _backup(settings: Settings, options: argparse.Namespace) -> int:
    from rolloutd.upkeep.copies import backup

    verdict = backup(settings.state_dir, options.file)
    if options.json:
        sys.stdout.write(
            json.dumps({"file": str(options.file), "head": verdict.head, "ok": verdict.ok}) + "\n"
        )
    else:
        sys.stdout.write(f"{options.file}: {verdict.entries} audit entries, head {verdict.head}\n")
    _say(f"not in it: the playbooks' trees and the runs' logs, {settings.state_dir}/trees and .../runs")
    if not verdict.ok:
        _say(f"the audit's chain is BROKEN, in the database as in this copy: {verdict.message}")
    return WELL if verdict.ok else NOT_WELL


def _restore(settings: Settings, options: argparse.Namespace) -> int:
    from rolloutd.upkeep.copies import restore

    done = restore(settings.state_dir, options.file)
    if options.json:
        kept = None if done.kept is None else str(done.kept)
        sys.stdout.write(json.dumps({"head": done.verdict.head, "kept": kept, "epoch": done.epoch}) + "\n")
    else:
        sys.stdout.write(f"restored {done.verdict.entries} audit entries, head {done.verdict.head}\n")
    if done.kept is not None:
        _say(f"what was there before is kept as {done.kept}")
    _say("what happened after the backup is forgotten: look at every node that was in flight since")
    _say("the playbooks' trees do not come with it: `rolloutctl doctor` says whether any is missing")
    return WELL


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
