"""What differs between two answers of `GET /v1/status`, and how a client applies it.

It computes no figure: a change has only what the two answers have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NamedItems:
    """A list whose items are compared one by one: the member that names an item, and its own such lists."""

    name: str
    lists: Mapping[str, NamedItems] = field(default_factory=dict)


STATUS_LISTS = {
    "rollouts": NamedItems("rollout", {"pools": NamedItems("pool"), "in_flight": NamedItems("node")})
}


def difference(
    before: Object, after: Object, lists: Mapping[str, NamedItems] = STATUS_LISTS
) -> dict[str, Any]:
    """Return the members that differ; no member of an answer ever disappears.

    A list of named items has `items`, what differs of each changed item, with its name; and `order`, all
    names, if it has other items than before or another order.  Every other list and object is whole.
    """
    change: dict[str, Any] = {}
    for key, value in after.items():
        known = before.get(key, change)
        # Most rows are those of the answer before.
        if known is value:
            continue
        if known is not change and key in lists:
            if changed := _list_difference(known, value, lists[key]):
                change[key] = changed
        elif known is change or known != value:
            change[key] = value
    return change


def merge(before: Object, change: Object, lists: Mapping[str, NamedItems] = STATUS_LISTS) -> dict[str, Any]:
    """Return the later answer; it shares with the earlier one what did not change."""
    after = dict(before)
    for key, value in change.items():
        is_whole = key not in lists or key not in before
        after[key] = value if is_whole else _merge_list(before[key], value, lists[key])
    return after


def _list_difference(before: list[Object], after: list[Object], items: NamedItems) -> dict[str, Any]:
    name, old = items.name, {each[items.name]: each for each in before}
    order = [each[name] for each in after]
    found = [(key, old.get(key, {}), each) for key, each in zip(order, after, strict=True)]
    differing = [
        (key, difference(known, each, items.lists)) for key, known, each in found if known is not each
    ]
    change: dict[str, Any] = {}
    if changed := [{name: key, **members} for key, members in differing if members]:
        change["items"] = changed
    if order != list(old):
        change["order"] = order
    return change


def _merge_list(before: list[Object], change: Object, items: NamedItems) -> list[Object]:
    merged = {each[items.name]: each for each in before}
    order = change.get("order", list(merged))
    for each in change.get("items", ()):
        merged[each[items.name]] = merge(merged.get(each[items.name], {}), each, items.lists)
    return [merged[name] for name in order]
