"""Values of the simulated source that no controller may evaluate, and the judge of what would be."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tests.sim.world import SimWorld

SHELL_TEXT = "$(touch canary); `touch canary` 'a"
"""A label of each node; the commands of the plans have it as one word."""

TEMPLATE = "{{ lookup('pipe', 'touch canary') }}"
"""A variable of each node, at the top and nested; a run must get it as text that Ansible does not render."""

LABELS = {"note": SHELL_TEXT}

VARIABLES = {"note": TEMPLATE, "notes": {"deep": [TEMPLATE]}}


def judge_command(world: SimWorld, command: str) -> None:
    """Report a command that a shell would read otherwise than its author wrote it."""
    world.coverage.count("values:shell-text")
    if SHELL_TEXT not in _words_of(command):
        world.checker.report_violation(f"a shell would evaluate a label of a source: {command}")


@lru_cache(maxsize=64)  # all nodes have the same label
def _words_of(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def judge_variables(world: SimWorld, variables: Mapping[str, Any]) -> None:
    """Report variables of a run that Ansible would render on the controller."""
    world.coverage.count("values:templates")
    if any("{{" in text for text in _rendered_texts(variables)):
        world.checker.report_violation("a run would render a variable of a source on the controller")


def _rendered_texts(value: Any) -> Iterator[str]:
    """Yield the texts that Ansible takes for templates."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if value.keys() != {"__ansible_unsafe"}:
            for key, inner in value.items():
                yield from _rendered_texts(key)
                yield from _rendered_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _rendered_texts(inner)
