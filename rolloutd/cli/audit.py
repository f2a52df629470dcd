"""Commands that read, verify and export the audit.

With --database, a copy of the file is enough: rolloutd.admin reads it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machines.model.timefmt import format_rfc3339
from rolloutd.cli import exits
from rolloutd.cli.command_group import (
    CommandGroup,
    Invocation,
    Parser,
    confirm,
    int_argument,
    past_time_argument,
)
from rolloutd.cli.follow import PAGE_SIZE, follow_events, read_entries
from rolloutd.cli.local import run_admin_query
from rolloutd.cli.output import format_local, parse_rfc3339, print_line, print_message, print_now, sanitize
from rolloutd.control.client import Client, api_path
from rolloutd.texts import event_text
from rolloutd.texts.audit_names import current_event_name

if TYPE_CHECKING:
    from rolloutd.control.audit.wire_audit import AuditEntry

ALL_MISMATCHES = "all"
"""Subject of `audit settle` that stands for every mismatch."""

LOOKBACK_FACTOR = 10
"""How much further back to search if too few of the last entries match."""

ARCHIVE_README = """\
Everything that rolloutd shows of one rollout.

rollout.json    the rollout, its gates and every vote
plan.json       the plan in its canonical form, the pinned source, and the hashes: what people voted for
targets.json    every node, its wave, its outcome
nodes/NODE.json every step of every attempt on the node; `checks` are those before and after its change
nodes/NODE.log  the output of its runs and checks; without another team's output
audit.jsonl     the audit entries of this rollout, each with its hash
audit.json      the verification of the whole chain at the time of the export, and its latest hash
timeline.txt    the same entries, one line each
"""


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("audit", audit, "show who did what; verify or export the audit")
    _add_rollout(parser, required=False)
    parser.argument("--node", metavar="NODE", text="only this node")
    parser.argument("--actor", metavar="NAME", text="only this person")
    parser.argument("--kind", metavar="EVENT", text="only this kind of event, such as VoteCast")
    after = "only entries after this number"
    parser.argument("--after", metavar="SEQ", text=after, type=int_argument(0), default=0)
    since = "only entries after this: RFC 3339, or a duration before now, such as 10m (all)"
    parser.argument("--since", metavar="TIME", text=since, type=past_time_argument)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--limit", metavar="N", type=int_argument(1), help="only the first N entries")
    size.add_argument("-n", "--last", metavar="N", type=int_argument(1), help="only the last N entries")
    parser.flag("-f", "--follow", text="show new entries until interrupted")
    verbs = commands.add_verbs(parser)
    parser = verbs.add_command("verify", _verify_chain, "check that the audit is intact")
    head = verbs.add_command("head", _print_head, "print the latest hash, to keep elsewhere")
    for each in (parser, head):
        each.argument("--database", metavar="FILE", text="read this file, without a daemon", type=Path)
    for option, text in (
        ("--segments", "directory with the segments of older entries"),
        ("--anchor", "copy of the anchors' lines, which the audit must agree with"),
    ):
        metavar = "DIR" if option == "--segments" else "FILE"
        parser.argument(option, metavar=metavar, text=text, type=Path)
    noted = "a hash noted earlier, which the chain must contain"
    parser.argument("--head", metavar="HASH", text=noted, type=_hash_argument)
    summary = "settle what the audit does not account for, and verify again"
    parser = verbs.add_command("settle", _settle, summary)
    subject = "a mismatch, as verify lists it, or all"
    parser.argument("subject", metavar="SUBJECT | all", text=subject)
    keep = "restore rows from the audit, or keep those of the database"
    parser.add_argument("--keep", choices=("audit", "database"), help=keep, required=True)
    parser.reason().yes()
    parser = verbs.add_command("export", _export, "write all of a rollout to an archive", formats=())
    _add_rollout(parser, required=True)
    output = "archive to write (ROLLOUT.tar.gz); - is stdout"
    parser.argument("--output", metavar="FILE", text=output, type=Path)


def _add_rollout(parser: Parser, *, required: bool) -> None:
    either = parser.add_mutually_exclusive_group(required=required)
    # Without a default, which would replace the value of the option.
    text, absent = "rollout id, its prefix, or its plan's name", argparse.SUPPRESS
    either.add_argument("rollout", metavar="ROLLOUT", help=text, nargs="?", default=absent)
    text = "the same, also of a rollout whose name is that of a verb"
    either.add_argument("--rollout", metavar="ROLLOUT", help=text)


def audit(call: Invocation) -> int:
    args = call.args
    if args.since is not None:
        args.after = max(args.after, _last_before(call, parse_rfc3339(args.since)))
    if args.follow:
        return _follow_entries(call)
    entries = _fetch_entries(call, args.after) if args.last is None else _last_entries(call)
    if args.json:
        listed = list(entries)
        call.print_data({"entries": listed}, [str(each["seq"]) for each in listed])
        return exits.OK
    printed = 0
    for printed, found in enumerate(entries, 1):  # noqa: B007  # counted, without keeping them
        print_line(_format_entry(found["entry"]))
    return exits.OK if printed else _report_no_entry(args.kind)


def _report_no_entry(kind: str | None) -> int:
    """Report that nothing matches; a kind that this version does not know is probably misspelled."""
    if kind is None or current_event_name(kind) in event_text.EVENT_NAMES:
        print_message("no entry matches")
        return exits.OK
    near = [event for event in event_text.EVENT_NAMES if kind.lower() in event.lower()]
    action = f"did you mean {' or '.join(near)}?" if near else "list the events with rolloutctl names events"
    print_message(f"{kind}: no such event; {action}")
    return exits.REFUSED


def _last_before(call: Invocation, instant: datetime) -> int:
    """Return the number of the last entry before an instant, in few questions: the entries' times rise."""
    before, at_or_after = 0, call.get(api_path("audit", "head"))["seq"]
    while before < at_or_after:
        middle = (before + at_or_after) // 2
        entry = call.get(api_path("audit"), after=middle, limit=1)["entries"][0]
        if parse_rfc3339(entry["at"]) < instant:
            before = entry["seq"]
        else:
            at_or_after = middle
    return before


