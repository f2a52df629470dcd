"""Who asks through Kubernetes: an object submits as a service, a user of the cluster votes as a person."""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from machines.model.rollout import Actor, ActorKind, Rollout
from rolloutd.concurrency import threads
from rolloutd.control.identity import Account, identify, look_up_account
from rolloutd.control.tcp_listener import NAMELESS
from rolloutd.errors import NotAllowed
from rolloutd.operator.objects import RolloutObject
from rolloutd.settings import Settings
from rolloutd.settings.operator import Operator

ISSUER = "kubernetes"

SYSTEM_PREFIX = "system:"
"""How the names of service accounts and of the cluster's parts begin: none is a person."""


@dataclass(frozen=True, slots=True)
class ClusterPrincipal:
    """A caller of a command (a Principal), as the settings map it."""

    user: str
    actor: Actor
    teams: frozenset[str]
    admin: bool = False


def submitter(cluster: str, obj: RolloutObject, teams: frozenset[str]) -> ClusterPrincipal:
    """Return who submits an object: never a person, so it takes no person's vote away."""
    name = submitter_name(cluster, obj.namespace, obj.name, obj.uid)
    return ClusterPrincipal(name, Actor(ActorKind.SERVICE, name), teams)


def rollout_of_object(rollouts: Iterable[Rollout], cluster: str, namespace: str, name: str) -> str | None:
    """Return the open rollout that the object of this name submitted last, None without one."""
    found = [each for of, each in objects_of_namespace(rollouts, cluster, namespace) if of == name]
    return max(found, key=lambda each: each.submitted_at).id if found else None


def objects_of_namespace(
    rollouts: Iterable[Rollout], cluster: str, namespace: str
) -> Iterator[tuple[str, Rollout]]:
    """Yield the open rollouts of a namespace's objects, each with its object's name."""
    prefix = f"{submitter_prefix(cluster)}{namespace}/"
    for each in rollouts:
        if each.submitted_by.name.startswith(prefix) and not each.closed:
            yield each.submitted_by.name.removeprefix(prefix).partition("/")[0], each


async def person_of(user: str, operator: Operator, settings: Settings) -> ClusterPrincipal:
    """Return the person of the settings who a user of the cluster is; raises NotAllowed."""
    person = None if user.startswith(SYSTEM_PREFIX) else operator.people.get(user)
    if person is None:
        raise NotAllowed(f"{user}: no person of the settings; an admin adds them to operator.people")
    account = await threads.ACCOUNTS.run(_account_of, person)
    name = f"{ISSUER}:{person}"
    teams = identify(account, settings.teams, ()).teams
    return ClusterPrincipal(name, Actor(ActorKind.SERVICE, name), teams)


def _account_of(person: str) -> Account:
    """Return the account of a name; one without an account here is a member by name alone."""
    try:
        return look_up_account(pwd.getpwnam(person).pw_uid)
    except KeyError:
        return Account(NAMELESS, person, frozenset())


def submitter_name(cluster: str, namespace: str, name: str, uid: str) -> str:
    return f"{submitter_prefix(cluster)}{namespace}/{name}/{uid}"


def submitter_prefix(cluster: str) -> str:
    """Return how the names of a cluster's submitters begin; a person's name has no slash."""
    return f"{ISSUER}:{cluster}/"
