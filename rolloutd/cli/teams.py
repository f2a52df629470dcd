"""Commands by which a team tightens for itself what the settings allow.

Its windows and canaries come on top of those of the settings and of every plan;
a freeze of its own holds its nodes back at once.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, add_reason, add_until, body_of
from rolloutd.cli.output import printable, put, put_json, say
from rolloutd.control.client import path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Team


def register(family: Family) -> None:
    """Add the commands of this family."""
    group = family.group("team", "show what a team has set for itself, or set it")
    parser = group.command("show", show, "show a team's windows, canaries and freezes")
    _add_team(parser)
    parser = group.command("windows", set_windows, "set when the team's nodes may start, besides all else")
    _add_team(parser)
    parser.add_argument(
        "window", metavar="WINDOW", nargs="*", type=_window, help='"mon-fri 09:00-16:00 Europe/Amsterdam"'
    )
    parser.add_argument("--none", action="store_true", help="no windows of its own any more")
    add_reason(parser)
    parser = group.command("canaries", set_canaries, "set which of the team's nodes go first")
    _add_team(parser)
    parser.add_argument("node", metavar="NODE", nargs="*", help="in their order")
    parser.add_argument("--none", action="store_true", help="no canaries of its own any more")
    add_reason(parser)
    parser = group.command("freeze", freeze, "let none of the team's nodes start")
    _add_team(parser)
    add_until(parser, "when it ends by itself")
    add_reason(parser)
    parser = group.command("unfreeze", unfreeze, "lift the team's freezes")
    _add_team(parser)
    add_reason(parser, required=False)


def show(call: Call) -> int:
    """Show a team."""
    return _show(call, call.get(path_of("teams", call.args.team)))


def set_windows(call: Call) -> int:
    """Set a team's own windows."""
    return _set(call, "windows", call.args.window)


def set_canaries(call: Call) -> int:
    """Set a team's own canaries."""
    return _set(call, "canaries", call.args.node)


def freeze(call: Call) -> int:
    """Freeze a team's nodes."""
    args = call.args
    body = body_of(scope=f"team/{args.team}", until=args.until, reason=args.reason)
    return _report(call, call.client.post(path_of("freezes"), body), f"frozen: team/{args.team}")


def unfreeze(call: Call) -> int:
    """Lift a team's freezes."""
    args = call.args
    body = body_of(scope=f"team/{args.team}", reason=args.reason)
    answer = call.client.delete(path_of("freezes"), body)
    return _report(call, answer, f"team/{args.team}: {answer['lifted']} freezes lifted")


def _set(call: Call, what: str, values: list[Any]) -> int:
    args = call.args
    if bool(values) == args.none:
        raise exits.Stop(exits.USAGE, f"rolloutctl team {what}: name some, or say --none")
    answer = call.client.put(path_of("teams", args.team), {what: values, "reason": args.reason})
    return _show(call, answer)


def _show(call: Call, team: Team) -> int:
    if call.args.json:
        put_json(team)
        return exits.DONE
    put(printable(f"{team['team']}: {', '.join(team['members']) or 'nobody'}"))
    for name, settings, own in (
        ("windows", team["windows"], team["own_windows"]),
        ("canaries", team["canaries"], team["own_canaries"]),
    ):
        put(printable(f"  {name} of the settings: {', '.join(settings) or 'none'}"))
        put(printable(f"  {name} of its own: {', '.join(own) or 'none'}"))
    for each in team["freezes"]:
        until = f" until {moments.local(each['until'])}" if each["until"] else ""
        put(printable(f"  frozen{until} by {each['by']}: {each['reason']}"))
    return exits.DONE


def _report(call: Call, answer: Any, text: str) -> int:
    if call.args.json:
        put_json(answer)
    say(text)
    return exits.DONE


def _add_team(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("team", metavar="TEAM", help="the team's name")


def _window(text: str) -> dict[str, str]:
    """Return a window as the API takes it; the daemon judges what its parts mean."""
    parts = text.split()
    first, dash, last = parts[1].partition("-") if len(parts) in (2, 3) else ("", "", "")
    if not dash:
        raise argparse.ArgumentTypeError(f"'{text}' is no window such as 'mon-fri 09:00-16:00 UTC'")
    return {"days": parts[0], "from": first, "to": last, **({"zone": parts[2]} if len(parts) == 3 else {})}
