"""What check mode reports: the impact of a plan, and the command `drift` for the nodes of a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits, timestamps
from rolloutd.cli.command_group import CommandGroup, Invocation, add_rollout_argument
from rolloutd.cli.output import print_line, print_message, print_table
from rolloutd.control.client import api_path
from rolloutd.text import pluralize

if TYPE_CHECKING:
    from rolloutd.control.wire import Node
    from rolloutd.control.wire_plans import Impact


def register(commands: CommandGroup) -> None:
    parser = commands.add_command(
        "drift", drift, "run a rollout's playbook on its done nodes in check mode now, to find drift"
    )
    add_rollout_argument(parser)


def read_impact(call: Invocation, path: str, body: Mapping[str, Any], nodes: Sequence[str]) -> Impact:
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


def print_impact(impact: Impact, since: Mapping[str, str]) -> None:
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
    if call.args.json:
        drifted = [{**each, "since": since.get(each["node"])} for each in found["would_change"]]
        rest = {"unknown": found["unknown"], "compliant": found["compliant"]}
        call.print_data({"drifted": drifted, **rest})
    else:
        print_impact(found, {node: timestamps.format_local(at) for node, at in since.items()})
    return exits.REFUSED if found["would_change"] else exits.OK


def _drifted_since(nodes: Sequence[Node]) -> dict[str, str]:
    reasons = {node["node"]: node["reason"] for node in nodes}
    return {
        node: reason["since"]
        for node, reason in reasons.items()
        if reason is not None and reason["code"] == "drifted" and reason["since"] is not None
    }
