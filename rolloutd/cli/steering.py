"""Commands that steer a rollout or one of its nodes; each wants a reason, which the audit keeps.

It knows which words to send; whether they are granted, the daemon decides.
"""

from __future__ import annotations

from typing import Any

from rolloutd.cli import exits
from rolloutd.cli.command import Call, Family, add_node, add_reason, add_rollout, body_of
from rolloutd.cli.output import put_json, say
from rolloutd.cli.reading import reason_sentence
from rolloutd.control.client import path_of

_ROLLOUT_VERBS = {
    "pause": ("start no node of this rollout until it is resumed", "paused; nodes in flight finish"),
    "resume": ("lift a person's pause", "resumed"),
    "cancel": ("end this rollout: nothing of it starts any more", "cancelled; nodes in flight finish"),
}
_STOPPING = frozenset({"pause", "cancel"})
_NODE_VERBS = {
    "retry": ("try a failed node again", "will be tried again"),
    "rollback": ("run the rollback playbook on a failed node", "will be rolled back"),
    "advance": ("let a waiting node go before the others of its wave", "goes next"),
}


def register(family: Family) -> None:
    """Add the commands of this family."""
    for verb, (summary, _) in _ROLLOUT_VERBS.items():
        parser = family.command(verb, steer_rollout, summary)
        add_rollout(parser)
        add_reason(parser)
        if verb in _STOPPING:
            parser.add_argument(
                "--now",
                action="store_true",
                help="end what runs too: its nodes are failed, for you to judge",
            )
    for verb, (summary, _) in _NODE_VERBS.items():
        parser = family.command(verb, steer_node, summary)
        add_rollout(parser)
        add_node(parser)
        add_reason(parser)
    _register_skip(family)
    parser = family.command("return", return_node, "put a node back in service, after its infra checks")
    add_node(parser)
    add_reason(parser, required=False)


def _register_skip(family: Family) -> None:
    parser = family.command("skip", skip, "leave a node out of this rollout")
    add_rollout(parser)
    add_node(parser)
    add_reason(parser)
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--return",
        dest="put_back",
        action="store_const",
        const="return",
        help="undo the isolation, after the infra checks",
    )
    way.add_argument(
        "--leave",
        dest="put_back",
        action="store_const",
        const="leave",
        help="leave it isolated; its slot stays taken",
    )


def steer_rollout(call: Call) -> int:
    """Pause, resume or cancel."""
    verb: str = call.args.command
    body: dict[str, Any] = {"reason": call.args.reason}
    said = _ROLLOUT_VERBS[verb][1]
    if verb in _STOPPING and call.args.now:
        body["now"] = True
        said = said.replace("nodes in flight finish", "what runs is being ended")
    answer = call.client.post(path_of("rollouts", call.args.rollout, verb), body)
    return _report(call, answer, f"{call.args.rollout}: {said}")


def steer_node(call: Call) -> int:
    """Retry or roll back."""
    verb: str = call.args.command
    path = path_of("rollouts", call.args.rollout, "nodes", call.args.node, verb)
    answer = call.client.post(path, {"reason": call.args.reason})
    reason = answer.get("reason")
    waits = f"; until then: {reason_sentence(reason)}" if reason and verb != "rollback" else ""
    return _report(call, answer, f"{call.args.node}: {_NODE_VERBS[verb][1]}{waits}")


def skip(call: Call) -> int:
    """Leave a node out; one that is isolated needs a word on what becomes of it."""
    path = path_of("rollouts", call.args.rollout, "nodes", call.args.node, "skip")
    answer = call.client.post(path, {"reason": call.args.reason, "put_back": call.args.put_back})
    done = answer["phase"] == "done"
    return _report(
        call, answer, f"{call.args.node}: {'skipped' if done else 'will be put back, and is skipped then'}"
    )


def return_node(call: Call) -> int:
    """Put a node back in service."""
    path = path_of("nodes", call.args.node, "return")
    answer = call.client.post(path, body_of(reason=call.args.reason))
    return _report(call, answer, f"{call.args.node}: will be put back once its checks pass")


def _report(call: Call, answer: Any, text: str) -> int:
    if call.args.json:
        put_json(answer)
    say(text)
    return exits.DONE
