"""Commands for slots, holds, freezes, and a team's own windows and canaries.

A repeated hold with the same name is granted again, so that scripts may retry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, reboots
from rolloutd.cli.command_group import CommandGroup, Handler, Invocation, Parser, without_none
from rolloutd.cli.output import Columns, format_age, format_local, print_line, print_list, sanitize
from rolloutd.cli.status import format_down
from rolloutd.control.client import ApiError, api_path
from rolloutd.texts.formats import join_limited, pluralize

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import Freeze, Hold, Locks, SlotHolder, Team


BUSY_PHASES = ("isolating", "maintaining", "verifying")

MAX_UNOBSERVED_SHOWN = 8
"""Unobserved nodes shown by name; a large pool may have hundreds, all of them healthy."""


def register(commands: CommandGroup) -> None:
    commands.add_command(
        "locks", show_locks, "show every pool's slots and holders, holds and freezes"
    ).watch()
    summary = "reserve a node for other work: no rollout starts it, and it takes its slots"
    hold = commands.add_command("hold", take_hold, summary)
    release = commands.add_command("release", release_hold, "release a hold on a node")
    for parser in (hold, release):
        parser.node().argument("--as", dest="id", metavar="ID", text="name of the hold (your user name)")
        parser.argument("--source", metavar="SOURCE", text="what holds the node (person)")
    hold.until("end of the hold").reason()
    freeze = commands.add_command("freeze", start_freeze, "start no node until the freeze is lifted")
    unfreeze = commands.add_command("unfreeze", lift_freeze, "lift a freeze")
    scope = "all, team/NAME, node/NAME, or a pool such as rack/r12 (all)"
    freeze.argument("--scope", metavar="SCOPE", text=scope)
    unfreeze.argument("--scope", metavar="SCOPE", text=f"{scope}, or the id of one freeze")
    freeze.until("end of the freeze").reason()
    unfreeze.reason(required=False)
    group = commands.add_group("team", "show or set a team's own rules")

    def add(name: str, handler: Handler, summary: str) -> Parser:
        return group.add_command(name, handler, summary).argument(
            "team", metavar="TEAM", text="the team's name"
        )

    summary = "show a team's windows, canaries and freezes"
    add("show", lambda call: _print_team(call, call.get(api_path("teams", call.args.team))), summary)
    parser = add("windows", set_windows, "set when the team's nodes may start; all other windows apply too")
    window = 'a window, such as "mon-fri 09:00-16:00 Europe/Amsterdam"'
    parser.argument("window", metavar="WINDOW", text=window, nargs="*", type=_window_argument)
    parser.flag("--none", text="remove the team's own windows").reason()
    summary = "set which of the team's nodes go first"
    parser = add("canaries", lambda call: _set_rules(call, "canaries", call.args.node), summary)
    canary = "a canary; give them in the order in which they start"
    parser.argument("node", metavar="NODE", text=canary, nargs="*")
    parser.flag("--none", text="remove the team's own canaries").reason()
    parser = add("freeze", start_freeze, "start none of the team's nodes until the freeze is lifted")
    parser.until("end of the freeze").reason()
    add("unfreeze", lift_freeze, "lift the team's freeze").reason(required=False)


def show_locks(call: Invocation) -> None:
    answer: Locks = call.get(api_path("locks"))
    if call.print_data(answer, [pool["pool"] for pool in answer["pools"]]):
        return
    print_list(POOL_COLUMNS, answer["pools"])
    for hold in answer["holds"]:
        what = f"held: {hold['node']} as {hold['source']}/{hold['id']}{_until(hold)}"
        print_line(sanitize(f"{what} by {hold['by']}: {hold['reason']}"))
    for freeze in answer["freezes"]:
        what = f"frozen: {freeze['scope']} as {freeze['id']}{_until(freeze)}"
        print_line(sanitize(f"{what} by {freeze['by']}: {freeze['reason']}"))
    for gate in answer["reboot_gates"]:
        reboots.print_gate(gate)


def take_hold(call: Invocation) -> int:
    """Take a hold: exit 0 if granted, 1 with the reason if not."""
    args = call.args
    body = without_none(node=args.node, source=args.source, id=args.id, until=args.until, reason=args.reason)
    # Asked before the hold: the rollout may finish its work on the node before the hold is granted.
    rollout = None if call.args.json else _busy_rollout(call, args.node)
    granted: Hold = call.client.put(api_path("holds"), body)
    later = f", once {rollout} finishes its work there" if rollout else ""
    held = f"{args.node}: held as {granted['source']}/{granted['id']}{_until(granted)}{later}"
    return call.report(granted, held, args.node)


def release_hold(call: Invocation) -> int:
    args = call.args
    body = without_none(node=args.node, source=args.source, id=args.id)
    answer = call.client.delete(api_path("holds"), body)
    if answer["lifted"]:
        return call.report(answer, f"{args.node}: released", args.node)
    # The node may have a hold of another name, so "not held" would be wrong.
    name = f"hold {args.id}" if args.id else "hold of yours"
    return call.report_no_change(answer, f"{args.node}: no {name}; list all holds with rolloutctl locks")


def start_freeze(call: Invocation) -> int:
    args = call.args
    body = without_none(reason=args.reason, scope=_scope(call), until=args.until)
    answer: Freeze = call.client.post(api_path("freezes"), body)
    return call.report(answer, f"frozen: {answer['scope']}", answer["scope"])


def lift_freeze(call: Invocation) -> int:
    args = call.args
    scope = _scope(call)
    answer = call.client.delete(api_path("freezes"), without_none(scope=scope, reason=args.reason))
    scope = scope or "all"
    if answer["lifted"]:
        return call.report(answer, f"{scope}: {pluralize(answer['lifted'], 'freeze')} lifted", scope)
    return call.report_no_change(answer, f"{scope}: no freeze; list all freezes with rolloutctl locks")


def _scope(call: Invocation) -> str | None:
    """Return the scope of a freeze: that of `team freeze` is its team."""
    team = getattr(call.args, "team", None)
    return call.args.scope if team is None else f"team/{team}"


def _busy_rollout(call: Invocation, node: str) -> str | None:
    answer: Locks = call.get(api_path("locks"))
    holders = (holder for lock in answer["pools"] for holder in lock["holders"])
    rollout = next((holder["rollout"] for holder in holders if holder["node"] == node), None)
    if rollout is None:
        return None
    phase = call.get(api_path("rollouts", rollout, "nodes", node, "why"))["phase"]
    return rollout if phase in BUSY_PHASES else None


def _format_holders(holders: Sequence[SlotHolder]) -> Iterator[str]:
    """Yield the holders one by one, then the unobserved nodes grouped by their last observation."""
    unobserved: dict[str, list[str]] = {}
    for holder in holders:
        if holder.get("unobserved"):
            unobserved.setdefault(holder["state"], []).append(holder["node"])
        else:
            hold = f"{holder['source']}/{holder['id']}" if holder["id"] else None
            since = f", {format_age(holder['since'])}" if holder["since"] else ""
            yield f"{holder['node']} ({holder['rollout'] or hold or holder['state']}{since})"
    for why, names in unobserved.items():
        yield f"{join_limited(names, MAX_UNOBSERVED_SHOWN)} (unobserved: {why})"


POOL_COLUMNS: Columns = {
    "POOL": "pool",
    "DOWN": format_down,
    "BUDGET": "max_unavailable",
    "MEMBERS": "members",
    "HOLDERS": lambda lock: ", ".join(_format_holders(lock["holders"])),
}


def _until(lock: Hold | Freeze) -> str:
    return f" until {format_local(lock['until'])}" if lock["until"] else ""


def set_windows(call: Invocation) -> int:
    try:
        return _set_rules(call, "windows", call.args.window)
    except ApiError as error:
        if error.status != HTTPStatus.BAD_REQUEST:
            raise
        problem = str(error).removeprefix("the body: ")
        example = "write 'mon-fri 09:00-16:00 Europe/Amsterdam'"
        raise exits.Exit(exits.USAGE, f"rolloutctl team windows: {problem}; {example}") from error


def _set_rules(call: Invocation, field: str, values: list[Any]) -> int:
    args = call.args
    if bool(values) == args.none:
        raise exits.Exit(exits.USAGE, f"rolloutctl team {field}: nothing to set; name some, or use --none")
    answer = call.client.put(api_path("teams", args.team), {field: values, "reason": args.reason})
    return _print_team(call, answer)


def _print_team(call: Invocation, team: Team) -> int:
    if call.print_data(team, [team["team"]]):
        return exits.OK
    print_line(sanitize(f"{team['team']}: {', '.join(team['members']) or 'no members'}"))
    for name, settings, own in (
        ("windows", team["windows"], team["own_windows"]),
        ("canaries", team["canaries"], team["own_canaries"]),
    ):
        print_line(sanitize(f"  {name} of the settings: {', '.join(settings) or 'none'}"))
        print_line(sanitize(f"  {name} of its own: {', '.join(own) or 'none'}"))
    for each in team["freezes"]:
        print_line(sanitize(f"  frozen as {each['id']}{_until(each)} by {each['by']}: {each['reason']}"))
    return exits.OK


def _window_argument(text: str) -> dict[str, str]:
    """Return a window as the API takes it; the daemon validates its parts."""
    parts = text.split()
    first, dash, last = parts[1].partition("-") if len(parts) in (2, 3) else ("", "", "")
    if not dash:
        raise argparse.ArgumentTypeError(f"'{text}' is not a window; write 'mon-fri 09:00-16:00 UTC'")
    return {"days": parts[0], "from": first, "to": last, **({"zone": parts[2]} if len(parts) == 3 else {})}
