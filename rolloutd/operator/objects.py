"""MaintenanceRollout objects: what is read of one, and the status that is written to it.

A status is below 10 KiB, because each write sends the whole object to all who watch it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rolloutd.adapters.kubernetes.api_errors import malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, api_path
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.rollouts import wire
from rolloutd.errors import InvalidFile
from rolloutd.ports import JSON

GROUP_VERSION: Final = f"{DEFAULT_DOMAIN}/v1"
KIND: Final = "MaintenanceRollout"
APPLY_PATCH: Final = "application/apply-patch+yaml"
RESOURCE: Final = "maintenancerollouts"

MAX_ITEMS = 20
"""Gates, and nodes that need people, in one status."""

MAX_TEXT_CHARS = 250
"""Characters of one sentence."""

MAX_DIAGNOSTICS_CHARS = 8_000
"""Characters of a plan's mistakes; most plans have fewer than ten."""

MAX_TRANSITIONS = 5
"""Events of one status: with a status at most every five seconds, people can still read them."""

RUNNING_STATES = frozenset({"awaiting-approval", "running", "soaking"})


@dataclass(frozen=True, slots=True)
class RolloutObject:
    """The used fields of a MaintenanceRollout."""

    namespace: str
    name: str
    uid: str
    generation: int
    plan: str | None
    source: Mapping[str, str] | None
    supersede: bool
    status: Mapping[str, JSON]
    is_being_removed: bool

    @property
    def status_path(self) -> str:
        return api_path(
            RESOURCE, self.name, namespace=self.namespace, group=GROUP_VERSION, subresource="status"
        )


