"""Commands `changes`, `config`, `diff` and `drift`: what nodes have, and what a plan would change."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import (
    Columns,
    format_local,
    percent_of,
    print_in_blocks,
    print_line,
    print_list,
    print_message,
    print_table,
    sanitize,
    short_of,
)
from rolloutd.control.client import api_path
from rolloutd.control.fleet.version_table import NEXT_STEPS, Cell, VersionTable, version_table
from rolloutd.texts.formats import join_limited, pluralize, short_hash

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import Change, Changes, ChangeState
    from rolloutd.control.nodes.wire_nodes import Node
    from rolloutd.control.plans import wire_plans


RECORDS = ("current", "previous", "invalid")

MAX_NODES_NAMED = 5
"""Nodes of a group that are named; the others are counted."""

STATES: tuple[ChangeState, ...] = (
    *("done", "drifted", "in-flight", "pending", "held"),
    *("failed", "unknown", "skipped", "replaced", "never"),
)


def _count_nodes(state: ChangeState, change: Change) -> int | None:
    return change["counts"].get(state)


def _describe_counts(change: Change) -> str:
    """Return the nodes by state: `52 done, 2 failed`."""
    counts = change["counts"]
    return ", ".join(f"{counts[state]} {state}" for state in STATES if state in counts)


RECORD_COLUMNS: Columns = {
    "RECORD": "record",
    "CONTENT": short_of("content"),
    "CHANGE": short_of("change"),
    "ROLLOUT": "rollout",
    "AT": "at",
    "EVIDENCE": lambda each: each["evidence"] and "{step}: {text}".format_map(each["evidence"]),
}
CHANGE_COLUMNS: Columns = {
    "PLAN": "plan",
    "VERSION": "version",
    "PERCENT": percent_of("percent"),
    "NODES": _describe_counts,
}
CHANGE_WIDE: Columns = {
    "CHANGE": short_of("change"),
    "PIN": "pin",
    **{state.upper(): partial(_count_nodes, state) for state in STATES},
}
GROUP_COLUMNS: Columns = {
    "GROUP": "group",
    "DONE": lambda each: f"{each['done']}/{each['total']}",
    "PERCENT": percent_of("percent"),
}


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("config", config, "show what runs gave to a node, without secrets").node()
    record = "print the values of this record (all records, without values)"
    parser.add_argument("--record", choices=RECORDS, help=record)
    summary = "show the values that differ between two records of a node"
    parser = commands.add_command("diff", diff, summary).node()
    for name, metavar, default, text in (
        ("before", "A", "previous", "a record (previous)"),
        ("after", "B", "current", "another record (current)"),
    ):
        parser.argument(name, metavar=metavar, text=text, nargs="?", choices=RECORDS, default=default)
    summary = "show which node has which change, across rollouts"
    parser = commands.add_command("changes", changes, summary, is_list=True)
    parser.argument("plan", metavar="PLAN", text="only this plan, with its groups and nodes", nargs="?")
    text = "a line for each node, with the version of each plan that it has; wide names whole pins"
    parser.add_argument("--matrix", action="store_true", help=text)
    summary = "run a rollout's playbook on its done nodes in check mode now, to find drift"
    commands.add_command("drift", drift, summary).rollout()


def config(call: Invocation) -> int:
    args = call.args
    answer = call.get(api_path("nodes", args.node, "configuration"))
    if args.record is not None:
        return _print_record(call, args.record, answer[args.record])
    found = [{"record": name, **answer[name]} for name in RECORDS if answer[name] is not None]
    if call.print_data(answer, [each["record"] for each in found]):
        return exits.OK
    print_list(RECORD_COLUMNS, found) if found else print_message(f"{args.node}: no run has reached it")
    return exits.OK


def diff(call: Invocation) -> None:
    args = call.args
    path = api_path("nodes", args.node, "configuration", "diff")
    answer = call.get(path, before=args.before, after=args.after)
    if call.print_data(answer, [each["name"] for each in answer["differences"]]):
        return
    for each in answer["differences"]:
        print_line(_format_difference(each))
    if not answer["differences"]:
        print_message(f"{args.node}: {args.before} and {args.after} are equal")


def print_plan_differences(answer: wire_plans.PlanDifferences) -> None:
    """Print each group of nodes with what a plan would change for them."""
    for group in answer["groups"]:
        count = pluralize(len(group["nodes"]), "node")
        match group["state"]:
            case "changed":
                lines = [_format_difference(each) for each in group["differences"]]
                if group["not_shown"]:
                    lines.append(f"{pluralize(group['not_shown'], 'further difference')}, not shown")
            case "same":
                lines = ["no difference"]
            case _:
                lines = ["no record: no run has passed there"]
        prefix = f"{count}: "
        for number, line in enumerate(lines):
            print_line((prefix if number == 0 else " " * len(prefix)) + line)
        if group["state"] == "changed":
            print_line(" " * len(prefix) + f"({sanitize(join_limited(group['nodes'], MAX_NODES_NAMED))})")


def _print_record(call: Invocation, name: str, record: wire_plans.ConfigurationRecord | None) -> int:
    is_printed = call.print_data(record, [] if record is None else [name])
    if record is None:
        node = call.args.node
        print_message(f"{node}: no {name} configuration; list its records with rolloutctl config {node}")
    elif not is_printed:
        for line in json.dumps(record["values"], indent=2, ensure_ascii=False, sort_keys=True).splitlines():
            print_line(sanitize(line))
    return exits.OK


def _format_difference(difference: wire_plans.ValueDifference) -> str:
    before, after = _format_value(difference["before"]), _format_value(difference["after"])
    return f"{sanitize(difference['name'])} {before} \u2192 {after}"


def _format_value(value: Any) -> str:
    if value is None:
        return "(absent)"
    return sanitize(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def changes(call: Invocation) -> None:
    """Print the changes; those of one plan with their groups and nodes."""
    # A table of all changes shows no node.
    limit = 1 if call.args.plan is None and not call.args.matrix and call.args.json is False else None
    answer: Changes = call.get(api_path("changes"), plan=call.args.plan, limit=limit)
    if call.args.plan is not None and not answer["changes"]:
        problem = "no rollout of this plan; list the plans with rolloutctl changes"
        raise exits.Exit(exits.REFUSED, f"{call.args.plan}: {problem}")
    if call.print_data(answer, [each["plan"] for each in answer["changes"]]):
        return
    if call.args.matrix:
        _print_matrix(version_table(answer["changes"]), is_wide=call.args.wide)
        return
    call.print_items(CHANGE_COLUMNS, answer["changes"], CHANGE_WIDE)
    if call.args.plan is not None:
        for change in answer["changes"]:
            _print_change(change)


def _print_matrix(table: VersionTable, *, is_wide: bool) -> None:
    """Print for each node its version of each plan, and what to do about the states that occur."""
    columns: dict[str, str | Callable[[Any], Any]] = {"NODE": itemgetter(0)}
    for plan, latest in table.latest.items():
        heading = f"{plan.upper()} {latest['pin' if is_wide else 'version']}"
        columns[heading] = partial(_describe_cell, plan, latest)
    print_in_blocks(columns, list(table.rows.items()))
    for state, number in table.states().items():
        if state != "done":
            print_message(f"{number} {state}: {NEXT_STEPS[state]}")


def _describe_cell(plan: str, latest: Change, row: tuple[str, Mapping[str, Cell]]) -> str:
    cell = row[1].get(plan)
    return "-" if cell is None else cell.describe(latest)


def _print_change(change: Change) -> None:
    print_line()
    short, rollouts = short_hash(change["change"]), ", ".join(change["rollouts"])
    print_line(sanitize(f"{change['version']} (pin {change['pin']}), change {short}, rollouts {rollouts}"))
    print_list(GROUP_COLUMNS, change["groups"])
    print_line()
    print_list({"NODE": "node", "STATE": "state"}, change["nodes"])


def read_impact(
    call: Invocation, path: str, body: Mapping[str, Any], nodes: Sequence[str]
) -> wire_plans.Impact:
    """Return what check mode says of the nodes, in their order; progress goes to stderr."""
    reports: dict[str, Any] = {}
    with contextlib.closing(call.client.stream(path, method="POST", body=body)) as lines:
        for line in lines:
            reports[line["node"]] = line
            print_message(f"{len(reports)} checked: {line['node']} {line['compliance']}")
    in_order = [reports[node] for node in nodes if node in reports]
    return {
        "would_change": [
            {"node": each["node"], "changes": each["changes"], "problem": each["problem"]}
            for each in in_order
            if each["compliance"] == "would-change"
        ],
        "unknown": [
            {"node": each["node"], "problem": each["problem"]}
            for each in in_order
            if each["compliance"] == "unknown"
        ],
        "compliant": [each["node"] for each in in_order if each["compliance"] == "compliant"],
    }


def print_impact(impact: wire_plans.Impact, since: Mapping[str, str]) -> None:
    """Print each task that would change a node, and what is unknown; `since` is when a node drifted."""
    found = impact["would_change"]
    rows = [
        (node["node"], "would change", since.get(node["node"], ""), change["task"])
        for node in found
        for change in node["changes"]
    ]
    doubtful = [(node["node"], node["problem"]) for node in (*found, *impact["unknown"])]
    rows += [(node, "unknown", "", problem) for node, problem in doubtful if problem is not None]
    print_table(("NODE", "IMPACT", "SINCE", "TASK"), rows)
    print_line()
    print_line(
        f"{pluralize(len(found), 'node')} would change, {len(impact['unknown'])} unknown, "
        f"{len(impact['compliant'])} compliant"
    )


def drift(call: Invocation) -> int:
    """Check the done nodes of a rollout; exit 1 if one has drifted."""
    path = api_path("rollouts", call.args.rollout, "nodes")
    names = [node["node"] for node in call.get(path)["nodes"]]
    found = read_impact(call, api_path("rollouts", call.args.rollout, "drift"), {}, names)
    since = _drifted_since(call.get(path)["nodes"])
    drifted = [{**each, "since": since.get(each["node"])} for each in found["would_change"]]
    answer = {"drifted": drifted, "unknown": found["unknown"], "compliant": found["compliant"]}
    if not call.print_data(answer, [each["node"] for each in found["would_change"]]):
        print_impact(found, {node: format_local(at) for node, at in since.items()})
    return exits.REFUSED if found["would_change"] else exits.OK


def _drifted_since(nodes: Sequence[Node]) -> dict[str, str]:
    reasons = {node["node"]: node["reason"] for node in nodes}
    return {
        node: reason["since"]
        for node, reason in reasons.items()
        if reason is not None and reason["code"] == "drifted" and reason["since"] is not None
    }