def _last_entries(call: Invocation) -> Iterable[AuditEntry]:
    """Return the last entries that match: read from the end, further back until there are enough."""
    args = call.args
    head: int = call.get(api_path("audit", "head"))["seq"]
    lookback = max(args.last, PAGE_SIZE)
    while True:
        after = max(args.after, head - lookback)
        found = deque(_fetch_entries(call, after), maxlen=args.last)
        if len(found) == args.last or after == args.after:
            return found
        lookback *= LOOKBACK_FACTOR


def _fetch_entries(call: Invocation, after: int) -> Iterator[AuditEntry]:
    args = call.args
    return read_entries(
        call.client, after, args.limit, rollout=args.rollout, node=args.node, actor=args.actor, kind=args.kind
    )


def _follow_entries(call: Invocation) -> int:
    args = call.args
    after = args.after
    for shown in () if args.last is None else _last_entries(call):
        after = shown["seq"]
        _print_entry(call, after, shown["entry"])
    for line in follow_events(call.client, args.rollout, after):
        entry = line.get("entry")
        if entry is not None and _matches_filter(args, entry):
            _print_entry(call, line["seq"], entry)
    return exits.OK


def _print_entry(call: Invocation, seq: int, entry: dict[str, Any]) -> None:
    if not call.print_data({"seq": seq, "entry": entry}, [str(seq)], is_streamed=True):
        print_now(_format_entry(entry))


def _matches_filter(args: argparse.Namespace, entry: dict[str, Any]) -> bool:
    return (
        args.node in (None, entry.get("node"))
        and args.actor in (None, event_text.actor_name(entry))
        and (args.kind is None or current_event_name(args.kind) == current_event_name(entry["event"]))
    )


