"""Claims of runs in AWX: an inventory with the run's name and its one node.

A name is unique in an organization, so of two who create the inventory one fails.  A claim without a job is
abandoned by turning its host off: a launch of it that is still on its way then runs on no host, also if it is
committed long after its client has gone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rolloutd.adapters.awx.events import instant
from rolloutd.adapters.awx.http import AnswerLost, AwxClient, AwxRefused, Query
from rolloutd.errors import AdapterFailed
from rolloutd.ports import JSON, RunRequest

NAME_PREFIX = "rolloutd "
"""Before the handle in the name of an inventory, so that users of AWX know whose it is."""

MAX_GROUPS = 100
"""Groups of a node that its inventory gets; each costs two requests."""

CREATE_TRIES = 3
"""Tries of creating an object whose answer was lost: a repetition is recognized by its name."""

ACTIVE = frozenset({"new", "pending", "waiting", "running"})


@dataclass(frozen=True, slots=True)
class Claim:
    """The inventory of a run, whose host may be missing or turned off."""

    inventory: int
    facts: Mapping[str, JSON]
    created_at: float = 0.0
    host: int | None = None
    is_abandoned: bool = False


class Claims:
    def __init__(self, client: AwxClient) -> None:
        self._client = client

    async def take(self, organization: int, handle: str, facts: Mapping[str, JSON]) -> tuple[Claim, bool]:
        """Create the claim of a run, or return that of an earlier call; and whether it is new."""
        nonce = secrets.token_hex(8)
        body = {
            "name": NAME_PREFIX + handle,
            "organization": organization,
            "description": str(facts["rolloutd_node"]),
            "variables": json.dumps({**facts, "rolloutd_claim": nonce}),
        }
        answer = await self._create("inventories/", body)
        if answer is not None:
            return Claim(int(answer["id"]), facts), True
        claim = await self.find(organization, handle)
        if claim is None:
            name = NAME_PREFIX + handle
            raise self._client.unavailable(f"inventory {name} is being deleted", "wait until AWX has done it")
        # The answer to our own request may have been lost.
        return claim, claim.facts.get("rolloutd_claim") == nonce

    async def find(self, organization: int, handle: str) -> Claim | None:
        query: Query = {"name": NAME_PREFIX + handle, "organization": organization}
        listed = await self._client.list_all("inventories/", query)
        exact = [
            each
            for each in listed
            if each.get("name") == NAME_PREFIX + handle and not each.get("pending_deletion")
        ]
        if not exact:
            return None
        created_at = instant(exact[0].get("created")) or 0.0
        claim = Claim(int(exact[0]["id"]), read_facts(exact[0].get("variables")), created_at)
        return await self._with_host(claim)

    async def list_all(self, organization: int) -> Sequence[Mapping[str, JSON]]:
        query: Query = {"name__startswith": NAME_PREFIX, "organization": organization}
        listed = await self._client.list_all("inventories/", query)
        return [each for each in listed if not each.get("pending_deletion")]

    async def fill(
        self, claim: Claim, node: str, variables: Mapping[str, JSON], groups: Sequence[str]
    ) -> Claim:
        path = f"inventories/{claim.inventory}/"
        body = {"name": node, "variables": json.dumps(variables), "enabled": True}
        answer = await self._create(f"{path}hosts/", body)
        if answer is None:
            claim = await self._with_host(claim)
            if claim.host is None or claim.is_abandoned:
                raise self._client.refused(
                    400, f"inventory of {node} was abandoned by another daemon", "stop the older daemon"
                )
        else:
            claim = replace(claim, host=int(answer["id"]))
        for name in groups[:MAX_GROUPS]:
            group = await self._create(f"{path}groups/", {"name": name})
            if group is None:
                raise self._client.refused(
                    400, f"group {name} cannot be added to an inventory", "rename the group"
                )
            await self._client.request(
                "POST", f"groups/{int(group['id'])}/hosts/", body={"id": claim.host}, accepted=(201, 204)
            )
        return claim

    async def abandon(self, claim: Claim, node: str) -> Claim:
        """Let no job run on the node by this claim that has not begun yet."""
        if claim.host is None:
            body = {"name": node, "enabled": False}
            answer = await self._create(f"inventories/{claim.inventory}/hosts/", body)
            if answer is not None:
                return replace(claim, host=int(answer["id"]), is_abandoned=True)
            claim = await self._with_host(claim)
        if not claim.is_abandoned:
            await self._client.request("PATCH", f"hosts/{claim.host}/", body={"enabled": False})
        return replace(claim, is_abandoned=True)

    async def jobs(self, claim: Claim) -> Sequence[Mapping[str, JSON]]:
        """Return the jobs of a claim, the oldest first; a claim that two daemons use has more than one."""
        query: Query = {"inventory": claim.inventory, "order_by": "id"}
        return await self._client.list_all("jobs/", query)

    async def active_jobs(self, organization: int, node: str) -> Sequence[Mapping[str, JSON]]:
        query: Query = {
            "inventory__organization": organization,
            "inventory__description": node,
            "inventory__name__startswith": NAME_PREFIX,
            "status__in": ",".join(sorted(ACTIVE)),
        }
        return await self._client.list_all("jobs/", query)

    async def delete(self, claim: Claim) -> None:
        """Delete the inventory; its job stays in AWX, and is no longer found by the run."""
        await self._client.request("DELETE", f"inventories/{claim.inventory}/", accepted=(202, 204, 404))

    async def _with_host(self, claim: Claim) -> Claim:
        hosts = await self._client.list_all(f"inventories/{claim.inventory}/hosts/", {})
        if not hosts:
            return claim
        return replace(
            claim, host=int(hosts[0]["id"]), is_abandoned=not any(each.get("enabled") for each in hosts)
        )

    async def _create(self, path: str, body: JSON) -> JSON:
        """Create an object; return None if one has its name."""
        for left in reversed(range(CREATE_TRIES)):
            try:
                return (await self._client.request("POST", path, body=body, accepted=(201,)))[1]
            except AnswerLost:
                if not left:
                    raise
            except AwxRefused as error:
                if error.status == 400 and "already exists" in str(error.body):
                    return None
                raise
        raise AdapterFailed(f"{path}: not created")


def run_facts(request: RunRequest, tasks: int) -> Mapping[str, JSON]:
    """Return what a later daemon needs to know of a run that only its request says."""
    return {
        "rolloutd_node": request.node,
        "rolloutd_rollout": request.rollout,
        "rolloutd_playbook": request.playbook,
        "rolloutd_pin": request.source.pin,
        "rolloutd_timeout_s": request.timeout_s,
        "rolloutd_check_only": request.check_only,
        "rolloutd_tasks": tasks,
    }


def read_facts(text: JSON) -> Mapping[str, JSON]:
    try:
        facts = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        facts = None
    return facts if isinstance(facts, dict) else {}
