"""Who is asking: the socket's peer credential, and what the settings make of it.

The kernel says which uid holds the other end; the machine's name service says
what that uid is called and which groups it is in; the settings say which teams
and admins those are.  Nothing that a client claims is ever looked at.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from machines.rollout import Actor, ActorKind

REMEMBERED_S = 10.0
"""How long the name service's answer is used: a person who was just added to a group waits no longer."""

MOST_REMEMBERED = 1024
"""Accounts kept; more people than use one machine in ten seconds."""

_CREDENTIAL = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of the socket, as the kernel says."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Account:
    """What the name service knows of a uid; `#1234` is the user of a uid without a name."""

    uid: int
    user: str
    groups: frozenset[str]


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who asks, and what they are here; `via` says how we know."""

    uid: int
    user: str
    groups: frozenset[str] = frozenset()
    admin: bool = False
    teams: frozenset[str] = frozenset()
    via: str = "socket"

    @property
    def actor(self) -> Actor:
        """The same somebody, as events name them."""
        return Actor(ActorKind.PERSON, self.user, self.uid)

    def member_of(self, team: str | None) -> bool:
        """Whether they are a member of the team."""
        return team is not None and team in self.teams


class Membership(Protocol):
    """The part of a team's settings that is read here."""

    @property
    def members(self) -> Iterable[str]:
        """User names and @groups."""
        ...


def peer_of(sock: socket.socket | None) -> Peer | None:
    """Return the kernel's word on the other end of a connected Unix socket; None when it has none."""
    if sock is None:
        return None
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIAL.size)
    except OSError:
        return None
    peer = Peer(*_CREDENTIAL.unpack(raw))
    return peer if peer.uid >= 0 else None


def look_up(uid: int) -> Account:
    """Ask this machine's name service; blocks for as long as that takes."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid, f"#{uid}", frozenset())
    names = set()
    for gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return Account(uid, entry.pw_name, frozenset(names))


class Names(Protocol):
    """Knows the accounts behind uids."""

    async def account(self, uid: int) -> Account:
        """Return what is known of the uid."""
        ...


class NameService:
    """Remembers the name service's answers for a short while; asks it in a thread."""

    def __init__(self, now: Callable[[], float], look: Callable[[int], Account] = look_up) -> None:
        self._now = now
        self._look = look
        self._kept: dict[int, tuple[float, Account]] = {}

    async def account(self, uid: int) -> Account:
        """Return what is known of the uid, at most REMEMBERED_S old."""
        kept = self._kept.get(uid)
        now = self._now()
        if kept is not None and 0 <= now - kept[0] < REMEMBERED_S:
            return kept[1]
        account = await asyncio.to_thread(self._look, uid)
        self._kept.pop(uid, None)
        while len(self._kept) >= MOST_REMEMBERED:
            del self._kept[next(iter(self._kept))]
        self._kept[uid] = (now, account)
        return account


def listed(account: Account, members: Iterable[str]) -> bool:
    """Say whether a list of user names and @groups means this account."""
    return any(
        member[1:] in account.groups if member.startswith("@") else member == account.user
        for member in members
    )


def identify(account: Account, teams: Iterable[tuple[str, Membership]], admins: Iterable[str]) -> Identity:
    """Return what the settings make of an account."""
    return Identity(
        uid=account.uid,
        user=account.user,
        groups=account.groups,
        admin=listed(account, admins),
        teams=frozenset(name for name, team in teams if listed(account, team.members)),
    )
