"""Membership: what a changed inventory, or a superseded rollout, does to the targets of live rollouts.

After every refresh of the inventory new nodes that match join (last, within bounds), removed nodes leave and
rejoin when they are back, and targets follow their node's team and pools.  None of this alters a digest or
voids a vote.

A node that was in flight when its rollout was superseded finishes under the old digest.  The new rollout
records it as done in the same commit, so no crash lies between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from machines.facts.index import Index
from machines.facts.votes import gate_without_vote
from machines.model.causes import Cause, CauseCode, Describe
from machines.model.events import Event, PhaseMoved, TargetChanged, TargetsJoined
from machines.model.node import Node, natural_sort_key
from machines.model.plan import PILOT_WAVE, EnrolPolicy
from machines.model.rollout import Rollout, Target
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition


def membership_events(
    index: Index, now: float, describe: Describe, names: Collection[str] | None = None
) -> tuple[Event, ...]:
    """Return the events that adapt every rollout to the inventory, in order; `names`: only to these nodes."""
    events: list[Event] = []
    for rollout in index.rollouts.values():
        targets = _targets(index, rollout, names)
        events += _removed_targets(index, rollout, targets, now, describe)
        if not rollout.closed:
            events += _returned_targets(index, targets, now, describe)
            events += _changed_targets(index, targets, now)
            events += _joined_targets(index, rollout, names, now)
    return tuple(events)


def _targets(index: Index, rollout: Rollout, names: Collection[str] | None) -> Collection[Target]:
    if names is None:
        return tuple(index.targets(rollout.id))
    found = (index.get(Target, rollout.id, name) for name in names)
    return sorted((each for each in found if each is not None), key=lambda each: each.position)


def _removed_targets(
    index: Index, rollout: Rollout, targets: Iterable[Target], now: float, describe: Describe
) -> Iterator[Event]:
    """Yield the end of every target that the inventory no longer has; its slot is freed.

    Its isolation stays recorded: a node that left by mistake comes back as it was.
    """
    # A cancelled rollout still has nodes in flight; one that has ended has none.
    if rollout.ended_at is not None:
        return
    for target in targets:
        if target.node in index.nodes or target.phase is Phase.DONE:
            continue
        text = describe((Cause(CauseCode.NODE_GONE),))
        yield transition(target, Trigger.LEFT, now, outcome=Outcome.LEFT, text=text)


def _returned_targets(
    index: Index, targets: Iterable[Target], now: float, describe: Describe
) -> Iterator[Event]:
    """Yield the requeue of every target that left and is back, in its wave and with the votes that it had."""
    for target in targets:
        if target.outcome is Outcome.LEFT and target.node in index.nodes:
            text = describe((Cause(CauseCode.NODE_BACK),))
            yield transition(target, Trigger.REJOINED, now, text=text)
            yield from target_changes(index, target, now)


def _changed_targets(index: Index, targets: Iterable[Target], now: float) -> Iterator[Event]:
    """Yield a change for each target whose node has other pools or another team now."""
    for target in targets:
        # In flight too, because progress is counted by pool: the node counts where it is now.
        if target.phase is not Phase.DONE:
            yield from target_changes(index, target, now)


def target_changes(index: Index, target: Target, now: float) -> Iterator[Event]:
    """Yield the change of a target whose node has other pools or another team now.

    A done target follows its node only when its rollout works on it again.
    """
    node = index.nodes.get(target.node)
    if node is None:
        return
    pools = tuple(pool.id for pool in index.pools_for(target.rollout, node.name))
    if (node.team, pools) == (target.team, target.pools):
        return
    needs_vote_of = target.needs_vote_of
    if node.team != target.team:
        # A joiner that was not admitted yet still waits for its own team, whichever that is now.
        is_waiting = needs_vote_of is not None and not target.attempt
        needs_vote_of = _awaited_team(index.rollout(target.rollout), node.team, is_waiting)
    yield TargetChanged(target.rollout, target.node, node.team, pools, needs_vote_of, now)


def _joined_targets(
    index: Index, rollout: Rollout, names: Collection[str] | None, now: float
) -> Iterator[Event]:
    if rollout.plan.enrol is EnrolPolicy.NEVER:
        return
    known, targets = index.nodes, index.targets_by_node(rollout.id)
    names = known if names is None else [name for name in names if name in known]
    # By name first: usually most of the fleet are targets.
    others = [known[name] for name in names if name not in targets]
    new = [node for node in others if rollout.plan.selector.matches(node.labels)]
    if not new:
        return
    present = tuple(index.targets(rollout.id))
    allowance = rollout.free_joiners - sum(t.joined for t in present)
    position = max((target.position for target in present), default=-1) + 1
    joined = []
    for number, node in enumerate(sorted(new, key=lambda each: natural_sort_key(each.name))):
        joined.append(_new_target(index, rollout, node, position + number, now, number >= allowance))
    yield TargetsJoined(rollout.id, tuple(joined), now)


def renamed_targets(
    index: Index, old_names: Mapping[str, str], now: float, describe: Describe
) -> Iterator[Event]:
    """Yield the targets of nodes with a new name: each in the place that it had by its old name.

    `index` has the new names.  Of a node that has the change the new name has it too.
    """
    for rollout in index.rollouts.values():
        places = {target.node: target for target in index.targets(rollout.id)}
        names = {new: places[old] for new, old in old_names.items() if old in places and new not in places}
        if rollout.closed or not names:
            continue
        targets = {new: _renamed_target(index, rollout, new, old) for new, old in names.items()}
        yield TargetsJoined(rollout.id, tuple(targets.values()), now)
        for new, old in names.items():
            done = _END_OF_RENAMED.get(old.outcome)
            if done is not None:
                was = {"outcome": None if old.outcome is None else old.outcome.value, "name": old.node}
                text = describe((Cause(CauseCode.RENAMED, was),))
                yield transition(targets[new], done[0], now, outcome=done[1], text=text)


_END_OF_RENAMED: Final[Mapping[Outcome | None, tuple[Trigger, Outcome]]] = {
    Outcome.CHANGED: (Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT),
    Outcome.ALREADY_CURRENT: (Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT),
    Outcome.SKIPPED: (Trigger.SKIPPED, Outcome.SKIPPED),
    Outcome.ROLLED_BACK: (Trigger.SKIPPED, Outcome.SKIPPED),
}


def _renamed_target(index: Index, rollout: Rollout, name: str, old: Target) -> Target:
    node = index.nodes[name]
    is_same_team = node.team == old.team
    return replace(
        _new_target(index, rollout, node, old.position, old.since, needs_vote=False),
        wave=old.wave,
        joined=old.joined,
        needs_vote_of=old.needs_vote_of if is_same_team else _awaited_team(rollout, node.team, False),
        maybe_current=old.maybe_current,
    )


def _new_target(
    index: Index, rollout: Rollout, node: Node, position: int, now: float, needs_vote: bool
) -> Target:
    """Return the target of a node that joins: last, and waiting for its team's vote where one is needed."""
    return Target(
        rollout=rollout.id,
        node=node.name,
        team=node.team,
        pools=tuple(pool.id for pool in index.pools_for(rollout.id, node.name)),
        wave=rollout.plan.waves[-1].name,
        position=position,
        since=now,
        joined=True,
        needs_vote_of=_awaited_team(rollout, node.team, needs_vote),
        maybe_current=rollout.plan.skip_compliant,
    )


