"""Commands for services that carry people's votes: make a token, hand one in.

A token is never an argument: whoever can list processes would read it.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from rolloutd.cli import exits
from rolloutd.cli.command import Call, Family, add_reason, add_rollout, instant
from rolloutd.cli.output import put, put_json
from rolloutd.cli.voting import GATES, gate_sentence
from rolloutd.control.client import path_of


def register(family: Family) -> None:
    """Add the commands of this family."""
    group = family.group("token", "carry people's votes from a ticket system or a chat")
    parser = group.command("sign", sign, "make a token for somebody's vote", json=False)
    add_rollout(parser)
    parser.add_argument("gate", metavar="GATE", choices=GATES, help="start, continue or proceed")
    parser.add_argument("--service", metavar="NAME", required=True, help="its name in the settings")
    parser.add_argument("--key-file", metavar="FILE", type=Path, required=True, help="its HMAC secret")
    parser.add_argument("--for", dest="outside", metavar="PERSON", required=True, help="whose vote it is")
    parser.add_argument(
        "--answer", choices=("yes", "no", "withdraw"), default="yes", help="what they said (yes)"
    )
    parser.add_argument("--expires", metavar="TIME", type=instant, default=None, help="until when (15m)")
    parser.add_argument("--team", metavar="TEAM", help="the team it is for, where the service has several")
    parser.add_argument("--wave", metavar="WAVE", help="the wave that the gate comes after")
    add_reason(parser)
    parser = group.command("use", use, "hand a token in: the vote that it carries counts once")
    add_rollout(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the token's file (stdin)")


def sign(call: Call) -> int:
    """Print a token for the digest, and the failures, that the rollout has now."""
    import secrets

    from rolloutd.orders import tokens

    args = call.args
    shown = call.get(path_of("rollouts", args.rollout))
    payload = {
        "service": args.service,
        "rollout": shown["rollout"],
        "gate": args.gate,
        "digest": shown["digest"],
        "answer": args.answer,
        "outside": args.outside,
        "expires": datetime.fromisoformat(args.expires or instant("15m")).timestamp(),
        "nonce": secrets.token_urlsafe(18),
        "reason": args.reason,
        **{name: value for name, value in (("team", args.team), ("wave", args.wave)) if value is not None},
    }
    if args.gate == "proceed":
        nodes = call.get(path_of("rollouts", shown["rollout"], "nodes"))["nodes"]
        failed = [node["node"] for node in nodes if node["phase"] == "failed"]
        details = [call.get(path_of("rollouts", shown["rollout"], "nodes", node)) for node in failed]
        payload["shown"] = [detail["failure"]["id"] for detail in details]
    try:
        put(tokens.sign(payload, args.key_file.read_bytes()))
    except tokens.BadToken as bad:
        raise exits.Stop(exits.NO, str(bad)) from bad
    return exits.DONE


def use(call: Call) -> int:
    """Hand a token in."""
    args = call.args
    text = sys.stdin.read() if args.file is None else args.file.read_text("utf-8")
    gate = call.client.post(path_of("rollouts", args.rollout, "votes", "token"), {"token": text.strip()})
    put_json(gate) if args.json else put(gate_sentence(gate))
    return exits.DONE
