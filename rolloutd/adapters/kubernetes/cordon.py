"""Cordon and uncordon of a node by compare-and-set.

rolloutd cordons a node only if no other client holds it, and uncordons it only if the cordon is its own.
Each patch carries the version on which it was decided, so another client's write in between wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from rolloutd.adapters.kubernetes import nodes
from rolloutd.adapters.kubernetes.api_errors import ApiError, malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster, api_path
from rolloutd.ports import JSON, Busy, Ok

Patch = tuple[dict[str, JSON], str]
"""A patch, and the sentence that describes it once it is written."""

Decide = Callable[[Mapping[str, JSON], nodes.CordonState], "Patch | Ok | Busy"]

MAX_CONFLICT_RETRIES = 10
"""Reads of a node that other clients keep changing; kubelets write every few seconds."""


async def read_node(cluster: Cluster, name: str) -> Mapping[str, JSON]:
    node: Mapping[str, JSON] = await cluster.get(api_path("nodes", name))
    with malformed_answers():
        # Read whole before any decision, so that none fails on a missing field half-way.
        nodes.parse_node(node)
        require_text(node["metadata"]["resourceVersion"])
    return node


def read_cordon_state(cluster: Cluster, node: Mapping[str, JSON], rollout: str) -> nodes.CordonState:
    seen = cluster.uncordoned_by_others.get(node["metadata"]["name"])
    return nodes.parse_cordon_state(node, rollout, uncordoned_record=seen, domain=cluster.domain)


async def cordon_node(cluster: Cluster, name: str, *, rollout: str, attempt: int, at: float) -> Ok | Busy:
    """Cordon the node for the rollout; Busy if another client or rollout holds it."""

    def decide(node: Mapping[str, JSON], cordon: nodes.CordonState) -> Patch | Ok | Busy:
        if cordon.hold_reason is not None:
            return Busy(f"{name} is {cordon.hold_reason}")
        match cordon.cordon_owner:
            case nodes.CordonOwner.OTHER if not cordon.left_cordoned:
                return Busy(f"{name} is {cordon.text}")
            case nodes.CordonOwner.OURS:
                return Ok(f"{name} is cordoned")
            case nodes.CordonOwner.NONE | nodes.CordonOwner.UNCORDONED_BY_OTHER | nodes.CordonOwner.OTHER:
                since = datetime.fromtimestamp(at, UTC).isoformat()
                record = nodes.IsolationRecord(rollout, attempt, since).annotation_value
                return _build_patch(cluster, node, True, isolation=record), f"cordoned {name}"

    return await _compare_and_set(cluster, name, rollout, decide)


async def prefer_no_schedule(cluster: Cluster, name: str, *, rollout: str, at: float) -> float:
    """Taint a node in service, and return since when it has the taint (epoch seconds); 0 for any other."""
    since = 0.0

    def decide(node: Mapping[str, JSON], cordon: nodes.CordonState) -> Patch | Ok | Busy:
        nonlocal since
        if cordon.cordon_owner is not nodes.CordonOwner.NONE or cordon.hold_reason is not None:
            return Ok("")
        key, taints = f"{cluster.domain}/{nodes.SOFT_TAINT}", (node.get("spec") or {}).get("taints") or []
        values = (str(each.get("value", "")) for each in taints if each["key"] == key)
        found = next(values, None)
        # The taint has its own time, so that a restarted daemon does not wait again from the start.
        since = float(found) if found is not None and found.isdecimal() else at
        if found is not None:
            return Ok("")
        taint = {"key": key, "value": f"{at:.0f}", "effect": "PreferNoSchedule"}
        meta = {"resourceVersion": node["metadata"]["resourceVersion"]}
        return {"metadata": meta, "spec": {"taints": [*taints, taint]}}, ""

    await _compare_and_set(cluster, name, rollout, decide)
    return since


async def uncordon_node(
    cluster: Cluster, name: str, *, rollout: str, was_cordoned: bool, hold_reason: str = ""
) -> Ok | Busy:
    """Remove our annotation, and our cordon unless another client shares it.

    `hold_reason` keeps the node cordoned.  If only a hold does, an annotation stays on the node, by which
    release_node() recognises our cordon.
    """

    def decide(node: Mapping[str, JSON], cordon: nodes.CordonState) -> Patch | Ok | Busy:
        closed = cordon.cordon_owner in (nodes.CordonOwner.OURS, nodes.CordonOwner.OTHER)
        why = (
            hold_reason
            or cordon.hold_reason
            or (cordon.text if cordon.cordon_owner is nodes.CordonOwner.OTHER else "")
        )
        if was_cordoned and not why:
            why = "as it was before us"
        stays = closed and bool(why)
        done = f"{name} stays cordoned: {why}" if stays else f"{name} is in service as before"
        if cordon.record is None and (soft_taint := _without_soft_taint(cluster, node)):
            return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]}, **soft_taint}, done
        if cordon.record is None or cordon.record.rollout != rollout:
            return Ok(done)
        kept = why if stays and cordon.cordon_owner is nodes.CordonOwner.OURS and not was_cordoned else None
        return _build_patch(cluster, node, stays, left_for=kept), done

    return await _compare_and_set(cluster, name, rollout, decide)


async def release_node(cluster: Cluster, name: str) -> Ok | Busy:
    """Remove the cordon that we left for a hold; Busy while the node has a hold annotation."""

    def decide(node: Mapping[str, JSON], cordon: nodes.CordonState) -> Patch | Ok | Busy:
        if nodes.find_annotation(node, nodes.KEPT_FOR, cluster.domain) is None or cordon.record is not None:
            return Ok(f"{name} is not kept by us")
        closed = cordon.cordon_owner is not nodes.CordonOwner.NONE
        if cordon.left_cordoned and cordon.hold_reason is not None:
            return Busy(f"{name} is {cordon.hold_reason}")
        if closed and not cordon.left_cordoned:
            return _build_patch(cluster, node, True), f"{name} stays cordoned: {cordon.text}"
        return _build_patch(cluster, node, False), f"{name} is in service as before"

    return await _compare_and_set(cluster, name, "", decide)


def _build_patch(
    cluster: Cluster,
    node: Mapping[str, JSON],
    cordoned: bool,
    *,
    isolation: str | None = None,
    left_for: str | None = None,
) -> dict[str, JSON]:
    """Return the patch; null removes a field, so that an uncordoned node is exactly as it was."""
    meta = node["metadata"]
    present = meta.get("annotations") or {}
    kept_for = f"{cluster.domain}/{nodes.KEPT_FOR}"
    annotations: dict[str, JSON] = {
        f"{nodes.LEGACY_DOMAIN}/{name}": None
        for name in (nodes.ISOLATED_BY, nodes.KEPT_FOR)
        if f"{nodes.LEGACY_DOMAIN}/{name}" in present
    }
    annotations[f"{cluster.domain}/{nodes.ISOLATED_BY}"] = isolation
    if left_for is not None or kept_for in present:
        annotations[kept_for] = None if left_for is None else left_for[: nodes.MAX_REASON_LENGTH]
    patch: dict[str, JSON] = {
        "metadata": {"resourceVersion": meta["resourceVersion"], "annotations": annotations},
        **_without_soft_taint(cluster, node),
    }
    if bool((node.get("spec") or {}).get("unschedulable")) != cordoned:
        patch.setdefault("spec", {})["unschedulable"] = True if cordoned else None
    return patch


def _without_soft_taint(cluster: Cluster, node: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the part of a patch that removes our taint; empty if the node has none."""
    taints = (node.get("spec") or {}).get("taints") or []
    rest = [taint for taint in taints if taint["key"] != f"{cluster.domain}/{nodes.SOFT_TAINT}"]
    # The API server replaces the list as a whole.
    return {} if len(rest) == len(taints) else {"spec": {"taints": rest or None}}


async def _compare_and_set(cluster: Cluster, name: str, rollout: str, decide: Decide) -> Ok | Busy:
    return await patch_node(
        cluster, name, lambda node: decide(node, read_cordon_state(cluster, node, rollout))
    )


async def patch_node(
    cluster: Cluster,
    name: str,
    decide: Callable[[Mapping[str, JSON]], Patch | Ok | Busy],
    *,
    subresource: str = "",
) -> Ok | Busy:
    """Read, decide and write until no other client writes in between."""
    backoff = Backoff(0.05, 1.0)
    for _ in range(MAX_CONFLICT_RETRIES):
        decision = decide(await read_node(cluster, name))
        if isinstance(decision, Ok | Busy):
            return decision
        patch, done = decision
        try:
            await cluster.patch(api_path("nodes", name, subresource=subresource), patch)
        except ApiError as error:
            # 409: another client wrote first, so the decision is made again on its version.
            if error.status != 409:
                raise
        else:
            return Ok(done)
        await asyncio.sleep(backoff.next_s())
    return Busy(f"{name} changes faster than it can be written: {MAX_CONFLICT_RETRIES} conflicts in a row")
