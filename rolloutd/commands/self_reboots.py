"""Slots for machines that reboot themselves: a hold that the rules of a start grant.

A machine proves nothing but its id.  So it gets no more than a slot, and gives it back once it was seen up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from machines.model.causes import Cause, CauseCode
from machines.model.events import HoldReleased, HoldTaken
from machines.model.reasons import Reason
from machines.model.rollout import Actor, ActorKind, Hold
from machines.rules.reboots import reboot_blocker, return_blocker
from machines.scheduler.expiry import end_hold
from rolloutd.commands.holds_and_freezes import MAX_HOLDS, find_hold, unobserved_peers
from rolloutd.commands.rollout_commands import FLEETLOCK_SOURCE, Events
from rolloutd.engine.state import State
from rolloutd.errors import Refused
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.reason_text import describe

REASON: Final = "reboots itself"


@dataclass(frozen=True, slots=True)
class Machine:
    """Who asks (a Principal): a node of the inventory, by its group and its id there."""

    group: str
    id: str
    node: str

    @property
    def hold_id(self) -> str:
        return f"{self.group}/{self.id}"

    @property
    def user(self) -> str:
        return self.actor.name

    @property
    def admin(self) -> bool:
        return False

    @property
    def teams(self) -> frozenset[str]:
        return frozenset()

    @property
    def actor(self) -> Actor:
        return Actor(ActorKind.SERVICE, f"{FLEETLOCK_SOURCE}:{self.group}/{self.node}")


class RebootRefused(Refused):
    """The machine waits; `unobserved` are the nodes whose observation may change that."""

    def __init__(self, reason: Reason, unobserved: tuple[str, ...] = ()) -> None:
        super().__init__(reason.code, describe(reason))
        self.unobserved = unobserved


def take_slot(state: State, machine: Machine) -> Events:
    """Return the events by which the machine may reboot, none if it may already; raises RebootRefused."""
    index, now, node = state.index, state.now(), machine.node
    expired: Events = ()
    if (hold := find_hold(state, node, FLEETLOCK_SOURCE, machine.hold_id)) is not None:
        if hold.until is None or now < hold.until:
            return ()
        expired = (end_hold(hold, now, describe_causes((Cause(CauseCode.TIME_IS_OVER),))),)
    if len(index.holds) >= MAX_HOLDS:
        raise Refused("too-many-holds", f"holds: the maximum of {MAX_HOLDS} is reached; release some")
    if (reason := reboot_blocker(index, node, now)) is not None:
        raise RebootRefused(reason, unobserved_peers(state, node, reason))
    within_s = _reboot_within_s(state, node)
    until = None if within_s is None else now + within_s
    return (
        *expired,
        HoldTaken(Hold(node, FLEETLOCK_SOURCE, machine.hold_id, machine.actor, REASON, now, until)),
    )


def give_slot_back(state: State, machine: Machine) -> Events:
    """Return the events by which the machine's slot is free, none if it has none; raises RebootRefused."""
    if find_hold(state, machine.node, FLEETLOCK_SOURCE, machine.hold_id) is None:
        return ()
    if machine.node in state.index.nodes:
        reason = return_blocker(state.index, machine.node)
        if reason is not None:
            raise RebootRefused(reason, (machine.node,))
    return (HoldReleased(machine.node, FLEETLOCK_SOURCE, machine.hold_id, machine.actor, state.now()),)


def machine_with_slot(state: State, group: str, machine_id: str) -> Machine | None:
    """Return the machine that has a slot by this id, whatever node the settings give the id now."""
    owner = (FLEETLOCK_SOURCE, f"{group}/{machine_id}")
    hold = next((each for each in state.index.holds if (each.source, each.id) == owner), None)
    return None if hold is None else Machine(group, machine_id, hold.node)


def _reboot_within_s(state: State, node: str) -> float | None:
    team = state.settings.teams.get(state.index.nodes[node].team or "")
    return None if team is None else team.reboot_within
