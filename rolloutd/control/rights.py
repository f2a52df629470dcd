"""Rights of a call, checked before its query and body are read.

Each rule knows only the user and the path.  The command itself checks rights that
depend on the body (a plan's owner, a gate's teams); no rule here replaces that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from rolloutd.commands import rollout_commands
from rolloutd.control.identity import Identity
from rolloutd.control.resolve import resolve_rollout
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed

Right = Callable[[State, Identity, Mapping[str, str]], Awaitable[None]]
"""Raises NotAllowed; also NotFound or Refused if the path names none or several objects."""


async def any_user(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow every user who can open the socket."""


async def admin(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    if not who.admin:
        raise NotAllowed(f"{who.user} may not settle what the audit does not account for; ask an admin")


async def team_member(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of some team, and admins."""
    rollout_commands.require_team_member(who, "do this")


async def voter(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of some team: an admin alone has no vote."""
    if not who.teams:
        raise NotAllowed(f"{who.user} may not vote; ask a member of a team that the gate asks")


async def plan_owner(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of the team that owns the plan, and admins."""
    rollout_commands.require_team_member(who, "change a rollout")
    resolved = await resolve_rollout(state, path_params["r"])
    rollout_commands.require_plan_owner(who, resolved.rollout, "change")


async def plan_or_node_owner(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of the team that owns the plan or the node, and admins."""
    node = state.index.nodes.get(path_params["n"])
    if node is None or node.team is None or node.team not in who.teams:
        await plan_owner(state, who, path_params)


async def isolation_owner(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of the teams whose plans have the node among their targets, and admins."""
    rollout_commands.require_team_member(who, "return a node")
    targets = state.index.targets_on(path_params["n"])
    owners = {state.index.rollout(target.rollout).plan.owner for target in targets}
    if owners and not who.admin and not owners & who.teams:
        raise NotAllowed(
            f"{who.user} may not return {path_params['n']}; "
            f"ask a member of {' or '.join(sorted(owners))} or an admin"
        )


async def own_team(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of the team in the path, and admins."""
    rollout_commands.require_member(who, path_params["t"], f"set the rules of {path_params['t']}")
