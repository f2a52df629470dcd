"""A plan's content: the one form that is stored, hashed, voted for and compiled.

Content is JSON with every default filled in, selectors in canonical spelling and durations in seconds, so
comments, key order and spelling change nothing.  Its three parts have hashes of their own: what is done
(change), where (scope), and who must agree and when (policy).  Every key belongs to exactly one part, except
`metadata.ticket` and `metadata.description`, which are for people, and `source`, which the pin replaces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

from rolloutd.planfile.change import COMMON_STAGE_KEYS, DEFAULT_EXPECTED_S, DEFAULT_GUARD
from rolloutd.planfile.model import PlanDocument
from rolloutd.planfile.prepare import stage_names
from rolloutd.plugin import PLAYBOOK

JSON = Any
Content = Mapping[str, JSON]

CHANGE_KEYS = ("isolate", "maintain", "rollback", "verify", "probation")
SCOPE_KEYS = ("targets", "enrol", "pools")
POLICY_KEYS = ("max_parallel", "soak", "windows", "traffic", "gates", "limits")

OPTIONAL_CHANGE_KEYS = ("guard",)
OPTIONAL_POLICY_KEYS = (
    "idle_for",
    "poll",
    "pilot",
    "skip_compliant",
    "keep",
    "every",
    "train",
    "on_failure",
    "at_most",
    "show_vars",
    "bootstrap",
    "strategy",
)
"""Keys that a plan has only when they are given and not false, so that other plans keep their digest."""

RESOLVED_CHANGE_KEYS = ("values",)
"""Keys of the change that are added at submit: the values of each target."""

PREPARE_CHANGE_KEYS = ("stages", "cleanup", "resolved")
PREPARE_POLICY_KEYS = ("windows", "tolerate", "force", "force_nodes")
"""The parts of `prepare`: `resolved` and what is forced are added at submit, the one from the source."""


def plan_content(document: PlanDocument) -> dict[str, JSON]:
    content = document.model_dump(mode="json", by_alias=True)
    spec = content["spec"]
    stages = spec["maintain"]
    for number, stage in enumerate(stages, start=1):
        _complete_stage(stage, number, len(stages))
    for key in (*OPTIONAL_CHANGE_KEYS, *OPTIONAL_POLICY_KEYS):
        if spec[key] is None or spec[key] is False:
            del spec[key]
    for section, key, default in (
        (spec, "on_failure", "pause"),
        (spec, "prepare", None),
        (spec, "show_vars", []),
        (spec["limits"], "start", None),
        (spec.get("guard", {}), "kind", DEFAULT_GUARD),
    ):
        # Younger keys: a plan that says the default has the digest of one without the key.
        if section.get(key, default) == default:
            section.pop(key, None)
    if "prepare" in spec:
        written = [(kind, stage) for item in spec["prepare"]["stages"] for kind, stage in item.items()]
        names = stage_names([(kind, stage["name"]) for kind, stage in written])
        for name, (_, stage) in zip(names, written, strict=True):
            stage["name"] = name
    # A gate that cannot be reached must not change the digest that people vote for.
    if "pilot" not in spec:
        del spec["gates"]["pilot"]
    rollback = spec["rollback"]
    if rollback is not None:
        # A rollback needs the variables of the change; they are written out, so that people vote for them.
        rollback["vars"] = {**_merged_variables(stages), **rollback["vars"]}
    return content


def _complete_stage(stage: dict[str, JSON], number: int, count: int) -> None:
    """Fill in the defaults of a stage, and leave out the keys of the kinds that it is not."""
    if stage["name"] is None:
        stage["name"] = _default_stage_name(number, count)
    if stage["expected"] is None:
        stage["expected"] = min(DEFAULT_EXPECTED_S, stage["timeout"])
    for kind in stage.keys() - COMMON_STAGE_KEYS:
        if stage[kind] is None:
            del stage[kind]
        elif kind != PLAYBOOK:
            stage[kind] = {key: value for key, value in stage[kind].items() if value is not None}
            del stage["vars"]


def written_content(content: Content) -> dict[str, JSON]:
    """Return a plan's content without the defaults: what its author wrote."""
    written = _without_defaults(content, PlanDocument)
    for key in RESOLVED_CHANGE_KEYS:
        written["spec"].pop(key, None)
    stages = content["spec"]["maintain"]
    for number, (stage, kept) in enumerate(zip(stages, written["spec"]["maintain"], strict=True), start=1):
        if stage["name"] == _default_stage_name(number, len(stages)):
            del kept["name"]
        if stage["expected"] == min(DEFAULT_EXPECTED_S, stage["timeout"]):
            kept.pop("expected", None)
    return written


