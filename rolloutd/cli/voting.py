"""Commands by which people answer at a gate, and take an answer back.

Who may vote and what is still missing, the daemon says.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.cli.command import Call, Family, add_reason, add_rollout, add_until, body_of
from rolloutd.cli.output import put, put_json
from rolloutd.control.client import path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Gate

GATES = ("start", "continue", "proceed")

MOST_MORE = 1000
"""A vote that covers more failures than this covers all of them; the daemon has its own limit."""


def register(family: Family) -> None:
    """Add the commands of this family."""
    approve = family.command("approve", vote, "say yes at a gate")
    reject = family.command("reject", vote, "say no at a gate")
    withdraw = family.command("withdraw", take_back, "take back what you said at a gate")
    for parser in (approve, reject, withdraw):
        add_rollout(parser)
        parser.add_argument("gate", metavar="GATE", choices=GATES, help="start, continue or proceed")
        parser.add_argument("--team", metavar="TEAM", help="the team you speak for, where you are in several")
        parser.add_argument(
            "--wave", metavar="WAVE", help="the wave that the gate comes after, where there are several"
        )
        add_reason(parser)
    for parser in (approve, reject):
        parser.add_argument("--digest", metavar="SHA256", help="what you read; refused if it is another")
    approve.add_argument(
        "--node", metavar="NODE", action="append", help="at proceed: only this failed node (repeatable)"
    )
    approve.add_argument(
        "--more", metavar="K", type=_few, help="at proceed: so many more failures are covered"
    )
    add_until(approve, "at proceed: until when further failures are covered")


def vote(call: Call) -> int:
    """Vote yes or no."""
    args = call.args
    yes = args.command == "approve"
    body = body_of(gate=args.gate, yes=yes, reason=args.reason, team=args.team, wave=args.wave)
    body |= body_of(digest=args.digest)
    if yes:
        body |= body_of(nodes=args.node, more=args.more, until=args.until)
    return _report(call, call.client.post(path_of("rollouts", args.rollout, "votes"), body))


def take_back(call: Call) -> int:
    """Withdraw a vote."""
    args = call.args
    body = body_of(gate=args.gate, reason=args.reason, team=args.team, wave=args.wave)
    return _report(call, call.client.post(path_of("rollouts", args.rollout, "withdraw"), body))


def gate_sentence(gate: Gate) -> str:
    """Return how a gate stands and who is missing, in one line."""
    missing = f": {gate['missing']}" if gate["missing"] and gate["state"] != "open" else ""
    team = f" of {gate['team']}" if gate["team"] else ""
    wave = f" after {gate['wave']}" if gate["wave"] else ""
    return f"{gate['gate']}{team}{wave} is {gate['state']}{missing}"


def _report(call: Call, gate: Gate) -> int:
    if call.args.json:
        put_json(gate)
    else:
        put(gate_sentence(gate))
    return exits.DONE


def _few(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_MORE:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {MOST_MORE}")
    return int(text)
