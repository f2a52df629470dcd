"""Settings of the front end in Kubernetes: rollouts as objects, and votes by the cluster's users."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rolloutd.plugin import Params
from rolloutd.plugin.addresses import ListenAddress
from rolloutd.plugin.field_types import MAX_ITEMS, FilePath, Namespace, ShortName, TeamName

MAX_PEOPLE = 10_000
"""Users of the cluster who may vote: more than the largest operators employ."""

ClusterUser = Annotated[str, Field(min_length=1, max_length=253)]
Person = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]*$")]


class VotesTls(Params):
    """The certificate of the listener."""

    cert: FilePath = Field(description="Certificate with its chain, PEM; read at the start.")
    key: FilePath = Field(description="Its private key, PEM.")


class OperatorVotes(Params):
    """Where users of the cluster vote with their own token."""

    listen: ListenAddress = Field(description="Address and port, such as 192.0.2.7:9479.")
    tls: VotesTls = Field(description="Tokens cross no network without encryption.")
    audience: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="rolloutd", description="Audience that a token must be for."
    )


class Operator(Params):
    """Rollouts as objects of a Kubernetes cluster."""

    cluster: ShortName = Field(description="Name of a `kubernetes` source of `inventory`.")
    namespaces: dict[Namespace, list[TeamName]] = Field(
        min_length=1,
        max_length=MAX_ITEMS,
        description="Namespaces whose objects are rollouts, each with the teams whose plans it may submit.",
    )
    people: dict[ClusterUser, Person] = Field(
        default={},
        max_length=MAX_PEOPLE,
        description="The cluster's users who may vote, each with the user name of `teams` and `admins`.",
    )
    vote_objects: bool = Field(
        default=False,
        description="Count MaintenanceVote objects whose voters the shipped admission policy proves.",
    )
    votes: OperatorVotes | None = Field(default=None, description="Where they vote with their own token.")
