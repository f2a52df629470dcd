"""A directory as one archive, and its content hash.

rolloutctl packs the directory that a plan names, and the daemon keeps it under
its content hash; both count with what is written here, so both see the same
tree: regular files with their executable bit and symbolic links that stay
inside.  Owners, times and empty directories are no content.  It knows neither
plans nor the daemon, and needs the standard library alone.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.errors import Refused

MAX_TREE_BYTES = 64 * 1024 * 1024
"""Of one tree, unpacked: playbooks are text; what is larger belongs into a package or an artifact store."""

MAX_TREE_FILES = 20_000
"""Of one tree: far above any playbook repository, and each costs an inode on the daemon's disk."""

SKIPPED = frozenset({".git"})
"""Names that are not packed: a repository's own bookkeeping, which changes without its content."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A file or a link of a tree; `path` is relative with slashes, `content` a link's target."""

    path: str
    content: bytes
    executable: bool = False
    link: bool = False


def pack(directory: Path) -> bytes:
    """Return the directory as a gzipped tar, the same bytes for the same content.

    Raises Refused for what cannot be packed: no directory, too much, a socket
    or device, a link that leads outside.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for leaf in read_tree(directory):
            member = tarfile.TarInfo(leaf.path)
            if leaf.link:
                member.type, member.linkname = tarfile.SYMTYPE, leaf.content.decode()
                tar.addfile(member)
            else:
                member.mode, member.size = 0o755 if leaf.executable else 0o644, len(leaf.content)
                tar.addfile(member, io.BytesIO(leaf.content))
    return gzip.compress(archive.getvalue(), compresslevel=6, mtime=0)


def tree_hash(directory: Path) -> str:
    """Return the content hash of a directory, hexadecimal sha256; raises Refused as `pack` does."""
    return hash_leaves(read_tree(directory))


def hash_leaves(leaves: Iterable[Leaf]) -> str:
    """Return the content hash of a tree's leaves, in whatever order they come."""
    whole = hashlib.sha256()
    for leaf in sorted(leaves, key=lambda leaf: leaf.path.encode()):
        kind = "link" if leaf.link else "program" if leaf.executable else "file"
        # Lengths make it impossible to move bytes between a name and a content unnoticed.
        name = leaf.path.encode()
        whole.update(f"{kind} {len(name)} {len(leaf.content)}\n".encode())
        whole.update(name)
        whole.update(leaf.content)
    return whole.hexdigest()


def read_tree(directory: Path) -> Iterator[Leaf]:
    """Yield the leaves of a directory by name, reading each file once; raises Refused."""
    if not directory.is_dir():
        raise Refused("source", f"{directory} is not a directory")
    size = count = 0
    for path in _walk(directory):
        leaf = _read_leaf(directory, path)
        size, count = size + len(leaf.content), count + 1
        check_limits(size, count)
        yield leaf


def check_limits(size: int, count: int) -> None:
    """Raise Refused where a tree is too large."""
    if size > MAX_TREE_BYTES:
        raise Refused("source", f"the tree is larger than {MAX_TREE_BYTES // 1024**2} MiB; name a git source")
    if count > MAX_TREE_FILES:
        raise Refused("source", f"the tree has more than {MAX_TREE_FILES} files; name a git source")


def check_link(path: str, target: str) -> None:
    """Raise Refused where a link of a tree leads outside of it."""
    ends_at = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if not target or target.startswith("/") or ends_at == ".." or ends_at.startswith("../"):
        raise Refused("source", f"{path} is a link to {target!r}, outside of the tree")


def _walk(directory: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise Refused("source", f"{directory} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name in SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _read_leaf(directory: Path, path: Path) -> Leaf:
    name = path.relative_to(directory).as_posix()
    try:
        name.encode()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = str(path.readlink())
            check_link(name, target)
            return Leaf(name, target.encode(), link=True)
        if not stat.S_ISREG(mode):
            raise Refused("source", f"{path} is neither a file nor a link, and cannot be packed")
        if path.stat().st_size > MAX_TREE_BYTES:
            check_limits(path.stat().st_size, 1)
        return Leaf(name, path.read_bytes(), executable=bool(mode & 0o100))
    except OSError as error:
        raise Refused("source", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise Refused("source", f"{os.fsencode(path)!r} has a name that is not UTF-8") from error
