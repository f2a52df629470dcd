"""Events of trust in the inventory, of shells and of leadership: only the audit has them."""

from __future__ import annotations

from dataclasses import dataclass

from machines.model.rollout import Actor


@dataclass(frozen=True, slots=True)
class InventoryAccepted:
    """An admin accepted an answer of an inventory source that was held; `removed` counts its nodes."""

    source: str
    removed: int
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class IdentityPinned:
    """An admin accepted the host key or machine id that the sources now report of a node."""

    node: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class HostKeysStored:
    """An admin had host keys of a node written to known_hosts.

    `stored` and `replaced` are types with fingerprints; `confirmed_by` names the second sources that agree.
    """

    node: str
    stored: tuple[str, ...]
    replaced: tuple[str, ...]
    confirmed_by: tuple[str, ...]
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ShellOpened:
    """A person was given the command that opens a shell on a node, and runs it as themselves."""

    node: str
    command: tuple[str, ...]
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaderSteppedDown:
    """A person made the daemon hand leadership over to a standby."""

    epoch: int
    actor: Actor
    reason: str
    at: float


TrustEvent = InventoryAccepted | IdentityPinned | HostKeysStored | ShellOpened | LeaderSteppedDown
