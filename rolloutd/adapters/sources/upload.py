"""Uploaded tar archives, validated and unpacked as a tree.

The whole archive is validated before anything is written, and links are written last, so that no write
follows one.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
import zlib
from pathlib import Path

from rolloutd.errors import Refused
from rolloutd.files.source_archive import MAX_TREE_BYTES, MAX_TREE_FILES, TreeEntry, check_limits, check_link

MAX_ARCHIVE_BYTES = MAX_TREE_BYTES + MAX_TREE_FILES * 1024
"""Limit of an unpacked archive: the content, and a header and padding per file."""

MAX_NAME_BYTES = 255
"""The limit of Linux's file systems for one name in a path."""

MAX_PATH_BYTES = 2048
"""Half of Linux's limit; the other half is for the directory of the trees."""

GZIP_MAGIC = b"\x1f\x8b"


def read_archive(archive: bytes) -> list[TreeEntry]:
    """Return the entries of a plain or gzipped tar archive; raises Refused for an invalid one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(_decompress(archive)), mode="r:") as tar:
            return _read_members(tar)
    # RecursionError: tarfile reads each extended header within the one before.
    except (tarfile.TarError, zlib.error, UnicodeError, ValueError, EOFError, RecursionError) as error:
        raise Refused("upload", f"the upload is not a tar archive: {error}") from error


def write_entries(entries: list[TreeEntry], directory: Path) -> None:
    """Write validated entries into an empty directory."""
    for entry in sorted(entries, key=lambda leaf: leaf.is_symlink):
        path = directory / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.is_symlink:
            path.symlink_to(entry.content.decode())
        else:
            path.write_bytes(entry.content)
            path.chmod(0o755 if entry.is_executable else 0o644)


def _decompress(archive: bytes) -> bytes:
    if not archive.startswith(GZIP_MAGIC):
        content = archive
    else:
        decompressor = zlib.decompressobj(wbits=31)
        # One byte more than the limit shows an excess without unpacking it.
        content = decompressor.decompress(archive, MAX_ARCHIVE_BYTES + 1)
        if not decompressor.eof and len(content) <= MAX_ARCHIVE_BYTES:
            raise Refused("upload", "the upload is cut off: its gzip stream has no end")
    if len(content) > MAX_ARCHIVE_BYTES:
        raise Refused("upload", f"the upload is larger than {MAX_TREE_BYTES // 1024**2} MiB when unpacked")
    return content


def _read_members(tar: tarfile.TarFile) -> list[TreeEntry]:
    entries: dict[str, TreeEntry] = {}
    size = 0
    for count, member in enumerate(tar, 1):
        size += member.size
        check_limits(size, count)
        path = _validate_path(member)
        if member.isdir():
            continue
        if path in entries:
            raise Refused("upload", f"{path} is twice in the upload")
        entries[path] = _read_entry(tar, member, path)
    _check_parents(entries)
    if not entries:
        raise Refused("upload", "the upload holds no file")
    return list(entries.values())


def _validate_path(member: tarfile.TarInfo) -> str:
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


def _read_entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> TreeEntry:
    if member.issym():
        check_link(path, member.linkname)
        return TreeEntry(path, member.linkname.encode(), is_symlink=True)
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise Refused("upload", f"{path} is neither a file nor a directory nor a link")
    return TreeEntry(path, content.read(), is_executable=bool(member.mode & 0o100))


def _check_parents(entries: dict[str, TreeEntry]) -> None:
    for path in entries:
        parent = posixpath.dirname(path)
        while parent:
            if parent in entries:
                raise Refused("upload", f"{path} lies below {parent}, which is not a directory")
            parent = posixpath.dirname(parent)
