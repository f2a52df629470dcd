"""Commands about plan files: validate, preview, submit, schema.

`validate` and `schema` need no daemon.  The others send the file's text, and
pack and upload the directory that it names under `source.path`: the daemon
opens no path that a client names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, body_of
from rolloutd.cli.output import printable, put, put_json, put_table, say
from rolloutd.control.client import Answer, path_of
from rolloutd.counting import count
from rolloutd.errors import Mistake

if TYPE_CHECKING:
    from rolloutd.control.wire import Preview, PreviewGate, PreviewNeeds, PreviewTarget, PreviewWave

STDIN = "-"

MISTAKE = tuple(field.name for field in fields(Mistake))
"""What is read of a mistake; a newer daemon may say more of it."""

LONGEST_FILE = 16 * 1024 * 1024
"""Bytes that are read of a file at all: more than a plan may have, so that its own limit answers."""


def register(family: Family) -> None:
    """Add the commands of this family."""
    group = family.group("plan", "check, preview and submit plan files")
    for name, handler, summary in (
        ("validate", validate, "name every mistake in a plan file; needs no daemon"),
        ("preview", preview, "show what a plan would do, and what cannot start and why"),
        ("submit", submit, "open a rollout, which waits at its start gate"),
    ):
        parser = group.command(name, handler, summary)
        parser.add_argument("file", metavar="FILE", help="the plan file; - is stdin")
    parser.add_argument("--again", action="store_true", help="a new rollout even if this very plan has one")
    parser.add_argument(
        "--supersede", action="store_true", help="cancel the one of this name that still runs"
    )
    parser = group.command(
        "schema", schema, "print the JSON Schema of plan files; needs no daemon", json=False
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="write it there instead of to stdout")


def mistake_line(mistake: Mapping[str, Any]) -> str:
    """Return a mistake as one line that editors can jump to."""
    return str(Mistake(**{name: mistake[name] for name in MISTAKE}))


def validate(call: Call) -> int:
    """Check a plan file without a daemon."""
    name, text = _read(call.args.file)
    mistakes = _mistakes(name, text, _directory(call.args.file))
    if call.args.json:
        put_json({"valid": not mistakes, "errors": mistakes})
    else:
        for mistake in mistakes:
            put(printable(mistake_line(mistake)))
        say(f"{name}: {count(len(mistakes), 'mistake')}" if mistakes else f"{name}: valid")
    return exits.NO if mistakes else exits.DONE


def schema(call: Call) -> int:
    """Print the JSON Schema."""
    from rolloutd import planfile

    text = json.dumps(planfile.schema(), indent=2)
    if call.args.file is None:
        put(text)
    else:
        Path(call.args.file).write_text(text + "\n", encoding="utf-8")
        say(f"{call.args.file}: written")
    return exits.DONE


def preview(call: Call) -> int:
    """Show what a plan would do."""
    answer = _posted(call, "preview", _body(call))
    put_json(answer) if call.args.json else _put_preview(answer)
    return exits.DONE


def submit(call: Call) -> int:
    """Open a rollout, or find the one that this plan already has."""
    body = _body(call) | {"again": call.args.again, "supersede": call.args.supersede}
    answer = _posted(call, "submit", body)
    if call.args.json:
        put_json(answer)
    else:
        put(answer["rollout"])
    if answer["existing"]:
        say(f"this very plan has one, which is {answer['state']}; --again opens a new one")
    else:
        say(f"{answer['rollout']} is {answer['state']}, digest {answer['digest']}")
    return exits.DONE


def _read(file: str) -> tuple[str, bytes]:
    if file == STDIN:
        return "(stdin)", sys.stdin.buffer.read(LONGEST_FILE)
    with Path(file).open("rb") as opened:
        return file, opened.read(LONGEST_FILE)


def _mistakes(name: str, text: bytes, directory: Path | None) -> list[dict[str, Any]]:
    from rolloutd import planfile
    from rolloutd.errors import InvalidFile
    from rolloutd.planfile.playbooks import playbook_mistakes

    try:
        plan = planfile.read(text, name)
    except InvalidFile as invalid:
        return [asdict(mistake) for mistake in invalid.mistakes]
    if directory is None or "path" not in plan.source:
        return []
    return [asdict(mistake) for mistake in playbook_mistakes(plan, directory / plan.source["path"])]


def _directory(file: str) -> Path | None:
    """Return where the plan's `source.path` begins; nobody knows that of a plan that comes by stdin."""
    return None if file == STDIN else Path(file).parent


