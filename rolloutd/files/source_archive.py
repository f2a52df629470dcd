"""Archive and content hash of a directory.

rolloutctl packs the directory of a plan, and the daemon stores it under its content
hash.  Content is regular files with their executable bit, and symbolic links that
stay inside; owners, times and empty directories are not.  It knows neither plans
nor the daemon.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.errors import Refused

MAX_TREE_BYTES = 64 * 1024 * 1024
"""Bytes of an unpacked tree: playbooks are text; larger files belong in an artifact store."""

MAX_TREE_FILES = 20_000
"""Files of one tree: more than any playbook repository has; each needs an inode on the daemon's disk."""

EXCLUDED_NAMES = frozenset({".git", "__pycache__"})
"""Names that are not packed: a repository's metadata and compiled Python change without the content, and no
reviewer can read them."""

REQUIREMENTS_FILES = tuple(
    f"{folder}requirements.{suffix}"
    for folder in ("", "collections/", "roles/")
    for suffix in ("yml", "yaml")
)
"""Where a tree lists the collections and roles that it requires, as AWX finds them too."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A file or a link of a tree; `path` is relative with slashes, `content` a link's target."""

    path: str
    content: bytes
    is_executable: bool = False
    is_symlink: bool = False


def pack_tree(directory: Path) -> bytes:
    """Return the directory as a gzipped tar, the same bytes for the same content.

    Raises Refused for a missing directory, a tree over the limits, a socket or
    device, and a link that leads outside.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for leaf in read_tree(directory):
            member = tarfile.TarInfo(leaf.path)
            if leaf.is_symlink:
                member.type, member.linkname = tarfile.SYMTYPE, leaf.content.decode()
                tar.addfile(member)
            else:
                member.mode, member.size = 0o755 if leaf.is_executable else 0o644, len(leaf.content)
                tar.addfile(member, io.BytesIO(leaf.content))
    return gzip.compress(archive.getvalue(), compresslevel=6, mtime=0)


def tree_hash(directory: Path) -> str:
    """Return the content hash of a directory, hexadecimal sha256; raises Refused as pack_tree does."""
    return hash_entries(read_tree(directory))


def hash_entries(entries: Iterable[TreeEntry]) -> str:
    """Return the content hash of a tree's entries, independent of their order."""
    digest = hashlib.sha256()
    for leaf in sorted(entries, key=lambda leaf: leaf.path.encode()):
        kind = "link" if leaf.is_symlink else "program" if leaf.is_executable else "file"
        # With the lengths, moving bytes from a name to a content changes the hash.
        name = leaf.path.encode()
        digest.update(f"{kind} {len(name)} {len(leaf.content)}\n".encode())
        digest.update(name)
        digest.update(leaf.content)
    return digest.hexdigest()


def read_tree(directory: Path) -> Iterator[TreeEntry]:
    """Yield the entries of a directory by name, reading each file once; raises Refused."""
    if not directory.is_dir():
        raise Refused("source", f"{directory} is not a directory; fix spec.source.path")
    size = count = 0
    for path in _walk(directory, EXCLUDED_NAMES):
        leaf = _read_entry(directory, path)
        size, count = size + len(leaf.content), count + 1
        check_limits(size, count)
        yield leaf


MAX_LINK_BYTES, MAX_LINK_NAME_BYTES = 4095, 255
"""Bytes of a link's target and of one name in it (PATH_MAX and NAME_MAX of Linux)."""


def check_limits(size: int, count: int) -> None:
    """Raise Refused for a tree over the limits."""
    if size > MAX_TREE_BYTES:
        raise Refused("source", f"the tree is larger than {MAX_TREE_BYTES // 1024**2} MiB; name a git source")
    if count > MAX_TREE_FILES:
        raise Refused("source", f"the tree has more than {MAX_TREE_FILES} files; name a git source")


def require_links_inside(tree: Path, excluded: Container[str] = ()) -> None:
    """Raise Refused for a link of a tree that leads out of it, by itself or over other links.

    A tree is stored only after this, so its readers follow links without a check of their own.
    """
    for path in _walk(tree, excluded):
        if path.is_symlink():
            _read_link(tree, path)


def _read_link(tree: Path, link: Path) -> str:
    """Return the target of a link; raises Refused if it leads out of the tree."""
    path, target = link.relative_to(tree).as_posix(), str(link.readlink())
    check_link(path, target)
    try:
        # Of a chain of links, each may stay inside by its text alone.
        is_inside = link.resolve().is_relative_to(tree.resolve())
    except (OSError, RuntimeError) as error:
        raise Refused("source", f"{path}: links to {target!r}, which leads to itself; remove it") from error
    if not is_inside:
        raise _leads_outside(path, target)
    return target


def _leads_outside(path: str, target: str) -> Refused:
    return Refused("source", f"{path}: links to {target!r}, outside of the tree; replace it with a file")


def check_link(path: str, target: str) -> None:
    """Raise Refused for a link whose target is too long, or leads outside of the tree by its text alone.

    A target that leads out and in again works only at this place, so it is refused too.
    """
    ends_at = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    names = os.fsencode(target).split(b"/")
    if len(b"/".join(names)) > MAX_LINK_BYTES or max(map(len, names)) > MAX_LINK_NAME_BYTES:
        raise Refused("source", f"{path}: the target of the link is too long; shorten it")
    if not target or target.startswith("/") or ends_at == ".." or ends_at.startswith("../"):
        raise _leads_outside(path, target)


def _walk(directory: Path, excluded: Container[str]) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise Refused("source", f"{directory}: not readable ({error.strerror}); check its mode") from error
    for entry in entries:
        if entry.name in excluded:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), excluded)
        else:
            yield Path(entry.path)


def _read_entry(directory: Path, path: Path) -> TreeEntry:
    name = path.relative_to(directory).as_posix()
    try:
        name.encode()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return TreeEntry(name, _read_link(directory, path).encode(), is_symlink=True)
        if not stat.S_ISREG(mode):
            raise Refused("source", f"{path} is neither a file nor a link; remove it")
        if path.stat().st_size > MAX_TREE_BYTES:
            check_limits(path.stat().st_size, 1)
        return TreeEntry(name, path.read_bytes(), is_executable=bool(mode & 0o100))
    except OSError as error:
        raise Refused("source", f"{path}: not readable ({error.strerror}); check its mode") from error
    except UnicodeEncodeError as error:
        raise Refused("source", f"{os.fsencode(path)!r}: its name is not UTF-8; rename it") from error
