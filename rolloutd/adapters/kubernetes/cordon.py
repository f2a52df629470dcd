"""Closes a node to new pods and opens it again, always by compare-and-set.

A node is closed only if nobody else has a hand on it, and opened only if the
cordon that stands is the one we placed; both are judged on the very version of
the node that is written, so whoever moves between our look and our write wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from rolloutd.adapters.kubernetes.answers import ApiError
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster, path_of
from rolloutd.adapters.kubernetes.nodes import (
    ISOLATED_BY,
    KEPT,
    SHOWN_LENGTH,
    Cordon,
    Hand,
    Owner,
    read_cordon,
)
from rolloutd.ports import Busy, Ok

JSON = Any
Write = tuple[dict[str, JSON], str]
"""A patch, and what will have been done when it is written."""

Decide = Callable[[Mapping[str, JSON], Cordon], "Write | Ok | Busy"]

CONFLICT_TRIES = 10
"""How often a node that changed under our hands is looked at again; kubelets write every few seconds."""


async def read_node(cluster: Cluster, name: str) -> Mapping[str, JSON]:
    """Return the node as it is now."""
    node: Mapping[str, JSON] = await cluster.get(path_of("nodes", name))
    return node


def cordon_of(cluster: Cluster, node: Mapping[str, JSON], rollout: str) -> Cordon:
    """Say how the node stands towards this rollout."""
    return read_cordon(node, rollout, uncordoned=cluster.uncordoned.get(node["metadata"]["name"]))


async def close(cluster: Cluster, name: str, *, rollout: str, attempt: int, at: float) -> Ok | Busy:
    """Cordon the node in our name; Busy when it is in somebody else's hand."""

    def decide(node: Mapping[str, JSON], cordon: Cordon) -> Write | Ok | Busy:
        if cordon.hold is not None:
            return Busy(f"{name} is {cordon.hold}")
        match cordon.hand:
            case Hand.FOREIGN if not cordon.kept:
                return Busy(f"{name} is {cordon.text}")
            case Hand.OURS:
                return Ok(f"{name} is cordoned")
            case Hand.NOBODY | Hand.LOST | Hand.FOREIGN:
                since = datetime.fromtimestamp(at, UTC).isoformat()
                return _write(node, True, owner=Owner(rollout, attempt, since).text), f"cordoned {name}"

    return await _compare_and_set(cluster, name, rollout, decide)


async def reopen(cluster: Cluster, name: str, *, rollout: str, was_closed: bool, held: str = "") -> Ok | Busy:
    """Take our cordon and our annotation off; leave a cordon that is not ours alone any more.

    `held` says why the node is to stay closed all the same.  Where a hold alone
    keeps it closed, a note stays on the node, by which let_go() knows our cordon.
    """

    def decide(node: Mapping[str, JSON], cordon: Cordon) -> Write | Ok | Busy:
        closed = cordon.hand in (Hand.OURS, Hand.FOREIGN)
        why = held or cordon.hold or (cordon.text if cordon.hand is Hand.FOREIGN else "")
        if was_closed and not why:
            why = "as it was before us"
        stays = closed and bool(why)
        done = f"{name} stays cordoned: {why}" if stays else f"{name} is in service as before"
        if cordon.owner is None or cordon.owner.rollout != rollout:
            return Ok(done)
        kept = why if stays and cordon.hand is Hand.OURS and not was_closed else None
        return _write(node, stays, kept=kept), done

    return await _compare_and_set(cluster, name, rollout, decide)


async def let_go(cluster: Cluster, name: str) -> Ok | Busy:
    """Take off the cordon that we left for a hold; Busy while an annotation on the node still asks for it."""

    def decide(node: Mapping[str, JSON], cordon: Cordon) -> Write | Ok | Busy:
        if KEPT not in (node["metadata"].get("annotations") or {}) or cordon.owner is not None:
            return Ok(f"{name} is not kept by us")
        closed = cordon.hand is not Hand.NOBODY
        if cordon.kept and cordon.hold is not None:
            return Busy(f"{name} is {cordon.hold}")
        if closed and not cordon.kept:
            return _write(node, True), f"{name} stays cordoned: {cordon.text}"
        return _write(node, False), f"{name} is in service as before"

    return await _compare_and_set(cluster, name, "", decide)


def _write(
    node: Mapping[str, JSON], closed: bool, *, owner: str | None = None, kept: str | None = None
) -> dict[str, JSON]:
    """Return the patch; null takes a field away, so that an open node is exactly as it was."""
    meta = node["metadata"]
    notes: dict[str, JSON] = {ISOLATED_BY: owner}
    if kept is not None or KEPT in (meta.get("annotations") or {}):
        notes[KEPT] = None if kept is None else kept[:SHOWN_LENGTH]
    patch: dict[str, JSON] = {"metadata": {"resourceVersion": meta["resourceVersion"], "annotations": notes}}
    if bool((node.get("spec") or {}).get("unschedulable")) != closed:
        patch["spec"] = {"unschedulable": True if closed else None}
    return patch


async def _compare_and_set(cluster: Cluster, name: str, rollout: str, decide: Decide) -> Ok | Busy:
    """Read, decide and write until the node that was decided on is the one that is written."""
    backoff = Backoff(0.05, 1.0)
    for _ in range(CONFLICT_TRIES):
        node = await read_node(cluster, name)
        decision = decide(node, cordon_of(cluster, node, rollout))
        if isinstance(decision, Ok | Busy):
            return decision
        patch, done = decision
        try:
            await cluster.patch(path_of("nodes", name), patch)
        except ApiError as error:
            if error.status != 409:
                raise
        else:
            return Ok(done)
        await asyncio.sleep(backoff.next_s())
    return Busy(f"{name} changes faster than it can be written: {CONFLICT_TRIES} conflicts in a row")
