"""The values of a plan's changes at its submission: those of each target, and the secrets that they name."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence

from machines.facts.projection import Projection
from machines.model.plan import Plan
from rolloutd.configuration import target_values
from rolloutd.engine.state import State
from rolloutd.errors import InvalidFile
from rolloutd.planfile import PlanFile
from rolloutd.ports import JSON
from rolloutd.settings.compile import compile_plan
from rolloutd.texts.formats import join_limited, pluralize

MAX_NAMED_TARGETS = 10
"""Targets that a refusal names: enough to see what they lack."""

MAX_VALUES_BYTES = 8 * 1024 * 1024
"""Values of all targets of a plan: they are stored with it, and hashed at each preview."""

SECRETS_AT_ONCE = 16
"""Secrets that are read at once at a submit, so that no management cluster is flooded."""

NO_SECRETS: target_values.SecretDigests = {}


async def digest_secrets(state: State, plan_file: PlanFile) -> target_values.SecretDigests:
    """Return keyed digests of the secrets that the plan's values name, for each target."""
    plan = compile_plan(plan_file.content, teams=state.settings.teams)
    named = [
        (stage.kind, expression["secret"], expression["key"])
        for stage in target_values.stages_with_values(plan)
        for expression in stage.params[target_values.VALUES].values()
        if "secret" in expression and not isinstance(expression, str)
    ]
    if not named:
        return NO_SECRETS
    at_once = asyncio.Semaphore(SECRETS_AT_ONCE)

    async def digest(node: str, kind: str, name: str, key: str) -> str:
        async with at_once:
            found = await state.digest_secret(kind, state.host(node), name, key)
        return hmac.new(state.redaction_key, found.encode(), hashlib.sha256).hexdigest()

    nodes = [node.name for node in state.index.nodes.values() if plan.selector.matches(node.labels)]
    keys = [(node, *each) for node in nodes for each in set(named)]
    return dict(zip(keys, await asyncio.gather(*(digest(*each) for each in keys)), strict=True))


def resolve_all_values(
    facts: Projection,
    connections: Mapping[str, Mapping[str, JSON]],
    plan_file: PlanFile,
    plan: Plan,
    nodes: Sequence[str],
    secrets: target_values.SecretDigests,
) -> dict[str, dict[str, dict[str, JSON]]]:
    """Return the values of each target; refuses a plan of which a target lacks one."""
    values: dict[str, dict[str, dict[str, JSON]]] = {}
    missing: list[str] = []
    if not any(target_values.stages_with_values(plan)):
        return values
    for node in nodes:
        try:
            values[node] = target_values.resolve_values(
                plan, node, facts.nodes[node].labels, connections.get(node, {}), secrets
            )
        except target_values.MissingValue as error:
            missing.append(str(error))
    if missing:
        found = f"{pluralize(len(missing), 'target')} of {len(nodes)} without a value"
        allowed = "labels, fields and secrets that each target has"
        text = join_limited(missing, MAX_NAMED_TARGETS)
        mistake = plan_file.diagnostic(("spec", "maintain"), found=found, allowed=allowed, message=text)
        raise InvalidFile((mistake,))
    size = len(json.dumps(values))
    if size > MAX_VALUES_BYTES:
        found, allowed = f"{size} bytes", f"at most {MAX_VALUES_BYTES} bytes for all targets together"
        mistake = plan_file.diagnostic(
            ("spec", "maintain"),
            found=found,
            allowed=allowed,
            message="the values of the targets are too large",
        )
        raise InvalidFile((mistake,))
    return values