def _format_entry(entry: dict[str, Any], *, local: bool = True) -> str:
    at = format_rfc3339(entry["at"])
    shown_at = format_local(at) if local else at
    actor = event_text.actor_name(entry)
    return sanitize(f"{entry['seq']:>6}  {shown_at}  {actor:<10}  {event_text.describe_entry(entry)}")


# -- the hash chain -----------------------------------------------------------


def _verify_chain(call: Invocation) -> int:
    if call.args.database is not None:
        arguments = ["verify", "--json", f"--file={call.args.database}"]
        arguments += ["--head", call.args.head] if call.args.head else []
        arguments += [f"--segments={call.args.segments}"] if call.args.segments else []
        verification = run_admin_query(arguments)
    else:
        verification = call.get(api_path("audit", "verify"), head=call.args.head)
        if call.args.segments is not None and verification["ok"] and verification.get("exported"):
            segments = _read_segments(call.args.segments, verification["exported"])
            if not segments["ok"]:
                verification |= {key: segments[key] for key in ("ok", "first_bad", "message")}
    if call.args.anchor is not None and verification["ok"]:
        problem = _compare_anchor(call, verification.get("exported"))
        verification = {**verification, "ok": not problem, "message": problem or verification["message"]}
    return _print_verification(call, verification)


def _compare_anchor(call: Invocation, exported: dict[str, Any] | None) -> str:
    """Return how the audit differs from a file of lines `TIME NUMBER HASH`.

    Without the segments, lines of entries in them are not compared: the hash of a later entry covers them.
    """
    from rolloutd.audit import audit_anchor

    path: Path = call.args.anchor
    try:
        anchored = audit_anchor.parse_lines(path.read_text("utf-8", "replace").splitlines())
    except OSError as error:
        raise exits.Exit(exits.USAGE, f"{path}: {error.strerror}; name another file") from error
    if not anchored:
        raise exits.Exit(exits.USAGE, f"{path}: no line TIME NUMBER HASH; name another file")
    through = 0 if exported is None else exported["through"]
    if call.args.segments is None:
        anchored = [each for each in anchored if each.seq > through]
    numbers = sorted({each.seq for each in anchored if each.seq > through})
    if call.args.database is not None:
        chain = _read_chain(call.args.database, call.args.head, numbers)
        hashes = {int(seq): text for seq, text in chain["hashes"].items()}
    else:
        pages = (call.get(api_path("audit"), after=seq - 1, limit=1)["entries"] for seq in numbers)
        hashes = {entry["seq"]: entry["hash"] for page in pages for entry in page}
    older = [each.seq for each in anchored if each.seq <= through]
    if older and exported is not None:
        segments = _read_segments(call.args.segments, exported, older)
        hashes |= {int(seq): text for seq, text in segments["hashes"].items()}
    return audit_anchor.describe_difference(anchored, hashes)


def _settle(call: Invocation) -> int:
    """Settle rows that the audit does not account for, and verify again."""
    args = call.args
    if args.subject == ALL_MISMATCHES:
        lost = f"all rows that differ: only those of the {args.keep} are kept; this cannot be undone"
        confirm(call, lambda: lost, "settle them?", must_ask=True)
    body = {"subjects": [args.subject], "keep": args.keep, "reason": args.reason}
    return _print_verification(call, call.client.post(api_path("audit", "settle"), body))


def _print_verification(call: Invocation, verification: dict[str, Any]) -> int:
    if not call.print_data(verification, [each["subject"] for each in verification["mismatches"]]):
        print_line(f"{'intact' if verification['ok'] else 'NOT INTACT'}: {sanitize(verification['message'])}")
        if verification["ok"] or verification["entries"]:
            print_line(f"head {verification['head']}")
        for each in verification["mismatches"]:
            print_line(sanitize(each["text"]))
        if verification["entries"] and not verification["compared"]:
            print_message("the tables were not compared: another version wrote this file")
        if verification["unreadable"]:
            print_line(f"unreadable entries: {', '.join(map(str, verification['unreadable']))}")
    return exits.OK if verification["ok"] else exits.REFUSED


