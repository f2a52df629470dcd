"""Digest of a playbook and what it imports, so that a change elsewhere in its source does not count.

It finds files by name: every text in a playbook that is the path of a file, and every role.  Where a path is
a template, or a file cannot be read, the whole source counts.  It reads files below a directory and runs
nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_FILES = 10_000
"""Files of one digest; a source is at most 64 MiB."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_YAML = frozenset({".yml", ".yaml"})
_IMPORTS = frozenset(
    {
        *("import_playbook", "import_tasks", "include_tasks", "include", "import_role", "include_role"),
        *("include_vars", "vars_files", "roles", "src", "script"),
    }
)
"""Keys whose values name files or roles; a template in one of them can name any file."""

_ANY_FILE = re.compile(r"\b(?:lookup|query|q)\s*\(|\bsrc=\S*\{\{")
"""A lookup, or a module's `src=` with a template: it may read any file."""

_LOOPS = ("with_file", "with_first_found", "with_lines")
"""Beginnings of the names of loops over files."""

_ALWAYS = (
    *("ansible.cfg", "requirements.yml", "collections", "group_vars", "host_vars", "library"),
    *("module_utils", "action_plugins", "filter_plugins", "lookup_plugins", "test_plugins", "vars_plugins"),
)
"""What Ansible reads without being asked, next to the playbook and at the top of the source."""

_PLACES = ("", "tasks", "handlers", "files", "templates", "vars", "defaults", "meta")
"""Directories, next to a playbook or in a role, in which Ansible looks for a name."""


def playbook_digest(tree: Path, playbook: str) -> str:
    """Return the digest of a playbook inside a source, with all that it imports."""
    try:
        files = sorted(_Closure(tree).of_playbook(tree / playbook))
    except (OSError, yaml.YAMLError, _AnyFile):
        files = sorted(_files_below(tree))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(tree)}\0".encode("utf-8", "surrogateescape"))
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class _AnyFile(Exception):
    """The playbook may import any file of the source."""


class _Closure:
    def __init__(self, tree: Path) -> None:
        self._tree = tree.resolve()
        self._root = tree
        self._found: set[Path] = set()

    def of_playbook(self, playbook: Path) -> set[Path]:
        for place in {playbook.parent, self._root}:
            for name in _ALWAYS:
                self._add_all(place / name)
            config = place / "ansible.cfg"
            if config.is_file() and b"roles_path" in config.read_bytes():
                raise _AnyFile
        self._add(playbook)
        return self._found

    def _add(self, path: Path) -> None:
        """Add a file, and what a YAML file names."""
        if path in self._found or not self._is_inside(path):
            return
        self._found.add(path)
        if len(self._found) > MAX_FILES:
            raise _AnyFile
        if path.suffix in _YAML:
            for key, text in _texts(yaml.load(path.read_bytes(), Loader=_LOADER)):  # noqa: S506  # a safe loader
                self._follow(path, key, text)

    def _follow(self, path: Path, key: str, text: str) -> None:
        if (key in _IMPORTS and "{{" in text) or _ANY_FILE.search(text):
            raise _AnyFile
        name = text.strip().partition(" ")[0]
        if not name or len(name) > 512 or "\0" in name or "\n" in name:
            return
        for base in (path.parent, path.parent.parent, self._root):
            for place in _PLACES:
                self._add_all(base / place / name)
            self._add_all(base / "roles" / name)

    def _add_all(self, path: Path) -> None:
        if not self._is_inside(path) or path.resolve() == self._tree:
            return
        if path.is_dir():
            for file in _files_below(path):
                self._add(file)
        elif path.is_file():
            self._add(path)

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._tree)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a document, with the nearest key that names files."""
    match value:
        case dict():
            for name, inner in value.items():
                short = str(name).rpartition(".")[2]
                if short.startswith(_LOOPS):
                    raise _AnyFile
                if short == "src" and value.get("remote_src") in (True, "yes", "true"):
                    continue  # a file of the node
                yield from _texts(inner, short if short in _IMPORTS else key)
        case list():
            for inner in value:
                yield from _texts(inner, key)
        case str():
            yield key, value
        case _:
            pass


def _files_below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name != ".git"]
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                yield path
