"""The operations: when each applies, who may run it, what it asks, and what it sends.

Nothing here draws or sends.  A user reads the texts before the operation runs, so
they say what will happen and which digest it is bound to.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from rolloutd.control import response_text, user_time
from rolloutd.control.client import api_path
from rolloutd.control.rollouts import wire
from rolloutd.texts import event_text, formats
from tui.formatting import formatting
from tui.formatting.lines import sanitize
from tui.operations.confirm import (
    CONFIRM_DIGEST_LENGTH,
    REASON_FIELD,
    Confirmation,
    FieldValues,
    InputField,
    Operation,
    OperationRequest,
    Selection,
)
from tui.operations.dialog import DIGEST_FIELD_NAME
from tui.state import permissions
from tui.state.model import Model
from tui.state.permissions import Permission
from tui.state.values import BUSY_PHASES, NodeState, RolloutState, parse_timestamp
from tui.widgets.summaries import PendingGate, missing_votes

MAX_NAMED_FAILURES = 4


def _rollout(selection: Selection) -> RolloutState:
    assert selection.rollout is not None
    return selection.rollout


def _node(selection: Selection) -> NodeState:
    assert selection.node is not None
    return selection.node


def _gate(selection: Selection) -> PendingGate:
    assert selection.gate is not None
    return selection.gate


def _describe_rollout(rollout: RolloutState) -> str:
    status = rollout.status
    return f"{rollout.id}  plan {status['plan']}, digest {formats.short_hash(status['digest'])}"


def _digest_field(rollout: RolloutState) -> InputField:
    prefix = rollout.status["digest"][:CONFIRM_DIGEST_LENGTH]
    return InputField(
        DIGEST_FIELD_NAME, f"type {prefix}, the first characters of the digest", required_value=prefix
    )


def _reason_without(attribute: str, reason: str) -> Callable[[Selection], str]:
    """Return a rule that gives `reason` if the selection lacks the attribute."""
    return lambda selection: "" if getattr(selection, attribute) else reason


def _rollout_permission(model: Model, selection: Selection) -> Permission:
    """Return whether the user may pause, resume, cancel, retry, skip and roll back."""
    return permissions.team_permission(model, _rollout(selection).status["owner"])


def _hold_and_freeze_permission(model: Model, _: Selection) -> Permission:
    return permissions.hold_and_freeze_permission(model)


def _vote_permission(model: Model, selection: Selection) -> Permission:
    gate = _gate(selection)
    return permissions.vote_permission(model, gate.rollout, gate.gate)


# -- a rollout ------------------------------------------------------------------


def _rollout_unavailable_reason(selection: Selection) -> str:
    if selection.rollout is None:
        return "no rollout is selected"
    return f"{selection.rollout.id} is {selection.rollout.state}" if selection.rollout.is_closed else ""


def _is_paused(selection: Selection) -> bool:
    reason = _rollout(selection).status["reason"]
    return reason is not None and reason["code"] == "paused"


def _resume_unavailable_reason(selection: Selection) -> str:
    unavailable = _rollout_unavailable_reason(selection)
    return unavailable or ("" if _is_paused(selection) else "no user has paused the rollout")


def _pause_unavailable_reason(selection: Selection) -> str:
    unavailable = _rollout_unavailable_reason(selection)
    return unavailable or ("the rollout is already paused" if _is_paused(selection) else "")


def _rollout_operation(
    verb: str,
    outcome: str,
    effect: str,
    *,
    is_irreversible: bool = False,
    unavailable_reason: Callable[[Selection], str] = _rollout_unavailable_reason,
) -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        rollout = _rollout(selection)
        fields = (REASON_FIELD, _digest_field(rollout)) if is_irreversible else (REASON_FIELD,)
        title = f"{verb.capitalize()} {rollout.id}?"
        return Confirmation(title, (_describe_rollout(rollout), effect), fields, verb, is_irreversible)

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        rollout = _rollout(selection).id
        path = api_path("rollouts", rollout, verb)
        return OperationRequest("POST", path, dict(field_values), f"{rollout} {outcome}")

    return Operation(unavailable_reason, _rollout_permission, confirmation, request)


# -- a node ---------------------------------------------------------------------


def _node_operation(
    verb: str, outcome: str, effect: str, *phases: str, fields: tuple[InputField, ...] = ()
) -> Operation:
    def unavailable_reason(selection: Selection) -> str:
        node = selection.node
        if selection.rollout is None or node is None:
            return "no node is selected"
        allowed = " and ".join(phases)
        return "" if node.phase in phases else f"{node.node} is {node.phase}: works for {allowed} nodes only"

    def confirmation(selection: Selection) -> Confirmation:
        node = _node(selection)
        failure = (f"failure: {node.failure}",) if node.failure else ()
        text = (_describe_rollout(_rollout(selection)), *failure, effect)
        asked = (*(fields if node.isolated else ()), REASON_FIELD)
        return Confirmation(f"{verb.capitalize()} {node.node}?", text, asked, verb)

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        node = _node(selection).node
        path = api_path("rollouts", _rollout(selection).id, "nodes", node, verb)
        body = {name: value for name, value in field_values.items() if value}
        return OperationRequest("POST", path, body, f"{node} {outcome}")

    return Operation(unavailable_reason, _rollout_permission, confirmation, request)


def _return_operation() -> Operation:
    def unavailable_reason(selection: Selection) -> str:
        node = selection.node
        if node is None:
            return "no node is selected"
        if not node.isolated:
            return f"{node.node} is {node.phase} and in service: there is nothing to return"
        return f"{node.node} is {node.phase}" if node.phase in {*BUSY_PHASES, "pending"} else ""

    def confirmation(selection: Selection) -> Confirmation:
        node = _node(selection)
        text = "The daemon reverts its isolation, runs the checks, and returns the node to service."
        # Without the change: the rollout will be done with an exception.
        consequence = (
            ("It is then skipped: this rollout does not change it.",) if node.phase == "failed" else ()
        )
        return Confirmation(
            f"Return {node.node} to service?", (text, *consequence), (REASON_FIELD,), "return"
        )

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        node = _node(selection).node
        path = api_path("nodes", node, "return")
        return OperationRequest("POST", path, dict(field_values), f"{node} is returning to service")

    return Operation(unavailable_reason, _rollout_permission, confirmation, request)


def _shell_permission(model: Model, selection: Selection) -> Permission:
    # Outside a rollout the node's team is not known here; the daemon decides.
    if selection.node is None:
        return permissions.hold_and_freeze_permission(model)
    return permissions.team_permission(model, selection.node.team)


def _shell_operation() -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        shell = selection.shell
        command = (
            (f"It runs here, as you: {sanitize(shlex.join(shell['command']))}",) if shell is not None else ()
        )
        recorded = "The audit records the command and your reason, and nothing of what you do there."
        return Confirmation(
            f"Open a shell on {selection.node_name}?", (*command, recorded), (REASON_FIELD,), "shell"
        )

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        node, shell = selection.node_name, selection.shell
        command = () if shell is None else tuple(shell["command"])
        path = api_path("nodes", node, "shell")
        return OperationRequest("POST", path, dict(field_values), f"the shell on {node} has ended", command)

    unavailable_reason = _reason_without("node_name", "no node is selected")
    return Operation(unavailable_reason, _shell_permission, confirmation, request)


# -- a gate ---------------------------------------------------------------------


def has_unread_failures(selection: Selection) -> bool:
    """Return whether an approval would cover failures that were not on the screen."""
    gate = selection.gate
    return gate is not None and gate.gate["gate"] == "proceed" and selection.shown_failures is None


_gate_unavailable_reason = _reason_without("gate", "no gate waits here")


def _withdraw_unavailable_reason(selection: Selection) -> str:
    if selection.gate is None:
        return _gate_unavailable_reason(selection)
    return "" if any(vote["counts"] for vote in selection.gate.gate["votes"]) else "the gate has no vote"


def _gate_body(gate: wire.Gate, field_values: FieldValues) -> dict[str, Any]:
    body = {"gate": gate["gate"], "reason": field_values["reason"]}
    return {**body, "wave": gate["wave"]} if gate["wave"] else body


def _vote_effect(gate: wire.Gate, *, yes: bool) -> str:
    match gate["gate"], yes:
        case "pilot", True:
            return "When all votes are in, the pilot starts; the other nodes wait for its evidence."
        case "start", True:
            return "When all votes are in, the first wave starts."
        case "pilot" | "start", False:
            return f"A rejection at {gate['gate']} cancels the rollout; this cannot be undone."
        case "continue", True:
            return "When all votes are in, the next wave starts."
        case "proceed", True:
            return "The rollout continues; failed nodes stay failed until retried, skipped or rolled back."
        case _:
            return "The rollout stops until the rejection is withdrawn."


def _review_lines(selection: Selection) -> list[str]:
    """Return what an approval starts, and which missing votes it gives."""
    pending, review = _gate(selection), selection.review
    found = None if review is None else response_text.find_gate(review, pending.gate)
    if found is None:
        return []
    owner = pending.rollout.status["owner"]
    radius = response_text.describe_blast_radius(found["blast_radius"])
    approval = response_text.describe_approval(found["your_approval"], owner)
    unseen = [f"Not shown: {each}." for each in _unseen(selection)[:MAX_NAMED_FAILURES]]
    return [f"Starts: {radius}.", f"{approval[0].upper()}{approval[1:]}.", *unseen]


def _unseen(selection: Selection) -> list[str]:
    """Return what the approval would start without that a voter could read it."""
    is_asked = selection.review is not None and _gate(selection).gate["gate"] != "proceed"
    return selection.review["unseen"] if selection.review is not None and is_asked else []


def _vote_operation(*, yes: bool) -> Operation:
    verb = "approve" if yes else "reject"

    def confirmation(selection: Selection) -> Confirmation:
        pending, shown = _gate(selection), selection.shown_failures
        gate = pending.gate
        text = [_describe_rollout(pending.rollout), _vote_effect(gate, yes=yes)]
        if yes:
            text += _review_lines(selection)
        if yes and gate["gate"] == "proceed" and shown is not None:
            count = formats.pluralize(len(shown), "failure")
            text.append(f"It covers {count}: {formats.join_limited(shown, MAX_NAMED_FAILURES)}")
        if missing_votes(pending):
            text.append(f"Votes missing now: {missing_votes(pending)}.")
        cancels = not yes and gate["gate"] in ("pilot", "start")
        fields = (REASON_FIELD, _digest_field(pending.rollout)) if cancels else (REASON_FIELD,)
        if yes and _unseen(selection):
            fields = (*fields, _UNSEEN_FIELD)
        title = f"{verb.capitalize()} {event_text.gate_label(gate)}?"
        return Confirmation(title, tuple(text), fields, verb, not yes)

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        gate, rollout = _gate(selection).gate, _gate(selection).rollout
        body = {**_gate_body(gate, field_values), "yes": yes, "digest": gate["digest"]}
        if yes and gate["gate"] == "proceed":
            # An approval without a list opens the page with it, so a vote covers what was on the screen.
            body["shown"] = list(selection.shown_failures or ())
        if field_values.get(_UNSEEN_FIELD.name):
            body["unseen"] = True
        voted = "approved" if yes else "rejected"
        message = f"you {voted} {event_text.gate_label(gate)} of {rollout.id}"
        return OperationRequest("POST", api_path("rollouts", rollout.id, "votes"), body, message)

    return Operation(_gate_unavailable_reason, _vote_permission, confirmation, request)


_UNSEEN_FIELD = InputField(
    "unseen", "the review lacks the files above: type unseen to approve them", required_value="unseen"
)


def _withdraw_operation() -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        pending = _gate(selection)
        title = f"Withdraw your votes at {event_text.gate_label(pending.gate)}?"
        limits = "An approval can be withdrawn until the gate opens, a rejection at any time."
        return Confirmation(title, (_describe_rollout(pending.rollout), limits), (REASON_FIELD,), "withdraw")

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        gate, rollout = _gate(selection).gate, _gate(selection).rollout
        path, body = api_path("rollouts", rollout.id, "withdraw"), _gate_body(gate, field_values)
        return OperationRequest("POST", path, body, "your votes at this gate are withdrawn")

    return Operation(_withdraw_unavailable_reason, _vote_permission, confirmation, request)


# -- holds and freezes ----------------------------------------------------------


_UNTIL_FIELD = InputField(
    "until", "until: 2h, or RFC 3339 with zone (empty: no end)", is_optional=True, is_time=True
)


def _end(field_values: FieldValues) -> tuple[dict[str, str], str]:
    """Return the end as a part of the body and as text; a duration counts from when it is sent."""
    if not field_values["until"]:
        return {}, ""
    end = user_time.parse_future(field_values["until"])
    return {"until": end}, f" until {formatting.format_datetime(parse_timestamp(end) or 0.0)}"


def _hold_operation() -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        text = "The hold takes a slot of each pool of the node; the daemon refuses it while a pool is full."
        return Confirmation(f"Hold {selection.node_name}?", (text,), (REASON_FIELD, _UNTIL_FIELD), "hold")

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        end, until = _end(field_values)
        body = {"node": selection.node_name, "reason": field_values["reason"], **end}
        return OperationRequest("PUT", api_path("holds"), body, f"{selection.node_name} is held{until}")

    unavailable_reason = _reason_without("node_name", "no node is selected")
    return Operation(unavailable_reason, _hold_and_freeze_permission, confirmation, request)


def _release_operation() -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        hold = selection.hold
        assert hold is not None
        text = f"held by {hold['by']} as {hold['source']}/{hold['id']}: {hold['reason']}"
        return Confirmation(f"Release {hold['node']}?", (text,), (), "release")

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        hold = selection.hold
        assert hold is not None
        body = {"node": hold["node"], "source": hold["source"], "id": hold["id"]}
        return OperationRequest("DELETE", api_path("holds"), body, f"{hold['node']} is released")

    unavailable_reason = _reason_without("hold", "no hold is selected")
    return Operation(unavailable_reason, _hold_and_freeze_permission, confirmation, request)


def _freeze_operation() -> Operation:
    def confirmation(_: Selection) -> Confirmation:
        # With both fields filled in, Enter is enough: a freeze must be quick.
        reason = InputField("reason", REASON_FIELD.label, initial="frozen from the console")
        scope = InputField("scope", "scope: all, team/NAME, node/NAME or a pool", initial="all")
        text = "No node in the scope starts until the freeze is lifted. Nodes in flight finish."
        return Confirmation("Start a freeze?", (text,), (reason, scope, _UNTIL_FIELD), "freeze")

    def request(_: Selection, field_values: FieldValues) -> OperationRequest:
        end, until = _end(field_values)
        message = f"{field_values['scope']} is frozen{until}: no node starts there"
        body = {"reason": field_values["reason"], "scope": field_values["scope"], **end}
        return OperationRequest("POST", api_path("freezes"), body, message)

    return Operation(lambda _: "", _hold_and_freeze_permission, confirmation, request)


def _unfreeze_operation() -> Operation:
    def confirmation(selection: Selection) -> Confirmation:
        freeze = selection.freeze
        assert freeze is not None
        text = f"{freeze['scope']} is frozen by {freeze['by']}: {freeze['reason']}"
        effect = "Nodes may start again, unless another freeze covers them."
        return Confirmation("Lift the freeze?", (text, effect), (REASON_FIELD,), "unfreeze")

    def request(selection: Selection, field_values: FieldValues) -> OperationRequest:
        freeze = selection.freeze
        assert freeze is not None
        message = f"the freeze of {freeze['scope']} by {freeze['by']} is lifted"
        # By its id: other users may have frozen the same scope.
        body = {"scope": freeze["id"], "reason": field_values["reason"]}
        return OperationRequest("DELETE", api_path("freezes"), body, message)

    unavailable_reason = _reason_without("freeze", "no freeze is selected")
    return Operation(unavailable_reason, _hold_and_freeze_permission, confirmation, request)


_ISOLATION_FIELD = InputField(
    "put_back", "the node is isolated", choices=("return", "leave"), initial="return"
)

APPROVE = _vote_operation(yes=True)
REJECT = _vote_operation(yes=False)
WITHDRAW = _withdraw_operation()
PAUSE = _rollout_operation(
    "pause",
    "is paused",
    "No node of it starts until a user resumes it. Nodes in flight finish.",
    unavailable_reason=_pause_unavailable_reason,
)
RESUME = _rollout_operation(
    "resume",
    "is resumed",
    "It ends a user's pause; other reasons to wait remain.",
    unavailable_reason=_resume_unavailable_reason,
)
CANCEL = _rollout_operation(
    "cancel",
    "is cancelled",
    "No further node starts, and the rollout cannot be resumed. Nodes in flight finish.",
    is_irreversible=True,
)
RETRY = _node_operation(
    "retry",
    "is queued again",
    "It starts again when its turn comes, and stays isolated until then.",
    "failed",
)
SKIP = _node_operation(
    "skip",
    "is skipped",
    "The rollout leaves it out and ends as done with exceptions. After a failure, part of the change may be"
    " on the node.",
    "failed",
    "pending",
    fields=(_ISOLATION_FIELD,),
)
ROLL_BACK = _node_operation(
    "rollback",
    "is rolling back",
    "The plan's rollback playbook runs on it as soon as its pools have a slot, also outside windows.",
    "failed",
    "done",
)
RETURN = _return_operation()
SHELL = _shell_operation()
HOLD = _hold_operation()
RELEASE = _release_operation()
FREEZE = _freeze_operation()
UNFREEZE = _unfreeze_operation()
