"""Scan of the nodes' host keys, and how each compares with known_hosts and second sources."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import asyncssh

from rolloutd.adapters.ssh.route import read_route
from rolloutd.adapters.ssh.shell import SshShell, read_known_hosts
from rolloutd.admin.host_keys.evidence import Evidence, HostKey, SecondSources, host_key
from rolloutd.errors import HostKeyChanged, NodeUnreachable, RolloutdError
from rolloutd.ports import ConnectionDefaults, Host

JSON = Any

MAX_PARALLEL = 32
"""Nodes at once: a scan of 1,000 nodes of which a tenth is dead takes a minute."""

CERTIFICATE_TIMEOUT_S = 10.0
"""Limit of the login that verifies a certificate, as that of a connection."""

_NO_COMMON_KEY = (asyncssh.KeyExchangeFailed, asyncssh.ConnectionLost, ConnectionError)

MAX_KEY_CHARS = 4096
"""Characters of a key: RSA with 16,384 bits has 2,800."""


class KeyState(StrEnum):
    STORED = "stored"
    """known_hosts has this key."""
    CONFIRMED = "confirmed"
    """known_hosts has no key of the node's type; a second source has this one."""
    UNCONFIRMED = "unconfirmed"
    """known_hosts has no key of the node's type, and no second source has one."""
    CONTRADICTED = "contradicted"
    """A second source has another key of this type."""
    CHANGED = "changed"
    """known_hosts has another key of this type, or none of the node's keys."""
    CERTIFIED = "certified"
    """known_hosts trusts an authority for the node, so its certificate counts and not its key."""


@dataclass(frozen=True, slots=True)
class JudgedKey:
    """A key that a node offers, and what is known about it; `replaces` is known_hosts' key of its type."""

    key: HostKey
    state: KeyState
    confirmed_by: tuple[str, ...]
    contradicted_by: tuple[str, ...]
    replaces: tuple[HostKey, ...]

    def to_json(self) -> dict[str, JSON]:
        return {
            "algorithm": self.key.algorithm,
            "fingerprint": self.key.fingerprint,
            "state": self.state.value,
            "confirmed_by": list(self.confirmed_by),
            "contradicted_by": list(self.contradicted_by),
            "replaces": [each.fingerprint for each in self.replaces],
        }


@dataclass(frozen=True, slots=True)
class ScannedNode:
    node: str
    address: str
    known_hosts_name: str
    keys: tuple[JudgedKey, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, JSON]:
        return {
            "node": self.node,
            "address": self.address,
            "known_hosts_name": self.known_hosts_name,
            "keys": [key.to_json() for key in self.keys],
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Scanner:
    """Reads the keys of nodes side by side."""

    shell: SshShell
    defaults: ConnectionDefaults
    sources: SecondSources
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PARALLEL))

    async def scan(self, hosts: Sequence[Host]) -> list[ScannedNode]:
        return await asyncio.gather(*map(self._scan_node, hosts))

    async def _scan_node(self, host: Host) -> ScannedNode:
        try:
            route = read_route(host, self.defaults)
        except NodeUnreachable as error:
            return ScannedNode(host.name, "", "", problem=str(error))
        name = route.known_hosts_name
        try:
            async with self.slots:
                keys = await self.shell.read_host_keys(host)
        except (NodeUnreachable, HostKeyChanged) as error:
            return ScannedNode(host.name, route.address, name, problem=str(error))
        offered = [each for each in map(host_key, keys) if len(each.blob) <= MAX_KEY_CHARS]
        known = read_known_hosts(route.known_hosts)
        port = None if name == (route.alias or route.host) else route.port
        stored, authorities = known.match(route.alias or route.host, "", port)[:2]
        if authorities and not stored and not await self._has_certificate(host):
            authorities = []
        evidence = self.sources.find(host.name, name, (route.host,), host.connection)
        judged = judge(offered, [*map(host_key, stored)], evidence, authorities)
        return ScannedNode(host.name, route.address, name, judged)

    async def _has_certificate(self, host: Host) -> bool:
        """Return whether ssh trusts the node: an authority's line also covers nodes without a certificate."""
        try:
            async with self.slots:
                await self.shell.run(host, "true", timeout_s=CERTIFICATE_TIMEOUT_S)
        except HostKeyChanged:
            return False
        except RolloutdError as error:
            # A server without a trusted type of key ends the connection; the login itself may not work yet.
            return not isinstance(error.__cause__, _NO_COMMON_KEY)
        return True


def judge(
    offered: Sequence[HostKey],
    stored: Sequence[HostKey],
    evidence: Sequence[Evidence],
    authorities: Sequence[asyncssh.SSHKey],
) -> tuple[JudgedKey, ...]:
    """Compare the keys that a node offers with what known_hosts and the second sources have."""
    # With none of the stored keys it is another machine, also with a key of a type that was not stored.
    is_other = bool(stored) and not set(offered) & set(stored)
    offered_fingerprints = {key.fingerprint for key in offered}
    judged = []
    for key in offered:
        confirmed = dict.fromkeys(e.source for e in evidence if e.fingerprint == key.fingerprint)
        contradicted = dict.fromkeys(
            e.source
            for e in evidence
            if (e.key_type == key.key_type and e.fingerprint != key.fingerprint)
            or (not e.key_type and e.fingerprint not in offered_fingerprints)
        )
        sources = tuple(source for source in contradicted if source not in confirmed)
        replaces = tuple(each for each in stored if is_other or each.key_type == key.key_type)
        if key in stored:
            state = KeyState.STORED
        elif replaces:
            state = KeyState.CHANGED
        elif sources:
            state = KeyState.CONTRADICTED
        elif authorities and not stored:
            state = KeyState.CERTIFIED
        else:
            state = KeyState.CONFIRMED if confirmed else KeyState.UNCONFIRMED
        replaced = replaces if state is KeyState.CHANGED else ()
        judged.append(JudgedKey(key, state, tuple(confirmed), sources, replaced))
    return tuple(judged)


def known_hosts_path(defaults: ConnectionDefaults) -> Path:
    """Return the file that approved keys are written to."""
    return defaults.known_hosts or Path("~/.ssh/known_hosts").expanduser()
