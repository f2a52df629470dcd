"""Deeds: what changes the world, as values: does it apply, is it ours, what is asked, what is sent.

Nothing here draws or sends anything; the texts are what a person reads before
they say yes, so they say what will happen and what it is bound to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rolloutd.control import sentences, wire
from rolloutd.control.client import path_of
from tui import rights, wording
from tui.glance import missing
from tui.model import Model
from tui.question import REASON, TYPED_OF_DIGEST, Answers, Deed, Field, Question, Request, Subject
from tui.rights import Verdict
from tui.values import BUSY

# -- a whole rollout ------------------------------------------------------------


def _rollout_path(subject: Subject, *more: str) -> str:
    assert subject.rollout is not None
    return path_of("rollouts", subject.rollout.id, *more)


def _about(subject: Subject) -> tuple[str, ...]:
    assert subject.rollout is not None
    status = subject.rollout.status
    return (f"{subject.rollout.id}  plan {status['plan']}, digest {wording.short(status['digest'])}",)


def _no_rollout(subject: Subject) -> str:
    if subject.rollout is None:
        return "no rollout is chosen"
    return f"{subject.rollout.id} is {subject.rollout.state}" if subject.rollout.is_closed else ""


def _resumable(subject: Subject) -> str:
    lacking = _no_rollout(subject)
    if lacking or subject.rollout is None:
        return lacking
    reason = subject.rollout.status["reason"]
    return "" if reason is not None and reason["code"] == "paused" else "nobody has paused it"


def _pausable(subject: Subject) -> str:
    lacking = _no_rollout(subject)
    return lacking or ("" if _resumable(subject) else "somebody has paused it already")


def _steer(
    verb: str, done: str, meaning: str, *, grave: bool = False, lacks: Callable[[Subject], str] = _no_rollout
) -> Deed:
    def question(subject: Subject) -> Question:
        assert subject.rollout is not None
        digest = subject.rollout.status["digest"][:TYPED_OF_DIGEST]
        proof = Field("proof", f"type {digest}, the beginning of the digest", must_be=digest)
        return Question(
            f"{verb.capitalize()} {subject.rollout.id}?",
            (*_about(subject), meaning),
            (REASON, proof) if grave else (REASON,),
            verb,
            grave,
        )

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.rollout is not None
        body = {"reason": answers["reason"]}
        return Request("POST", _rollout_path(subject, verb), body, f"{subject.rollout.id} {done}")

    return Deed(lacks, _may_steer, question, request)


def _may_steer(model: Model, subject: Subject) -> Verdict:
    assert subject.rollout is not None
    return rights.steering(model, subject.rollout)


def _node_lacks(*phases: str) -> Callable[[Subject], str]:
    def lacks(subject: Subject) -> str:
        if subject.rollout is None or subject.node is None:
            return "no node is chosen"
        if subject.node.phase not in phases:
            return f"{subject.node.node} is {subject.node.phase}: only {' and '.join(phases)} nodes can"
        return ""

    return lacks


def _on_node(verb: str, done: str, meaning: str, *phases: str, fields: tuple[Field, ...] = ()) -> Deed:
    def question(subject: Subject) -> Question:
        assert subject.node is not None
        failure = (f"it failed: {subject.node.failure}",) if subject.node.failure else ()
        extra = fields if subject.node.isolated else ()
        title = f"{verb.capitalize()} {subject.node.node}?"
        return Question(title, (*_about(subject), *failure, meaning), (*extra, REASON), verb)

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.node is not None
        body = {name: answer for name, answer in answers.items() if answer}
        path = _rollout_path(subject, "nodes", subject.node.node, verb)
        return Request("POST", path, body, f"{subject.node.node} {done}")

    return Deed(_node_lacks(*phases), _may_steer, question, request)


def _gate_lacks(subject: Subject) -> str:
    return "no gate waits here" if subject.gate is None else ""


def unread(subject: Subject) -> bool:
    """Say whether a yes here would cover failures that were not on the screen."""
    gate = subject.gate
    return (
        gate is not None
        and gate.gate["gate"] == "proceed"
        and subject.shown is None
        and gate.rollout.counts["failed"] > 0
    )


def _may_vote(model: Model, subject: Subject) -> Verdict:
    assert subject.gate is not None
    return rights.voting(model, subject.gate.rollout, subject.gate.gate)


def _vote(*, yes: bool) -> Deed:
    def question(subject: Subject) -> Question:
        assert subject.gate is not None
        status, gate = subject.gate.rollout.status, subject.gate.gate
        digest = status["digest"]
        cancels = not yes and gate["gate"] == "start"
        text = [
            f"{subject.gate.rollout.id}  plan {status['plan']}, digest {wording.short(digest)}",
            _meaning(gate, yes=yes),
        ]
        if yes and gate["gate"] == "proceed" and subject.shown is not None:
            text.append(
                f"it covers {wording.count(len(subject.shown), 'failure')}: {wording.some(subject.shown, 4)}"
            )
        if missing(subject.gate):
            text.append(f"missing: {missing(subject.gate)}")
        proof = Field(
            "proof",
            f"type {digest[:TYPED_OF_DIGEST]}, the beginning of the digest",
            must_be=digest[:TYPED_OF_DIGEST],
        )
        verb = "approve" if yes else "reject"
        title = f"{verb.capitalize()} {sentences.gate_name(gate)}?"
        return Question(title, tuple(text), (REASON, proof) if cancels else (REASON,), verb, not yes)

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.gate is not None
        gate, rollout = subject.gate.gate, subject.gate.rollout
        body: dict[str, Any] = {
            "gate": gate["gate"],
            "yes": yes,
            "reason": answers["reason"],
            "digest": rollout.status["digest"],
        }
        if gate["wave"]:
            body["wave"] = gate["wave"]
        if yes and gate["gate"] == "proceed" and subject.shown:
            body["shown"] = list(subject.shown)
        said = "yes" if yes else "no"
        return Request(
            "POST",
            path_of("rollouts", rollout.id, "votes"),
            body,
            f"you said {said} at {sentences.gate_name(gate)} of {rollout.id}",
        )

    return Deed(_gate_lacks, _may_vote, question, request)


def _meaning(gate: wire.Gate, *, yes: bool) -> str:
    match gate["gate"], yes:
        case "start", True:
            return "With all votes there its first wave begins."
        case "start", False:
            return "A no at start cancels the rollout; that cannot be taken back."
        case "continue", True:
            return "With all votes there the next wave begins."
        case "proceed", True:
            return "It goes on; failed nodes stay as they are until they are retried, skipped or rolled back."
        case _:
            return "It stops until the no is withdrawn."


def _withdrawable(subject: Subject) -> str:
    if subject.gate is None:
        return _gate_lacks(subject)
    votes = subject.gate.gate["votes"]
    return "" if any(vote["counts"] for vote in votes) else "nobody has voted there"


def _withdraw() -> Deed:
    def question(subject: Subject) -> Question:
        assert subject.gate is not None
        rollout = subject.gate.rollout
        about = f"{rollout.id}, digest {wording.short(rollout.status['digest'])}"
        return Question(
            f"Take your votes at {sentences.gate_name(subject.gate.gate)} back?",
            (about, "A yes can be taken back until the gate opens, a no at any time."),
            (REASON,),
            "withdraw",
        )

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.gate is not None
        gate, rollout = subject.gate.gate, subject.gate.rollout
        body = {
            "gate": gate["gate"],
            "reason": answers["reason"],
            **({"wave": gate["wave"]} if gate["wave"] else {}),
        }
        return Request(
            "POST", path_of("rollouts", rollout.id, "withdraw"), body, "your votes there are taken back"
        )

    return Deed(_withdrawable, _may_vote, question, request)


def _may_administer(model: Model, _subject: Subject) -> Verdict:
    return rights.administering(model)


def _hold() -> Deed:
    def question(subject: Subject) -> Question:
        return Question(
            f"Hold {subject.node_name}?",
            ("It takes a slot of each of its pools until you release it; refused while a pool is full.",),
            (REASON, Field("until", "until (RFC 3339 with zone, or empty: until released)", optional=True)),
            "hold",
        )

    def request(subject: Subject, answers: Answers) -> Request:
        body = {"node": subject.node_name, **{name: answer for name, answer in answers.items() if answer}}
        return Request("PUT", path_of("holds"), body, f"{subject.node_name} is held")

    return Deed(
        lambda subject: "" if subject.node_name else "no node is chosen", _may_administer, question, request
    )


def _release() -> Deed:
    def question(subject: Subject) -> Question:
        assert subject.hold is not None
        hold = subject.hold
        return Question(
            f"Release {hold['node']}?",
            (f"held by {hold['by']} as {hold['source']}/{hold['id']}: {hold['reason']}",),
            (),
            "release",
        )

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.hold is not None
        hold = subject.hold
        body = {"node": hold["node"], "source": hold["source"], "id": hold["id"]}
        return Request("DELETE", path_of("holds"), body, f"{hold['node']} is released")

    return Deed(
        lambda subject: "" if subject.hold else "no hold is chosen", _may_administer, question, request
    )


def _freeze() -> Deed:
    def question(subject: Subject) -> Question:
        return Question(
            "Freeze everything?",
            ("No node starts, in any rollout, until the freeze is lifted. Nodes in flight finish.",),
            (
                Field("reason", "reason (kept in the audit)", initial="frozen from the console"),
                Field("scope", "scope: all, team/NAME or a pool", initial="all"),
            ),
            "freeze",
        )

    def request(_subject: Subject, answers: Answers) -> Request:
        return Request(
            "POST", path_of("freezes"), dict(answers), f"{answers['scope']} is frozen: nothing starts there"
        )

    return Deed(lambda _: "", _may_administer, question, request)


def _unfreeze() -> Deed:
    def question(subject: Subject) -> Question:
        freeze = subject.freeze
        said = () if freeze is None else (f"{freeze['scope']} frozen by {freeze['by']}: {freeze['reason']}",)
        scope = Field("scope", "scope", initial="all" if freeze is None else freeze["scope"])
        return Question("Lift the freeze?", (*said, "Nodes may start again."), (scope, REASON), "unfreeze")

    def request(_subject: Subject, answers: Answers) -> Request:
        return Request(
            "DELETE", path_of("freezes"), dict(answers), f"the freeze of {answers['scope']} is lifted"
        )

    return Deed(
        lambda subject: "" if subject.freeze else "nothing is frozen", _may_administer, question, request
    )


def _return() -> Deed:
    def lacks(subject: Subject) -> str:
        if subject.node is None:
            return "no node is chosen"
        if not subject.node.isolated or subject.node.phase in BUSY or subject.node.phase == "pending":
            return f"{subject.node.node} is {subject.node.phase}" + (
                "" if subject.node.isolated else " and not isolated: there is nothing to return"
            )
        return ""

    def question(subject: Subject) -> Question:
        assert subject.node is not None
        text = "What isolated it is undone, and it is checked; then it is in service again."
        return Question(f"Return {subject.node.node} to service?", (text,), (REASON,), "return")

    def request(subject: Subject, answers: Answers) -> Request:
        assert subject.node is not None
        name = subject.node.node
        return Request("POST", path_of("nodes", name, "return"), dict(answers), f"{name} is being returned")

    return Deed(lacks, _may_steer, question, request)


_PUT_BACK = Field("put_back", "it is isolated", choices=("return", "leave"), initial="return")

APPROVE = _vote(yes=True)
REJECT = _vote(yes=False)
WITHDRAW = _withdraw()
PAUSE = _steer(
    "pause",
    "is paused",
    "No node of it starts until somebody resumes it. Nodes in flight finish.",
    lacks=_pausable,
)
RESUME = _steer("resume", "goes on", "It lifts a person's pause, and nothing else.", lacks=_resumable)
CANCEL = _steer(
    "cancel", "is cancelled", "Nothing of it ever starts again. Nodes in flight finish.", grave=True
)
RETRY = _on_node(
    "retry",
    "will be tried again",
    "It starts anew when its turn comes; it stays isolated until then.",
    "failed",
)
SKIP = _on_node(
    "skip", "is skipped", "It is left out of this rollout.", "failed", "pending", fields=(_PUT_BACK,)
)
ROLL_BACK = _on_node(
    "rollback",
    "will be rolled back",
    "The plan's rollback playbook runs on it, now: windows and freezes do not hold it.",
    "failed",
)
RETURN = _return()
HOLD = _hold()
RELEASE = _release()
FREEZE = _freeze()
UNFREEZE = _unfreeze()
