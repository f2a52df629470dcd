"""The command `changes`: which node has which change, across rollouts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import format_percent, print_line, print_table
from rolloutd.control.client import api_path

if TYPE_CHECKING:
    from rolloutd.control.wire_fleet import Change, Changes

STATES = ("done", "drifted", "in-flight", "pending", "failed", "skipped", "never")

SHORT_HASH = 12
"""Characters of a change's hash in a table: enough to tell a plan's changes apart."""


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("changes", changes, "show which node has which change, across rollouts")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="only this plan, with its groups and nodes")


def changes(call: Invocation) -> int:
    """Print the changes; those of one plan with their groups and nodes."""
    answer: Changes = call.get(api_path("changes"), plan=call.args.plan)
    if call.args.json:
        call.print_data(answer)
        return exits.OK
    print_table(
        ("PLAN", "CHANGE", "PERCENT", *(state.upper() for state in STATES)),
        map(_change_row, answer["changes"]),
    )
    if call.args.plan is not None:
        for change in answer["changes"]:
            _print_change(change)
    return exits.OK


def _change_row(change: Change) -> tuple[str, ...]:
    counts = Counter(str(node["state"]) for node in change["nodes"])
    numbers = (str(counts[state]) if counts[state] else "" for state in STATES)
    return (change["plan"], change["change"][:SHORT_HASH], format_percent(change["percent"]), *numbers)


def _print_change(change: Change) -> None:
    print_line()
    print_line(f"change {change['change'][:SHORT_HASH]}, rollouts {', '.join(change['rollouts'])}")
    print_table(
        ("GROUP", "DONE", "PERCENT"),
        (
            (group["group"], f"{group['done']}/{group['total']}", format_percent(group["percent"]))
            for group in change["groups"]
        ),
    )
    print_line()
    print_table(("NODE", "STATE"), ((node["node"], node["state"]) for node in change["nodes"]))
