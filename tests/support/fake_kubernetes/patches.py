"""Merges patches into objects, and keeps the record of who wrote which field.

As much of strategic merge as nodes, pods and budgets need: mappings merge, null
deletes, lists of named things merge by their key.  Field managers are recorded
for each field of `spec`, a list as one, and for each annotation and label.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.support.fake_kubernetes.errors import ApiRefusal

JSON = Any

Paths = set[tuple[str, ...]]
"""Fields of objects, each as the names that lead to it."""

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


def paths_of(thing: JSON) -> Paths:
    """Return the fields of `spec`, the annotations and the labels of an object, a list as one field."""
    return set(_leaves(thing))


def apply(before: JSON, body: JSON, manager: str, *, force: bool = False) -> JSON:
    """Return the object with a server-side apply in it: what the manager applied before and omits is gone.

    A field with another value that another manager wrote is a conflict.
    """
    wanted, now = _leaves(body), _leaves(before)
    owners = {
        (entry["manager"], entry["operation"]): _read(entry["fieldsV1"])
        for entry in before["metadata"].get("managedFields") or ()
    }
    mine = owners.pop((manager, "Apply"), set())
    conflicts = [
        (name, path)
        for (name, _), paths in owners.items()
        for path in sorted(paths)
        for field, value in wanted.items()
        if (path[: len(field)] == field or field[: len(path)] == path) and now.get(field) != value
    ]
    if conflicts and not force:
        causes = [
            {
                "reason": "FieldManagerConflict",
                "message": f'conflict with "{name}"',
                "field": "." + ".".join(path),
            }
            for name, path in conflicts
        ]
        text = f"Apply failed with {len(causes)} conflict(s): {causes[0]['message']}: {causes[0]['field']}"
        raise ApiRefusal(409, text, causes=causes)
    after = copy.deepcopy(before)
    for path in mine - set(wanted):
        if not any(path in paths for paths in owners.values()):
            _put(after, path, None)
    for path, value in wanted.items():
        _put(after, path, copy.deepcopy(value))
    return after


def record_manager(
    before: JSON, after: JSON, manager: str, subresource: str, now: str, applied: Paths | None = None
) -> None:
    """Note in `after` which fields this write changed, or applied, and whose they are now."""
    fields = _changed(before or {}, after)
    operation = "Update" if applied is None else "Apply"
    gone = {path for path in _leaves(before or {}) if path not in _leaves(after)}
    entries = list(after["metadata"].get("managedFields") or ())
    kept = []
    for entry in entries:
        paths = _read(entry["fieldsV1"]) - fields - gone
        if paths:
            kept.append({**entry, "fieldsV1": _write(paths)})
    mine = {
        "manager": manager,
        "operation": operation,
        "apiVersion": after.get("apiVersion", "v1"),
        "time": now,
    }
    if subresource:
        mine["subresource"] = subresource
    same = next(
        (
            each
            for each in kept
            if (each["manager"], each["operation"], each.get("subresource", ""))
            == (manager, operation, subresource)
        ),
        None,
    )
    if same is not None:
        kept.remove(same)
        fields |= _read(same["fieldsV1"])
    if applied is not None:
        fields = applied
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
    _descend(thing.get("spec") or {}, ("spec",), found)
    for part in ("annotations", "labels"):
        for name, value in (thing.get("metadata", {}).get(part) or {}).items():
            found["metadata", part, name] = value
    return found


def _descend(value: JSON, path: tuple[str, ...], found: dict[tuple[str, ...], JSON]) -> None:
    if isinstance(value, dict) and (value or len(path) == 1):
        for name, below in value.items():
            _descend(below, (*path, name), found)
    else:
        found[path] = value


def _put(thing: JSON, path: tuple[str, ...], value: JSON) -> None:
    """Set a field, or remove it and what is empty without it."""
    place, above = thing, []
    for name in path[:-1]:
        above.append((place, name))
        place = place.setdefault(name, {})
    if value is not None:
        place[path[-1]] = value
        return
    place.pop(path[-1], None)
    for outer, name in reversed(above):
        if not outer[name] and len(above) > 1:
            del outer[name]


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
