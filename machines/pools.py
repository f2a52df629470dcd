"""The pool lock as a value: who takes the slots of a pool, and whether one is left.

A node takes a slot of every pool it is in for as long as it is down, for
whatever reason: worked on, failed and not returned, isolated by us, held, out of
service by its own or somebody else's doing.  A node of which nobody can say that
it is up takes one as well.  Which of the waiting nodes gets a free slot is
decided in schedule.py; this file knows no order, no gate and no window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from machines.moments import stamp
from machines.node import Observation, Sight, natural
from machines.rollout import Hold, Reason, Target
from machines.states import BUSY, Phase

if TYPE_CHECKING:
    from machines.index import Index
    from machines.slots import Pool

NAMED_HOLDERS: Final = 3
"""Nodes named in one sentence: more than three nobody reads."""

_RANK = {"busy": 0, "failed": 1, "isolated": 2, "held": 3, "down": 4, "foreign": 5, "unknown": 6}


@dataclass(frozen=True, slots=True)
class Stand:
    """Why a node counts as down.

    `code` is busy, failed, isolated, held, down, foreign or unknown; `by` is
    what says so.  `stale` asks for a new observation: the last one is too old,
    or from before we were done with the node, or there is none.
    """

    node: str
    code: str
    by: Target | Hold | Observation | None = None
    stale: bool = False

    @property
    def sure(self) -> bool:
        """Whether the node is known to be down, not merely unknown."""
        return self.code != "unknown"

    @property
    def suspect(self) -> bool:
        """Whether the last look at the node, however old, did not find it up."""
        return isinstance(self.by, Observation) and (self.by.foreign or self.by.sight is not Sight.UP)

    @property
    def since(self) -> float | None:
        """Since when (epoch seconds), as far as it is known."""
        match self.by:
            case Target(since=at) | Hold(at=at) | Observation(at=at):
                return at
            case None:
                return None

    @property
    def text(self) -> str:
        """One sentence that names the node and the cause."""
        match self.by:
            case Target() as target:
                return _doing(target)
            case Hold() as hold:
                until = "" if hold.until is None else f" until {stamp(hold.until)}"
                return (
                    f"{self.node} is held by {hold.actor.name} since {stamp(hold.at)}{until}: {hold.reason}"
                )
            case Observation() as seen:
                return _seen(seen, self.stale)
            case None:
                return f"{self.node} has not been observed yet"

    @property
    def lifted_by(self) -> str:
        """Who or what can end it."""
        match self.by:
            case Target(phase=phase) as target if phase in BUSY:
                return f"{target.node}, when it is done in {target.rollout}"
            case Target(phase=Phase.FAILED) as target:
                return f"rolloutctl retry, skip or rollback {target.rollout} {target.node}"
            case Target(phase=Phase.PENDING) as target:
                return f"rolloutctl skip {target.rollout} {target.node} --return"
            case Target() as target:
                return f"rolloutctl return {target.node}"
            case Hold() as hold:
                return _releasing(hold)
            case _:
                return f"{self.node}, once it is seen up"


def _releasing(hold: Hold) -> str:
    """Say how a hold ends: by the very command, where there is one."""
    match hold.source:
        case "person":
            named = "" if hold.id == hold.actor.name else f" --as {hold.id}"
            return f"{hold.actor.name}: rolloutctl release {hold.node}{named}"
        case "left":
            return f"rolloutctl return {hold.node}"
        case source:
            return f"{source}, which holds it as {hold.id}"


def _doing(target: Target) -> str:
    where = f"in {target.rollout} since {stamp(target.since)}"
    if target.phase is Phase.FAILED:
        why = "" if target.failure is None else f": {target.failure.message}"
        return f"{target.node} is failed {where}{why}"
    if target.phase in BUSY:
        return f"{target.node} is {target.phase} {where}"
    return f"{target.node} is {target.phase} {where} and still isolated"


def _seen(seen: Observation, stale: bool) -> str:
    why = f": {seen.why}" if seen.why else ""
    age = f" (observed at {stamp(seen.at)})" if stale else ""
    if seen.foreign:
        return f"{seen.node} was taken out of service by somebody else{why}{age}"
    match seen.sight:
        case Sight.DOWN:
            return f"{seen.node} does not answer{why}{age}"
        case Sight.UNKNOWN:
            return f"{seen.node} could not be judged{why}{age}"
        case Sight.UP:
            return f"{seen.node} was last seen up at {stamp(seen.at)}"


# -- one node ------------------------------------------------------------------


def stand(index: Index, node: str) -> Stand | None:
    """Return why the node is down at the index's instant, None when it is known to be up."""
    ours = _ours(index, node)
    if ours is not None:
        return ours
    for hold in index.holds_on(node):
        if hold.until is None or index.now < hold.until:
            return Stand(node, "held", hold)
    return sight(index, node)


def sight(index: Index, node: str) -> Stand | None:
    """Return what is wrong with the node by observation alone, None when it was freshly seen up."""
    seen = index.observation(node)
    if seen is None:
        return Stand(node, "unknown", stale=True)
    up = seen.sight is Sight.UP and not seen.foreign
    old = index.now >= seen.at + index.limits.observe_within_s
    if old or (not up and seen.at < index.released_at(node)):
        return Stand(node, "unknown", seen, stale=True)
    if up:
        return None
    return Stand(node, "foreign" if seen.foreign else "down" if seen.sight is Sight.DOWN else "unknown", seen)


