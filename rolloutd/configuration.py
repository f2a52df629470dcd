"""The intended configuration of a node: what a run gives it, as one document without secrets.

A document is known by its hash.  A secret is replaced by a keyed hash of its name and value, so that a
changed secret is another content, and the document does not give it away.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from machines.model.plan import Plan
from rolloutd.audit_chain import canonical_json
from rolloutd.key_file import load_key
from rolloutd.ports import GROUPS, JSON, WITHHELD, plain_value
from rolloutd.secret_variables import SECRETS_MARK, map_secrets, marked_secrets

KEY_FILE = "redaction.key"

SECRET_PREFIX = "secret:"  # noqa: S105  # what stands for a secret, not one
"""Begins what stands for a secret in a document."""


def load_redaction_key(state_dir: Path) -> bytes:
    """Return the key of the hashes of secrets; it is made at the first start."""
    return load_key(state_dir / KEY_FILE)


def intended_configuration(
    plan: Plan, source: Mapping[str, str], variables: Mapping[str, JSON], key: bytes
) -> dict[str, JSON]:
    """Return what a run of the plan gives to a node that has these variables in the inventory.

    `variables` of the document are those of the inventory under those of the plan's first stage; a later
    stage has its own where they differ.
    """
    names = marked_secrets(variables)
    inventory = {name: plain_value(value) for name, value in variables.items() if name not in _NOT_GIVEN}
    first = {**inventory, **(plan.stages[0].variables if plan.stages else {})}

    def redact(given: Mapping[str, JSON]) -> dict[str, JSON]:
        redacted: dict[str, JSON] = map_secrets(
            given, lambda name, value: _keyed_hash(key, name, value), names
        )
        return redacted

    return {
        "artifacts": {},
        "commit": f"{source['kind']}:{source['pin']}",
        "groups": list(variables.get(GROUPS) or ()),
        "stages": {
            stage.name: {
                "playbook": stage.playbook,
                "variables": redact({k: v for k, v in stage.variables.items() if first.get(k, _OTHER) != v}),
            }
            for stage in plan.stages
        },
        "variables": redact(first),
    }


_NOT_GIVEN = frozenset({GROUPS, WITHHELD, SECRETS_MARK})
"""Keys of a connection that are not variables of the node."""

_OTHER = object()


def content_hash(document: Mapping[str, JSON]) -> str:
    return hashlib.sha256(canonical_json(document).encode("utf-8", "surrogatepass")).hexdigest()


def _keyed_hash(key: bytes, name: str, value: JSON) -> str:
    text = f"{name}={canonical_json(value)}".encode("utf-8", "surrogatepass")
    return SECRET_PREFIX + hmac.new(key, text, hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs between two documents; None where it is absent."""

    name: str
    before: JSON
    after: JSON


def differences(
    before: Mapping[str, JSON] | None, after: Mapping[str, JSON] | None
) -> tuple[Difference, ...]:
    """Return the values that differ, by name; variables have their own names, other keys dotted paths."""
    old, new = dict(_flatten(before or {})), dict(_flatten(after or {}))
    return tuple(
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _OTHER) != new.get(name, _OTHER)
    )


def _flatten(document: Mapping[str, JSON]) -> Iterator[tuple[str, JSON]]:
    for key, value in document.items():
        yield from _flatten_value("" if key == "variables" else key, value)


def _flatten_value(name: str, value: JSON) -> Iterator[tuple[str, JSON]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flatten_value(f"{name}.{key}" if name else key, inner)