def _body(call: Call) -> dict[str, Any]:
    """Return the request for a plan; its mistakes end the command before anything is sent."""
    from rolloutd import planfile

    name, text = _read(call.args.file)
    mistakes = _mistakes(name, text, _directory(call.args.file))
    if mistakes:
        raise _stop(call, name, mistakes)
    source = planfile.read(text, name).source
    upload = None
    if "path" in source:
        upload = _upload(call, (_directory(call.args.file) or Path()) / source["path"])
    return body_of(file=name, text=text.decode(), upload=upload)


def _posted(call: Call, order: str, body: Mapping[str, Any]) -> Any:
    """Hand the plan to the daemon, which may find the mistakes that only its settings and nodes show."""
    try:
        return call.client.post(path_of("plans", order), body)
    except Answer as answer:
        mistakes = answer.body.get("errors")
        if not mistakes:
            raise
        raise _stop(call, body["file"], mistakes) from answer


def _stop(call: Call, name: str, mistakes: Sequence[Mapping[str, Any]]) -> exits.Stop:
    """Print the mistakes for a program, and return what ends the command with them for a person."""
    if call.args.json:
        put_json({"valid": False, "errors": mistakes})
    told = "\n".join(mistake_line(mistake) for mistake in mistakes)
    return exits.Stop(exits.NO, f"{told}\n{name}: {count(len(mistakes), 'mistake')}")


def _upload(call: Call, directory: Path) -> str:
    from rolloutd.packing import pack

    archive = pack(directory)
    say(f"packed {directory}: {count(len(archive), 'byte')}")
    answer: dict[str, str] = call.client.upload(path_of("uploads"), archive)
    return answer["upload"]


def _put_preview(answer: Preview) -> None:
    put_table(("NODE", "TEAM", "WAVE", "POOLS", "CANNOT START"), map(_target_row, answer["targets"]))
    put()
    put_table(("WAVE", "NODES", "AT ONCE", "SOAK", "GATE AFTER"), map(_wave_row, answer["waves"]))
    put()
    put_table(
        ("POOL", "TARGETS", "MEMBERS", "BUDGET"),
        (
            (p["pool"], str(p["targets"]), str(p["members"]), str(p["max_unavailable"]))
            for p in answer["pools"]
        ),
    )
    put()
    put_table(("GATE", "NEEDS", "WHO MAY ANSWER"), map(_gate_row, answer["gates"]))
    put()
    for looked in answer["looked_at"]:
        put(f"looked at: {printable(looked)}")
    if answer["not_looked_at"]:
        put(f"not looked at: {printable(', '.join(answer['not_looked_at']))}")
    put(f"digest {answer['digest']}")
    for warning in answer["warnings"]:
        say(f"warning: {warning}")


def _target_row(target: PreviewTarget) -> tuple[str, ...]:
    reason = target["cannot_start"]
    return (
        target["node"],
        target["team"] or "",
        target["wave"],
        ",".join(target["pools"]),
        reason["text"] if reason else "",
    )


def _wave_row(wave: PreviewWave) -> tuple[str, ...]:
    limit = wave["max_parallel"]
    return (
        wave["wave"],
        str(len(wave["nodes"])),
        "" if limit is None else str(limit),
        moments.span(wave["soak_s"]),
        wave["gate"] or "",
    )


def _gate_row(gate: PreviewGate) -> tuple[str, ...]:
    able = gate["answerable_by"]
    teams = "; ".join(f"{team}: {', '.join(names)}" for team, names in sorted(able["teams"].items()))
    owner = f"owner: {', '.join(able['owner'])}" if able["owner"] else ""
    return gate["gate"], _needs(gate["needs"]), "; ".join(part for part in (owner, teams) if part)


def _needs(needs: PreviewNeeds) -> str:
    parts = [f"{needs['owner']} of the owner"] if needs["owner"] else []
    parts += [f"{needs['each_team']} of each team"] if needs["each_team"] else []
    parts += ["four eyes"] if needs["four_eyes"] else []
    return ", ".join(parts) or "nobody"
