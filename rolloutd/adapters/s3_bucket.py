"""Directories in a bucket of an S3-compatible server, each packed into one object.

A key ends with the sha256 of its content, so what another machine fetches is what was stored.  Packing is
repeatable: one directory has one key, on every machine.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from rolloutd.errors import Refused, SourceFailed
from rolloutd.files.artifact_files import file_digest
from rolloutd.files.source_archive import require_links_inside
from rolloutd.settings.shared_files import S3Files

if TYPE_CHECKING:
    from obstore import ObjectMeta

CONNECT_LIMIT_S = 5.0
SILENCE_LIMIT_S = 30.0
"""Longest wait for the next bytes of an answer."""

REQUEST_LIMIT_S = 3600.0
"""Of one request, however the bytes drip: enough for an image of some GB."""

RETRIES = 3
RETRY_LIMIT_S = 90.0
"""People wait for a submit; the next attempt of a node asks again by itself."""

PART_BYTES = 8 * 1024 * 1024
"""Bytes that are in memory at once: of a download, and of each part of an upload."""

PARTS_AT_ONCE = 2

SUFFIX = ".tar"

_KEY = re.compile(r"(?P<name>.+)/(?P<digest>[0-9a-f]{64})\.tar")

_ACTIONS = {
    "SignatureDoesNotMatch": "the secret key is wrong; check `files.s3.credentials_file`",
    "InvalidAccessKeyId": "the access key is unknown; check `files.s3.credentials_file`",
    "AccessDenied": "the key may not do this; grant it reading, writing, listing and deleting",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's; synchronize it",
    "AuthorizationHeaderMalformed": "the region is wrong; check `files.s3.region`",
    "redirect without LOCATION": "the region or endpoint is wrong; check `files.s3`",
    "NoSuchBucket": "there is no such bucket; create it",
    "BadDigest": "the content was altered on its way; check the network and proxies",
    "XAmzContentSHA256Mismatch": "the content was altered on its way; check the network and proxies",
}
"""What to do about an error, by the code of S3's answer."""


