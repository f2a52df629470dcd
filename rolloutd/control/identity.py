"""The caller's identity: peer credential, account, teams.

The kernel gives the uid of the socket's other end, the machine's name service its
name and groups, and the settings its teams and admin right.  Nothing that a
client sends counts.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from machines.model.rollout import Actor, ActorKind
from rolloutd.concurrency import threads
from rolloutd.errors import AccountUnknown
from rolloutd.settings import TeamSettings

ACCOUNT_CACHE_TTL_S = 10.0
"""How long an account is cached: a person who was just added to a group waits no longer."""

LOOKUP_TIMEOUT_S = 10.0
"""How long a caller waits for the name service before the request is refused."""

MAX_CACHED_ACCOUNTS = 1024
"""Accounts cached; more people than use one machine in ten seconds."""

# struct ucred of Linux: pid, uid, gid.
_CREDENTIAL = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Account:
    """A uid with its name and groups; the user of a uid without a name is `#1234`."""

    uid: int
    user: str
    groups: frozenset[str]


@dataclass(frozen=True, slots=True)
class Identity:
    uid: int
    user: str
    groups: frozenset[str] = frozenset()
    admin: bool = False
    teams: frozenset[str] = frozenset()

    @property
    def actor(self) -> Actor:
        return Actor(ActorKind.PERSON, self.user, self.uid)

    def is_member_of(self, team: str | None) -> bool:
        return team is not None and team in self.teams


def read_peer_uid(sock: socket.socket | None) -> int | None:
    """Return the user at the other end of a connected Unix socket; None if the kernel does not know it."""
    if sock is None:
        return None
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIAL.size)
    except OSError:
        return None
    uid: int = _CREDENTIAL.unpack(raw)[1]
    # The kernel gives -1 for a socket whose peer it does not know.
    return uid if uid >= 0 else None


def look_up_account(uid: int) -> Account:
    """Return the account of a uid; blocks while the name service answers."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid, f"#{uid}", frozenset())
    names = set()
    for gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
        try:
            names.add(grp.getgrgid(gid).gr_name)
        # A group without a name cannot be in the settings.
        except KeyError:
            continue
    return Account(uid, entry.pw_name, frozenset(names))


class AccountLookup(Protocol):
    """Returns the account of a uid."""

    async def account(self, uid: int) -> Account: ...


class CachedNameService:
    """A name service with a cache; callers with one uid share one lookup, which runs in a thread."""

    def __init__(self, now: Callable[[], float], look_up: Callable[[int], Account] = look_up_account) -> None:
        self._now = now
        self._look_up = look_up
        self._cache: dict[int, tuple[float, Account]] = {}
        self._running: dict[int, asyncio.Task[Account]] = {}

    async def account(self, uid: int) -> Account:
        """Return the account, at most ACCOUNT_CACHE_TTL_S old; raises AccountUnknown."""
        cached = self._cache.get(uid)
        # A clock that was set back must not keep an account for longer.
        if cached is not None and 0 <= self._now() - cached[0] < ACCOUNT_CACHE_TTL_S:
            return cached[1]
        running = self._running.get(uid)
        if running is None:
            running = self._running[uid] = asyncio.create_task(self._look_up_and_cache(uid))
        # Not the lookup itself: it continues, and a caller that comes again must not add another.
        await asyncio.wait((running,), timeout=LOOKUP_TIMEOUT_S)
        if not running.done():
            raise AccountUnknown(
                f"user {uid}: the name service has not answered for {LOOKUP_TIMEOUT_S:.0f} s; "
                f"see `getent passwd {uid}`, then try again"
            )
        return running.result()

    async def _look_up_and_cache(self, uid: int) -> Account:
        asked_at = self._now()
        try:
            account = await threads.ACCOUNTS.run(self._look_up, uid)
        finally:
            del self._running[uid]
        # Removed first, so that the order of the dict is by age and the oldest is dropped.
        self._cache.pop(uid, None)
        while len(self._cache) >= MAX_CACHED_ACCOUNTS:
            del self._cache[next(iter(self._cache))]
        self._cache[uid] = (asked_at, account)
        return account


def is_listed(account: Account, members: Iterable[str]) -> bool:
    """Return whether a list of user names and @groups contains this account."""
    return any(
        member[1:] in account.groups if member.startswith("@") else member == account.user
        for member in members
    )


def identify(account: Account, teams: Mapping[str, TeamSettings], admins: Iterable[str]) -> Identity:
    return Identity(
        uid=account.uid,
        user=account.user,
        groups=account.groups,
        admin=is_listed(account, admins),
        teams=frozenset(name for name, team in teams.items() if is_listed(account, team.members)),
    )
