"""Rights of a call, checked before its query and body are read, and the document of who may make it.

Each rule knows only the user and the path.  The command itself checks rights that
depend on the body (a plan's owner, a gate's teams); no rule here replaces that.
The table of roles in docs/api.md is drawn from the Access of each route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rolloutd.commands import rollout_commands
from rolloutd.commands.resolve import resolve_rollout
from rolloutd.control.identity import Identity
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed

Right = Callable[[State, Identity, Mapping[str, str]], Awaitable[None]]
"""Raises NotAllowed; also NotFound or Refused if the path names none or several objects."""


async def any_user(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow every user who can open the socket."""


def admin_to(do: str) -> Right:
    """Return a rule that allows admins alone."""

    async def check(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
        if not who.admin:
            raise NotAllowed(f"{who.user} may not {do}; ask an admin")

    return check


async def team_member(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of some team, and admins."""
    rollout_commands.require_team_member(who, "do this")


async def voter(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of some team, and admins, who are asked where a verdict is overridden."""
    if not who.teams and not who.admin:
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


async def cleaner(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    """Allow members of the team of the node in the path, or of the rollout's owner, and admins."""
    node = state.index.nodes.get(path_params["s"])
    if node is None:
        await plan_owner(state, who, {"r": path_params["s"]})
    else:
        rollout_commands.require_member(who, node.team, f"clean {node.name}")


async def own_team(state: State, who: Identity, path_params: Mapping[str, str]) -> None:
    rollout_commands.require_member(who, path_params["t"], f"set the rules of {path_params['t']}")


Cell = Literal["no", "own", "token", "yes"]
"""What a role may do: a call for what is its own, with a service's token, or for everything."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may make a call.

    `check` runs before the body is read.  The other fields say what the call as a whole allows: to all who
    can open the socket (`others`), to members of a team, to members of the plan's owner team, to admins.
    """

    callers: str
    check: Right
    others: Cell = "no"
    team: Cell = "yes"
    owner: Cell = "yes"
    admin: Cell = "yes"


EVERYBODY = Access("every user who can open the socket", any_user, others="yes")
TOKEN_BEARER = Access(
    "any caller with a token that a service of the settings signed",
    any_user,
    others="token",
    team="token",
    owner="token",
    admin="token",
)
ANY_TEAM_MEMBER = Access("members of the teams in the settings, and admins", team_member)
VOTER = Access(
    "members of the teams that the gate asks; admins only where a verdict is overridden",
    voter,
    team="own",
    admin="no",
)
OWN_VOTE = Access("the caller who cast the votes", voter, team="own", owner="own", admin="no")
PLAN_SUBMITTER = Access(
    "members of the team that metadata.owner names, and admins", team_member, team="own", owner="own"
)
PLAN_OWNER = Access("members of the team that owns the plan, and admins", plan_owner, team="no")
PLAN_OR_NODE_OWNER = Access(
    "members of the team that owns the plan or the node, and admins", plan_or_node_owner, team="own"
)
ISOLATION_OWNER = Access("members of the team that owns the plan, and admins", isolation_owner, team="no")
NODE_TEAM = Access("members of the node's team, and admins", team_member, team="own", owner="own")
CLEANER = Access(
    "members of the team that owns the node or the plan, and admins",
    cleaner,
    team="own",
    owner="own",
)
HOLD_OWNER = Access("the owner of the hold, and admins", team_member, team="own", owner="own")
FREEZE_SCOPE = Access("admins; members of a team for its own scope", team_member, team="own", owner="own")
ADMIN = Access("admins", admin_to("settle what the audit does not account for"), team="no", owner="no")
VERDICT_ADMIN = Access("admins", admin_to("clear a verdict"), team="no", owner="no")
INVENTORY_ADMIN = Access(
    "admins", admin_to("decide what is believed of the inventory"), team="no", owner="no"
)
LEADERSHIP_ADMIN = Access("admins", admin_to("make the leader step down"), team="no", owner="no")
TRAIN_OWNER = Access(
    "members of the teams that own a rollout of the train, and admins", team_member, team="own", owner="own"
)
OWN_TEAM = Access("members of the team, and admins", own_team, team="own", owner="own")
