"""Changes to the text of a settings file that keep every other byte.

A YAML writer would lose the user's comments, so a change replaces or inserts text where the parser found the
place.  The result is parsed again and must be exactly the old content with the change.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rolloutd.errors import RolloutdError

JSON = Any

COMMENT_WIDTH = 100
"""Columns of a comment line, without its indentation."""

APPEND = "[]"
"""Last element of a path: a new item of the list."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value of the settings, and the reason that stands above it in the file.

    In a path, a number is an item of a list.
    """

    path: tuple[str, ...]
    value: JSON
    reason: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


class CannotEdit(RolloutdError):
    """The file is written in a way that the change cannot be placed in."""


def apply_changes(text: str, changes: Sequence[Change]) -> str:
    """Return the file's text with the changes; raises CannotEdit."""
    for change in changes:
        text = _apply(text, change)
    return text


def _apply(text: str, change: Change) -> str:
    try:
        before = yaml.safe_load(text) or {}
        wanted = _with_value(before, change)
        if wanted == before:
            return text
        edited = _edit(text, yaml.compose(text, Loader=yaml.SafeLoader), change)
        if yaml.safe_load(edited) == wanted:
            return edited
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise CannotEdit(
            f"{change.key}: the settings cannot be edited ({error!s:.200}); edit them"
        ) from error
    raise CannotEdit(f"{change.key}: no place for it in the settings; write it there by hand")


def _with_value(content: JSON, change: Change) -> JSON:
    content = _copy(content)
    *parents, last = change.path
    parent = content
    for position, key in enumerate(parents):
        if isinstance(parent, list):
            parent = parent[int(key)]
            continue
        is_list = position == len(parents) - 1 and last == APPEND
        if parent.get(key) is None:
            parent[key] = [] if is_list else {}
        parent = parent[key]
    if last != APPEND:
        parent[last] = change.value
    elif change.value not in parent:
        parent.append(change.value)
    return content


def _copy(content: JSON) -> JSON:
    """Return a copy in which no two places are one object, as an alias of YAML makes them."""
    match content:
        case dict():
            return {key: _copy(value) for key, value in content.items()}
        case list():
            return [_copy(value) for value in content]
        case _:
            return content


def _edit(text: str, node: yaml.Node | None, change: Change) -> str:
    for depth, key in enumerate(change.path):
        if isinstance(node, yaml.SequenceNode) and key.isdecimal():
            node = node.value[int(key)]
            continue
        if not isinstance(node, yaml.MappingNode) or key == APPEND:
            return _insert(text, node, change, change.path[depth:])
        values = {name.value: value for name, value in node.value}
        if key not in values:
            return _insert(text, node, change, change.path[depth:])
        node = values[key]
    assert node is not None
    new, end = _flow(change.value), _end_of_content(node)
    space = " " if node.start_mark.index == end else ""
    return text[: node.start_mark.index] + space + new + text[end:]


def _insert(text: str, node: yaml.Node | None, change: Change, missing: Sequence[str]) -> str:
    """Insert what is missing below a node; None is an empty file, an empty scalar an empty value."""
    is_root = len(missing) == len(change.path)
    if node is None or (is_root and isinstance(node, yaml.MappingNode) and not node.flow_style):
        gap = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{gap}\n{_block(missing, change)}"
    if isinstance(node, yaml.ScalarNode):
        value = _flow(_nested(missing, change.value))
        return f"{text[: node.start_mark.index]} {value}{text[_end_of_content(node) :]}"
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        closing, comma = node.end_mark.index - 1, ", " if node.value else ""
        inner = _flow(_nested(missing, change.value))[1:-1]
        return text[:closing].rstrip() + comma + inner + text[closing:]
    end = text.find("\n", _end_of_content(node))
    head, tail = (text + "\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return head + textwrap.indent(_block(missing, change), " " * node.start_mark.column) + tail


def _nested(path: Sequence[str], value: JSON) -> JSON:
    for key in reversed(path):
        value = [value] if key == APPEND else {key: value}
    return value


def _end_of_content(node: yaml.Node) -> int:
    """Return where a node's last value ends: the end of a block includes the comments after it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    index: int = node.end_mark.index
    return index


def _block(path: Sequence[str], change: Change) -> str:
    """Return the value under the keys of the path, with the reason above it."""
    key, *deeper = path
    if deeper and key != APPEND:
        return f"{_flow(key)}:\n{textwrap.indent(_block(deeper, change), '  ')}"
    reason = textwrap.wrap(change.reason, COMMENT_WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    value = change.value
    if key == APPEND and isinstance(value, dict) and len(value) == 1:
        [(kind, value)] = value.items()
        key = f"- {_flow(kind)}:"
    else:
        key = "-" if key == APPEND else f"{_flow(key)}:"
    return "".join(f"# {line}\n" for line in reason) + f"{key} {_flow(value)}\n"


def _flow(value: JSON) -> str:
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()