def _print_head(call: Invocation) -> int:
    if call.args.database is None:
        found: dict[str, Any] = call.get(api_path("audit", "head"))
    else:
        verification = _read_chain(call.args.database)
        if not verification["ok"]:
            raise exits.Exit(exits.REFUSED, f"NOT INTACT: {verification['message']}")
        found = {"seq": verification["entries"], "hash": verification["head"], "at": None, "exported": None}
    if not call.print_data(found, [str(found["seq"])]):
        print_line(f"{found['hash']} {found['seq']}")
    return exits.OK


def _read_chain(database: Path, head: str | None = None, numbers: Sequence[int] = ()) -> dict[str, Any]:
    """Return the verification of a file's chain, and the hashes of these entries."""
    options = [] if head is None else [f"--head={head}"]
    options += [f"--entry={number}" for number in numbers]
    return run_admin_query(["chain", f"--file={database}", *options])


def _read_segments(directory: Path, exported: dict[str, Any], numbers: Sequence[int] = ()) -> dict[str, Any]:
    """Return the verification of segments up to the last exported entry, and the hashes of these entries."""
    entries = (f"--entry={number}" for number in (exported["through"], *numbers))
    return run_admin_query(["segments", f"--segments={directory}", f"--head={exported['head']}", *entries])


def _hash_argument(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("a hash has 64 hexadecimal digits")
    return text


# -- the export ---------------------------------------------------------------


def _export(call: Invocation) -> int:
    """Write everything that the API shows this user of one rollout; `-` is stdout.

    The times in the archive are the rollout's, so the same rollout gives the same files.
    """
    import tarfile  # rolloutctl's start-up counts

    rollout, output = call.get(api_path("rollouts", call.args.rollout)), call.args.output
    name = rollout["rollout"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        at = int(parse_rfc3339(rollout["submitted_at"]).timestamp())
        for path, text in _archive_files(call.client, name, rollout):
            content = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size, member.mtime = len(content), at
            tar.addfile(member, io.BytesIO(content))
    if output is not None and str(output) == "-":
        sys.stdout.buffer.write(buffer.getvalue())
        return exits.OK
    archive_path = output or Path(f"{name}.tar.gz")
    archive_path.write_bytes(buffer.getvalue())
    print_message(f"{archive_path}: written")
    return exits.OK


def _archive_files(client: Client, name: str, rollout: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "README.txt", ARCHIVE_README
    yield "rollout.json", _to_json(rollout)
    yield "plan.json", _to_json(client.get(api_path("rollouts", name, "plan")))
    nodes = client.get(api_path("rollouts", name, "nodes"))["nodes"]
    yield "targets.json", _to_json(nodes)
    for node in nodes:
        detail = client.get(api_path("rollouts", name, "nodes", node["node"]))
        yield f"nodes/{node['node']}.json", _to_json({**detail, "checks": _checks_by_change(detail["steps"])})
        yield f"nodes/{node['node']}.log", "".join(_log_lines(client, name, node))
    entries = list(read_entries(client, rollout=name))
    yield "audit.jsonl", "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
    yield "audit.json", _to_json(client.get(api_path("audit", "verify")))
    yield "timeline.txt", "".join(_format_entry(entry["entry"], local=False) + "\n" for entry in entries)


def _checks_by_change(steps: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the checks of all attempts, before and after the first run of the change."""
    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    changed = False
    for step in steps:
        changed = changed or step["action"] == "run"
        if step["action"] in ("check", "inspect"):
            found["after" if changed else "before"].append(step)
    return found


def _log_lines(client: Client, name: str, node: dict[str, Any]) -> Iterator[str]:
    for attempt in range(1, node["attempt"] + 1):
        yield f"# attempt {attempt}\n"
        path = api_path("rollouts", name, "nodes", node["node"], "log")
        for line in client.stream(path, {"attempt": attempt}):
            yield f"{line['at']} {line['kind']} {line['text']}\n"


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
