"""Merges patches into objects, and keeps the record of who wrote which field.

As much of strategic merge as nodes, pods and budgets need: mappings merge, null
deletes, lists of named things merge by their key.  Field managers are recorded
for the fields of `spec`, one by one, and for each annotation and label.
"""

from __future__ import annotations

import copy
from typing import Any

JSON = Any

MERGE_KEYS = {
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "volumes": "name",
}


def strategic(old: JSON, patch: JSON, key: str = "") -> JSON:
    """Return the old value with a strategic merge patch in it."""
    if isinstance(patch, dict):
        merged = copy.deepcopy(old) if isinstance(old, dict) else {}
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = strategic(merged.get(name), value, name)
        return merged
    if isinstance(patch, list) and key in MERGE_KEYS and isinstance(old, list):
        return _lists(old, patch, MERGE_KEYS[key])
    return copy.deepcopy(patch)


def merge(old: JSON, patch: JSON) -> JSON:
    """Return the old value with a JSON merge patch (RFC 7386) in it."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def record_manager(before: JSON, after: JSON, manager: str, subresource: str, now: str) -> None:
    """Note in `after` which fields this write changed, and whose they are now."""
    fields = _changed(before or {}, after)
    gone = {path for path in _leaves(before or {}) if path not in _leaves(after)}
    entries = list(after["metadata"].get("managedFields") or ())
    kept = []
    for entry in entries:
        paths = _read(entry["fieldsV1"]) - fields - gone
        if paths:
            kept.append({**entry, "fieldsV1": _write(paths)})
    mine = {
        "manager": manager,
        "operation": "Update",
        "apiVersion": after.get("apiVersion", "v1"),
        "time": now,
    }
    if subresource:
        mine["subresource"] = subresource
    same = next(
        (e for e in kept if e["manager"] == manager and e.get("subresource", "") == subresource), None
    )
    if same is not None:
        kept.remove(same)
        fields |= _read(same["fieldsV1"])
    if fields:
        kept.append({**mine, "fieldsType": "FieldsV1", "fieldsV1": _write(fields)})
    after["metadata"]["managedFields"] = kept


def _lists(old: list[JSON], patch: list[JSON], key: str) -> list[JSON]:
    merged = copy.deepcopy(old)
    for item in patch:
        place = next((i for i, each in enumerate(merged) if each.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            merged = [each for each in merged if each.get(key) != item.get(key)]
        elif place is None:
            merged.append(copy.deepcopy(item))
        else:
            merged[place] = strategic(merged[place], item)
    return merged


def _leaves(thing: JSON) -> dict[tuple[str, ...], JSON]:
    found: dict[tuple[str, ...], JSON] = {}
    for name, value in (thing.get("spec") or {}).items():
        found["spec", name] = value
    for part in ("annotations", "labels"):
        for name, value in (thing.get("metadata", {}).get(part) or {}).items():
            found["metadata", part, name] = value
    return found


def _changed(before: JSON, after: JSON) -> set[tuple[str, ...]]:
    old = _leaves(before)
    return {path for path, value in _leaves(after).items() if path not in old or old[path] != value}


def _read(fields: JSON, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not fields:
        return {path}
    return {leaf for name, below in fields.items() for leaf in _read(below, (*path, name[2:]))}


def _write(paths: set[tuple[str, ...]]) -> JSON:
    fields: dict[str, JSON] = {}
    for path in sorted(paths):
        place = fields
        for part in path:
            place = place.setdefault(f"f:{part}", {})
    return fields
