"""Why a node counts as down: the facts about one node, judged.

For whatever reason: worked on, failed and not returned, isolated by us, held, out
of service by its own or somebody else's doing.  Of a node that was not observed
lately nobody can say that it is up.  What that means for a pool is said in
pools.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from machines.book import Book
from machines.moments import stamp
from machines.node import Observation, Sight
from machines.rollout import Hold, Order, Target
from machines.states import BUSY, Phase

RANK: Final = {"busy": 0, "failed": 1, "isolated": 2, "held": 3, "down": 4, "foreign": 5, "unknown": 6}
"""Which of several causes is told: what we do ourselves first, what nobody knows last."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Why a node counts as down.

    `code` is busy, failed, isolated, held, down, foreign or unknown; `by` is
    what says so.  `stale` asks for a new observation: the last one is too old,
    or from before we were done with the node, or there is none.  `over` says that
    the rollout of the target is closed: nothing of it is tried again.
    """

    node: str
    code: str
    by: Target | Hold | Observation | None = None
    stale: bool = False
    over: bool = False

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
            case Target(order=Order.RETURN) as target:
                return _returning(target)
            case Target(phase=Phase.FAILED) as target:
                return settling(target, over=self.over)
            case Target(phase=Phase.PENDING) as target:
                return f"rolloutctl skip {target.rollout} {target.node} --return"
            case Target() as target:
                return f"rolloutctl return {target.node}"
            case Hold() as hold:
                return _releasing(hold)
            case Observation(foreign=True):
                return f"whoever took {self.node} out of service"
            case _:
                return f"{self.node}, once it is seen up"


def settling(target: Target, *, over: bool) -> str:
    """Say how a failed node is settled; in a rollout that is over it can only be left out."""
    if target.order is Order.RETURN:
        return _returning(target)
    if not over:
        return f"rolloutctl retry, skip or rollback {target.rollout} {target.node}"
    return f"rolloutctl skip {target.rollout} {target.node}" + (" --return" if target.isolated else "")


def _returning(target: Target) -> str:
    by = "" if target.order_by is None else f", as {target.order_by.name} has asked"
    return f"{target.node}, once it is returned{by}"


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


# -- judging ------------------------------------------------------------------


def stand(book: Book, node: str) -> Stand | None:
    """Return why the node is down at the book's instant, None when it is known to be up."""
    ours = _ours(book, node)
    if ours is not None:
        return ours
    return held(book, node) or sight(book, node)


def held(book: Book, node: str) -> Stand | None:
    """Return the hold on the node that lasts, None where nobody holds it."""
    lasting = (hold for hold in book.holds_on(node) if hold.until is None or book.now < hold.until)
    return next((Stand(node, "held", hold) for hold in lasting), None)


def elsewhere(book: Book, target: Target) -> Stand | None:
    """Return by which other rollout the target's node is out of service, None where by none."""
    others = (other for other in book.targets_on(target.node) if other.rollout != target.rollout)
    out = (other for other in others if other.phase in BUSY or other.isolated)
    return next((kept_down(book, other) for other in out), None)


def kept_down(book: Book, target: Target) -> Stand:
    """Return the stand of a node that this target keeps down: at work, failed, or not yet put back."""
    over = book.rollout(target.rollout).closed
    return Stand(target.node, _code(target), target, over=over)


def sight(book: Book, node: str) -> Stand | None:
    """Return what is wrong with the node by observation alone, None when it was freshly seen up."""
    seen = book.observation(node)
    if seen is None:
        return Stand(node, "unknown", stale=True)
    up = seen.sight is Sight.UP and not seen.foreign
    old = book.now >= seen.at + book.limits.observe_within_s
    if old or (not up and seen.at < book.released_at(node)):
        return Stand(node, "unknown", seen, stale=True)
    if up:
        return None
    return Stand(node, "foreign" if seen.foreign else "down" if seen.sight is Sight.DOWN else "unknown", seen)


def _ours(book: Book, node: str) -> Stand | None:
    """Return the target by which we hold the node down: at work, failed, or not yet put back."""
    found: Stand | None = None
    for target in book.targets_on(node):
        code = _code(target)
        if code and (found is None or RANK[code] < RANK[found.code]):
            found = kept_down(book, target)
    return found


def _code(target: Target) -> str:
    code = "busy" if target.phase in BUSY else "failed" if target.phase is Phase.FAILED else ""
    return code or ("isolated" if target.isolated else "")
