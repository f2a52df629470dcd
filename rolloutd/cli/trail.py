"""Commands that read the audit, and verify that nobody has altered it.

`audit verify --database` needs no daemon: the chain's rules are in
rolloutd.chain, and a copy of the database file is enough.
"""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, number
from rolloutd.cli.following import follow_entries
from rolloutd.cli.output import printable, put, put_json, put_json_line, say
from rolloutd.control import sentences
from rolloutd.control.client import path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Audit, AuditEntry

PAGE = 1000
"""Entries asked for at a time: the most that the daemon gives in one answer."""

STRIDE = 10
"""How many times further back is looked when the last entries of a kind are too few so far."""

_HASH = re.compile(r"[0-9a-f]{64}")


def register(family: Family) -> None:
    """Add the commands of this family."""
    parser = family.command("audit", audit, "show who did what, or verify that nobody has altered it")
    parser.usage = (
        "rolloutctl audit [ROLLOUT] [--node NODE] [--actor NAME] [--kind EVENT]\n"
        "                        [--after SEQ] [--limit N | --last N] [-f] [--json]\n"
        "       rolloutctl audit verify [--database FILE] [--head HASH] [--json]\n"
        "       rolloutctl audit head [--database FILE] [--json]\n"
        "       rolloutctl audit export ROLLOUT [--output FILE]"
    )
    parser.add_argument(
        "rollout", metavar="ROLLOUT", nargs="?", help="only of this rollout; or verify, head or export"
    )
    parser.add_argument("exported", metavar="ROLLOUT", nargs="?", help="the rollout to export")
    parser.add_argument("--node", metavar="NODE", help="only of this node")
    parser.add_argument("--actor", metavar="NAME", help="only by this person")
    parser.add_argument("--kind", metavar="EVENT", help="only this kind of event, such as VoteCast")
    parser.add_argument(
        "--after", metavar="SEQ", type=number(0), default=0, help="only entries after this number"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--limit", metavar="N", type=number(1), help="no more than so many, from the first on")
    size.add_argument("-n", "--last", metavar="N", type=number(1), help="only the last so many")
    parser.add_argument("-f", "--follow", action="store_true", help="go on showing new ones")
    parser.add_argument("--database", metavar="FILE", type=Path, help="verify this file, without a daemon")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write the export there (ROLLOUT.tar.gz); - is stdout"
    )
    parser.add_argument(
        "--head", metavar="HASH", type=_hash, help="a hash noted earlier, which must still occur"
    )


def audit(call: Call) -> int:
    """Show entries, or verify the chain."""
    args = call.args
    if args.rollout == "export":
        if args.exported is None:
            raise exits.Stop(exits.USAGE, "rolloutctl audit export: which ROLLOUT?")
        from rolloutd.cli.exporting import export

        return export(call.client, args.exported, args.output)
    if args.exported is not None or args.output is not None:
        raise exits.Stop(exits.USAGE, "one ROLLOUT only; rolloutctl audit export ROLLOUT makes an archive")
    if args.rollout == "verify":
        return _verify(call)
    if args.rollout == "head" and args.head is None:
        return _head(call)
    if args.database is not None or args.head is not None:
        raise exits.Stop(exits.USAGE, "--database and --head belong to: rolloutctl audit verify")
    if args.follow:
        return _follow(call)
    entries = _entries(call, args.after) if args.last is None else _last(call)
    if args.json:
        put_json({"entries": list(entries)})
        return exits.DONE
    told = 0
    for told, found in enumerate(entries, 1):  # noqa: B007  # counted, without keeping them
        put(_line(found["entry"]))
    if not told:
        say(f"no entry is like that{_no_such_kind(args.kind)}")
    return exits.DONE


def _no_such_kind(kind: str | None) -> str:
    if kind is None or kind in sentences.EVENTS:
        return ""
    near = [event for event in sentences.EVENTS if kind.lower() in event.lower()]
    return f": no event is called {kind}; there is {', '.join(near or sentences.EVENTS)}"


def _last(call: Call) -> Iterable[AuditEntry]:
    """Return the last entries that are wanted: looked for from the end, ever further back."""
    args = call.args
    head: int = call.get(path_of("audit", "head"))["seq"]
    span = max(args.last, PAGE)
    while True:
        after = max(args.after, head - span)
        found = deque(_entries(call, after), maxlen=args.last)
        if len(found) == args.last or after == args.after:
            return found
        span *= STRIDE


def _entries(call: Call, after: int) -> Iterator[AuditEntry]:
    args = call.args
    left = args.limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        page: Audit = call.get(
            path_of("audit"),
            rollout=args.rollout,
            node=args.node,
            actor=args.actor,
            kind=args.kind,
            after=after,
            limit=size,
        )
        yield from page["entries"]
        if page["next"] is None:
            return
        after = page["next"]
        left = None if left is None else left - len(page["entries"])


def _follow(call: Call) -> int:
    args = call.args
    after = args.after
    for told in () if args.last is None else _last(call):
        after = told["seq"]
        put_json_line({"seq": after, "entry": told["entry"]}) if args.json else put(_line(told["entry"]))
    for line in follow_entries(call.client, args.rollout, after):
        entry = line.get("entry")
        if entry is None or not _wanted(args, entry):
            continue
        if args.json:
            put_json_line(line)
        else:
            print(_line(entry), flush=True)  # noqa: T201
    return exits.DONE


def _wanted(args: argparse.Namespace, entry: dict[str, Any]) -> bool:
    return (
        args.node in (None, entry.get("node"))
        and args.actor in (None, sentences.actor(entry))
        and args.kind in (None, entry["event"])
    )


def _line(entry: dict[str, Any]) -> str:
    at = moments.local(datetime.fromtimestamp(entry["at"], UTC).isoformat())
    return printable(f"{entry['seq']:>6}  {at}  {sentences.actor(entry):<10}  {sentences.of_entry(entry)}")


def _verify(call: Call) -> int:
    verdict = _verdict_of_file(call.args) if call.args.database is not None else _verdict_of_daemon(call)
    if call.args.json:
        put_json(verdict)
    else:
        put(f"{'intact' if verdict['ok'] else 'NOT INTACT'}: {printable(verdict['message'])}")
        if verdict["ok"] or verdict["entries"]:
            put(f"head {verdict['head']}")
    return exits.DONE if verdict["ok"] else exits.NO


def _head(call: Call) -> int:
    """Print the hash that is to be kept elsewhere."""
    if call.args.database is None:
        found: dict[str, Any] = call.get(path_of("audit", "head"))
    else:
        verdict = _verdict_of_file(call.args)
        if not verdict["ok"]:
            raise exits.Stop(exits.NO, f"NOT INTACT: {verdict['message']}")
        found = {"seq": verdict["entries"], "hash": verdict["head"], "at": None}
    put_json(found) if call.args.json else put(f"{found['hash']} {found['seq']}")
    return exits.DONE


def _verdict_of_daemon(call: Call) -> dict[str, Any]:
    verdict: dict[str, Any] = call.get(path_of("audit", "verify"), head=call.args.head)
    return verdict


def _verdict_of_file(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from rolloutd import chain

    try:
        verdict = chain.verify(args.database, args.head)
    except FileNotFoundError as missing:
        say(str(missing))
        raise exits.Stop(exits.NO) from missing
    return asdict(verdict)


def _hash(text: str) -> str:
    if not _HASH.fullmatch(text):
        raise argparse.ArgumentTypeError("a hash has 64 hexadecimal digits")
    return text
