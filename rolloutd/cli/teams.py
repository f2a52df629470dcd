"""Commands for a team's own windows, canaries and freezes.

They tighten what the settings and the plans allow.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, holds, timestamps
from rolloutd.cli.command_group import (
    CommandGroup,
    Handler,
    Invocation,
    add_reason_option,
    add_until_option,
)
from rolloutd.cli.output import print_line, sanitize
from rolloutd.control.client import api_path

if TYPE_CHECKING:
    from rolloutd.control.wire_fleet import Team


def register(commands: CommandGroup) -> None:
    group = commands.add_group("team", "show or set a team's own rules")

    def add(name: str, handler: Handler, summary: str) -> argparse.ArgumentParser:
        parser = group.add_command(name, handler, summary)
        parser.add_argument("team", metavar="TEAM", help="the team's name")
        return parser

    add("show", show_team, "show a team's windows, canaries and freezes")
    windows = add("windows", set_windows, "set when the team's nodes may start; all other windows apply too")
    windows.add_argument(
        "window",
        metavar="WINDOW",
        nargs="*",
        type=_window_argument,
        help='such as "mon-fri 09:00-16:00 Europe/Amsterdam"',
    )
    canaries = add("canaries", set_canaries, "set which of the team's nodes go first")
    canaries.add_argument(
        "node", metavar="NODE", nargs="*", help="a canary; give them in the order in which they start"
    )
    freeze = add("freeze", freeze_team, "start none of the team's nodes until the freeze is lifted")
    add_until_option(freeze, "end of the freeze")
    unfreeze = add("unfreeze", unfreeze_team, "lift the team's freezes")
    for parser, name in ((windows, "windows"), (canaries, "canaries")):
        parser.add_argument("--none", action="store_true", help=f"remove the team's own {name}")
    for parser in (windows, canaries, freeze):
        add_reason_option(parser)
    add_reason_option(unfreeze, required=False)


def show_team(call: Invocation) -> int:
    return _print_team(call, call.get(api_path("teams", call.args.team)))


def set_windows(call: Invocation) -> int:
    return _set_rules(call, "windows", call.args.window)


def set_canaries(call: Invocation) -> int:
    return _set_rules(call, "canaries", call.args.node)


def freeze_team(call: Invocation) -> int:
    call.args.scope = f"team/{call.args.team}"
    return holds.start_freeze(call)


def unfreeze_team(call: Invocation) -> int:
    """Lift a team's freezes."""
    call.args.scope = f"team/{call.args.team}"
    return holds.lift_freeze(call)


def _set_rules(call: Invocation, field: str, values: list[Any]) -> int:
    args = call.args
    if bool(values) == args.none:
        raise exits.Exit(exits.USAGE, f"rolloutctl team {field}: nothing to set; name some, or use --none")
    answer = call.client.put(api_path("teams", args.team), {field: values, "reason": args.reason})
    return _print_team(call, answer)


def _print_team(call: Invocation, team: Team) -> int:
    if call.args.json:
        call.print_data(team)
        return exits.OK
    print_line(sanitize(f"{team['team']}: {', '.join(team['members']) or 'no members'}"))
    for name, settings, own in (
        ("windows", team["windows"], team["own_windows"]),
        ("canaries", team["canaries"], team["own_canaries"]),
    ):
        print_line(sanitize(f"  {name} of the settings: {', '.join(settings) or 'none'}"))
        print_line(sanitize(f"  {name} of its own: {', '.join(own) or 'none'}"))
    for each in team["freezes"]:
        until = f" until {timestamps.format_local(each['until'])}" if each["until"] else ""
        print_line(sanitize(f"  frozen{until} by {each['by']}: {each['reason']}"))
    return exits.OK


def _window_argument(text: str) -> dict[str, str]:
    """Return a window as the API takes it; the daemon validates its parts."""
    parts = text.split()
    first, dash, last = parts[1].partition("-") if len(parts) in (2, 3) else ("", "", "")
    if not dash:
        raise argparse.ArgumentTypeError(f"'{text}' is not a window; write 'mon-fri 09:00-16:00 UTC'")
    return {"days": parts[0], "from": first, "to": last, **({"zone": parts[2]} if len(parts) == 3 else {})}
