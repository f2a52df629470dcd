"""A user who votes during faults, and resolves everything after them."""

from __future__ import annotations

from machines.facts import votes
from machines.model.plan import GateName
from machines.model.reasons import ReasonCode
from machines.model.rollout import Rollout, Target
from machines.rules import gates
from machines.rules.rollbacks import rollbacks_reason
from machines.states import IN_FLIGHT_PHASES, Phase
from rolloutd.commands import holds_and_freezes, rollout_commands, voting
from rolloutd.commands.execution import Events
from rolloutd.commands.voting import Ballot
from rolloutd.engine.state import State
from tests.sim.people import ALL_USERS, OLGA, SimUser, SimUsers

WAIT_LIMIT_S = 3600.0
"""After this time the user skips a node that waits isolated, or that failed and keeps its slot."""

MAX_RETRY_COMMANDS = 6
"""Commands to retry one node, after which it is skipped: a retry that is refused stays so."""


class RecoveryUser:
    """Gives the commands that let every rollout end."""

    def __init__(self, users: SimUsers) -> None:
        self._users = users
        self._retries: dict[tuple[str, str], list[int]] = {}

    async def recover(self) -> None:
        """After the last fault, give the commands that let every rollout end."""
        state = self._users.current_state()
        if state is None:
            return
        for freeze in state.index.freezes:
            scope = freeze.id
            await self._users.run_command(
                OLGA, "thaw", lambda now, scope=scope: holds_and_freezes.unfreeze(now, OLGA, scope)
            )  # type: ignore[misc]
        for hold in state.index.holds:
            if hold.source != rollout_commands.LEFT_ISOLATED_SOURCE:
                if "/" in hold.id:  # a rollout that was deleted had left it isolated
                    self._users.world.put_in_service(self._users.world.machines[hold.node])
                await self._release_hold(hold.node, hold.source, hold.id)
        for rollout in list(state.index.rollouts.values()):
            await self._unblock(state, rollout)
        for rollout in state.index.rollouts.values():
            for target in state.index.targets(rollout.id):
                waits = target.phase is Phase.PENDING and target.isolated
                if rollout.closed and target.order is None and (waits or target.phase is Phase.FAILED):
                    await self._users.command_node(_return, rollout.id, target.node)
        left = {
            hold.node for hold in state.index.holds if hold.source == rollout_commands.LEFT_ISOLATED_SOURCE
        }
        for node in sorted(self._users.world.machines):
            # A failed node of an open rollout is retried or skipped above.
            isolated = any(
                t.isolated
                and t.phase not in IN_FLIGHT_PHASES
                and (t.phase is not Phase.FAILED or state.index.rollout(t.rollout).closed)
                for t in state.index.targets_on(node)
            )
            if isolated or node in left:
                await self._users.return_node(node)

    async def approve_and_resume(self) -> None:
        """During faults, vote and resume paused rollouts."""
        state = self._users.current_state()
        if state is None:
            return
        for rollout in list(state.index.rollouts.values()):
            if rollout.paused is not None:
                await self._users.command_rollout(rollout_commands.resume, rollout.id)
            await self._approve(state, rollout)

    async def _approve(self, state: State, rollout: Rollout) -> None:
        reason = rollbacks_reason(state.index, rollout)
        is_rolling_back = reason is not None and reason.code is ReasonCode.ROLLING_BACK
        for gate in GateName:
            if gate is GateName.PROCEED and is_rolling_back:
                continue  # a vote would end the rollbacks that have not begun
            waves = [w.name for w in rollout.plan.waves] if gate is GateName.CONTINUE else [""]
            for wave in waves:
                await self._approve_gate(state, rollout.id, gate, wave)

    async def _release_hold(self, node: str, source: str, name: str) -> None:
        await self._users.run_command(
            OLGA, "tidy", lambda now: holds_and_freezes.release(now, OLGA, node, source=source, id=name)
        )

    async def _unblock(self, state: State, rollout: Rollout) -> None:
        name = rollout.id
        if rollout.closed:
            return
        if rollout.paused is not None:
            await self._users.command_rollout(rollout_commands.resume, name)
        await self._approve(state, rollout)
        reason = rollbacks_reason(state.index, rollout)
        is_rolling_back = reason is not None and reason.code is ReasonCode.ROLLING_BACK
        for target in list(state.index.targets(name)):
            waits_long = state.now() - target.since > WAIT_LIMIT_S
            may_act = waits_long or not is_rolling_back
            if target.phase is Phase.FAILED and target.order is None and may_act:
                await self._retry_or_skip(target)
            # Nobody submits again for a value that has changed: its target is left out.
            has_other_value = (name, target.node) in state.index.changed_values
            if target.phase is Phase.PENDING and waits_long and (target.isolated or has_other_value):
                await self._users.command_node(_return, name, target.node)

    async def _approve_gate(self, state: State, name: str, gate: GateName, wave: str) -> None:
        """Let everybody take back their no, and say yes where they are asked."""
        rollout = state.index.rollouts.get(name)
        if rollout is None or rollout.closed:
            return
        rejections = [v for v in votes.valid_votes(rollout, gate, wave) if not v.yes]
        view = gates.gate_view(state.index, rollout, gate, wave, state.now())
        if (
            not rejections
            and view.state != "waiting"
            and not any(h < w for _, w, h in view.teams)
            and not any(t.needs_vote_of is not None for t in state.index.targets(name))
        ):
            return
        wave_or_none = wave or None
        for who in ALL_USERS:
            if any(each.actor.uid == who.uid for each in rejections):
                await self._users.run_command(
                    who,
                    "tidy",
                    lambda now, who=who: voting.withdraw(  # type: ignore[misc]
                        now, who, now.index.rollout(name), gate, "tidy", team=None, wave=wave_or_none
                    ),
                )
            await self._users.vote(who, name, Ballot(gate, True, "tidy", wave=wave_or_none))

    async def _retry_or_skip(self, target: Target) -> None:
        """Try two attempts of a failed node again, and after that leave it out."""
        key = (target.rollout, target.node)
        retried = self._retries.setdefault(key, [])
        retried.append(target.attempt)  # again if the daemon was killed and nothing came of it
        may_retry = len(set(retried)) <= 2 and len(retried) <= MAX_RETRY_COMMANDS
        await self._users.command_node(rollout_commands.retry if may_retry else _return, *key)


def _return(state: State, who: SimUser, rollout: Rollout, target: Target, reason: str) -> Events:
    return rollout_commands.skip(state, who, rollout, target, reason, "return")
