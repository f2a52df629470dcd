"""The values of a plan's changes for one target, resolved from its labels and its object.

What submit resolves is hashed and voted for.  A target that joins later gets what holds when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from machines.model.plan import MaintainStage, Plan
from rolloutd.errors import RolloutdError
from rolloutd.plugin.templates import RenderFailed, TemplateInvalid, render
from rolloutd.ports import JSON, Host, plain_value

VALUES = "values"
"""Key of a change's parameters with an expression for each value."""

OBJECT_KEY = "cluster_object"
"""Variable of a node with the fields of its object that plans may use."""

SHOWN_DIGITS = 12

SecretDigests = Mapping[tuple[str, str, str, str], str]
"""Digests of secrets by node, kind of change, name and key."""


class MissingValue(RolloutdError):
    """A target has no value for a name."""


def resolve_values(
    plan: Plan,
    node: str,
    labels: Mapping[str, str],
    variables: Mapping[str, JSON],
    secrets: SecretDigests,
) -> dict[str, dict[str, JSON]]:
    """Return the values of each stage that has some, by step; raises MissingValue, which names the node."""
    return {
        stage.step: {
            name: _resolve(stage, node, name, expression, labels, variables, secrets)
            for name, expression in stage.params[VALUES].items()
        }
        for stage in stages_with_values(plan)
    }


def stages_with_values(plan: Plan) -> Iterator[MaintainStage]:
    return (stage for stage in plan.stages if stage.params.get(VALUES))


def _resolve(
    stage: MaintainStage,
    node: str,
    name: str,
    expression: JSON,
    labels: Mapping[str, str],
    variables: Mapping[str, JSON],
    secrets: SecretDigests,
) -> JSON:
    found: JSON
    match expression:
        case {"label": key}:
            found, where = labels.get(key), f"label {key}"
        case {"field": pointer}:
            found, where = read_field(plain_value(variables.get(OBJECT_KEY)), pointer), f"field {pointer}"
        case {"secret": secret, "key": key}:
            digest = secrets.get((node, stage.kind, secret, key))
            found = None if digest is None else {**expression, "digest": digest}
            where = f"secret {secret}, key {key}"
        case _:
            found, where = _fill(expression, node, labels), "its template"
    if found is None or found == "":
        raise MissingValue(f"{node}: value {name} is missing ({where}); set it, or leave the target out")
    return found


def _fill(text: str, node: str, labels: Mapping[str, str]) -> str | None:
    try:
        return (
            str(render(text, node=node, address=node, labels=labels, variables={})) if "{{" in text else text
        )
    except (RenderFailed, TemplateInvalid):
        return None


def read_field(document: JSON, pointer: str) -> str | None:
    """Return the scalar at a JSON pointer as text, None if there is none."""
    for part in pointer.removeprefix("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, Mapping):
            document = document.get(key)
        elif isinstance(document, list) and key.isdigit() and int(key) < len(document):
            document = document[int(key)]
        else:
            return None
    if isinstance(document, str):
        return document
    return json.dumps(document) if isinstance(document, bool | int | float) else None


def params_for(plan: Plan, stage: MaintainStage, host: Host) -> dict[str, Any]:
    """Return the parameters of a stage on a node: templates filled, with the values that were voted for.

    Raises RenderFailed, and MissingValue for a target that joined later and lacks a value.
    """
    others = {key: value for key, value in stage.params.items() if key != VALUES}
    filled: dict[str, Any] = render(
        others, node=host.name, address=host.address, labels=host.labels, variables={}
    )
    if stage.params.get(VALUES):
        values = plan.values.get(host.name)
        if values is None:
            values = resolve_values(plan, host.name, host.labels, host.connection, {})
        filled[VALUES] = values[stage.undoes or stage.step]
    return filled


def shown_value(value: JSON) -> str:
    """Return a resolved value as people see it: of a secret its reference and the start of its digest."""
    if isinstance(value, str):
        return value
    return f"secret {value['secret']}, key {value['key']}, digest {value['digest'][:SHOWN_DIGITS]}"


def changed_values(
    plan: Plan, node: str, labels: Mapping[str, str], variables: Mapping[str, JSON]
) -> tuple[tuple[str, str, str], ...]:
    """Return the name, the voted and the present text of each value of a target that has changed since.

    A secret is read at submit only.
    """
    changed = []
    for stage in stages_with_values(plan):
        for name, voted in plan.values.get(node, {}).get(stage.step, {}).items():
            expression = stage.params[VALUES][name]
            if isinstance(voted, Mapping):
                continue
            try:
                now = str(_resolve(stage, node, name, expression, labels, variables, {}))
            except MissingValue:
                now = ""
            if now != voted:
                changed.append((name, str(voted), now))
    return tuple(changed)
