"""The command `clean`: remove from nodes what ended rollouts left there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, add_reason_option, add_yes_option, confirm
from rolloutd.cli.output import print_message, print_table
from rolloutd.control.client import api_path
from rolloutd.text import pluralize

if TYPE_CHECKING:
    from rolloutd.control.wire_fleet import LeftFile


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("clean", clean, "remove from nodes what ended rollouts left there")
    parser.add_argument("subject", metavar="NODE | ROLLOUT", help="a node, or a rollout for all its nodes")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    add_reason_option(parser, required=False)
    add_yes_option(parser)


def clean(call: Invocation) -> int:
    """Clean a node or the nodes of a rollout; exit 1 if one of them is not clean after that."""
    args = call.args
    if args.dry_run:
        return _print(call, _request(call, dry_run=True))
    if args.reason is None:
        raise exits.Exit(exits.USAGE, "rolloutctl clean: no --reason; give one, or --dry-run")
    confirm(call, lambda: _summarize(_request(call, dry_run=True)), f"Clean {args.subject}?")
    return _print(call, _request(call, dry_run=False))


def _request(call: Invocation, *, dry_run: bool) -> Sequence[LeftFile]:
    body = {"reason": call.args.reason or "dry run", "dry_run": dry_run}
    path = api_path("clean", call.args.subject)
    with contextlib.closing(call.client.stream(path, method="POST", body=body)) as lines:
        files = [each for line in lines for each in line["files"]]
    return sorted(files, key=lambda each: each["node"])


def _print(call: Invocation, files: Sequence[LeftFile]) -> int:
    if call.args.json:
        call.print_data(files)
    elif not files:
        print_message(f"{call.args.subject}: nothing was left")
    else:
        print_table(
            ("NODE", "WHAT", "PATH", "RESULT", "REASON"),
            ((f["node"], f["what"], f["path"], f["result"], f["reason"] or "") for f in files),
        )
    is_clean = all(each["what"] != "node" for each in files)
    return exits.OK if is_clean else exits.REFUSED


def _summarize(files: Sequence[LeftFile]) -> str:
    removable = [each for each in files if each["result"] == "found"]
    nodes = {each["node"] for each in removable}
    return (
        f"{pluralize(len(removable), 'thing')} on {pluralize(len(nodes), 'node')} would be removed;"
        " --dry-run lists them"
    )
