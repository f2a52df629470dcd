"""Reads node objects: is the node well, who cordoned it, what should be remembered of it.

Values in, values out.  Whose cordon it is, is read from the node alone, so it is
true after any restart: our annotation says what we did, and the server's own
record of field managers says whether the cordon that stands is still ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from machines.node import Observation, Sight
from rolloutd.adapters.kubernetes.cluster import MANAGER

JSON = Any

ISOLATED_BY = "rolloutd/isolated-by"
"""On a node that we cordoned: JSON of rollout, attempt, since (RFC 3339) and unschedulable (before)."""

HOLD = "rolloutd/hold"
"""Put on a node by a person: it is not to be touched, or not to be put back; its value says why."""

KEPT = "rolloutd/kept-for"
"""On a node that is still cordoned in our name because somebody held it when we were done; who, and why."""

KIND = "kubernetes"
"""What the isolator is called that keeps nodes so."""

LEAVING = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"})
"""Taints by which autoscalers announce that they are taking a node away."""

UNUSABLE = frozenset(
    {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"}
)
"""Taints of a node that cannot be used, whatever its conditions still say."""

SHOWN_LENGTH = 160
"""Kept of an annotation or a condition in a sentence."""


class Hand(StrEnum):
    """Whose doing it is that a node takes no new pods, or does."""

    NOBODY = "nobody"
    OURS = "ours"
    LOST = "lost"
    """We cordoned it, and somebody else uncordoned it."""
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Owner:
    """What the owner annotation says: who isolated the node for what, and what was there before."""

    rollout: str
    attempt: int
    since: str
    unschedulable: bool = False

    @property
    def text(self) -> str:
        """Return the annotation's value."""
        said = {
            "rollout": self.rollout,
            "attempt": self.attempt,
            "since": self.since,
            "unschedulable": self.unschedulable,
        }
        return json.dumps(said, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Cordon:
    """How a node stands: in whose hand it is, in a sentence, and perhaps a hold on it.

    `kept` says that the cordon is the one we placed, left for whoever held the node.
    """

    hand: Hand
    text: str = ""
    owner: Owner | None = None
    hold: str | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """What is kept of a node: a tenth of its object, which lists every image on it."""

    name: str
    uid: str
    ready: bool
    condition: str
    cordon: Cordon
    taints: tuple[str, ...] = ()
    leaving: bool = False
    kept: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    provider_id: str = ""
    boot_id: str = ""
    kubelet: str = ""

    def observation(self, node: str, at: float) -> Observation:
        """Return what the core is to know, under the name it knows the node by."""
        return replace(self._seen(node, at), kept=self.kept)

    def _seen(self, node: str, at: float) -> Observation:
        cordon = self.cordon
        if not self.ready:
            return Observation(node, Sight.DOWN, at, self.condition, foreign=cordon.hand is Hand.FOREIGN)
        if cordon.hold is not None:
            return Observation(node, Sight.UP, at, cordon.hold, foreign=True)
        match cordon.hand:
            case Hand.FOREIGN:
                return Observation(node, Sight.UP, at, cordon.text, foreign=True)
            case Hand.OURS:
                return Observation(node, Sight.DOWN, at, cordon.text)
            case Hand.NOBODY | Hand.LOST:
                return self._in_service(node, at)

    def _in_service(self, node: str, at: float) -> Observation:
        if self.leaving:
            return Observation(
                node, Sight.UP, at, f"it is being taken away: {', '.join(self.taints)}", foreign=True
            )
        taints = f"; taints {', '.join(self.taints)}" if self.taints else ""
        return Observation(
            node, Sight.UP, at, f"Ready; kubelet {self.kubelet}; boot {self.boot_id[:8]}{taints}"
        )


def view(node: Mapping[str, JSON], uncordoned: str | None = None) -> NodeView:
    """Return what is kept of a node object; `uncordoned` as for read_cordon."""
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    taints = tuple(sorted(str(taint["key"]) for taint in spec.get("taints") or ()))
    ready, condition = _readiness(node, taints)
    system = status.get("nodeInfo") or {}
    return NodeView(
        name=meta["name"],
        uid=meta["uid"],
        ready=ready,
        condition=condition,
        cordon=read_cordon(node, uncordoned=uncordoned),
        taints=taints,
        leaving=bool(LEAVING.intersection(taints)),
        kept=KIND if KEPT in (meta.get("annotations") or {}) and HOLD not in meta["annotations"] else "",
        labels=dict(meta.get("labels") or {}),
        addresses={a["type"]: a["address"] for a in reversed(status.get("addresses") or ())},
        provider_id=str(spec.get("providerID") or ""),
        boot_id=str(system.get("bootID") or ""),
        kubelet=str(system.get("kubeletVersion") or ""),
    )


def readiness(node: Mapping[str, JSON]) -> tuple[bool, str]:
    """Say whether a node object is Ready, and why not."""
    return _readiness(node, tuple(taint["key"] for taint in (node.get("spec") or {}).get("taints") or ()))


def read_cordon(
    node: Mapping[str, JSON], rollout: str | None = None, *, uncordoned: str | None = None
) -> Cordon:
    """Say in whose hand a node object is.

    With `rollout`, what another rollout isolated counts as foreign.
    `uncordoned` is the owner annotation that was seen on this node when
    somebody had uncordoned it: where the server keeps no field managers, a
    cordon under that same annotation cannot be ours any more.
    """
    notes = node["metadata"].get("annotations") or {}
    closed = bool((node.get("spec") or {}).get("unschedulable"))
    owner = read_owner(notes.get(ISOLATED_BY))
    hold = (
        None
        if HOLD not in notes
        else f"annotated {HOLD}: {str(notes[HOLD])[:SHOWN_LENGTH] or 'no reason given'}"
    )
    if not closed:
        lost = Cordon(Hand.LOST, "somebody uncordoned it after we cordoned it", owner, hold)
        return Cordon(Hand.NOBODY, hold=hold) if owner is None else lost
    managers = cordoned_by(node)
    if owner is None:
        who = f" by {', '.join(sorted(managers))}" if managers else ""
        if KEPT in notes and not managers - {MANAGER}:
            said = f"it stays cordoned after our attempt: {str(notes[KEPT])[:SHOWN_LENGTH]}"
            return Cordon(Hand.FOREIGN, said, hold=hold, kept=True)
        said = "our annotation was taken off" if managers == {MANAGER} else "not by us"
        return Cordon(Hand.FOREIGN, f"cordoned{who}, {said}", hold=hold)
    others = managers - {MANAGER}
    if others or (not managers and uncordoned == notes[ISOLATED_BY]):
        who = ", ".join(sorted(others)) or "somebody else"
        return Cordon(Hand.FOREIGN, f"cordoned by {who} since we cordoned it", owner, hold)
    text = f"isolated for {owner.rollout}, attempt {owner.attempt}, since {owner.since}"
    if rollout is not None and owner.rollout != rollout:
        return Cordon(Hand.FOREIGN, text, owner, hold)
    return Cordon(Hand.OURS, text, owner, hold)


def read_owner(text: JSON) -> Owner | None:
    """Read the owner annotation; one that is not ours to read is None."""
    try:
        said = json.loads(text)
        return Owner(
            str(said["rollout"]),
            int(said["attempt"]),
            str(said["since"]),
            bool(said.get("unschedulable", False)),
        )
    except (TypeError, ValueError, KeyError):
        return None


def cordoned_by(node: Mapping[str, JSON]) -> frozenset[str]:
    """Return the field managers that own `spec.unschedulable`; none where the server keeps no record."""
    return frozenset(
        str(entry.get("manager"))
        for entry in node["metadata"].get("managedFields") or ()
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        and entry.get("manager") != "ancient-changes"  # into which the server folds its oldest entries
    )


def _readiness(node: Mapping[str, JSON], taints: tuple[str, ...]) -> tuple[bool, str]:
    if node["metadata"].get("deletionTimestamp"):
        return False, "the node is being deleted"
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") != "Ready":
            continue
        since = condition.get("lastTransitionTime", "some time")
        why = str(condition.get("message") or condition.get("reason") or "no reason given")[:SHOWN_LENGTH]
        unusable = UNUSABLE.intersection(taints)
        if condition.get("status") == "True" and not unusable:
            return True, ""
        if condition.get("status") == "True":
            return False, f"tainted {', '.join(sorted(unusable))}"
        state = "NotReady" if condition.get("status") == "False" else "silent (Ready is unknown)"
        return False, f"{state} since {since}: {why}"
    return False, "its kubelet has never reported"
