"""A check of the commands that reasons suggest: each is tried for every user it names.

Commands are functions from the facts to events, so the check asks what would follow and writes nothing.  A
reason whose command is refused to every user is a lie at three in the morning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from machines.model.plan import GateName
from machines.model.reasons import ReasonCode, Remedy, RemedyKind
from machines.scheduler.why import why_nodes
from rolloutd.commands import holds_and_freezes, rollbacks, rollout_commands, voting
from rolloutd.commands.voting import Ballot
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.texts.reason_text import describe, describe_remedy
from tests.sim.people import ALL_USERS, SimUser, with_failures

Args = Mapping[str, Any]
CommandAttempt = Callable[[State, SimUser, Args], object]


def refused_suggestions(state: State) -> Iterator[str]:
    """Yield a sentence for every reason that suggests only commands that no user may give, or is none."""
    for rollout in [name for name, each in state.index.rollouts.items() if not each.closed]:
        for node, reason in why_nodes(state.index, rollout, state.now()).items():
            if reason is None:
                continue
            for remedy in filter(None, (reason.remedy, reason.remedy and reason.remedy.also)):
                refusals = list(_refusals(state, remedy))
                if refusals and None not in refusals:
                    suggestion = f"{describe_remedy(remedy)!r} is refused: {refusals[0]}"
                    yield f"{node} of {rollout} waits ({describe(reason)}); {suggestion}"
            if reason.code is ReasonCode.ROLLBACK_FAILED and reason.params["code"] == "unreachable":
                yield f"{node} of {rollout} waits for {reason.subject}, which no undo has reached"


def _refusals(state: State, remedy: Remedy) -> Iterator[str | None]:
    """Yield why each command was refused to each user who may give it; None for one that was not."""
    for attempt in _ATTEMPTS.get(remedy.kind, ()):
        for who in ALL_USERS:
            if remedy.who not in (None, who.user):
                continue
            try:
                attempt(state, who, remedy.args)
            except (Refused, NotAllowed, NotFound) as error:
                yield f"{attempt.__name__} by {who.user}: {error}"
            else:
                yield None


def _approve(state: State, who: SimUser, args: Args) -> object:
    ballot = Ballot(GateName(args["gate"]), True, "tests", team=args.get("team"), wave=args.get("wave"))
    ballot = with_failures(state, args["rollout"], ballot)
    return voting.vote(state, who, state.index.rollout(args["rollout"]), ballot, ())


def _withdraw(state: State, who: SimUser, args: Args) -> object:
    rollout, gate = state.index.rollout(args["rollout"]), GateName(args["gate"])
    return voting.withdraw(state, who, rollout, gate, "tests", team=None, wave=args["wave"] or None)


def _resume(state: State, who: SimUser, args: Args) -> object:
    return rollout_commands.resume(state, who, state.index.rollout(args["rollout"]), "tests")


def _retry(state: State, who: SimUser, args: Args) -> object:
    rollout, target = state.index.rollout(args["rollout"]), state.index.target(args["rollout"], args["node"])
    return rollout_commands.retry(state, who, rollout, target, "tests")


def _rollback(state: State, who: SimUser, args: Args) -> object:
    rollout, target = state.index.rollout(args["rollout"]), state.index.target(args["rollout"], args["node"])
    return rollout_commands.rollback(state, who, rollout, target, "tests")


def _roll_back_all(state: State, who: SimUser, args: Args) -> object:
    rollout = state.index.rollout(args["rollout"])
    targets = [state.index.target(rollout.id, node) for node in args["nodes"].split()]
    return rollbacks.roll_back_nodes(state, who, rollout, targets, "tests", {})


def _skip(state: State, who: SimUser, args: Args) -> object:
    rollout, target = state.index.rollout(args["rollout"]), state.index.target(args["rollout"], args["node"])
    return rollout_commands.skip(state, who, rollout, target, "tests", "return" if target.isolated else None)


def _return(state: State, who: SimUser, args: Args) -> object:
    return rollout_commands.return_node(state, who, args["node"], "tests")


def _release(state: State, who: SimUser, args: Args) -> object:
    return holds_and_freezes.release(state, who, args["node"], id=args.get("id"))


def _unfreeze(state: State, who: SimUser, args: Args) -> object:
    return holds_and_freezes.unfreeze(state, who, args["id"])


_ATTEMPTS: Mapping[RemedyKind, tuple[CommandAttempt, ...]] = {
    RemedyKind.APPROVE: (_approve,),
    RemedyKind.WITHDRAW: (_withdraw,),
    RemedyKind.RESUME: (_resume,),
    RemedyKind.RETRY: (_retry, _skip, _rollback),
    RemedyKind.ROLL_BACK: (_roll_back_all,),
    RemedyKind.ADD_TEAM: (_skip,),
    RemedyKind.SKIP: (_skip,),
    RemedyKind.RETURN: (_return,),
    RemedyKind.RELEASE: (_release,),
    RemedyKind.UNFREEZE: (_unfreeze,),
}
