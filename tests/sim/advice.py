"""Whether what people are told to do is allowed: every command in a reason is tried, and none is carried out.

Orders are functions from the facts to events, so they can be asked what would
follow.  A sentence that sends somebody to a command that is refused to everybody
is a lie at three in the morning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from machines.plan import GateName
from machines.schedule import why_all
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.orders import locking, steering, voting
from rolloutd.orders.voting import Ballot
from rolloutd.state import State
from tests.sim.people import EVERYBODY, Person

_VERBS = r"(?P<verbs>[a-z]+(?:, [a-z]+)*(?: or [a-z]+)?)"
_COMMAND = re.compile(rf"(?:(?P<who>\w+): )?rolloutctl {_VERBS} (?P<rest>.+)")

Trying = Callable[[State, Person, Sequence[str]], object]


def refused(state: State) -> Iterator[str]:
    """Yield a sentence for every reason that names only commands that nobody may give."""
    for rollout in [name for name, each in state.index.rollouts.items() if not each.closed]:
        for node, reason in why_all(state.index, rollout, state.now()).items():
            told = reason.lifted_by or ""
            match = _COMMAND.search(told)
            if match is None:
                continue
            answers = list(_answers(state, match))
            if answers and None not in answers:
                yield f"{node} of {rollout} waits ({reason.text}); {told!r} is refused: {answers[0]}"


def _answers(state: State, match: re.Match[str]) -> Iterator[str | None]:
    """Yield why each command was refused to each who may be meant; None for one that was not."""
    words = match["rest"].split()
    people = [each for each in EVERYBODY if match["who"] in (None, each.user)]
    for verb in re.split(r", | or ", match["verbs"]):
        for who in people:
            try:
                _TRIED[verb](state, who, words)
            except (Refused, NotAllowed, NotFound) as error:
                yield f"{verb} by {who.user}: {error}"
            else:
                yield None


def _approve(state: State, who: Person, words: Sequence[str]) -> object:
    ballot = Ballot(GateName(words[1]), True, "tests")
    return voting.vote(state, who, state.index.rollout(words[0]), ballot)


def _withdraw(state: State, who: Person, words: Sequence[str]) -> object:
    rollout = state.index.rollout(words[0])
    wave = words[words.index("--wave") + 1] if "--wave" in words else None
    return voting.withdraw(state, who, rollout, GateName(words[1]), "tests", team=None, wave=wave)


def _resume(state: State, who: Person, words: Sequence[str]) -> object:
    return steering.resume(state, who, state.index.rollout(words[0]), "tests")


def _on_node(order: Callable[..., object]) -> Trying:
    def tried(state: State, who: Person, words: Sequence[str]) -> object:
        rollout, target = state.index.rollout(words[0]), state.index.target(words[0], words[1])
        return order(state, who, rollout, target, "tests")

    return tried


def _skip(state: State, who: Person, words: Sequence[str]) -> object:
    rollout, target = state.index.rollout(words[0]), state.index.target(words[0], words[1])
    return steering.skip(state, who, rollout, target, "tests", "return" if target.isolated else None)


def _return(state: State, who: Person, words: Sequence[str]) -> object:
    return steering.give_back(state, who, words[0], "tests")


def _release(state: State, who: Person, words: Sequence[str]) -> object:
    named = words[words.index("--as") + 1] if "--as" in words else None
    return locking.release(state, who, words[0], id=named)


def _unfreeze(state: State, who: Person, words: Sequence[str]) -> object:
    return locking.unfreeze(state, who, words[words.index("--scope") + 1])


_TRIED: dict[str, Trying] = {
    "approve": _approve,
    "withdraw": _withdraw,
    "resume": _resume,
    "retry": _on_node(steering.retry),
    "rollback": _on_node(steering.rollback),
    "skip": _skip,
    "return": _return,
    "release": _release,
    "unfreeze": _unfreeze,
}
