"""The intended configuration of a node: what a run gives it, as one document without secrets.

A configuration is known by a hash over digests of all its values.  The document has the values that may be
shown, and keyed digests of the others, so a changed secret is another content that shows nothing of it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from machines.model.plan import PLAYBOOK_RUN, MaintainStage, Plan
from rolloutd.audit.audit_chain import canonical_json
from rolloutd.configuration.secret_variables import SECRETS_MARK, marked_secrets
from rolloutd.configuration.shown_variables import hide, is_shown
from rolloutd.errors import StoreFailed
from rolloutd.files.key_file import KEY_BYTES, load_key
from rolloutd.ports import GROUPS, JSON, WITHHELD, plain_value

KEY_FILE = "redaction.key"


def load_redaction_key(state_dir: Path, file: Path | None = None) -> bytes:
    """Return the key of digests and of sealed variables.

    That of the state directory is made at the first start; one that the settings name must be there.  Raises
    StoreFailed.
    """
    if file is None:
        return load_key(state_dir / KEY_FILE)
    try:
        key = file.read_bytes()
    except OSError as error:
        raise StoreFailed(f"redaction_key_file {file}: it cannot be read ({error}); check it") from error
    if len(key) < KEY_BYTES:
        raise StoreFailed(f"redaction_key_file {file}: it is too short; write {KEY_BYTES} random bytes")
    return key


def fingerprint(key: bytes) -> str:
    """Return digits that say whether two keys are the same, and nothing else of them."""
    return hmac.new(key, b"rolloutd redaction key", hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a run gives to a node: its hash, and the document with the values that may be shown."""

    hash: str
    document: Mapping[str, JSON]


def intended_configuration(
    plan: Plan, source: Mapping[str, str], variables: Mapping[str, JSON], key: bytes, allowed: Sequence[str]
) -> dict[str, JSON]:
    """Return what a run of the plan gives to a node that has these variables in the inventory.

    `variables` of the document are those of the inventory under those of the plan's first stage; a later
    stage has its own where they differ.  `allowed` are globs of the names that the settings show; the plan
    shows names of its own variables only.
    """
    shown_by_plan = {
        name for stage in plan.stages for name in stage.variables if is_shown(name, plan.shown_variables)
    }

    def shows(name: str, *, is_own: bool) -> bool:
        return is_shown(name, allowed) or (is_own and name in shown_by_plan)

    document = _document(plan, source, variables, key, shows)
    return {**document, _SHOWN_BY_PLAN: sorted(shown_by_plan)} if shown_by_plan else document


def configuration_hash(
    plan: Plan, source: Mapping[str, str], variables: Mapping[str, JSON], key: bytes
) -> str:
    """Return the hash of what a run gives to a node; it does not depend on what is shown."""
    return content_hash(_document(plan, source, variables, key, lambda name, *, is_own: False))


def earlier_configuration_hash(
    plan: Plan, source: Mapping[str, str], variables: Mapping[str, JSON], key: bytes
) -> str:
    """Return the hash by which rolloutd knew the same when it had digests for known secrets only.

    Verdicts on such content stay in effect.
    """
    return content_hash(_document(plan, source, variables, key, lambda name, *, is_own: True))


def shown_document(document: Mapping[str, JSON], key: bytes, allowed: Sequence[str]) -> dict[str, JSON]:
    """Return a stored document as people may see it now."""
    by_plan = frozenset(document.get(_SHOWN_BY_PLAN, ()))
    return _hide_document(document, key, lambda name: name in by_plan or is_shown(name, allowed))


def _hide_document(document: Mapping[str, JSON], key: bytes, shows: Callable[[str], bool]) -> dict[str, JSON]:
    def hide_stored(variables: Mapping[str, JSON]) -> dict[str, JSON]:
        return hide(variables, key, shows, has_digests=True)

    stages = {
        name: {**stage, "variables": hide_stored(stage["variables"])}
        for name, stage in document["stages"].items()
    }
    hidden = {**document, "stages": stages, "variables": hide_stored(document["variables"])}
    hidden.pop(_SHOWN_BY_PLAN, None)
    return hidden


class _Shows(Protocol):
    def __call__(self, name: str, *, is_own: bool) -> bool: ...


def _document(
    plan: Plan, source: Mapping[str, str], variables: Mapping[str, JSON], key: bytes, shows: _Shows
) -> dict[str, JSON]:
    names = marked_secrets(variables)
    inventory = {name: plain_value(value) for name, value in variables.items() if name not in _NOT_GIVEN}
    own = plan.stages[0].variables if plan.stages else {}
    first = {**inventory, **own}
    return {
        "artifacts": {},
        "commit": f"{source['kind']}:{source['pin']}",
        **({"requirements": source["requirements"]} if "requirements" in source else {}),
        "groups": list(variables.get(GROUPS) or ()),
        "stages": {
            stage.name: {
                **({"playbook": stage.playbook} if stage.kind == PLAYBOOK_RUN else _change_of(stage)),
                "variables": hide(
                    {k: v for k, v in stage.variables.items() if first.get(k, _OTHER) != v},
                    key,
                    lambda name: shows(name, is_own=True),
                    names,
                ),
            }
            for stage in plan.stages
        },
        "variables": hide(first, key, lambda name: shows(name, is_own=name in own), names),
    }


def _change_of(stage: MaintainStage) -> dict[str, JSON]:
    return {"kind": stage.kind, "params": dict(stage.params)}


_NOT_GIVEN = frozenset({GROUPS, WITHHELD, SECRETS_MARK})
"""Keys of a connection that are not variables of the node."""

_SHOWN_BY_PLAN = "shown"
"""Key of a stored document with the names of variables that the plan shows."""

_OTHER = object()


def content_hash(document: Mapping[str, JSON]) -> str:
    return hashlib.sha256(canonical_json(document).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs between two documents; None where it is absent."""

    name: str
    before: JSON
    after: JSON


def differences(
    before: Mapping[str, JSON], after: Mapping[str, JSON], key: bytes, allowed: Sequence[str]
) -> tuple[Difference, ...]:
    """Return the values that differ, by name; variables have their own names, other keys dotted paths.

    Digests are compared, so a value that only one of the two shows is not a difference.
    """
    old, new = (dict(_flatten(_hide_document(each, key, lambda name: False))) for each in (before, after))
    was, becomes = (dict(_flatten(shown_document(each, key, allowed))) for each in (before, after))
    return tuple(
        Difference(name, was.get(name), becomes.get(name))
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
