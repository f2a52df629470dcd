"""Commands for what lies across all plans: slots, holds and freezes.

A hold takes a node's slot for somebody outside the plans; asking again for the
same one is granted again, so that scripts may repeat themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, add_node, add_reason, add_until, body_of
from rolloutd.cli.output import printable, put, put_json, put_table, say
from rolloutd.cli.reading import down_of
from rolloutd.control import sentences
from rolloutd.control.client import path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Freeze, Hold, Holder, Lock, Locks


AT_WORK = ("isolating", "maintaining", "verifying")
"""The phases in which a rollout has something to do on a node."""

MOST_UNSEEN = 8
"""Nodes named that nobody has looked at lately; of a large pool that may be hundreds, and none is wrong."""


def register(family: Family) -> None:
    """Add the commands of this family."""
    family.command("locks", show_locks, "show every pool's slots and who has them, the holds and the freezes")
    hold = family.command("hold", take, "take a node's slot, or be told why not")
    release = family.command("release", give_back, "give a node's slot back")
    for parser in (hold, release):
        add_node(parser)
        parser.add_argument("--as", dest="id", metavar="ID", help="the hold's name, to ask for it again")
    add_until(hold, "when it ends by itself")
    add_reason(hold)
    freeze = family.command("freeze", begin, "let nothing start")
    unfreeze = family.command("unfreeze", lift, "lift a freeze")
    for parser in (freeze, unfreeze):
        parser.add_argument(
            "--scope", metavar="SCOPE", help="all (the default), team/NAME, node/NAME, or a pool (rack/r12)"
        )
    add_until(freeze, "when it ends by itself")
    add_reason(freeze)
    add_reason(unfreeze, required=False)


def show_locks(call: Call) -> int:
    """Show pools with their holders, holds and freezes."""
    answer: Locks = call.get(path_of("locks"))
    if call.args.json:
        put_json(answer)
        return exits.DONE
    put_table(("POOL", "DOWN", "BUDGET", "MEMBERS", "HOLDERS"), [_lock_row(lock) for lock in answer["pools"]])
    for hold in answer["holds"]:
        put(printable(_hold_sentence(hold)))
    for freeze in answer["freezes"]:
        put(printable(_freeze_sentence(freeze)))
    return exits.DONE


def take(call: Call) -> int:
    """Take a slot: exit 0 when granted, 1 with the reason when not."""
    args = call.args
    body = body_of(node=args.node, id=args.id, until=args.until, reason=args.reason)
    # Asked before: a rollout that is about to let go of the node may have done so when we are answered.
    rollout = None if call.args.json else _at_work(call, args.node)
    granted: Hold = call.client.put(path_of("holds"), body)
    until = f" until {moments.local(granted['until'])}" if granted["until"] else ""
    later = f", once {rollout} lets go of it: it is at work there now" if rollout else ""
    return _report(call, granted, f"{args.node}: held as {granted['source']}/{granted['id']}{until}{later}")


def give_back(call: Call) -> int:
    """Give a slot back."""
    args = call.args
    answer = call.client.delete(path_of("holds"), body_of(node=args.node, id=args.id))
    return _report(call, answer, f"{args.node}: {'released' if answer['lifted'] else 'was not held'}")


def begin(call: Call) -> int:
    """Freeze."""
    args = call.args
    body = body_of(reason=args.reason, scope=args.scope, until=args.until)
    return _report(call, call.client.post(path_of("freezes"), body), f"frozen: {args.scope or 'all'}")


def lift(call: Call) -> int:
    """Unfreeze."""
    args = call.args
    answer = call.client.delete(path_of("freezes"), body_of(scope=args.scope, reason=args.reason))
    return _report(
        call, answer, f"{args.scope or 'all'}: {'freeze lifted' if answer['lifted'] else 'was not frozen'}"
    )


def _at_work(call: Call, node: str) -> str | None:
    """Return the rollout that is at work on the node this moment."""
    answer: Locks = call.get(path_of("locks"))
    holders = (holder for lock in answer["pools"] for holder in lock["holders"])
    rollout = next((holder["rollout"] for holder in holders if holder["node"] == node), None)
    if rollout is None:
        return None
    phase = call.get(path_of("rollouts", rollout, "nodes", node, "why"))["phase"]
    return rollout if phase in AT_WORK else None


def _report(call: Call, answer: Any, text: str) -> int:
    if call.args.json:
        put_json(answer)
    say(text)
    return exits.DONE


def _lock_row(lock: Lock) -> tuple[str, ...]:
    down = down_of(lock["down"], lock.get("unseen", 0))
    holders = ", ".join(_holders(lock["holders"]))
    return lock["pool"], down, str(lock["max_unavailable"]), str(lock["members"]), holders


def _holders(holders: Sequence[Holder]) -> Iterator[str]:
    """Yield who takes slots one by one, and those that nobody has looked at lately together."""
    unseen: dict[str, list[str]] = {}
    for holder in holders:
        if holder.get("unseen"):
            unseen.setdefault(sentences.last_look(_why(holder)), []).append(holder["node"])
        else:
            yield _holder(holder)
    for why, names in unseen.items():
        more = f" and {len(names) - MOST_UNSEEN} more" if len(names) > MOST_UNSEEN else ""
        yield f"{', '.join(names[:MOST_UNSEEN])}{more} (unseen: {why})"


def _why(holder: Holder) -> str:
    """Return why a node is down, without its name, which stands before it."""
    return holder["why"].removeprefix(holder["node"]).strip()


def _holder(holder: Holder) -> str:
    hold = f"{holder['source']}/{holder['id']}" if holder["id"] else None
    since = f", {moments.age(holder['since'])}" if holder["since"] else ""
    return f"{holder['node']} ({holder['rollout'] or hold or _why(holder)}{since})"


def _hold_sentence(hold: Hold) -> str:
    until = f" until {moments.local(hold['until'])}" if hold["until"] else ""
    return f"held: {hold['node']} as {hold['source']}/{hold['id']}{until} by {hold['by']}: {hold['reason']}"


def _freeze_sentence(freeze: Freeze) -> str:
    until = f" until {moments.local(freeze['until'])}" if freeze["until"] else ""
    return f"frozen: {freeze['scope']}{until} by {freeze['by']}: {freeze['reason']}"