@malformed_answers()
def parse_object(obj: Mapping[str, JSON]) -> RolloutObject:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    source = spec.get("source")
    return RolloutObject(
        namespace=require_text(meta["namespace"]),
        name=require_text(meta["name"]),
        uid=require_text(meta["uid"]),
        generation=int(meta.get("generation") or 1),
        plan=None if spec.get("plan") is None else require_text(spec["plan"]),
        source=None if source is None else {key: require_text(source[key]) for key in ("git", "ref", "path")},
        supersede=bool(spec.get("supersede")),
        status=obj.get("status") or {},
        is_being_removed=bool(meta.get("deletionTimestamp")),
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object is no rollout; `rollout` is the one that it had, so that it is not submitted again."""

    reason: str
    message: str
    rollout: str = ""


def refusal_of(error: Exception) -> Refusal:
    """Return why a submit was refused."""
    if isinstance(error, InvalidFile):
        # A selector without a match and an unknown owner may become valid; the plan's text does not.
        return Refusal("InvalidPlan", _join_diagnostics([str(each) for each in error.diagnostics]))
    return Refusal("Refused", str(error)[:MAX_DIAGNOSTICS_CHARS])


def status_of(
    obj: RolloutObject,
    rollout: wire.Rollout | None,
    failures: Sequence[wire_nodes.Failure],
    refusal: Refusal | None,
    now: str,
) -> dict[str, Any]:
    """Return the status of an object: of its rollout, else why it has none."""
    status: dict[str, Any] = {"observedGeneration": obj.generation}
    if rollout is not None:
        status |= _rollout_fields(rollout, failures)
    elif refusal is not None and refusal.rollout:
        status["rollout"] = refusal.rollout
    conditions = _conditions(rollout, failures, refusal)
    status["conditions"] = [_with_transition(obj, each, now) for each in conditions]
    return status


@dataclass(frozen=True, slots=True)
class Transition:
    """What changed between two statuses, for an event."""

    reason: str
    message: str
    is_warning: bool = False


def transitions(before: Mapping[str, JSON], after: Mapping[str, JSON]) -> list[Transition]:
    """Return what changed from a status to the next one, at most MAX_TRANSITIONS."""
    previous = {kind: each.get("status") for kind, each in _conditions_by_type(before).items()}
    conditions = _conditions_by_type(after)
    if conditions["Accepted"]["status"] != "True":
        # The other conditions only repeat it.
        conditions = {"Accepted": conditions["Accepted"]}
    changes = [_transition_of(each, previous.get(kind)) for kind, each in conditions.items()]
    asked = {(gate.get("gate"), gate.get("wave")) for gate in _mappings(before.get("gates"))}
    for gate in after.get("gates", ()):
        if (gate["gate"], gate.get("wave")) not in asked:
            where = f"{gate['gate']} after wave {gate['wave']}" if gate.get("wave") else gate["gate"]
            changes.append(Transition("AwaitingApproval", f"gate {where}: {gate['missing']}"))
    shown = {each.get("node") for each in _mappings(before.get("attention"))}
    changes.extend(
        Transition("NodeFailed", f"{failed['node']}: {failed['reason']}", is_warning=True)
        for failed in after.get("attention", ())
        if failed["node"] not in shown
    )
    return [each for each in changes if each is not None][:MAX_TRANSITIONS]


def _transition_of(condition: Mapping[str, JSON], previous: JSON) -> Transition | None:
    """Return what a condition's change means to people, None if it is the same or says nothing."""
    if condition["status"] == previous:
        return None
    match condition["type"], condition["status"]:
        case "Accepted", "True":
            return Transition("Submitted", condition["message"])
        case "Ready", "True":
            return Transition("Done", condition["message"])
        case ("Accepted", "False") | ("Stalled", "True"):
            return Transition(condition["reason"], condition["message"], is_warning=True)
        case "Stalled", "False" if previous == "True":
            return Transition("Resumed", condition["message"])
        case _:
            return None


def _conditions_by_type(status: Mapping[str, JSON]) -> dict[str, Mapping[str, JSON]]:
    """Return the conditions of a status that a person may have edited."""
    return {each["type"]: each for each in _mappings(status.get("conditions")) if "type" in each}


def _mappings(found: JSON) -> list[Mapping[str, JSON]]:
    return [each for each in found or () if isinstance(each, Mapping)] if isinstance(found, list) else []


def _rollout_fields(rollout: wire.Rollout, failures: Sequence[wire_nodes.Failure]) -> dict[str, Any]:
    waiting = [gate for gate in rollout["gates"] if gate["state"] == "waiting"]
    is_open = rollout["state"] in RUNNING_STATES or rollout["state"] == "paused"
    reason = rollout["reason"]
    return {
        "rollout": rollout["rollout"],
        "digest": rollout["digest"],
        "state": rollout["state"],
        "percent": rollout["percent"],
        "progress": f"{rollout['done']}/{rollout['total']}",
        "nodes": rollout["total"],
        "done": rollout["done"],
        "inFlight": len(rollout["in_flight"]),
        "pending": rollout["pending"],
        "failed": rollout["failed"],
        "waitsFor": _cut(reason["text"]) if reason is not None and is_open else "",
        "gates": [
            {
                "gate": gate["gate"],
                **({} if gate["wave"] is None else {"wave": gate["wave"]}),
                "missing": _cut(gate["missing"] or ""),
            }
            for gate in waiting[:MAX_ITEMS]
            if is_open
        ],
        "attention": [
            {"node": each["node"], "code": each["code"], "reason": _cut(f"{each['step']}: {each['message']}")}
            for each in failures[:MAX_ITEMS]
        ],
    }


def _conditions(
    rollout: wire.Rollout | None, failures: Sequence[wire_nodes.Failure], refusal: Refusal | None
) -> list[dict[str, str]]:
    """Return the conditions: Accepted, and as Argo CD and Flux read health, Ready and Stalled."""
    if rollout is None:
        accepted, reason, message = "Unknown", "Pending", "the daemon has not read it yet"
        if refusal is not None:
            accepted, reason, message = "False", refusal.reason, refusal.message
        is_stalled = refusal is not None
        return [
            _condition("Accepted", accepted, reason, message),
            _condition("Ready", "False", reason, "there is no rollout"),
            _condition("Stalled", str(is_stalled), reason, "see Accepted"),
        ]
    state, waits = rollout["state"], rollout["reason"]
    text = f"{rollout['done']} of {rollout['total']} nodes are done"
    if waits is not None and state != "done":
        text += f"; {waits['text']}"
    word = "".join(part.capitalize() for part in state.split("-"))
    is_stalled = state in ("paused", "cancelled") or bool(failures)
    return [
        _condition("Accepted", "True", "Submitted", f"rollout {rollout['rollout']}"),
        _condition("Ready", str(state == "done"), word, _cut(text)),
        _condition("Stalled", str(is_stalled), word, _cut(text) if is_stalled else "it continues by itself"),
    ]


def _condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _with_transition(obj: RolloutObject, condition: dict[str, str], now: str) -> dict[str, Any]:
    """Keep the instant of a condition whose status is the same."""
    same = _conditions_by_type(obj.status).get(condition["type"], {})
    kept = same.get("lastTransitionTime") if same.get("status") == condition["status"] else None
    return {**condition, "observedGeneration": obj.generation, "lastTransitionTime": kept or now}


def _join_diagnostics(texts: Sequence[str]) -> str:
    text, shown = "", 0
    for each in texts:
        if len(text) + len(each) > MAX_DIAGNOSTICS_CHARS:
            break
        text, shown = f"{text}{each}\n", shown + 1
    rest = len(texts) - shown
    return text.rstrip("\n") + (f"\nand {rest} more" if rest else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
