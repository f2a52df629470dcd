"""Slots for machines that reboot themselves: a hold that the rules of a start grant.

People approve the reboots of a group for a time, if the settings give it a gate.  A machine proves nothing
but its id.  So it gets no more than a slot, and gives it back once it was seen up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from machines.model.causes import Cause, CauseCode
from machines.model.events import HoldReleased, HoldTaken
from machines.model.plan import VoteRequirement
from machines.model.reasons import Reason
from machines.model.reboots import RebootApproval, RebootApprovalWithdrawn, RebootGate, RebootsApproved
from machines.model.rollout import DAEMON, Actor, ActorKind, Hold
from machines.model.selector import Selector, parse_selector
from machines.rules.reboots import active_approvals, reboot_blocker, return_blocker
from machines.scheduler.expiry import end_hold
from rolloutd.commands.execution import Events, Principal
from rolloutd.commands.holds_and_freezes import MAX_HOLDS, find_hold, unobserved_peers
from rolloutd.commands.rollout_commands import FLEETLOCK_SOURCE, unknown_node
from rolloutd.engine.state import State
from rolloutd.errors import DeadlineInPast, NotAllowed, NotFound, Refused
from rolloutd.settings.listeners import FleetLockGroup
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.formats import suggest_name
from rolloutd.texts.reason_text import describe

REASON: Final = "reboots itself"

MAX_APPROVAL_S: Final = 90 * 86_400.0
"""A quarter: people then look again at what they approved."""

MAX_APPROVALS: Final = 10_000
"""Approvals at once: a hundred people in each of a hundred groups."""


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
    if (reason := reboot_blocker(index, node, now, reboot_gate(state, machine.group))) is not None:
        raise RebootRefused(reason, unobserved_peers(state, node, reason))
    team = state.settings.teams.get(state.index.nodes[node].team or "")
    within_s = None if team is None else team.reboot_within
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


# -- the gate of a group ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupGate:
    gate: RebootGate
    selector: Selector


def reboot_gates(state: State) -> tuple[GroupGate, ...]:
    settings = state.settings.fleetlock
    groups = {} if settings is None else settings.groups
    gates = ((reboot_gate(state, name), parse_selector(group.nodes)) for name, group in groups.items())
    return tuple(GroupGate(gate, selector) for gate, selector in gates if gate is not None)


def reboot_gate(state: State, group: str) -> RebootGate | None:
    """Return the gate of a group; None if the settings give it none."""
    settings = state.settings.fleetlock
    own = None if settings is None else settings.groups.get(group)
    if own is None or own.gate is None:
        return None
    need = VoteRequirement(owner=own.gate.owner, each_team=own.gate.each_team)
    return RebootGate(group, own.owner, need, state.reboot_approvers.get(group, {}))


def require_group(state: State, group: str) -> FleetLockGroup:
    """Return a group of the settings; raises NotFound."""
    settings = state.settings.fleetlock
    groups = {} if settings is None else settings.groups
    if group not in groups:
        action = suggest_name(group, list(groups), "add it to `fleetlock.groups`")
        raise NotFound(f"fleetlock/{group}: no such group; {action}")
    return groups[group]


def explain_reboot(state: State, group: str, node: str) -> Reason | None:
    """Return why a node of a group may not reboot itself now; raises NotFound."""
    selector = parse_selector(require_group(state, group).nodes)
    if node not in state.index.nodes:
        raise unknown_node(state, node)
    if not selector.matches(state.index.nodes[node].labels):
        raise NotFound(f"{node}: not in fleetlock/{group}; see `fleetlock.groups.{group}.nodes`")
    return reboot_blocker(state.index, node, state.now(), reboot_gate(state, group))


def approve_reboots(
    state: State, who: Principal, group: str, reason: str, until: float, team: str | None
) -> Events:
    """Approve the reboots of a group until an instant, in place of the caller's earlier approval."""
    now, gate = state.now(), _require_gate(state, group)
    asked = set(state.settings.teams) if gate.need.each_team else set()
    teams = asked | ({gate.owner} if gate.owner is not None and gate.need.owner else set())
    own_teams = tuple(sorted(each for each in teams & who.teams if team in (None, each)))
    if not own_teams:
        voters = "the node's team" if gate.owner is None else gate.owner
        raise NotAllowed(f"{who.user} may not approve fleetlock/{group}; ask a member of {voters}")
    if until <= now:
        raise DeadlineInPast("past", "until: in the past; give a future time")
    if until > now + MAX_APPROVAL_S:
        raise Refused("too-long", f"until: more than {MAX_APPROVAL_S / 86_400:.0f} days away; give less")
    approval = RebootApproval(_approval_id(group, who), group, who.actor, own_teams, reason, now, until)
    over = tuple(
        each for each in state.index.reboot_approvals if each.until <= now and each.id != approval.id
    )
    if len(state.index.reboot_approvals) - len(over) >= MAX_APPROVALS:
        raise Refused("too-many-approvals", f"approvals: the maximum of {MAX_APPROVALS} is reached")
    text = describe_causes((Cause(CauseCode.TIME_IS_OVER),))
    ended = tuple(RebootApprovalWithdrawn(each.id, DAEMON, text, now) for each in over)
    return (*ended, RebootsApproved(approval))


def withdraw_approval(state: State, who: Principal, group: str, reason: str) -> Events:
    """Withdraw the caller's approval of a group; what has a slot keeps it."""
    _require_gate(state, group)
    id_ = _approval_id(group, who)
    if not any(each.id == id_ for each in state.index.reboot_approvals):
        raise Refused("no-vote", f"fleetlock/{group}: {who.user} has no approval there; nothing to withdraw")
    return (RebootApprovalWithdrawn(id_, who.actor, reason, state.now()),)


def people_with_approval(state: State, group: str) -> frozenset[int]:
    """Return the uids of the people whose approvals a group's gate counts; none without a gate."""
    if reboot_gate(state, group) is None:
        return frozenset()
    return frozenset(
        uid
        for each in active_approvals(state.index, group, state.now())
        if each.actor.kind is ActorKind.PERSON and (uid := each.actor.uid) is not None
    )


def _require_gate(state: State, group: str) -> RebootGate:
    require_group(state, group)
    gate = reboot_gate(state, group)
    if gate is None:
        raise Refused("no-gate", f"fleetlock/{group}: it has no gate; its machines need no approval")
    return gate


def _approval_id(group: str, who: Principal) -> str:
    return f"{group}/{who.actor.person_key}"