def _ours(index: Index, node: str) -> Stand | None:
    """Return the target by which we hold the node down: at work, failed, or not yet put back."""
    found: Stand | None = None
    for target in index.targets_on(node):
        code = "busy" if target.phase in BUSY else "failed" if target.phase is Phase.FAILED else ""
        code = code or ("isolated" if target.isolated else "")
        if code and (found is None or _RANK[code] < _RANK[found.code]):
            found = Stand(node, code, target)
    return found


def down(index: Index, node: str, now: float) -> Stand | None:
    """Return why the node counts as down at `now`, None when it is known to be up."""
    index.advance(now)
    return index.stand(node)


# -- one pool ------------------------------------------------------------------


def holders(index: Index, pool: str, now: float) -> tuple[Stand, ...]:
    """Return the nodes that take slots of the pool, those we are sure of first; for `locks`."""
    index.advance(now)
    found = index.pool(pool)
    return tuple(_ordered(index, (*found.down, *found.unknown)))


def budget(index: Index, pool: str) -> int:
    """Return how many nodes of the pool may be down; 1 for a pool that only a plan names."""
    return index.budget(index.pool(pool))


def excess(index: Index, pool: str, now: float) -> int:
    """Return by how many nodes the pool is over its budget, counting only those known to be down."""
    index.advance(now)
    found = index.pool(pool)
    return max(0, len(found.down) - index.budget(found))


def may_start(index: Index, target: Target, now: float, taken: Taken | None = None) -> Reason | None:
    """Return why no pool has a slot for this target, None when all have one.

    A node that is down already takes no second slot.  `taken` are the slots
    that the decision being made has given away.
    """
    index.advance(now)
    found = blocked_by(index, target, taken)
    if found is None:
        return None
    pool, surely = found
    return _unknown(index, pool, target) if surely is None else _full(index, pool, target.node, surely)


def blocked_by(index: Index, target: Target, taken: Taken | None = None) -> tuple[Pool, int | None] | None:
    """Return the pool without a slot for this target, and how many of its nodes are known to be down.

    None in place of the number says that only unknown nodes are in the way.
    The rule itself; may_start() is the same in words.
    """
    node = target.node
    unsure: tuple[Pool, None] | None = None
    for pool in index.pools_for(target.rollout, node):
        more = 0 if taken is None else taken.of(pool.id)
        budget = index.budget(pool)
        surely = len(pool.down) + more - (node in pool.down)
        if surely >= budget:
            return pool, surely
        if unsure is None and surely + len(pool.unknown) - (node in pool.unknown) >= budget:
            unsure = pool, None
    return unsure


def doubted(index: Index, target: Target) -> Stand | None:
    """Return the mate that is named where only unknown ones are in the target's way."""
    found = blocked_by(index, target)
    return None if found is None or found[1] is not None else _first_unknown(index, found[0], target.node)


def explain(index: Index, pool: Pool) -> Reason:
    """Return why a full pool is full."""
    return _full(index, pool, "", len(pool.down))


def others(index: Index, pool: Pool, node: str) -> str:
    """Name those of a pool's nodes besides this one that are known to be down."""
    texts = [stand.text for stand in holders(index, pool.id, index.now) if stand.sure and stand.node != node]
    return "; ".join(texts[:NAMED_HOLDERS])


class Taken:
    """Slots given away by a decision that is not carried out yet."""

    __slots__ = ("_slots", "nodes")

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self.nodes: set[str] = set()

    def of(self, pool: str) -> int:
        """Return how many slots of the pool were given away."""
        return self._slots.get(pool, 0)

    def take(self, node: str, pools: Iterable[Pool]) -> None:
        """Give the node a slot of each pool; one that is down has them already."""
        self.nodes.add(node)
        for pool in pools:
            if node not in pool.down:
                self._slots[pool.id] = self._slots.get(pool.id, 0) + 1


def _full(index: Index, pool: Pool, node: str, surely: int) -> Reason:
    budget = index.budget(pool)
    named = list(_ordered(index, pool.down, without=node))
    if budget == 0:
        return Reason(
            "pool-closed", f"pool {pool.id} is closed: its max_unavailable is 0", None, "the settings"
        )
    if not named:
        return Reason("pool-full", f"pool {pool.id} is full: another node of it is starting")
    first = named[0]
    if surely == len(named) == 1 and first.code in ("down", "foreign"):
        return Reason("mate-down", _mate(first, pool), first.since, first.lifted_by)
    over = surely > budget
    more = "" if len(named) <= NAMED_HOLDERS else f" and {len(named) - NAMED_HOLDERS} more"
    texts = "; ".join(each.text for each in named[:NAMED_HOLDERS]) + more
    state = f"over its budget of {budget}" if over else "full"
    code = "pool-over-budget" if over else "pool-full"
    return Reason(code, f"pool {pool.id} is {state}: {texts}", first.since, first.lifted_by)


def _unknown(index: Index, pool: Pool, target: Target) -> Reason:
    first = _first_unknown(index, pool, target.node)
    return Reason("mate-unknown", _mate(first, pool), first.since, first.lifted_by)


def _first_unknown(index: Index, pool: Pool, node: str) -> Stand:
    return next(_ordered(index, pool.unknown, without=node))


def _mate(mate: Stand, pool: Pool) -> str:
    return f"mate {mate.text}".replace(mate.node, f"{mate.node} of {pool.id}", 1)


def _ordered(index: Index, nodes: Iterable[str], without: str = "") -> Iterator[Stand]:
    """Yield the stands of the nodes: worked on first, unknown last and suspect ones before those; by name."""
    stands = [index.stand(node) for node in nodes if node != without]
    known = [each for each in stands if each is not None]
    yield from sorted(known, key=lambda each: (_RANK[each.code], not each.suspect, natural(each.node)))
