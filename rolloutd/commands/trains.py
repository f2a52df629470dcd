"""Commands on trains: which rollouts share the outage of a node, and who approves that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from machines.facts.index import Index
from machines.model.plan import Plan
from machines.model.rollout import Rollout
from machines.model.timefmt import format_duration
from machines.model.train import Train, TrainRemoved, TrainStored
from machines.scheduler.train_savings import shareable_nodes
from machines.workflow.outage import is_same_isolator
from rolloutd.commands.execution import Events, Principal
from rolloutd.commands.rollout_commands import require_team_member
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.texts.formats import join_limited, pluralize, suggest_name

DEFAULT_WAIT_S = 3600.0
"""How long a node waits for its turn in a train: an hour covers most changes of one node."""

MAX_ROLLOUTS = 10
"""Open rollouts of one train: more changes in one outage than people review together."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

MAX_TRAINS = 100
"""Trains at once, because each start of a node asks them."""


def add(
    state: State,
    who: Principal,
    name: str,
    rollouts: Sequence[Rollout],
    reason: str,
    wait_s: float | None = None,
    *,
    shown: Shown | None = None,
) -> Events:
    """Make a train of these rollouts, or add them at the end of it; approve it for those that one owns.

    `shown` is the train that the caller read, None if there was none.  Raises NotAllowed for a caller who
    owns none of the rollouts, Refused for those that cannot be together, or if the train is not as shown.
    """
    if not _NAME.fullmatch(name):
        raise Refused(
            "train-name",
            f"train {name[:40]!r}: not a name; use up to 100 letters, digits, dots, dashes or underscores",
        )
    known = find_train(state.index, name)
    before = () if known is None else known.rollouts
    order = tuple(dict.fromkeys((*before, *(each.id for each in rollouts))))
    members = _open_members(state.index, order)
    if not any(_owns(who, each) for each in members):
        raise NotAllowed(f"{who.user} may not make train {name}; ask an owner of its rollouts or an admin")
    _require_fit(state.index, name, members, rollouts)
    removed = () if known is not None else _make_room(state.index, who, state.now())
    train = _ordered(who, state.now(), known, name, order, members, wait_s)
    if train == known:
        return ()
    if known is not None or shown is not None:
        _require_as_shown(require_train(state.index, name), shown)
    return (*removed, TrainStored(train, who.actor, reason, state.now()))


def join(index: Index, who: Principal, opened: Rollout, nodes: Iterable[str], replaced: set[str]) -> Events:
    """Return the events by which a rollout that is opened now joins a train, because its plan says so.

    Its place is after the rollouts that it replaces, else the last one.  It stays alone where it cannot be
    in the train, which preview says.
    """
    partners = [each for each in train_partners(index, opened.plan, nodes) if each.id not in replaced]
    trains = {rollout: train for train in index.trains for rollout in train.rollouts}
    known = next((trains[each] for each in (*replaced, *(p.id for p in partners)) if each in trains), None)
    before = () if known is None else known.rollouts
    order = [*before, *(each.id for each in partners if each.id not in trains)]
    place = max((number for number, each in enumerate(order, 1) if each in replaced), default=len(order))
    order.insert(place, opened.id)
    members = [*(each for each in _open_members(index, order) if each.id not in replaced), opened]
    name = f"train-{opened.id.rpartition('-')[2]}" if known is None else known.name
    try:
        _require_fit(index, name, members, [opened])
        removed = () if known is not None else _make_room(index, who, opened.submitted_at)
    except Refused:
        return ()
    train = _ordered(who, opened.submitted_at, known, name, tuple(order), members, None)
    reason = f"plan {opened.plan.name} says train"
    return (*removed, TrainStored(train, who.actor, reason, opened.submitted_at))


