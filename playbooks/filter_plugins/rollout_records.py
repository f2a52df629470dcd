"""Records of what rollouts changed on a node, so that each can be undone alone.

The records of a playbook are one mapping: `layers`, oldest first, each with the `items` that one rollout
changed, and `dropped`, the rollouts whose layers were too old to keep.  An item is `{before, after}`; a layer
that lacks `after` does not know it.  These functions change nothing that they are given.
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError

MAX_DROPPED = 1000
"""Rollouts whose undo says that its record was dropped; 30 KB."""

Layer = dict[str, Any]


def record_items(
    records: dict[str, Any], rollout: str, attempt: int, found: dict[str, Any], history: int = 20
) -> dict[str, Any]:
    """Return the records with what the rollout is about to change.

    What an earlier run of the rollout found stays, unless another rollout has changed the item since.
    """
    layers = [{**layer, "items": dict(layer["items"])} for layer in records.get("layers", [])]
    fresh = {}
    for name, item in found.items():
        latest = next((layer for layer in reversed(layers) if name in layer["items"]), None)
        if latest is None or latest["rollout"] != rollout:
            fresh[name] = item
        else:
            latest["items"][name] = {**item, "before": latest["items"][name]["before"]}
    if fresh and layers and layers[-1]["rollout"] == rollout:
        layers[-1]["items"].update(fresh)
    elif fresh:
        layers.append({"rollout": rollout, "items": fresh})
    for layer in layers:
        if layer["rollout"] == rollout:
            layer["attempt"] = attempt
    return _drop_oldest(layers, list(records.get("dropped", [])), max(1, int(history)))


def to_items(before: dict[str, Any], after: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the items of a change from what was before it to what is after it, if that is known."""
    return {
        name: {"before": value} if after is None else {"before": value, "after": after[name]}
        for name, value in before.items()
    }


def items_to_restore(records: dict[str, Any], rollout: str) -> dict[str, Any]:
    """Return what each item was before the rollout, without those that a later rollout has changed."""
    if rollout in records.get("dropped", []) and not own_layers(records, rollout):
        raise AnsibleFilterError(
            f"record of rollout {rollout}: newer ones displaced it (playbook_history); undo it by hand"
        )
    return _without(records, rollout)[1]


def without_rollout(records: dict[str, Any], rollout: str) -> dict[str, Any]:
    """Return the records as if the rollout had changed nothing: the next one inherits what was before it."""
    return {"layers": _without(records, rollout)[0], "dropped": list(records.get("dropped", []))}


def own_layers(records: dict[str, Any], rollout: str) -> list[Layer]:
    """Return the rollout's layers: one, or more if another rollout came between two of its runs."""
    return [layer for layer in records.get("layers", []) if layer["rollout"] == rollout]


def _without(records: dict[str, Any], rollout: str) -> tuple[list[Layer], dict[str, Any]]:
    """Return the other layers, and what is to be restored."""
    newer: list[Layer] = []
    restored: dict[str, Any] = {}
    for layer in reversed(records.get("layers", [])):
        if layer["rollout"] != rollout:
            newer.insert(0, {**layer, "items": dict(layer["items"])})
            continue
        for name, item in layer["items"].items():
            heir = next((other for other in newer if name in other["items"]), None)
            if heir is None:
                # What the rollout found as it wanted it, it has not changed; another may have since.
                if "after" not in item or item["after"] != item["before"]:
                    restored[name] = item["before"]
            # What the heir found may be the work of a third, which came between the two.
            elif "after" not in item or heir["items"][name]["before"] == item["after"]:
                heir["items"][name] = {**heir["items"][name], "before": item["before"]}
    return newer, restored


def _drop_oldest(layers: list[Layer], dropped: list[str], history: int) -> dict[str, Any]:
    rollouts = list(dict.fromkeys(layer["rollout"] for layer in reversed(layers)))
    gone = rollouts[history:]
    kept = [layer for layer in layers if layer["rollout"] not in gone]
    return {"layers": kept, "dropped": [*dropped, *reversed(gone)][-MAX_DROPPED:]}


class FilterModule:
    """The filters of the playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "to_items": to_items,
            "record_items": record_items,
            "items_to_restore": items_to_restore,
            "without_rollout": without_rollout,
            "own_layers": own_layers,
        }
