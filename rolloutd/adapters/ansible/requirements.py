"""The collections and roles that a tree requires, as ansible-galaxy may install them.

ansible-galaxy opens what its file names, on this machine too, and passes it to git.  So only servers and
files of the tree are allowed, and nothing that git would take for an option.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rolloutd.errors import SourceFailed
from rolloutd.files.source_archive import REQUIREMENTS_FILES

MAX_FILE_BYTES = 1024 * 1024
MAX_ENTRIES = 1000
"""Limits of one file: a person writes it."""

COLLECTION_KEYS = ("name", "version", "source", "type")
ROLE_KEYS = ("name", "src", "version", "scm")

_COLLECTION_NAME = re.compile(r"[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*")
_ROLE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_VERSION = re.compile(r"[^-\s][^\n]*")
_GALAXY_SERVER = re.compile(r"[\w.-]+")
_URL = re.compile(r"(?:git\+)?(?:https?|ssh|git)://[^-\s][^\s]*|[\w.-]+@[\w.-]+:[^-:\s][^\s]*")


@dataclass(slots=True)
class Requirements:
    """Entries for ansible-galaxy, without those whose content the tree has."""

    collections: list[dict[str, str]] = field(default_factory=list)
    roles: list[dict[str, str]] = field(default_factory=list)

    def as_file(self) -> str:
        """Return the text of a requirements file, which is JSON and so YAML."""
        return json.dumps({"collections": self.collections, "roles": self.roles})


def read_requirements(tree: Path) -> Requirements:
    """Return what is to be installed for a tree; raises SourceFailed."""
    found = Requirements()
    for name in REQUIREMENTS_FILES:
        path = tree / name
        if not path.is_file():
            continue
        try:
            document = _load(path)
            for each in _entries(document, "collections"):
                if (entry := _collection(each, tree)) is not None:
                    found.collections.append(entry)
            roles = document if isinstance(document, list) else _entries(document, "roles")
            for each in roles:
                if (entry := _role(each, tree)) is not None:
                    found.roles.append(entry)
        except ValueError as error:
            raise SourceFailed(f"{name}: {error}") from None
    return found


def _load(path: Path) -> Any:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes; split the source")
    try:
        return yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is not valid YAML ({type(error).__name__}); correct it") from None


def _entries(document: Any, key: str) -> list[Any]:
    entries = document.get(key) if isinstance(document, dict) else None
    if entries is not None and not isinstance(entries, list):
        raise ValueError(f"{key} is not a list; correct it")
    if entries and len(entries) > MAX_ENTRIES:
        raise ValueError(f"{key} has more than {MAX_ENTRIES} entries; split the source")
    return entries or []


def _collection(entry: Any, tree: Path) -> dict[str, str] | None:
    """Return a collection's entry; None if the tree has it."""
    wanted = _texts({"name": entry} if isinstance(entry, str) else entry, COLLECTION_KEYS)
    name, _, version = wanted.get("name", "").partition(":")
    if _COLLECTION_NAME.fullmatch(name):
        _require(version, _VERSION)
        if tree.joinpath("collections", "ansible_collections", *name.split(".")).is_dir():
            return None
    else:
        wanted["name"] = _location(wanted.get("name", ""), tree)
    _require(wanted.get("version", ""), _VERSION)
    source = wanted.get("source", "")
    if not _GALAXY_SERVER.fullmatch(source) or source.startswith("-"):
        _require(source, _URL)
    return wanted


def _role(entry: Any, tree: Path) -> dict[str, str] | None:
    """Return a role's entry; None if the tree has it."""
    if isinstance(entry, str):
        words = [word.strip() for word in entry.split(",")]
        entry = dict(zip(("src", "version", "name"), words, strict=False))
    elif isinstance(entry, dict) and "role" in entry:
        entry = {"name": entry["role"], **entry}
    wanted = _texts(entry, ROLE_KEYS)
    source = wanted.setdefault("src", wanted.get("name", ""))
    _require(wanted.get("name", ""), _ROLE_NAME)
    _require(wanted.get("version", ""), _VERSION)
    if wanted.get("scm", "git") != "git":
        raise ValueError(f"scm {wanted['scm']} is not supported; use git")
    name = wanted.get("name") or re.sub(r"(\.git|\.tar\.gz)$", "", source.rpartition("/")[2])
    if name and (tree / "roles" / name).is_dir():
        return None
    if not _ROLE_NAME.fullmatch(source) or (tree / source).exists():
        wanted["src"] = _location(source, tree)
    return wanted


def _texts(entry: Any, keys: tuple[str, ...]) -> dict[str, str]:
    """Return the entry's values as texts; a version may be a number in YAML."""
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(key, ""), str | int | float) for key in keys
    ):
        raise ValueError(f"an entry is neither a name nor a mapping of texts: {str(entry)[:80]!r}")
    if "signatures" in entry or "include" in entry:
        raise ValueError("signatures and include are not supported; remove them")
    return {key: str(entry[key]) for key in keys if key in entry}


def _require(value: str, pattern: re.Pattern[str]) -> None:
    if value and not pattern.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not allowed here; correct it")


def _location(place: str, tree: Path) -> str:
    """Return the URL, or the absolute path of a file of the tree."""
    if _URL.fullmatch(place):
        return place
    path, root = (tree / place).resolve(), tree.resolve()
    if not place or not path.is_relative_to(root) or path == root or not path.exists():
        raise ValueError(f"{place[:80]!r} is neither a name, a URL nor a file of the source; correct it")
    return str(path)