def train_partners(index: Index, plan: Plan, nodes: Iterable[str]) -> list[Rollout]:
    """Return the open rollouts that share a node with a plan, if it and theirs say `train`, in order."""
    shared = shareable_nodes(index, nodes) if plan.joins_train else {}
    return [index.rollout(each) for each in shared if index.rollout(each).plan.joins_train]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a caller read: the rollouts, whose contents never change, in order, and the wait."""

    rollouts: tuple[str, ...]
    wait_s: float


def approve(
    state: State, who: Principal, name: str, reason: str, *, shown: Shown, rollout: Rollout | None = None
) -> Events:
    """Approve a train for those of its rollouts that the caller owns, or for one of them.

    Raises Refused if it is not the train that the caller read.
    """
    train = require_train(state.index, name)
    _require_as_shown(train, shown)
    members = _open_members(state.index, train.rollouts)
    asked = members if rollout is None else [each for each in members if each.id == rollout.id]
    if not any(_owns(who, each) for each in asked):
        what = f"train {name}" if rollout is None else f"train {name} for {rollout.id}"
        raise NotAllowed(f"{who.user} may not approve {what}; ask an owner of its rollouts or an admin")
    given = _approvals(who, train.rollouts if rollout is None else [rollout.id], members)
    approved = replace(train, approvals={**given, **train.approvals})
    return () if approved == train else (TrainStored(approved, who.actor, reason, state.now()),)


def _require_as_shown(train: Train, shown: Shown | None) -> None:
    """Raise Refused if the train has changed since the caller read it, or was made since."""
    if differences := _differences(train, shown or Shown((), train.wait_s)):
        raise Refused(
            "other-train", f"train {train.name}: {join_limited(differences, MAX_ROLLOUTS)}; read it again"
        )


def _differences(train: Train, shown: Shown) -> list[str]:
    """Return what is not as shown: rollouts, their order, the wait."""
    found = [f"{each} was added" for each in train.rollouts if each not in shown.rollouts]
    found += [f"{each} is not in it" for each in shown.rollouts if each not in train.rollouts]
    if not found and train.rollouts != shown.rollouts:
        found.append(f"its order is {', '.join(train.rollouts)}")
    if train.wait_s != shown.wait_s:
        waits = (format_duration(each) for each in (train.wait_s, shown.wait_s))
        found.append("its wait is {}, not {}".format(*waits))
    return found


def remove(state: State, who: Principal, name: str, reason: str) -> Events:
    """Remove a train: its rollouts finish what they share, and start no further node together."""
    train = require_train(state.index, name)
    members = [state.index.rollouts[each] for each in train.rollouts if each in state.index.rollouts]
    if members and not any(_owns(who, each) for each in members):
        raise NotAllowed(f"{who.user} may not remove train {name}; ask an owner of its rollouts or an admin")
    require_team_member(who, f"remove train {name}")
    return (TrainRemoved(name, who.actor, reason, state.now()),)


def find_train(index: Index, name: str) -> Train | None:
    return next((each for each in index.trains if each.name == name), None)


def require_train(index: Index, name: str) -> Train:
    """Return a train by its name; raises NotFound."""
    train = find_train(index, name)
    if train is None:
        names = (each.name for each in index.trains)
        raise NotFound(f"{name}: no such train; {suggest_name(name, names, 'make it with train add')}")
    return train


def isolator_conflict(one: Rollout, other: Rollout) -> str | None:
    """Return which isolator keeps two rollouts from one train: each would undo that of the other."""
    for spec in one.plan.isolate:
        differ = [each for each in other.plan.isolate if each.kind == spec.kind]
        if differ and not any(is_same_isolator(spec, each) for each in differ):
            return f"{other.id}: its isolator {spec.kind} has other parameters than that of {one.id}"
    return None


def _ordered(
    who: Principal,
    now: float,
    known: Train | None,
    name: str,
    order: tuple[str, ...],
    members: Sequence[Rollout],
    wait_s: float | None,
) -> Train:
    """Return the train with this order, approved for the open members that the caller owns."""
    wait = wait_s if wait_s is not None else DEFAULT_WAIT_S if known is None else known.wait_s
    # What is approved is the order, and how long nodes stay isolated for it: others need the approval of all.
    is_same = known is not None and (known.rollouts, known.wait_s) == (order, wait)
    kept = dict(known.approvals) if known is not None and is_same else {}
    by, at = (who.actor, now) if known is None else (known.by, known.at)
    return Train(name, order, wait, by, at, {**kept, **_approvals(who, order, members)})


def _approvals(who: Principal, order: Sequence[str], members: Sequence[Rollout]) -> dict[str, str]:
    """Return what the caller approves: what the caller owns, and what is closed, which begins nothing."""
    others = {each.id for each in members if not _owns(who, each)}
    return {each: who.user for each in order if each not in others}


def _owns(who: Principal, rollout: Rollout) -> bool:
    return who.admin or rollout.plan.owner in who.teams


def _open_members(index: Index, order: Iterable[str]) -> list[Rollout]:
    found = (index.rollouts.get(each) for each in order)
    return [each for each in found if each is not None and not each.closed]


def _require_fit(index: Index, name: str, members: Sequence[Rollout], added: Sequence[Rollout]) -> None:
    for rollout in added:
        if rollout.closed:
            raise Refused("closed", f"{rollout.id}: the rollout is closed; submit its plan again")
        train = next((t for t in index.trains if rollout.id in t.rollouts and t.name != name), None)
        if train is not None:
            raise Refused("in-train", f"{rollout.id}: it is in train {train.name}; remove that train first")
    if not 2 <= len(members) <= MAX_ROLLOUTS:
        count = pluralize(len(members), "open rollout")
        raise Refused("train-size", f"train {name}: {count}; give 2 to {MAX_ROLLOUTS}")
    for one, other in combinations(members, 2):
        if (conflict := isolator_conflict(one, other)) is not None:
            raise Refused("isolators", f"{conflict}; make them equal in both plans")


def _make_room(index: Index, who: Principal, now: float) -> Events:
    """Return the removal of the oldest ended train if there is no room for another one; raises Refused."""
    if len(index.trains) < MAX_TRAINS:
        return ()
    ended = next((each for each in index.trains if not _open_members(index, each.rollouts)), None)
    if ended is None:
        raise Refused("too-many-trains", f"trains: the maximum of {MAX_TRAINS} is reached; remove one")
    return (TrainRemoved(ended.name, who.actor, "it has ended; another train is made", now),)
