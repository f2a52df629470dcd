"""Commands of voters: the gates, what a vote is for, people's votes, and tokens for people's votes.

The daemon decides who may vote and which votes are missing.  A token is never an
argument, because every user of the machine can list arguments.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, reboots, trains
from rolloutd.cli.command_group import (
    CommandGroup,
    Invocation,
    Parser,
    confirm,
    int_argument,
    is_asked,
    time_argument,
    without_none,
)
from rolloutd.cli.output import colorize, print_line, print_message, sanitize
from rolloutd.cli.status import GATES, format_gate, print_gates
from rolloutd.control import response_text, review_text
from rolloutd.control.client import api_path
from rolloutd.control.review_text import ReviewLine, ReviewSection
from rolloutd.texts import event_text
from rolloutd.texts.formats import pluralize, short_hash

if TYPE_CHECKING:
    from rolloutd.control.nodes.wire_nodes import Failures
    from rolloutd.control.plans.wire_plans import Review
    from rolloutd.control.rollouts.wire import Gate, Rollout


MAX_MORE = 1000
"""Maximum of --more; the daemon has the same limit."""


def register(commands: CommandGroup) -> None:
    approve = commands.add_command("approve", vote, "vote yes at a gate")
    reject = commands.add_command("reject", vote, "vote no at a gate")
    withdraw = commands.add_command("withdraw", withdraw_vote, "withdraw your votes at a gate")
    for parser in (approve, reject, withdraw):
        train = ("train",) if parser is approve else ()
        _add_gate_arguments(parser, *train, optional=parser is not reject)
        parser.argument("--team", metavar="TEAM", text="team to vote as, if you belong to several")
    digest = "the digest that you reviewed; the vote is refused if it differs"
    for parser in (approve, reject):
        parser.argument("--digest", metavar="SHA256", text=digest)
    node = "at proceed: approve only this failed node (repeatable)"
    approve.argument("--node", metavar="NODE", text=node, action="append")
    more = "at proceed: approve up to K further failures too"
    approve.argument("--more", metavar="K", text=more, type=int_argument(1, MAX_MORE))
    approve.until("at proceed: end of --more; at fleetlock/GROUP: end of the approval").yes()
    _add_unseen_argument(approve)
    summary = "sign and use tokens for votes from a ticket system or a chat"
    _register_tokens(commands.add_group("token", summary))
    summary = "list gates, their votes and the missing votes; for one rollout, also its review"
    commands.add_command("gates", gates, summary).rollout(optional=True).watch()
    summary = "show what a vote approves: change, targets, checks, digest, plan"
    commands.add_command("review", review, summary).rollout()


def _register_tokens(group: CommandGroup) -> None:
    parser = group.add_command("sign", sign_token, "sign a token for a person's vote", formats=())
    _add_gate_arguments(parser)
    parser.argument("--service", metavar="NAME", text="service account from the settings", required=True)
    key = "file with the HMAC secret of the service"
    parser.argument("--key-file", metavar="FILE", text=key, type=Path, required=True)
    parser.argument("--for", dest="outside", metavar="PERSON", text="person who votes", required=True)
    answers = ("yes", "no", "withdraw")
    parser.add_argument("--answer", choices=answers, default="yes", help="their answer (yes)")
    expires = "end of validity: RFC 3339, or a duration from now, such as 2h (15m)"
    parser.argument("--expires", metavar="TIME", text=expires, type=time_argument)
    parser.argument("--team", metavar="TEAM", text="team to vote as, if the service has several")
    _add_unseen_argument(parser)
    parser = group.add_command("use", use_token, "cast the vote of a token; a token counts once").rollout()
    parser.argument("file", metavar="FILE", text="the token's file (stdin)", nargs="?", type=Path)


def _add_unseen_argument(parser: Parser) -> None:
    unseen = "approve also what the review cannot show, such as new encrypted or binary files"
    parser.add_argument("--unseen", action="store_true", help=unseen)


def _add_gate_arguments(parser: Parser, *more: str, optional: bool = False) -> None:
    """Add the arguments of a vote; `more` are gates that only this command knows."""
    gate = "pilot (before the pilot), start, continue (after a wave) or proceed (after a failure)"
    gate = ", or ".join((gate, *more))
    number = "?" if optional else None
    parser.rollout().argument("gate", metavar="GATE", text=gate, choices=(*GATES, *more), nargs=number)
    wave = "wave before the gate, if several gates have this name"
    parser.argument("--wave", metavar="WAVE", text=wave).reason()


def vote(call: Invocation) -> int:
    args = call.args
    yes = args.command == "approve"
    if yes and (group := reboots.group_of(args.rollout)) is not None:
        return reboots.approve(call, group)
    if args.gate == "train":
        return trains.approve_at_gate(call)
    _require_gate(call)
    body = without_none(
        gate=args.gate, yes=yes, reason=args.reason, team=args.team, wave=args.wave, digest=args.digest
    )
    if yes:
        body |= without_none(nodes=args.node, more=args.more, until=args.until, unseen=args.unseen or None)
        if args.gate == "proceed":
            body["shown"] = _show_failures(call, args.node)
        # With --yes or without a terminal nothing is shown, and only --digest binds the vote.
        if is_asked(call):
            text, shown = _describe_approval(call)
            # The vote is for what is shown, even if the evidence or the gate that waits changes meanwhile.
            body = shown | body
            confirm(call, lambda: text, f"approve {args.gate}?")
    return _report(call, call.client.post(api_path("rollouts", args.rollout, "votes"), body))


def _show_failures(call: Invocation, chosen: Collection[str] = ()) -> list[str]:
    """Print the failures that the approval covers, also for scripts; return their ids for the vote."""
    found: Failures = call.get(api_path("rollouts", call.args.rollout, "failures"))
    failures, omitted = found["failures"], found["omitted"]
    nodes = chosen or {each["node"] for each in failures}
    covered = [each for each in failures if each["node"] in nodes]
    for each in covered:
        print_message(f"covers {each['id']}: {each['node']} failed in {event_text.failed_step(each)}")
    if omitted:
        print_message(f"covers no more: {pluralize(omitted, 'failure')} need another vote")
    return [each["id"] for each in covered]


def _describe_approval(call: Invocation) -> tuple[str, dict[str, Any]]:
    """Return what the approval starts and which missing votes it gives, and the digest and the wave of that.

    Neither if the gate is open or not one of the rollout.
    """
    rollout: Rollout = call.get(api_path("rollouts", call.args.rollout))
    review: Review = call.get(api_path("rollouts", rollout["rollout"], "review"))
    asked = [each for each in _gates_of(rollout, call.args) if each["state"] != "open"]
    gate = next(iter(asked), None)
    found = None if gate is None else response_text.find_gate(review, gate)
    if gate is None or found is None:
        return f"{rollout['rollout']}: {call.args.gate} is open or not a gate of it", {}
    radius = response_text.describe_blast_radius(found["blast_radius"])
    effect = response_text.describe_approval(found["your_approval"], rollout["owner"])
    name, digest = rollout["rollout"], short_hash(gate["digest"])
    details = f"digest {digest}; for the change and the plan: rolloutctl review {name}"
    unseen = "".join(f"\nnot shown by the review: {sanitize(each)}" for each in review["unseen"])
    deadline = response_text.describe_vote_deadline(rollout)
    lines = (f"{name}: {call.args.gate} starts {radius}", deadline, effect, f"{details}{unseen}")
    return "\n".join(line for line in lines if line), without_none(digest=gate["digest"], wave=gate["wave"])


def withdraw_vote(call: Invocation) -> int:
    args = call.args
    if (group := reboots.group_of(args.rollout)) is not None:
        return reboots.withdraw(call, group)
    _require_gate(call)
    body = without_none(gate=args.gate, reason=args.reason, team=args.team, wave=args.wave)
    return _report(call, call.client.post(api_path("rollouts", args.rollout, "withdraw"), body))


def _require_gate(call: Invocation) -> None:
    # argparse cannot require it: a group of machines has one gate, without a name.
    if call.args.gate is None:
        raise exits.Exit(exits.USAGE, f"{call.args.rollout}: no gate; give one of {', '.join(GATES)}")


def sign_token(call: Invocation) -> None:
    """Print a token for the rollout's current digest and failures."""
    import secrets

    from rolloutd.commands import tokens

    args = call.args
    rollout = call.get(api_path("rollouts", args.rollout))
    gate = _gate_to_sign(rollout, args)
    payload = {
        "service": args.service,
        "rollout": rollout["rollout"],
        "gate": args.gate,
        # At `start` its digest covers the pilot's evidence.
        "digest": rollout["digest"] if gate is None else gate["digest"],
        "answer": args.answer,
        "outside": args.outside,
        "expires": datetime.fromisoformat(args.expires or time_argument("15m")).timestamp(),
        "nonce": secrets.token_urlsafe(18),
        "reason": args.reason,
        **without_none(team=args.team, wave=gate and gate["wave"], unseen=args.unseen or None),
    }
    if args.gate == "proceed":
        payload["shown"] = _show_failures(call)
    try:
        print_line(tokens.sign(payload, args.key_file.read_bytes()))
    except tokens.InvalidToken as bad:
        raise exits.Exit(exits.REFUSED, str(bad)) from bad


