"""Whether the playbooks that a plan names are in its source, and can be read at all.

Only what no variable can mend is a mistake: a file that is not there, that is
no YAML, or that is no list of plays.  The rest is Ansible's to say.  It reads
files below a directory that it is given and runs nothing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from rolloutd.errors import Mistake
from rolloutd.planfile import PlanFile

LARGEST_BYTES = 1024 * 1024
"""A playbook that is larger is left to Ansible: nobody should wait for us to read it."""

_VAULTED = b"$ANSIBLE_VAULT;"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COLLECTIONS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong in a playbook; line and column count from 1."""

    line: int
    column: int
    text: str


def playbook_mistakes(plan: PlanFile, tree: pathlib.Path) -> tuple[Mistake, ...]:
    """Return every playbook of the plan that the tree lacks or that cannot be read; reads files."""
    if not tree.is_dir():
        lost = plan.mistake(
            ("spec", "source", "path"),
            found=str(tree),
            allowed="the directory of the playbooks, relative to the plan's file",
            message=f"{tree} is not a directory",
        )
        return (lost,)
    judged = cache(_fault)
    found = []
    for path, name in plan.playbooks():
        place = tree / name
        if not _inside(tree, place):
            found.append(
                plan.mistake(
                    path,
                    found=name,
                    allowed="a playbook in the source, by its path within it",
                    message="there is no such playbook in the source",
                )
            )
        elif (fault := judged(place)) is not None:
            found.append(
                plan.mistake(
                    path,
                    found=f"{name}:{fault.line}:{fault.column}: {fault.text}",
                    allowed="a list of plays in YAML (ansible-playbook --syntax-check)",
                    message="the playbook cannot be read",
                )
            )
    return tuple(found)


def _inside(tree: pathlib.Path, place: pathlib.Path) -> bool:
    real = place.resolve()
    return real.is_file() and real.is_relative_to(tree.resolve())


def _fault(place: pathlib.Path) -> _Fault | None:
    try:
        with place.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        return _Fault(1, 1, str(error.strerror))
    if len(text) > LARGEST_BYTES or text.startswith(_VAULTED):
        return None
    try:
        return _shape_fault(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        return _marked(error.problem_mark or error.context_mark, error.problem or "no YAML")
    except yaml.YAMLError as error:
        return _Fault(1, 1, str(error).splitlines()[0])


def _shape_fault(events: Iterable[yaml.Event]) -> _Fault | None:
    """Return what makes it no list of plays, or a text that was meant to be quoted."""
    # Of each open collection whether a key comes next; None for a list.
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
                return _marked(event.start_mark, "a second document begins, and Ansible reads only one")
            if not isinstance(event, yaml.SequenceStartEvent):
                return _marked(event.start_mark, "it is no list of plays")
        elif opened[-1] is not None:
            if opened[-1] and collection:
                return _marked(event.start_mark, 'braces stand as a key: quote it, "{{ name }}"')
            opened[-1] = not opened[-1]
        if collection:
            opened.append(True if isinstance(event, yaml.MappingStartEvent) else None)
        empty = False
    return _Fault(1, 1, "it is empty") if empty else None


def _marked(mark: Any, text: str) -> _Fault:
    return _Fault(1, 1, text) if mark is None else _Fault(mark.line + 1, mark.column + 1, text)