class S3Bucket:
    """The directories of one kind, such as trees, by name; its functions block, and raise SourceFailed."""

    def __init__(self, settings: S3Files, kind: str) -> None:
        self._settings = settings
        self._root = "/".join(part for part in (settings.prefix, kind) if part)
        self._lock = threading.Lock()
        self._credentials: tuple[str, str] | None = None
        self._store: S3Store | None = None

    @property
    def title(self) -> str:
        return f"bucket {self._settings.bucket}"

    def put(self, name: str, directory: Path) -> None:
        """Store a directory, or restart the retention period of an equal one."""
        require_links_inside(directory)
        with tempfile.TemporaryDirectory(prefix="rolloutd-", dir=directory.parent) as place:
            packed = Path(place, "packed")
            _pack(directory, packed)
            key = f"{self._root}/{name}/{file_digest(packed)}{SUFFIX}"
            with self._reported(name):
                obstore.put(self._open(), key, packed, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def fetch(self, name: str, into: Path) -> bool:
        """Unpack the directory of a name, the latest one; return whether there is one."""
        found = max(self.objects(name), key=lambda each: each["last_modified"], default=None)
        if found is None:
            return False
        matched = _KEY.fullmatch(found["path"])
        assert matched is not None
        with tempfile.TemporaryFile(dir=into.parent) as packed:
            digest = hashlib.sha256()
            with self._reported(name):
                for part in obstore.get(self._open(), found["path"]).stream(min_chunk_size=PART_BYTES):
                    digest.update(part)
                    packed.write(part)
            if digest.hexdigest() != matched["digest"]:
                raise SourceFailed(
                    f"{self.title}: {found['path']} has other content than its name says;"
                    " remove it, then submit the plan again"
                )
            packed.seek(0)
            try:
                _unpack(packed, into)
                require_links_inside(into)
            except (tarfile.TarError, OSError, Refused) as error:
                raise SourceFailed(f"{self.title}: {found['path']} cannot be unpacked: {error}") from error
        return True

    def objects(self, name: str = "") -> list[ObjectMeta]:
        """Return the objects of a name and of names below it, or all."""
        with self._reported(name or self._root):
            found = obstore.list(self._open(), f"{self._root}/{name}".rstrip("/")).collect()
        return [each for each in found if _KEY.fullmatch(each["path"])]

    def names(self) -> dict[str, float]:
        """Return when each directory was stored, with those below it."""
        found: dict[str, float] = {}
        for each in self.objects():
            name = self._name_of(each).partition("/")[0]
            found[name] = max(found.get(name, 0.0), each["last_modified"].timestamp())
        return found

    def first_name(self, prefix: str) -> str | None:
        with self._reported(prefix):
            listed = obstore.list(self._open(), self._root, offset=f"{self._root}/{prefix}", chunk_size=1)
            following = next(iter(listed), [])
        name = self._name_of(following[0]) if following else ""
        return name if name.startswith(prefix) else None

    def _name_of(self, found: ObjectMeta) -> str:
        matched = _KEY.fullmatch(found["path"])
        return matched["name"].removeprefix(f"{self._root}/") if matched else ""

    def remove(self, name: str, unmodified_since: float = float("inf")) -> bool:
        """Remove the directories of a name and of names below it, unless one is newer; return whether."""
        found = self.objects(name)
        if any(each["last_modified"].timestamp() > unmodified_since for each in found):
            return False
        with self._reported(name):
            obstore.delete(self._open(), [each["path"] for each in found])
        return True

    def check(self) -> None:
        """Write, read, list and remove an object of this kind."""
        with tempfile.TemporaryDirectory(prefix="rolloutd-") as place:
            written, read = Path(place, "written"), Path(place, "read")
            written.mkdir()
            read.mkdir()
            name = f"check-{os.urandom(8).hex()}"
            (written / name).write_text(name)
            self.put(name, written)
            try:
                self.fetch(name, read)
            finally:
                self.remove(name)

    def _open(self) -> S3Store:
        """Return the client; another one if the credentials have changed."""
        with self._lock:
            credentials = _read_credentials(self._settings.credentials_file)
            if self._store is None or credentials != self._credentials:
                self._store, self._credentials = self._connect(*credentials), credentials
            return self._store

    def _connect(self, key: str, secret: str) -> S3Store:
        settings = self._settings
        trusted = settings.ca_file
        try:
            certificates = None if trusted is None else trusted.read_bytes()
            return S3Store(
                settings.bucket,
                region=settings.region,
                access_key_id=key,
                secret_access_key=secret,
                # Settings say where the bucket is, never the daemon's environment.
                endpoint=(settings.endpoint or f"https://s3.{settings.region}.amazonaws.com").rstrip("/"),
                virtual_hosted_style_request=False,
                # Where a server has no DeleteObjects, its plain DELETE does.
                disable_bulk_delete=True,
                client_options={
                    "allow_http": True,
                    "connect_timeout": timedelta(seconds=CONNECT_LIMIT_S),
                    "read_timeout": timedelta(seconds=SILENCE_LIMIT_S),
                    "timeout": timedelta(seconds=REQUEST_LIMIT_S),
                    **({} if certificates is None else {"root_certificate": certificates}),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_LIMIT_S)},
            )
        except OSError as error:
            raise SourceFailed(f"{trusted}: {error.strerror}; check `files.s3.ca_file`") from error
        except (BaseError, ValueError) as error:
            raise SourceFailed(f"{self.title}: {_first_line(error)}; check `files.s3`") from error

    @contextlib.contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Raise SourceFailed for what obstore raises, by the code of the server's answer."""
        try:
            yield
        except (BaseError, FileNotFoundError, ValueError) as error:
            # A redirection has its code in a body that obstore does not show.
            code = re.search(r"<Code>(\w+)</Code>|redirect without LOCATION", str(error))
            default = f"{name}: {_first_line(error)}; check the server and `files.s3`"
            problem = _ACTIONS.get((code[1] or code[0]) if code else "", default)
            raise SourceFailed(f"{self.title}: {problem}") from error


def _read_credentials(path: Path) -> tuple[str, str]:
    """Return an access key and its secret; raises SourceFailed, without what the file has."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
        section = parser["default"]
        return section["aws_access_key_id"], section["aws_secret_access_key"]
    except OSError as error:
        raise SourceFailed(f"{path}: {error.strerror}; name the file with the key of the bucket") from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # Their texts have lines of the file.
        raise SourceFailed(
            f"{path}: no key of a bucket; write aws_access_key_id and aws_secret_access_key below [default]"
        ) from None


def _first_line(error: Exception) -> str:
    """Return what happened, without obstore's debugging lines and the server's page."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    cause = re.search(r"kind: (Timeout|Connect|Decode|Interrupted)", str(error))
    return f"{text.partition(': <?xml')[0]}{f' ({cause[1].lower()})' if cause else ''}"[:300]


def _pack(directory: Path, packed: Path) -> None:
    """Write a tar of a directory that depends on its files' names, content and modes alone."""
    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directory.rglob("*")):
            tar.inodes.clear()  # type: ignore[attr-defined]  # a second name of a file is another file
            tar.add(path, path.relative_to(directory), recursive=False, filter=_without_times)


def _unpack(packed: IO[bytes], into: Path) -> None:
    """Write the entries of a tar; links last, so that no write follows one."""
    with tarfile.open(fileobj=packed) as tar:
        members = tar.getmembers()
        for member in members:
            path = PurePosixPath(member.name)
            is_kind = member.isreg() or member.isdir() or member.issym()
            if not is_kind or path.is_absolute() or ".." in path.parts:
                raise tarfile.ReadError(f"entry {member.name!r} is no file, directory or link inside")
        for member in sorted(members, key=tarfile.TarInfo.issym):
            target = into / member.name
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.issym():
                target.symlink_to(member.linkname)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                with content, target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _without_times(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (entry.isreg() or entry.isdir() or entry.issym()):
        return None
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
