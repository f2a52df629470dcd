"""`why`: why a rollout, a node or a machine that reboots itself waits, and what can change that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutd.cli import exits, reboots
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import format_age, print_line, sanitize
from rolloutd.control import response_text
from rolloutd.control.client import api_path
from rolloutd.texts.formats import join_limited, pluralize

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import RebootReason
    from rolloutd.control.nodes.wire_nodes import Node
    from rolloutd.control.rollouts import wire

MAX_NODES_NAMED = 5
"""Nodes that one line names; `nodes` lists all of them."""


def register(commands: CommandGroup) -> None:
    summary = "explain why a rollout or a node waits, and what can change that"
    commands.add_command("why", why, summary).rollout().node(optional=True).watch()


def why(call: Invocation) -> int:
    """Explain why a rollout or one of its nodes does not move."""
    if (group := reboots.group_of(call.args.rollout)) is not None:
        return _why_reboot(call, group)
    if call.args.node is None:
        return _why_rollout(call)
    answer = call.get(api_path("rollouts", call.args.rollout, "nodes", call.args.node, "why"))
    if call.print_data(answer, [answer["node"]]):
        return exits.OK
    # Of a node in flight the phase says it; an older daemon reports neither.
    is_isolated = answer.get("isolated") and answer["phase"] in ("pending", "failed", "done")
    outcome = f" ({answer['outcome']})" if answer.get("outcome") else ""
    state = f"{answer['node']} is {answer['phase']}{outcome}{' and isolated' if is_isolated else ''}"
    if answer["reason"] is None:
        is_moving = answer["phase"] != "done" and answer.get("trouble") is None
        print_line(f"{state}{'; nothing blocks it' if is_moving else ''}")
    else:
        print_line(f"{state}: {format_reason(answer['reason'])}")
    if answer["phase"] in ("pending", "failed") and not answer.get("is_selected", True):
        print_line(
            "its labels no longer match the plan's targets; it stays one, because it was approved by name;"
            f" to leave it out: rolloutctl skip {call.args.rollout} {answer['node']} --reason ..."
        )
    if (runner := answer.get("runner")) and runner["match"]:
        print_line(
            f"its playbooks run by runner {runner['name']}, for its labels: {sanitize(runner['match'])}"
        )
    if answer.get("trouble"):
        print_line(f"the daemon has trouble: {sanitize(answer['trouble'])}")
    return exits.OK


def _why_rollout(call: Invocation) -> int:
    """Explain why a rollout waits, and group its waiting nodes by reason."""
    rollout: wire.Rollout = call.get(api_path("rollouts", call.args.rollout))
    nodes: list[Node] = call.get(api_path("rollouts", rollout["rollout"], "nodes"))["nodes"]
    waiting: dict[str, list[str]] = {}
    for node in nodes:
        if node["phase"] in ("pending", "failed") and node["reason"] is not None:
            waiting.setdefault(format_reason(node["reason"]), []).append(node["node"])
    groups = [{"reason": text, "nodes": names} for text, names in waiting.items()]
    answer = {key: rollout[key] for key in ("rollout", "state", "reason", "train")}
    if call.print_data({**answer, "waiting": groups}, [rollout["rollout"]]):
        return exits.OK
    reason_text = "" if rollout["reason"] is None else f": {format_reason(rollout['reason'])}"
    print_line(f"{rollout['rollout']} is {rollout['state']}{reason_text}")
    if train := response_text.describe_train(rollout):
        print_line(sanitize(train))
    for text, names in waiting.items():
        shown = sanitize(join_limited(names, MAX_NODES_NAMED))
        print_line(f"  {pluralize(len(names), 'node')} ({shown}): {text}")
    return exits.OK


def _why_reboot(call: Invocation, group: str) -> int:
    """Explain why a machine of the group, or the whole group, may not reboot itself now."""
    if call.args.node is None:
        gate = reboots.read_gates(call, group)[0]
        if not call.print_data(gate, [call.args.rollout]):
            reboots.print_gate(gate)
        return exits.OK
    answer: RebootReason = call.get(api_path("fleetlock", group, "nodes", call.args.node, "why"))
    if not call.print_data(answer, [answer["node"]]):
        reason = answer["reason"]
        state = "may reboot itself" if reason is None else f"may not reboot itself: {format_reason(reason)}"
        print_line(f"{sanitize(answer['node'])} {state}")
    return exits.OK


def format_reason(reason: wire.Reason) -> str:
    """Return a reason in one line: what, since when, who or what can change it."""
    since = f", for {format_age(reason['since'])}" if reason["since"] else ""
    lifted = f"; lifted by {reason['lifted_by']}" if reason["lifted_by"] else ""
    return sanitize(f"{reason['text']} ({reason['code']}{since}{lifted})")
