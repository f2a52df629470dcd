"""Commands `config` and `diff`, and the differences of `plan preview`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, add_node_argument
from rolloutd.cli.output import print_line, print_message, print_table, sanitize
from rolloutd.control.client import api_path
from rolloutd.text import pluralize

if TYPE_CHECKING:
    from rolloutd.control.wire_plans import (
        ConfigurationRecord,
        DifferenceGroup,
        PlanDifferences,
        ValueDifference,
    )

RECORDS = ("current", "previous", "invalid")

SHORT_HASH = 12
"""Characters of a content's hash in a table."""

MAX_NODES_NAMED = 5
"""Nodes of a group that are named; the others are counted."""


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("config", config, "show what runs gave to a node, without secrets")
    add_node_argument(parser)
    parser.add_argument(
        "--record", choices=RECORDS, help="print the values of this record (all records, without values)"
    )
    parser = commands.add_command("diff", diff, "show the values that differ between two records of a node")
    add_node_argument(parser)
    parser.add_argument(
        "before", metavar="A", nargs="?", choices=RECORDS, default="previous", help="a record (previous)"
    )
    parser.add_argument(
        "after", metavar="B", nargs="?", choices=RECORDS, default="current", help="another record (current)"
    )


def config(call: Invocation) -> int:
    """Print the records of a node, or the values of one."""
    args = call.args
    answer = call.get(api_path("nodes", args.node, "configuration"))
    if args.record is not None:
        return _print_record(call, args.record, answer[args.record])
    if args.json:
        call.print_data(answer)
        return exits.OK
    found = [(name, answer[name]) for name in RECORDS if answer[name] is not None]
    if not found:
        print_message(f"{args.node}: no run has reached it")
        return exits.OK
    print_table(
        ("RECORD", "CONTENT", "CHANGE", "ROLLOUT", "AT", "EVIDENCE"),
        (_record_row(name, record) for name, record in found),
    )
    return exits.OK


def diff(call: Invocation) -> int:
    """Print what differs between two records of a node."""
    args = call.args
    path = api_path("nodes", args.node, "configuration", "diff")
    answer = call.get(path, before=args.before, after=args.after)
    if args.json:
        call.print_data(answer)
        return exits.OK
    for each in answer["differences"]:
        print_line(_format_difference(each))
    if not answer["differences"]:
        print_message(f"{args.node}: {args.before} and {args.after} are equal")
    return exits.OK


def print_plan_differences(answer: PlanDifferences) -> None:
    """Print each group of nodes with what a plan would change for them."""
    for group in answer["groups"]:
        count = pluralize(len(group["nodes"]), "node")
        match group["state"]:
            case "changed":
                lines = [_format_difference(each) for each in group["differences"]]
            case "same":
                lines = ["no difference"]
            case _:
                lines = ["no record: no run has passed there"]
        prefix = f"{count}: "
        for number, line in enumerate(lines):
            print_line((prefix if number == 0 else " " * len(prefix)) + line)
        if group["state"] == "changed":
            print_line(" " * len(prefix) + f"({_name_nodes(group)})")


def _name_nodes(group: DifferenceGroup) -> str:
    names: Sequence[str] = group["nodes"]
    more = len(names) - MAX_NODES_NAMED
    return sanitize(", ".join(names[:MAX_NODES_NAMED])) + (f" and {more} more" if more > 0 else "")


def _print_record(call: Invocation, name: str, record: ConfigurationRecord | None) -> int:
    if call.args.json:
        call.print_data(record)
    elif record is None:
        print_message(f"{call.args.node}: no {name} configuration")
    else:
        print_line(sanitize_lines(json.dumps(record["values"], indent=2, ensure_ascii=False, sort_keys=True)))
    return exits.OK


def sanitize_lines(text: str) -> str:
    return "\n".join(map(sanitize, text.splitlines()))


def _record_row(name: str, record: ConfigurationRecord) -> tuple[str, ...]:
    evidence = record["evidence"]
    return (
        name,
        record["content"][:SHORT_HASH],
        record["change"][:SHORT_HASH],
        record["rollout"],
        record["at"],
        f"{evidence['step']}: {evidence['text']}" if evidence else "",
    )


def _format_difference(difference: ValueDifference) -> str:
    before, after = _format_value(difference["before"]), _format_value(difference["after"])
    return f"{sanitize(difference['name'])} {before} \u2192 {after}"


def _format_value(value: Any) -> str:
    if value is None:
        return "(absent)"
    return sanitize(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
