"""Which artifacts stay on a node: those of its checkpoints, of the one before, and of other rollouts."""

from __future__ import annotations

from collections.abc import Iterable

from machines.model.node import Node
from machines.model.preparation import PrepareStage
from machines.model.rollout import Rollout
from machines.states import CARRIES_CHANGE
from rolloutd.engine.state import State
from rolloutd.ports import Checkpoint


def wanted_digests(rollouts: Iterable[Rollout]) -> set[str]:
    return {entry.sha256 for each in rollouts for stage in each.prepare_stages for entry in stage.manifest}


def remembered_digests(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """Return the digests that a node has, and those that it keeps for a rollback."""
    return {digest for each in checkpoints for digest in (*each.digests, *each.previous)}


async def previous_generation(
    state: State, node: Node, stage: PrepareStage, rollout: str, replaced: Checkpoint | None
) -> tuple[str, ...]:
    """Return the digests to keep for a rollback, once a rollout's stage replaces what a checkpoint names."""
    if replaced is None:
        return ()
    if not replaced.content:
        return replaced.previous
    if replaced.digests == {each.sha256 for each in stage.artifacts_for(node)}:
        # Staged again, because a file was damaged: what an earlier rollout brought stays without this one.
        own = () if replaced.rollout == rollout else replaced.digests
        return tuple(sorted({*own, *replaced.previous}))
    # What was only staged is no generation: what was before it stays too.
    if replaced.rollout in state.index.rollouts:
        on_node = (each for each in state.index.targets_on(node.name) if each.rollout == replaced.rollout)
        if all(target.outcome in CARRIES_CHANGE for target in on_node):
            return tuple(sorted(replaced.digests))
        # A node that waits may run what it has, such as one that was found current and has drifted since.
        # One that failed, left or was skipped may run what it had before.
        return tuple(sorted({*replaced.digests, *replaced.previous}))
    # After a restart a closed rollout is in the store only, which says whether the node has its change.
    in_effect = await state.store.find_changes_in_effect(node.name, [replaced.rollout])
    unused = () if in_effect.get(replaced.rollout, True) else replaced.previous
    return tuple(sorted({*replaced.digests, *unused}))