def _default_stage_name(number: int, count: int) -> str:
    return "configure" if count == 1 else f"stage-{number}"


def _without_defaults(content: Content, model: type[BaseModel]) -> dict[str, JSON]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    kept = {}
    for key, value in content.items():
        field = fields.get(key)
        if field is None:  # a key of an adapter that is no longer installed
            kept[key] = value
            continue
        default = field.default
        if isinstance(default, BaseModel):
            default = default.model_dump(mode="json", by_alias=True)
        if value == default:
            continue
        stripped = _strip_value(value, field.annotation)
        # A section whose values are all defaults says nothing, except one that is absent by default.
        if stripped != {} or default is None:
            kept[key] = stripped
    return kept


def _strip_value(value: JSON, annotation: Any) -> JSON:
    inner = next(iter(get_args(annotation)), None)
    if isinstance(value, list) and _is_model(inner):
        return [_without_defaults(each, inner) for each in value]
    if get_origin(annotation) is Union and isinstance(value, Mapping):
        # The models of several kinds: the value is of the one that has all its keys.
        kinds = [each for each in get_args(annotation) if _is_model(each)]
        annotation = next((each for each in kinds if value.keys() <= each.model_fields.keys()), None)
    return _without_defaults(value, annotation) if _is_model(annotation) else value


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _merged_variables(stages: Sequence[Mapping[str, JSON]]) -> dict[str, JSON]:
    return {key: value for stage in reversed(stages) for key, value in stage.get("vars", {}).items()}


def canonical_json(value: JSON) -> str:
    """Return the canonical text of a JSON value: sorted keys, no blanks; raises ValueError for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def change_content(content: Content, pin: Mapping[str, str]) -> dict[str, JSON]:
    """Return what is done: the pinned source and all that runs on a node.

    `pin` holds `kind` and `pin`, as the source was resolved at submit, and `requirements` if it has some.
    """
    spec = content["spec"]
    change = {key: spec[key] for key in CHANGE_KEYS}
    optional = {key: spec[key] for key in (*OPTIONAL_CHANGE_KEYS, *RESOLVED_CHANGE_KEYS) if key in spec}
    prepare = _part_of_prepare(spec, PREPARE_CHANGE_KEYS)
    keys = ("kind", "pin", "requirements")
    return {"pin": {key: pin[key] for key in keys if key in pin}, **change, **optional, **prepare}


def policy_content(content: Content) -> dict[str, JSON]:
    """Return who must agree and how carefully: owner, gates, waves' limits, windows, traffic."""
    spec = content["spec"]
    waves = [{key: wave[key] for key in ("max_parallel", "soak", "gate")} for wave in spec["waves"]]
    canary = spec["canary"] and {"max_parallel": spec["canary"]["max_parallel"]}
    policy = {key: spec[key] for key in POLICY_KEYS}
    optional = {key: spec[key] for key in OPTIONAL_POLICY_KEYS if key in spec}
    optional |= _part_of_prepare(spec, PREPARE_POLICY_KEYS)
    return {"owner": content["metadata"]["owner"], "canary": canary, "waves": waves, **policy, **optional}


def _part_of_prepare(spec: Mapping[str, JSON], keys: Sequence[str]) -> dict[str, JSON]:
    prepare = spec.get("prepare")
    return {} if prepare is None else {"prepare": {key: prepare[key] for key in keys if key in prepare}}


def digest(content: Content, pin: Mapping[str, str], targets: Iterable[str]) -> dict[str, str]:
    """Return the hashes people vote for: `change`, `scope`, `policy` and, over the three, `whole`."""
    parts = {
        "change": _sha256(change_content(content, pin)),
        "scope": _sha256({**_scope(content), "resolved": sorted(targets)}),
        "policy": _sha256(policy_content(content)),
    }
    return {**parts, "whole": _sha256(parts)}


def selector_digest(content: Content) -> str:
    """Return the hash of the scope as written, before targets were resolved."""
    return _sha256(_scope(content))


def _scope(content: Content) -> dict[str, JSON]:
    spec = content["spec"]
    waves = [{key: wave[key] for key in ("name", "select")} for wave in spec["waves"]]
    canary = spec["canary"] and {"select": spec["canary"]["select"]}
    scope = {key: spec[key] for key in SCOPE_KEYS}
    return {"name": content["metadata"]["name"], "canary": canary, "waves": waves, **scope}


def _sha256(value: JSON) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
