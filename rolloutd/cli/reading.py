"""Commands that show where things stand: status, rollouts, nodes, why, inventory.

Start-up counts here: the standard library only.  What a state or a reason
means, the daemon says; nothing is computed here that it could contradict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, add_node, add_rollout
from rolloutd.cli.output import bar, coloured, percentage, printable, put, put_json, put_table, say
from rolloutd.cli.voting import gate_sentence
from rolloutd.control.client import path_of
from rolloutd.counting import count

if TYPE_CHECKING:
    from rolloutd.control.wire import Node, Reason, Rollout

SHORT_DIGEST = 12
"""Digits of a digest that a person compares by eye."""


def register(family: Family) -> None:
    """Add the commands of this family."""
    parser = family.command("status", status, "show where the rollouts stand, and why they do not move")
    add_rollout(parser, optional=True)
    parser.add_argument("--all", action="store_true", help="closed ones too")
    parser = family.command(
        "rollouts", rollouts, "list all rollouts, closed ones too; or delete a closed one"
    )
    parser.usage = "rolloutctl rollouts [--json]\n       rolloutctl rollouts delete ROLLOUT"
    parser.add_argument(
        "verb", metavar="delete", nargs="?", choices=("delete",), help="delete a closed rollout"
    )
    parser.add_argument(
        "rollout",
        metavar="ROLLOUT",
        nargs="?",
        help="the one to delete, with what its runs said; its audit stays",
    )
    parser = family.command("nodes", nodes, "list the nodes of a rollout")
    add_rollout(parser)
    parser = family.command("why", why, "say why a node does not move, and who or what can lift that")
    add_rollout(parser)
    add_node(parser)
    parser = family.command("inventory", inventory, "list the known nodes, and how they are seen")
    parser.add_argument("--refresh", action="store_true", help="read the sources anew first")


def status(call: Call) -> int:
    """Show one rollout, or all of them."""
    args = call.args
    if args.rollout is not None:
        found = call.get(path_of("rollouts", args.rollout))
        put_json(found) if args.json else put_rollout(found)
        return exits.DONE
    answer = call.get(path_of("status"), all=args.all or None)
    if args.json:
        put_json(answer)
        return exits.DONE
    if answer["trouble"]:
        put(coloured(f"trouble: {printable(answer['trouble'])}", "red"))
    found = answer["rollouts"]
    if not found:
        say("no rollout is live")
    elif len(found) == 1:
        put_rollout(found[0])
    else:
        put_table(
            ("ROLLOUT", "PLAN", "STATE", "WAVE", "DONE", "FAILED", "PROGRESS", "REASON"),
            map(_status_row, found),
        )
    return exits.DONE


def rollouts(call: Call) -> int:
    """List rollouts, or delete one."""
    args = call.args
    if args.verb == "delete":
        if args.rollout is None:
            raise exits.Stop(exits.USAGE, "rolloutctl rollouts delete: which ROLLOUT?")
        answer = call.client.delete(path_of("rollouts", args.rollout))
        if args.json:
            put_json(answer)
        say(f"{args.rollout}: deleted, with what its runs have said; its audit stays")
        return exits.DONE
    answer = call.get(path_of("rollouts"))
    if args.json:
        put_json(answer)
    elif not answer["rollouts"]:
        say("there are no rollouts")
    else:
        put_table(
            ("ROLLOUT", "PLAN", "STATE", "PROGRESS", "BY", "SUBMITTED", "ENDED"),
            map(_list_row, answer["rollouts"]),
        )
    return exits.DONE


def nodes(call: Call) -> int:
    """List a rollout's nodes."""
    found = call.get(path_of("rollouts", call.args.rollout, "nodes"))["nodes"]
    if call.args.json:
        put_json(found)
    else:
        put_table(
            ("NODE", "TEAM", "WAVE", "PHASE", "OUTCOME", "SINCE", "STEP", "REASON"), map(_node_row, found)
        )
    return exits.DONE


def why(call: Call) -> int:
    """Say why a node does not move."""
    answer = call.get(path_of("rollouts", call.args.rollout, "nodes", call.args.node, "why"))
    if call.args.json:
        put_json(answer)
    elif answer["reason"] is None:
        going = "" if answer["phase"] == "done" else ", and nothing is known to hold it up"
        put(f"{answer['node']} is {answer['phase']}{going}")
    else:
        put(f"{answer['node']} is {answer['phase']}: {reason_sentence(answer['reason'])}")
    return exits.DONE


def inventory(call: Call) -> int:
    """List the known nodes; sources that fail are told on stderr."""
    if call.args.refresh:
        call.client.post(path_of("inventory", "refresh"))
    answer = call.get(path_of("inventory"))
    if call.args.json:
        put_json(answer)
    else:
        put_table(
            ("NODE", "KIND", "TEAM", "POOLS", "SEEN", "AGE", "LABELS"), map(_inventory_row, answer["nodes"])
        )
    for source in answer["sources"]:
        if source["error"]:
            last = moments.age(source["refreshed_at"])
            say(f"{source['source']}: {source['error']} (last good {last} ago)")
    return exits.DONE


