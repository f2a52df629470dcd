"""Commands that control a rollout or one of its nodes; each has a reason, which the audit keeps.

The daemon decides whether it carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, confirm, without_none
from rolloutd.cli.output import print_message
from rolloutd.cli.why import format_reason
from rolloutd.control.client import ApiError, api_path
from rolloutd.texts.formats import join_limited, pluralize

if TYPE_CHECKING:
    from rolloutd.control.rollouts.wire import Rollout

MAX_NAMED_NODES = 5
"""Nodes that one line names."""

_ROLLOUT_ACTIONS = {
    "pause": ("start no more nodes of a rollout until it is resumed", "paused"),
    "resume": ("resume a rollout that a user paused", "resumed"),
    "cancel": ("end a rollout: no further node starts, and it cannot be resumed", "cancelled"),
}
_ACTIONS_WITH_NOW = frozenset({"pause", "cancel"})
_NODE_ACTIONS = {
    "retry": ("retry failed nodes or prepare stages; without NODE, the failed build", "will be retried"),
    "advance": ("move waiting nodes to the front of their wave", "goes next"),
}


def register(commands: CommandGroup) -> None:
    for action, (summary, _) in _ROLLOUT_ACTIONS.items():
        parser = commands.add_command(action, run_rollout_action, summary).rollout().reason()
        if action in _ACTIONS_WITH_NOW:
            parser.flag(
                "--now", text="also stop the runs in progress; their nodes fail and wait for a decision"
            )
        if action == "cancel":
            parser.yes()
    node_actions = {action: (run_node_action, summary) for action, (summary, _) in _NODE_ACTIONS.items()}
    for action, (handler, summary) in {
        **node_actions,
        "skip": (skip_node, "leave nodes out of a rollout"),
    }.items():
        parser = commands.add_command(action, handler, summary).rollout()
        parser.nodes(optional=action == "retry").reason()
        if action == "retry":
            parser.flag("--failed", text="all failed nodes, in place of NODE")
    choice = parser.add_mutually_exclusive_group()
    for option, text in (
        ("return", "return an isolated node to service, after the infra checks"),
        ("leave", "keep an isolated node isolated; it keeps its slots"),
    ):
        choice.add_argument(f"--{option}", dest="put_back", action="store_const", const=option, help=text)
    _register_rollback(commands)
    summary = "return an isolated node to service, after its infra checks"
    commands.add_command("return", return_node, summary).node().reason(required=False)


def _register_rollback(commands: CommandGroup) -> None:
    summary = "run the rollback playbook on failed or changed nodes"
    parser = commands.add_command("rollback", roll_back, summary).rollout()
    parser.nodes(optional=True)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--wave", metavar="WAVE", help="all changed and failed nodes of a wave")
    choice.add_argument("--all", action="store_true", help="all changed and failed nodes")
    parser.flag("--withdraw", text="take back the orders that have not begun").reason().yes()


def run_rollout_action(call: Invocation) -> int:
    action: str = call.args.command
    body: dict[str, Any] = {"reason": call.args.reason}
    if action == "cancel":
        confirm(call, lambda: _describe_cancel(call), "cancel it?", must_ask=True)
    result_text = _ROLLOUT_ACTIONS[action][1]
    if action in _ACTIONS_WITH_NOW:
        result_text += "; running work is being stopped" if call.args.now else "; nodes in flight finish"
        body |= {"now": True} if call.args.now else {}
    answer = call.client.post(api_path("rollouts", call.args.rollout, action), body)
    if action == "cancel" and answer["failed"]:
        failed = pluralize(answer["failed"], "failed node")
        result_text += f"; still held: the slots of {failed}; see rolloutctl why {answer['rollout']}"
    if action == "resume" and answer["state"] == "paused" and answer["reason"]:
        # Only the person's pause is lifted: a failure or a no pauses it too.
        result_text += f", but still paused: {format_reason(answer['reason'])}"
    return call.report(answer, f"{call.args.rollout}: {result_text}", call.args.rollout)


def _describe_cancel(call: Invocation) -> str:
    """Return the consequence: a cancelled rollout cannot be resumed."""
    rollout: Rollout = call.get(api_path("rollouts", call.args.rollout))
    in_flight = pluralize(len(rollout["in_flight"]), "node")
    at_work = f"{'stop' if call.args.now else 'finish'} {in_flight} in flight"
    never = f"never start {pluralize(rollout['pending'], 'pending node')}"
    return f"{rollout['rollout']}: {at_work}, {never}; this cannot be undone"


def run_node_action(call: Invocation) -> int:
    args, action = call.args, call.args.command
    nodes: list[str] = args.nodes
    if action == "retry" and args.failed:
        if nodes:
            raise exits.Exit(exits.USAGE, "rolloutctl retry: --failed names the nodes; leave out NODE")
        failed = call.get(api_path("rollouts", args.rollout, "nodes"), phase="failed")["nodes"]
        nodes = [each["node"] for each in failed]
        if not nodes:
            return call.report_no_change([], f"{args.rollout}: no node has failed")
    if not nodes:
        answer = call.client.post(api_path("rollouts", args.rollout, action), {"reason": args.reason})
        return call.report(answer, f"{args.rollout}: its build will be retried", args.rollout)

    def describe(answer: Any) -> str:
        reason = answer.get("reason")
        return f"{_NODE_ACTIONS[action][1]}{f'; until then: {format_reason(reason)}' if reason else ''}"

    if action == "advance":
        nodes = nodes[::-1]  # each one goes before those that were moved earlier
    return _act_on_nodes(call, nodes, {"reason": args.reason}, describe)


def _act_on_nodes(
    call: Invocation, nodes: Sequence[str], body: Mapping[str, Any], describe: Callable[[Any], str]
) -> int:
    """Ask for the action on each node; one that is refused keeps none of the others from it."""
    codes = set()
    for node in dict.fromkeys(nodes):
        try:
            path = api_path("rollouts", call.args.rollout, "nodes", node, call.args.command)
            answer = call.client.post(path, body)
        except ApiError as error:
            print_message(str(error))
            codes.add(exits.from_status(error.status))
            continue
        call.print_data(answer, (node,), is_streamed=len(nodes) > 1)
        print_message(f"{node}: {describe(answer)}")
    return max(codes, default=exits.OK)


def roll_back(call: Invocation) -> int:
    """Order rollbacks, or withdraw those that have not begun."""
    args = call.args
    if not args.withdraw and not (args.nodes or args.wave or args.all):
        raise exits.Exit(exits.USAGE, "rolloutctl rollback: nothing chosen; name nodes, --wave or --all")
    if (args.wave or args.all) and not args.withdraw:
        where = f"wave {args.wave} of {args.rollout}" if args.wave else args.rollout
        confirm(call, lambda: f"{where}: all changed and failed nodes", "roll them back?", must_ask=True)
    body = {"reason": args.reason, "nodes": args.nodes, "wave": args.wave, "all": args.all}
    answer = call.client.post(
        api_path("rollouts", args.rollout, "rollback"), body | {"withdraw": args.withdraw}
    )
    if not answer["nodes"] and not args.withdraw:
        nodes = join_limited(args.nodes, MAX_NAMED_NODES)
        text = f"{args.rollout}: the rollback of {nodes} is ordered already; --withdraw ends one that waits"
        return call.report(answer, text, *args.nodes)
    if not answer["nodes"]:
        problem = f"no rollback waits here; list the nodes with rolloutctl nodes {args.rollout}"
        return call.report_no_change(answer, f"{args.rollout}: {problem}")
    count = pluralize(len(answer["nodes"]), "node")
    result_text = "no longer rolled back" if args.withdraw else "to be rolled back, newest first"
    return call.report(answer, f"{args.rollout}: {count} {result_text}", *answer["nodes"])


def skip_node(call: Invocation) -> int:
    """Leave nodes out; an isolated one needs --return or --leave."""

    def describe(answer: Any) -> str:
        return "skipped" if answer["phase"] == "done" else "will be returned to service, then skipped"

    body = {"reason": call.args.reason, "put_back": call.args.put_back}
    return _act_on_nodes(call, call.args.nodes, body, describe)


def return_node(call: Invocation) -> int:
    path = api_path("nodes", call.args.node, "return")
    answer = call.client.post(path, without_none(reason=call.args.reason))
    # Without the change: the rollout will be done with an exception.
    then = "; then it is skipped, without the change" if answer["phase"] == "failed" else ""
    result_text = f"will be returned to service once its checks pass{then}"
    return call.report(answer, f"{call.args.node}: {result_text}", call.args.node)
