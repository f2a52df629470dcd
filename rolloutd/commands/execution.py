"""The one way in for commands on rollouts and nodes: every front end has them executed here.

No event is written between the decision and the commit, so a command is judged by the facts that it changes.
A submit does the same for itself (submit.py), because it compiles its plan before; what is believed of
inventories is committed by their refresh. Who may do what is asked by the command itself; it knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Protocol

from machines.model.events import Event, VoteCast, VoteWithdrawn
from machines.model.rollout import Actor, Rollout, Target
from rolloutd.commands.resolve import ResolvedRollout, ensure_loaded, resolve_rollout
from rolloutd.engine.state import State
from rolloutd.errors import Refused

Events = tuple[Event, ...]


class Principal(Protocol):
    """The caller of a command: a person, or a service that votes for one."""

    @property
    def user(self) -> str: ...
    @property
    def actor(self) -> Actor: ...
    @property
    def admin(self) -> bool: ...
    @property
    def teams(self) -> frozenset[str]: ...


Decide = Callable[..., Events | Awaitable[Events]]
"""Takes state, principal, the command's rollout and its target, if it has them; returns the events."""


@dataclass(frozen=True, slots=True)
class UserCommand:
    """What a principal asks for; `cause` is that of its audit entry.

    `rollout` is resolved once by the front end, because a plan's name may mean another rollout a second
    later; `node` is a target of it.  A vote that another issuer has proven counts once by its `token`;
    `outside` is its voter's name there.
    """

    cause: str
    decide: Decide
    rollout: ResolvedRollout | None = None
    node: str = ""
    token: str = ""
    outside: str = ""


@dataclass(frozen=True, slots=True)
class Executed:
    """A command that was committed: its events, and its rollout with the facts after them."""

    events: Events
    resolved: ResolvedRollout | None

    @property
    def rollout(self) -> ResolvedRollout:
        assert self.resolved is not None, "the command named no rollout"
        return self.resolved


async def execute(state: State, who: Principal, command: UserCommand) -> Executed:
    """Decide and commit a command; raises what it refuses, Conflict, StoreFailed, or NotFound.

    NotFound: its rollout was deleted meanwhile, or has no such node.
    """
    resolved = command.rollout
    async with state.exclusive_commit(who.actor) as commit:
        await state.advance()
        subject: tuple[Rollout | Target, ...] = ()
        if resolved is not None:
            await ensure_loaded(state, resolved.rollout.id)
            resolved = current(state, resolved)
            subject = (resolved.rollout, *((resolved.target(command.node),) if command.node else ()))
        decided = command.decide(state, who, *subject)
        events = await decided if isawaitable(decided) else decided
        if command.token or command.outside:
            events = tuple(_with_proof(event, command) for event in events)
        await commit(events, command.cause)
    return Executed(events, None if resolved is None else current(state, resolved))


async def resolve_live(state: State, name_or_id: str) -> ResolvedRollout:
    """Return an open rollout; raises NotFound, or Refused if it is closed or several match."""
    resolved = await resolve_rollout(state, name_or_id)
    if not resolved.live:
        raise Refused("closed", f"{resolved.rollout.id}: the rollout is closed; submit its plan again")
    return resolved


def current(state: State, resolved: ResolvedRollout) -> ResolvedRollout:
    """Return the rollout as it is now; others may have changed it since it was resolved."""
    known = state.index.rollouts.get(resolved.rollout.id)
    return resolved if known is None else ResolvedRollout(state.index, known, live=True)


def _with_proof(event: Event, command: UserCommand) -> Event:
    if not isinstance(event, VoteCast | VoteWithdrawn):
        return event
    return replace(event, token=command.token, outside=command.outside)