def _gate_to_sign(rollout: Rollout, args: Namespace) -> Gate | None:
    """Return the gate that a token is for: the one that waits, even if another one waits when it is used."""
    found = _gates_of(rollout, args)
    if args.wave is not None and not found:
        name = rollout["rollout"]
        problem = f"no {args.gate} gate after wave {args.wave}; see rolloutctl gates {name}"
        raise exits.Exit(exits.REFUSED, f"{name}: {problem}")
    return next((each for each in found if each["state"] != "open"), found[-1] if found else None)


def _gates_of(rollout: Rollout, args: Namespace) -> list[Gate]:
    """Return the gates of this name, after the wave if one is given."""
    return [
        each for each in rollout["gates"] if each["gate"] == args.gate and args.wave in (None, each["wave"])
    ]


def use_token(call: Invocation) -> int:
    args = call.args
    # Bytes that are not UTF-8 are no token either: the daemon refuses them.
    text = sys.stdin.read() if args.file is None else args.file.read_text("utf-8", "replace")
    token = text.strip()
    if not token or len(token.splitlines()) > 1:
        # The daemon would quote the content, and the wrong file may be a key.
        problem = "not a token, which is one line; make one with rolloutctl token sign"
        raise exits.Exit(exits.USAGE, f"{args.file or '(stdin)'}: {problem}")
    path = api_path("rollouts", args.rollout, "votes", "token")
    return _report(call, call.client.post(path, {"token": token}))


