"""What a client uploads, read with suspicion: a tar archive as the leaves of a tree.

Nothing is written before the whole archive has been judged, and then links
last, so that no name can be followed anywhere.  Where the tree is kept is not
known here.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
import zlib
from pathlib import Path

from rolloutd.errors import Refused
from rolloutd.packing import MAX_TREE_BYTES, MAX_TREE_FILES, Leaf, check_limits, check_link

MAX_ARCHIVE_BYTES = MAX_TREE_BYTES + MAX_TREE_FILES * 1024
"""Of an archive, unpacked: the content and a header and padding of each file."""

MAX_NAME_BYTES = 255
"""Of one name in a path: no file system of Linux keeps a longer one."""

MAX_PATH_BYTES = 2048
"""Of a whole path: half of what Linux opens, the other half is for the place that trees are kept in."""

GZIP = b"\x1f\x8b"


def read_archive(archive: bytes) -> list[Leaf]:
    """Return the leaves of a plain or gzipped tar archive; raises Refused for anything else in it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(_inflate(archive)), mode="r:") as tar:
            return _read_members(tar)
    except (tarfile.TarError, zlib.error, UnicodeError, ValueError, EOFError) as error:
        raise Refused("upload", f"the upload is not a tar archive: {error}") from error


def write_leaves(leaves: list[Leaf], directory: Path) -> None:
    """Write a judged tree into an empty directory; raises Refused when a link leads outside after all."""
    for leaf in sorted(leaves, key=lambda leaf: leaf.link):
        path = directory / leaf.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if leaf.link:
            path.symlink_to(leaf.content.decode())
        else:
            path.write_bytes(leaf.content)
            path.chmod(0o755 if leaf.executable else 0o644)
    root = directory.resolve()
    for leaf in leaves:
        # Links by way of links can leave the tree although each alone stays inside.
        if leaf.link and not _ends_inside(directory / leaf.path, root):
            raise Refused("upload", f"{leaf.path} is a link that leads outside of the tree")


def _ends_inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a link that leads to itself
        return False


def _inflate(archive: bytes) -> bytes:
    if not archive.startswith(GZIP):
        plain = archive
    else:
        inflater = zlib.decompressobj(wbits=31)
        plain = inflater.decompress(archive, MAX_ARCHIVE_BYTES + 1)
        if not inflater.eof and len(plain) <= MAX_ARCHIVE_BYTES:
            raise Refused("upload", "the upload is cut off: its gzip stream has no end")
    if len(plain) > MAX_ARCHIVE_BYTES:
        raise Refused("upload", f"the upload is larger than {MAX_TREE_BYTES // 1024**2} MiB when unpacked")
    return plain


def _read_members(tar: tarfile.TarFile) -> list[Leaf]:
    leaves: dict[str, Leaf] = {}
    size = 0
    for count, member in enumerate(tar, 1):
        size += member.size
        check_limits(size, count)
        path = _clean(member)
        if member.isdir():
            continue
        if path in leaves:
            raise Refused("upload", f"{path} is twice in the upload")
        leaves[path] = _read_leaf(tar, member, path)
    _check_parents(leaves)
    if not leaves:
        raise Refused("upload", "the upload holds no file")
    return list(leaves.values())


def _clean(member: tarfile.TarInfo) -> str:
    name = member.name
    name.encode()  # raises for what is not UTF-8
    if name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Refused("upload", f"{name!r} is not a path inside of the tree")
    path = posixpath.normpath(name)
    if len(path.encode()) > MAX_PATH_BYTES or max(map(len, path.encode().split(b"/"))) > MAX_NAME_BYTES:
        raise Refused("upload", f"the name {name[:40]!r}... is too long to be kept")
    if path == "." and not member.isdir():
        raise Refused("upload", f"{name!r} is not a file's name")
    return path


def _read_leaf(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Leaf:
    if member.issym():
        check_link(path, member.linkname)
        return Leaf(path, member.linkname.encode(), link=True)
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise Refused("upload", f"{path} is neither a file nor a directory nor a link")
    return Leaf(path, content.read(), executable=bool(member.mode & 0o100))


def _check_parents(leaves: dict[str, Leaf]) -> None:
    for path in leaves:
        parent = posixpath.dirname(path)
        while parent:
            if parent in leaves:
                raise Refused("upload", f"{path} lies below {parent}, which is not a directory")
            parent = posixpath.dirname(parent)
