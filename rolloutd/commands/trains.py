"""Commands on trains: which rollouts share the outage of a node, and who approves that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from machines.model.rollout import Rollout
from machines.model.train import Train
from machines.model.train_events import TrainRemoved, TrainStored
from machines.workflow.outage import is_same_isolator
from rolloutd.commands.rollout_commands import Events, Principal, require_team_member
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.text import suggest_name

DEFAULT_WAIT_S = 3600.0
"""How long a node waits for its turn in a train: an hour covers most changes of one node."""

MAX_ROLLOUTS = 10
"""Rollouts of one train: more changes in one outage than people review together."""

MAX_TRAINS = 100
"""Trains at once, because each start of a node asks them."""


def add(
    state: State,
    who: Principal,
    name: str,
    rollouts: Sequence[Rollout],
    reason: str,
    wait_s: float | None = None,
) -> Events:
    """Make a train of these rollouts, or add them at the end of it; approve it for those that one owns.

    Raises NotAllowed for a caller who owns none of them, Refused for rollouts that cannot be together.
    """
    known = find_train(state, name)
    before = () if known is None else known.rollouts
    names = tuple(dict.fromkeys((*before, *(each.id for each in rollouts))))
    members = [state.index.rollouts[each] for each in names if each in state.index.rollouts]
    own = {each.id: who.user for each in members if _owns(who, each)}
    if not own:
        raise NotAllowed(f"{who.user} may not make train {name}; ask an owner of its rollouts or an admin")
    _require_fit(state, name, names, rollouts)
    if known is None and len(state.index.trains) >= MAX_TRAINS:
        raise Refused("too-many-trains", f"trains: the maximum of {MAX_TRAINS} is reached; remove one")
    _require_same_isolators(members)
    # What is approved is the order: another one needs the approval of all again.
    kept = {} if known is None or known.rollouts != names else dict(known.approvals)
    wait = wait_s if wait_s is not None else DEFAULT_WAIT_S if known is None else known.wait_s
    now = state.now()
    by, at = (who.actor, now) if known is None else (known.by, known.at)
    train = Train(name, names, wait, by, at, {**kept, **own})
    return () if train == known else (TrainStored(train, who.actor, reason, now),)


def approve(state: State, who: Principal, name: str, reason: str) -> Events:
    """Approve a train for those of its rollouts that the caller owns."""
    train = require_train(state, name)
    members = (state.index.rollouts[each] for each in train.rollouts if each in state.index.rollouts)
    own = {each.id: who.user for each in members if _owns(who, each)}
    if not own:
        raise NotAllowed(f"{who.user} may not approve train {name}; ask an owner of its rollouts or an admin")
    approved = replace(train, approvals={**own, **train.approvals})
    return () if approved == train else (TrainStored(approved, who.actor, reason, state.now()),)


def remove(state: State, who: Principal, name: str, reason: str) -> Events:
    """Remove a train: its rollouts finish what they share, and start no further node together."""
    train = require_train(state, name)
    members = [state.index.rollouts[each] for each in train.rollouts if each in state.index.rollouts]
    if members and not any(_owns(who, each) for each in members):
        raise NotAllowed(f"{who.user} may not remove train {name}; ask an owner of its rollouts or an admin")
    require_team_member(who, f"remove train {name}")
    return (TrainRemoved(name, who.actor, reason, state.now()),)


def find_train(state: State, name: str) -> Train | None:
    return next((each for each in state.index.trains if each.name == name), None)


def require_train(state: State, name: str) -> Train:
    """Return a train by its name; raises NotFound."""
    train = find_train(state, name)
    if train is None:
        names = (each.name for each in state.index.trains)
        raise NotFound(f"{name}: no such train; {suggest_name(name, names, 'make it with train add')}")
    return train


def _owns(who: Principal, rollout: Rollout) -> bool:
    return who.admin or rollout.plan.owner in who.teams


def _require_fit(state: State, name: str, names: Sequence[str], added: Sequence[Rollout]) -> None:
    if not 2 <= len(names) <= MAX_ROLLOUTS:
        raise Refused("train-size", f"train {name}: {len(names)} rollouts; give 2 to {MAX_ROLLOUTS}")
    for rollout in added:
        if rollout.closed:
            raise Refused("closed", f"{rollout.id}: the rollout is closed; submit its plan again")
        other = next((t for t in state.index.trains if rollout.id in t.rollouts and t.name != name), None)
        if other is not None:
            raise Refused("in-train", f"{rollout.id}: it is in train {other.name}; remove that train first")


def _require_same_isolators(members: Sequence[Rollout]) -> None:
    """Refuse two rollouts that isolate by one kind with different parameters: each would undo the other's."""
    for one, other in combinations(members, 2):
        for spec in one.plan.isolate:
            differ = [each for each in other.plan.isolate if each.kind == spec.kind]
            if differ and not any(is_same_isolator(spec, each) for each in differ):
                raise Refused(
                    "isolators",
                    f"{other.id}: its isolator {spec.kind} has other parameters than that of {one.id};"
                    " make them equal in both plans",
                )