def _report(call: Invocation, gate: Gate) -> int:
    if not call.print_data(gate, [_gate_path(call.args.rollout, gate)]):
        print_line(sanitize(format_gate(gate)))
    return exits.OK


def _gate_path(rollout: str, gate: Gate) -> str:
    """Return what names a gate: each rollout has a `start`, and may have several `continue`."""
    return "/".join(filter(None, (rollout, gate["gate"], gate["wave"], gate["team"])))


def gates(call: Invocation) -> None:
    """List the gates of one rollout or group of machines, or of all live ones."""
    name = call.args.rollout
    found: list[Rollout] = []
    group = reboots.group_of(name)
    if name is None:
        found = call.get(api_path("status"))["rollouts"]
    elif group is None:
        found = [call.get(api_path("rollouts", name))]
    of_machines = reboots.read_gates(call, group) if name is None or group is not None else []
    listed: list[dict[str, Any]] = [
        {"rollout": of["rollout"], **gate} for of in found for gate in of["gates"]
    ]
    names = [_gate_path(each["rollout"], gate) for each in found for gate in each["gates"]]
    listed += [{"rollout": f"{reboots.PREFIX}{each['group']}", **each} for each in of_machines]
    if call.print_data(listed, [*names, *(f"{reboots.PREFIX}{each['group']}" for each in of_machines)]):
        return
    for each in found:
        print_line(colorize(each["rollout"], "bold"))
        print_gates(each)
        if train := response_text.describe_train(each):
            print_line(sanitize(f"  {train}"))
    for gate in of_machines:
        reboots.print_gate(gate)
    if name is not None and group is None:
        _print_review(found[0], call.get(api_path("rollouts", found[0]["rollout"], "review")))


def review(call: Invocation) -> None:
    rollout: Rollout = call.get(api_path("rollouts", call.args.rollout))
    found: Review = call.get(api_path("rollouts", rollout["rollout"], "review"))
    if not call.print_data(found, [rollout["rollout"]]):
        _print_review(rollout, found)


def _print_review(rollout: Rollout, review: Review) -> None:
    """Print the change, the targets, the checks, what is not probed, the digest, then the plan."""
    gates = [gate for gate in rollout["gates"] if gate["state"] in ("waiting", "rejected")]
    digest = ReviewSection("DIGEST", "", [ReviewLine("", rollout["digest"])])
    for section in (
        *review_text.change_sections(review),
        *review_text.scope_sections(rollout, review, gates),
        digest,
        review_text.plan_section(review),
    ):
        print_line()
        print_line(f"{colorize(section.title, 'bold')} {sanitize(section.note)}".rstrip())
        for line in section.lines:
            print_line(sanitize(f"  {line.label}{line.text}"))
        if not section.lines and section.otherwise:
            print_line(f"  {sanitize(section.otherwise)}")
