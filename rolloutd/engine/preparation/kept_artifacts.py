"""Which artifacts stay on a node: those of its checkpoints, of the one before, and of other rollouts."""

from __future__ import annotations

from collections.abc import Iterable

from machines.facts.index import Index
from machines.model.node import Node
from machines.model.preparation import PrepareStage
from machines.model.rollout import Rollout
from machines.states import Phase
from rolloutd.ports import Checkpoint


def wanted_digests(rollouts: Iterable[Rollout]) -> set[str]:
    """Return the digests of all artifacts of rollouts."""
    return {entry.sha256 for each in rollouts for stage in each.prepare_stages for entry in stage.manifest}


def remembered_digests(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """Return the digests that a node has, and those that it keeps for a rollback."""
    return {digest for each in checkpoints for digest in (*each.digests, *each.previous)}


def previous_generation(
    index: Index, node: Node, stage: PrepareStage, replaced: Checkpoint | None
) -> tuple[str, ...]:
    """Return the digests to keep for a rollback, once a stage replaces what a checkpoint names."""
    if replaced is None:
        return ()
    # What was only staged is no generation: the node has what was before it.
    on_node = (target for target in index.targets_on(node.name) if target.rollout == replaced.rollout)
    was_used = all(target.phase is not Phase.PENDING for target in on_node)
    is_same = replaced.digests == {each.sha256 for each in stage.artifacts_for(node)}
    if is_same or not was_used or not replaced.content:
        return replaced.previous
    return tuple(sorted(replaced.digests))