def _awaited_team(rollout: Rollout, team: str | None, needs_vote: bool) -> str | None:
    """Return the team that a node waits for: always one if it `needs_vote`, the owner for no team.

    Otherwise its team if an opened gate asks every team and this one has not voted.
    """
    if needs_vote:
        return team or rollout.plan.owner
    return None if team is None or gate_without_vote(rollout, team) is None else team


# -- superseded rollouts ----------------------------------------------------------


def carry_over(index: Index, event: PhaseMoved, describe: Describe) -> list[PhaseMoved]:
    """Return the node's transitions in rollouts that supersede the one in which it is now done."""
    # Only a node that has just passed: one whose rollback was aborted is changed too, but will lose it.
    if event.trigger is not Trigger.VERIFIED or event.outcome is not Outcome.CHANGED:
        return []
    # Scope and policy may differ: what was done to the node is in the change alone.
    change = index.rollout(event.rollout).digest.change
    found = []
    for rollout in index.rollouts.values():
        if rollout.closed or rollout.digest.change != change or not _succeeds(index, rollout, event.rollout):
            continue
        for target in index.targets_on(event.node):
            # A pilot shows the new plan: it is not taken over.
            is_pilot = target.wave == PILOT_WAVE
            if target.rollout == rollout.id and target.phase is Phase.PENDING and not is_pilot:
                text = describe((Cause(CauseCode.DONE_BEFORE, {"rollout": event.rollout}),))
                found.append(
                    transition(
                        target,
                        Trigger.FOUND_CURRENT,
                        event.at,
                        outcome=Outcome.ALREADY_CURRENT,
                        text=text,
                    )
                )
    return found


def _succeeds(index: Index, rollout: Rollout, earlier: str) -> bool:
    """Return whether this rollout supersedes the earlier one, directly or not."""
    before, current = index.rollout(earlier), rollout
    while current.supersedes is not None:
        if current.supersedes == earlier:
            return True
        between = index.rollouts.get(current.supersedes)
        if between is None:
            # A closed rollout without work is not loaded at a start; those of one plan follow each other.
            is_older = before.submitted_at < rollout.submitted_at
            return before.plan.name == rollout.plan.name and before.cancelled is not None and is_older
        current = between
    return False
