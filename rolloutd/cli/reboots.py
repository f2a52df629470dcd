"""Machines that reboot themselves, named `fleetlock/GROUP` in place of a rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.cli.command_group import Invocation, without_none
from rolloutd.cli.output import colorize, format_local, print_line, sanitize
from rolloutd.control.client import api_path

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import RebootGate, RebootGates

PREFIX = "fleetlock/"


def group_of(rollout: str | None) -> str | None:
    """Return the group that an argument names in place of a rollout; None for a rollout."""
    return rollout.removeprefix(PREFIX) if rollout is not None and rollout.startswith(PREFIX) else None


def approve(call: Invocation, group: str) -> int:
    args = call.args
    if args.gate is not None or args.until is None:
        raise exits.Exit(exits.USAGE, f"{args.rollout}: give --until TIME, and no gate")
    body = without_none(reason=args.reason, until=args.until, team=args.team)
    return _report(call, call.client.put(api_path("fleetlock", group, "approval"), body))


def withdraw(call: Invocation, group: str) -> int:
    return _report(
        call, call.client.delete(api_path("fleetlock", group, "approval"), {"reason": call.args.reason})
    )


def read_gates(call: Invocation, group: str | None = None) -> list[RebootGate]:
    answer: RebootGates = call.get(api_path("fleetlock"))
    found = [each for each in answer["gates"] if group in (None, each["group"])]
    if group is not None and not found:
        raise exits.Exit(exits.REFUSED, f"{PREFIX}{group}: no gate of this name; see rolloutctl gates")
    return found


def print_gate(gate: RebootGate) -> None:
    print_line(colorize(f"{PREFIX}{gate['group']}", "bold"))
    print_line(sanitize(f"  {format_gate(gate)}"))
    for each in gate["approvals"]:
        for_teams = ", ".join(each["teams"])
        until = format_local(each["until"])
        print_line(sanitize(f"    yes by {each['by']} for {for_teams} until {until}: {each['reason']}"))


def format_gate(gate: RebootGate) -> str:
    return f"reboots {gate['state']}" + (f": {gate['missing']}" if gate["missing"] else "")


def _report(call: Invocation, gate: RebootGate) -> int:
    if not call.print_data(gate, [f"{PREFIX}{gate['group']}"]):
        print_gate(gate)
    return exits.OK