def reason_sentence(reason: Reason) -> str:
    """Return a reason as one line: what, since when, who or what can lift it."""
    since = f", for {moments.age(reason['since'])}" if reason["since"] else ""
    lifted = f"; lifted by {reason['lifted_by']}" if reason["lifted_by"] else ""
    return printable(f"{reason['text']} ({reason['code']}{since}{lifted})")


def put_rollout(rollout: Rollout) -> None:
    """Print all that a person at 3 a.m. wants to know of a rollout."""
    plan = coloured(printable(rollout["plan"]), "bold")
    put(f"{plan}   {rollout['rollout']}   digest {rollout['digest'][:SHORT_DIGEST]}")
    wave = f", wave {rollout['wave']}" if rollout["wave"] else ""
    eta = f", ends about {moments.ahead(rollout['eta'])}" if rollout["eta"] else ""
    put(f"{coloured(rollout['state'])}{wave}{eta}")
    put(f"{bar(rollout['percent'])} {percentage(rollout['percent'])}   {_counts(rollout)}")
    if rollout["reason"] is not None:
        put(coloured(reason_sentence(rollout["reason"]), "yellow"))
    for looked in rollout["looked_at"]:
        put(f"looked at: {printable(looked)}")
    if rollout["not_looked_at"]:
        put(f"not looked at: {printable(', '.join(rollout['not_looked_at']))}")
    _put_gates(rollout)
    _put_in_flight(rollout)
    put()
    put_table(
        ("POOL", "DONE", "FAILED", "IN FLIGHT", "DOWN", "BUDGET"),
        (
            (
                pool["pool"],
                f"{pool['done']}/{pool['total']}",
                str(pool["failed"]),
                str(pool["in_flight"]),
                down_of(pool["down"], pool.get("unseen", 0)),
                str(pool["max_unavailable"]),
            )
            for pool in rollout["pools"]
        ),
    )


def down_of(down: int, unseen: int) -> str:
    """Tell nodes that are down from those that merely nobody has looked at, because nobody had to."""
    return str(down) if not unseen else f"{down - unseen} + {unseen} unseen"


def _put_gates(rollout: Rollout) -> None:
    for gate in rollout["gates"]:
        put(f"  {printable(gate_sentence(gate))}")
        for vote in gate["votes"]:
            said = "withdrawn" if vote["withdrawn"] else "yes" if vote["yes"] else "no"
            spent = "" if vote["counts"] or vote["withdrawn"] else ", does not count"
            place = f"{vote['by']}{spent}, {moments.local(vote['at'])}"
            put(f"    {said} by {place}: {printable(vote['reason'])}")


def _put_in_flight(rollout: Rollout) -> None:
    if not rollout["in_flight"]:
        return
    put()
    put_table(
        ("IN FLIGHT", "PHASE", "STEP", "TASK", "PROGRESS", "FOR", "POOLS"),
        (
            (
                node["node"],
                node["phase"],
                node["step"] or "",
                node["task"] or "",
                percentage(node["percent"]),
                moments.age(node["since"]),
                ",".join(node["pools"]),
            )
            for node in rollout["in_flight"]
        ),
    )


def _counts(rollout: Rollout) -> str:
    parts = [f"{rollout['done']} of {count(rollout['total'], 'node')} done"]
    for name, number in (
        ("in flight", len(rollout["in_flight"])),
        ("pending", rollout["pending"]),
        ("failed", rollout["failed"]),
        ("skipped", rollout["skipped"]),
    ):
        if number:
            parts.append(f"{number} {name}")
    return ", ".join(parts)


def _status_row(rollout: Rollout) -> tuple[str, ...]:
    reason = rollout["reason"]
    return (
        rollout["rollout"],
        rollout["plan"],
        rollout["state"],
        rollout["wave"] or "",
        f"{rollout['done']}/{rollout['total']}",
        str(rollout["failed"]),
        percentage(rollout["percent"]),
        reason["text"] if reason else "",
    )


def _list_row(rollout: dict[str, Any]) -> tuple[str, ...]:
    return (
        rollout["rollout"],
        rollout["plan"],
        rollout["state"],
        percentage(rollout["percent"]),
        rollout["submitted_by"],
        moments.local(rollout["submitted_at"]),
        moments.local(rollout["ended_at"]) if rollout["ended_at"] else "",
    )


def _node_row(node: Node) -> tuple[str, ...]:
    reason = node["reason"]
    step = node["step"] or ""
    if step and node["percent"] is not None:
        step = f"{step} {percentage(node['percent'])}"
    return (
        node["node"],
        node["team"] or "",
        node["wave"],
        node["phase"],
        node["outcome"] or "",
        moments.age(node["since"]),
        step,
        reason["text"] if reason else "",
    )


def _inventory_row(node: dict[str, Any]) -> tuple[str, ...]:
    labels = ",".join(f"{key}={value}" for key, value in sorted(node["labels"].items()))
    return (
        node["node"],
        node["kind"],
        node["team"] or "",
        ",".join(node["pools"]),
        node["sight"],
        moments.age(node["seen_at"]),
        labels,
    )
