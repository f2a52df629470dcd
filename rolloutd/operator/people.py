"""Who asks through Kubernetes: an object submits as a service, a user of the cluster votes as a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from machines.model.rollout import Actor, ActorKind, Rollout
from rolloutd.operator.objects import RolloutObject

ISSUER = "kubernetes"


@dataclass(frozen=True, slots=True)
class ClusterPrincipal:
    """A caller of a command (a Principal), as the settings map it."""

    user: str
    actor: Actor
    teams: frozenset[str]
    admin: bool = False


def submitter(cluster: str, obj: RolloutObject, teams: frozenset[str]) -> ClusterPrincipal:
    """Return who submits an object: never a person, so it takes no vote from anybody."""
    name = f"{submitter_prefix(cluster)}{obj.namespace}/{obj.name}/{obj.uid}"
    return ClusterPrincipal(name, Actor(ActorKind.SERVICE, name), teams)


def rollout_of_object(rollouts: Iterable[Rollout], cluster: str, namespace: str, name: str) -> str | None:
    """Return the open rollout that the object of this name submitted last, None without one."""
    prefix = f"{submitter_prefix(cluster)}{namespace}/{name}/"
    found = [each for each in rollouts if each.submitted_by.name.startswith(prefix) and not each.closed]
    return max(found, key=lambda each: each.submitted_at).id if found else None


def submitter_prefix(cluster: str) -> str:
    """Return how the names of a cluster's submitters begin; a person's name has no slash."""
    return f"{ISSUER}:{cluster}/"
