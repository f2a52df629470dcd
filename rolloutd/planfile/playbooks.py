"""Checks of the playbooks that a plan names.

Variables can change the rest, so only these are mistakes: a missing file, invalid YAML, not a list of plays.
It reads files below the given directory and runs nothing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from rolloutd.errors import Diagnostic
from rolloutd.planfile import PlanFile

MAX_PLAYBOOK_BYTES = 1024 * 1024
"""A larger playbook is left to Ansible, so that its parsing delays no user."""

_VAULT_HEADER = b"$ANSIBLE_VAULT;"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COLLECTIONS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)


@dataclass(frozen=True, slots=True)
class _PlaybookError:
    """A mistake in a playbook; line and column count from 1."""

    line: int
    column: int
    text: str


def playbook_diagnostics(plan: PlanFile, tree: pathlib.Path) -> tuple[Diagnostic, ...]:
    """Return a mistake for each playbook of the plan that is missing or unreadable; reads files."""
    if not _is_directory(tree):
        missing = plan.diagnostic(
            ("spec", "source", "path"),
            found=str(tree),
            allowed="the directory of the playbooks, relative to the plan's file",
            message=f"{tree} is not a directory",
        )
        return (missing,)
    cached_error = cache(_playbook_error)
    diagnostics = []
    for path, name in plan.named_playbooks():
        playbook = tree / name
        if not _is_inside(tree, playbook):
            diagnostics.append(
                plan.diagnostic(
                    path,
                    found=name,
                    allowed="a playbook in the source, by its path within it",
                    message="there is no such playbook in the source",
                )
            )
        elif (fault := cached_error(playbook)) is not None:
            diagnostics.append(
                plan.diagnostic(
                    path,
                    found=f"{name}:{fault.line}:{fault.column}: {fault.text}",
                    allowed="a list of plays in YAML (ansible-playbook --syntax-check)",
                    message="the playbook cannot be read",
                )
            )
    return tuple(diagnostics)


def _is_directory(tree: pathlib.Path) -> bool:
    try:
        return tree.is_dir()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def _is_inside(tree: pathlib.Path, path: pathlib.Path) -> bool:
    try:
        real = path.resolve()
        return real.is_file() and real.is_relative_to(tree.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a name that is too long
        return False


def _playbook_error(path: pathlib.Path) -> _PlaybookError | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAYBOOK_BYTES + 1)
    except OSError as error:
        return _PlaybookError(1, 1, str(error.strerror))
    if len(text) > MAX_PLAYBOOK_BYTES or text.startswith(_VAULT_HEADER):
        return None
    try:
        return _structure_error(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        return _error_at(error.problem_mark or error.context_mark, error.problem or "no YAML")
    except yaml.YAMLError as error:
        return _PlaybookError(1, 1, str(error).splitlines()[0])


def _structure_error(events: Iterable[yaml.Event]) -> _PlaybookError | None:
    """Return the first mistake: it is not a list of plays, or braces lack quotes. None if there is none."""
    # One item per open collection: whether a mapping's key comes next; None for a list.
    opened: list[bool | None] = []
    empty = True
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        collection = isinstance(event, _COLLECTIONS)
        if not opened:
            if not empty:
                return _error_at(event.start_mark, "a second document begins, and Ansible reads only one")
            if not isinstance(event, yaml.SequenceStartEvent):
                return _error_at(event.start_mark, "it is not a list of plays")
        elif opened[-1] is not None:
            if opened[-1] and collection:
                return _error_at(event.start_mark, 'braces stand as a key: quote it, "{{ name }}"')
            opened[-1] = not opened[-1]
        if collection:
            opened.append(True if isinstance(event, yaml.MappingStartEvent) else None)
        empty = False
    return _PlaybookError(1, 1, "it is empty") if empty else None


def _error_at(mark: Any, text: str) -> _PlaybookError:
    return (
        _PlaybookError(1, 1, text) if mark is None else _PlaybookError(mark.line + 1, mark.column + 1, text)
    )
