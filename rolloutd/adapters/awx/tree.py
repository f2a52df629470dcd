"""Tasks of a playbook by its files: their number, for a percentage, and those that defy check mode.

AWX's events say neither.  Only files of the tree are read; what a template names, and what a collection has,
is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rolloutd.ports import JSON

MAX_TASKS = 10_000
"""Tasks that are counted: a playbook with more ends the count, not the run."""

MAX_FILE_BYTES = 1024 * 1024
"""A larger file of tasks is not counted."""

_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_SECTIONS = ("pre_tasks", "roles", "tasks", "post_tasks")
_BLOCKS = ("block", "rescue", "always")
_PREFIXES = ("", "ansible.builtin.", "ansible.legacy.")
_FALSE = frozenset({"false", "no", "off", "0", "n", "f"})


@dataclass(slots=True)
class PlaybookTasks:
    tree: Path
    count: int = 0
    defying: str = ""
    """The first task that would run in spite of check mode and does not say that it changes nothing."""
    _open: set[Path] = field(default_factory=set)

    @classmethod
    def read(cls, tree: Path, playbook: str) -> PlaybookTasks:
        """Read the tasks; what cannot be read is left to Ansible."""
        tasks = cls(tree)
        tasks._add_playbook(tree / playbook)
        return tasks

    def _add_playbook(self, path: Path) -> None:
        for play in self._load(path):
            if imported := _argument(play, "import_playbook"):
                self._add_playbook(path.parent / imported)
                continue
            # A play gathers facts unless it says otherwise.
            self.count += "gather_facts" not in play or str(play["gather_facts"]).lower() not in _FALSE
            for section in _SECTIONS:
                entries = play.get(section)
                for entry in entries if isinstance(entries, list) else ():
                    if section == "roles":
                        name = entry if isinstance(entry, str) else _role_name(entry)
                        self._add_role(path.parent, name, "main")
                    else:
                        self._add_task(path.parent, entry, play)
        self._open.discard(path)

    def _add_task(self, base: Path, task: JSON, parent: Mapping[str, JSON]) -> None:
        if not isinstance(task, dict) or self.count >= MAX_TASKS:
            return
        inherited = {key: parent[key] for key in ("check_mode", "changed_when") if key in parent}
        task = {**inherited, **task}
        if "block" in task:
            for name in _BLOCKS:
                entries = task.get(name)
                for entry in entries if isinstance(entries, list) else ():
                    # What a rescue does is not expected to run, and must not defy check mode either.
                    before = self.count
                    self._add_task(base, entry, task)
                    self.count = before if name == "rescue" else self.count
            return
        self.count += 1
        if str(task.get("check_mode", "")).lower() in _FALSE:
            changes = str(task.get("changed_when", "")).lower() not in _FALSE
            self.defying = self.defying or (str(task.get("name") or "without a name") if changes else "")
        for kind in ("import", "include"):
            if name := _argument(task, f"{kind}_tasks"):
                self._add_tasks(base / name, task)
            if (role := _arguments(task, f"{kind}_role").get("name")) is not None:
                self._add_role(
                    base, str(role), str(_arguments(task, f"{kind}_role").get("tasks_from", "main"))
                )

    def _add_tasks(self, path: Path, parent: Mapping[str, JSON]) -> None:
        for task in self._load(path):
            self._add_task(path.parent, task, parent)
        self._open.discard(path)

    def _add_role(self, base: Path, name: str, tasks: str) -> None:
        for roles in (base / "roles", self.tree / "roles", base.parent.parent):
            for suffix in (".yml", ".yaml", ""):
                path = roles / name / "tasks" / f"{tasks}{suffix}"
                if _is_file(path):
                    self._add_tasks(path, {})
                    return

    def _load(self, path: Path) -> Iterator[dict[str, JSON]]:
        if path in self._open or not _is_file(path) or path.stat().st_size > MAX_FILE_BYTES:
            return
        self._open.add(path)
        try:
            document = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506 - it makes texts only
        except (OSError, yaml.YAMLError, RecursionError, ValueError):
            return
        yield from (each for each in document if isinstance(each, dict)) if isinstance(document, list) else ()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or a template
        return False


def _role_name(entry: JSON) -> str:
    return str(entry.get("role") or entry.get("name") or "") if isinstance(entry, dict) else ""


def _argument(task: Mapping[str, JSON], action: str) -> str:
    for prefix in _PREFIXES:
        value = task.get(prefix + action)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return str(value.get("file") or "")
    return ""


def _arguments(task: Mapping[str, JSON], action: str) -> Mapping[str, JSON]:
    values = (task.get(prefix + action) for prefix in _PREFIXES)
    return next((each for each in values if isinstance(each, dict)), {})
