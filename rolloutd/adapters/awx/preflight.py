"""What an AWX lacks for runs: its version, the account's rights, projects and job templates."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rolloutd.adapters.awx.claims import Claims
from rolloutd.adapters.awx.http import AwxClient
from rolloutd.adapters.awx.templates import Templates
from rolloutd.errors import RolloutdError

OLDEST_VERSION = 23
"""AWX has asked for a timeout and for forks on launch since this version."""


async def find_problems(client: AwxClient, templates: Templates, claims: Claims) -> Sequence[str]:
    """Return a sentence for each problem; an empty inventory is created and deleted."""
    problems: list[str] = []
    try:
        if problem := await _version_problem(client):
            problems.append(problem)
        organization = await templates.organization(is_asked_again=True)
    except RolloutdError as error:
        return [*problems, str(error)]
    try:
        facts = {"rolloutd_node": "no node: a test of the account's rights"}
        claim, _ = await claims.take(organization, f"test {secrets.token_hex(8)}", facts)
        await claims.abandon(claim, "none")
        await claims.delete(claim)
    except RolloutdError as error:
        text = f"{client.name}: the account cannot create inventories ({error})"
        problems.append(f"{text}; give it `inventory admin` of the organization")
    for name in dict.fromkeys(templates.projects.values()):
        try:
            problems += await templates.problems(name)
        except RolloutdError as error:
            problems.append(str(error))
    return problems


async def _version_problem(client: AwxClient) -> str:
    answer = await client.get("ping/")
    version = str(answer.get("version") or "") if isinstance(answer, dict) else ""
    major = version.partition(".")[0]
    if not major.isdecimal():
        return f"{client.name}: it does not say its version; check `url` and `prefix`"
    if int(major) < OLDEST_VERSION:
        return f"{client.name}: version {version} is too old; upgrade to {OLDEST_VERSION} or later"
    return ""
