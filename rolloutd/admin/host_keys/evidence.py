"""What second sources say about host keys: known_hosts files, console output, SSHFP records, the inventory.

Each source is foreign text.  Only fingerprints and key types leave this file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncssh

from rolloutd.errors import RolloutdError

JSON = Any

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Bytes read of a source: known_hosts of ten thousand nodes with three keys each has 9 MiB."""

MAX_CONSOLE_BYTES = 1024 * 1024
"""Bytes read of one node's console output, from its end: clouds keep 64 KiB."""

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}(?![A-Za-z0-9+/])")

_CONSOLE_LINE = re.compile(r"(SHA256:[A-Za-z0-9+/]{43})\s[^()]{0,300}\((ED25519|ECDSA|RSA)\)")
"""A line of cloud-init's or ssh-keygen's: `256 SHA256:... root@host (ED25519)`."""

_ALGORITHM = re.compile(r"[a-z0-9@.-]{1,64}")

_SSHFP = re.compile(
    r"^(\S{1,255})\s+(?:\d{1,10}\s+)?(?:IN\s+)?SSHFP\s+([134])\s+2\s+([0-9A-Fa-f ]{64,80})\s*$",
    re.IGNORECASE | re.MULTILINE,
)
"""A record with a SHA-256 digest; those with SHA-1 prove too little."""

_SSHFP_KEY_TYPES = {"1": "RSA", "3": "ECDSA", "4": "ED25519"}


class SourceUnreadable(RolloutdError):
    """A second source cannot be read."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """A host key as people compare it; `algorithm` and `blob` as known_hosts has them."""

    algorithm: str
    blob: str

    @property
    def key_type(self) -> str:
        return key_type(self.algorithm)

    @property
    def fingerprint(self) -> str:
        return fingerprint(base64.b64decode(self.blob))

    @property
    def text(self) -> str:
        return f"{self.algorithm} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fingerprint that a source has for a node; `key_type` is empty where the source does not say."""

    source: str
    key_type: str
    fingerprint: str


def host_key(key: asyncssh.SSHKey) -> HostKey:
    algorithm, blob = key.export_public_key("openssh").decode("ascii").split()[:2]
    return HostKey(algorithm, blob)


def key_type(algorithm: str) -> str:
    """Return the type by which ssh-keygen names an algorithm."""
    if algorithm.startswith("ecdsa-"):
        return "ECDSA"
    return {"ssh-ed25519": "ED25519", "ssh-rsa": "RSA"}.get(algorithm, algorithm)


def fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


class SecondSources:
    """All second sources that a scan was given, read once."""

    def __init__(
        self, known_hosts: Sequence[Path] = (), consoles: Sequence[Path] = (), zones: Sequence[Path] = ()
    ) -> None:
        self._known_hosts = [(path, _import_known_hosts(path)) for path in known_hosts]
        self._consoles = tuple(consoles)
        self._zones = [(path, dict(_read_zone(path))) for path in zones]
        for path in consoles:
            if not path.is_dir():
                raise SourceUnreadable(f"{path}: not a directory; give one with a file for each node")

    def find(
        self, node: str, known_hosts_name: str, names: Iterable[str], variables: Mapping[str, JSON]
    ) -> list[Evidence]:
        """Return what the sources say of a node; `names` are its host names and addresses."""
        found = list(_read_variable(variables.get("host_key")))
        for path, known in self._known_hosts:
            for name in dict.fromkeys((known_hosts_name, node)):
                for key in known.match(_plain_name(name), "", _port(name))[0]:
                    each = host_key(key)
                    found.append(Evidence(str(path), each.key_type, each.fingerprint))
        for directory in self._consoles:
            found += _read_console(directory, node)
        for path, records in self._zones:
            for name in dict.fromkeys((node, *names)):
                wanted = [record for record in records if record == name or record.startswith(f"{name}.")]
                found += [Evidence(str(path), *pair) for record in wanted for pair in records[record]]
        return list(dict.fromkeys(found))


def _plain_name(known_hosts_name: str) -> str:
    return known_hosts_name[1:].partition("]")[0] if known_hosts_name.startswith("[") else known_hosts_name


def _port(known_hosts_name: str) -> int | None:
    _, _, port = known_hosts_name.rpartition("]:")
    return int(port) if known_hosts_name.startswith("[") and port.isdecimal() else None


def _import_known_hosts(path: Path) -> asyncssh.SSHKnownHosts:
    lines = []
    for line in _read_text(path).splitlines():
        try:
            asyncssh.import_known_hosts(line)
        except ValueError:
            continue  # OpenSSH reads the other lines of such a file too
        lines.append(line)
    return asyncssh.import_known_hosts("\n".join(lines))


def _read_variable(value: JSON) -> Iterator[Evidence]:
    """Yield the inventory's host_key: a public key, or a fingerprint."""
    if not isinstance(value, str):
        return
    if matched := _FINGERPRINT.search(value):
        yield Evidence("inventory", "", matched[0])
        return
    words = value.split()
    for algorithm, blob in pairwise(words):
        try:
            content = base64.b64decode(blob, validate=True)
        except (binascii.Error, ValueError):
            continue
        # A public key begins with its own algorithm's name, after the length of that.
        name = algorithm.encode(errors="replace")
        if _ALGORITHM.fullmatch(algorithm) and content.startswith(len(name).to_bytes(4, "big") + name):
            yield Evidence("inventory", key_type(algorithm), fingerprint(content))


def _read_console(directory: Path, node: str) -> Iterator[Evidence]:
    """Yield the fingerprints in a node's console output, the file NODE, NODE.log or NODE.txt."""
    for suffix in ("", ".log", ".txt"):
        path = directory / f"{node}{suffix}"
        if "/" not in node and path.is_file():
            text = _read_text(path, MAX_CONSOLE_BYTES, from_end=True)
            for matched in _CONSOLE_LINE.finditer(text):
                yield Evidence(str(path), matched[2], matched[1])


def _read_zone(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each name of a zone or of dig's output with its key types and fingerprints."""
    records: dict[str, list[tuple[str, str]]] = {}
    for name, algorithm, digest in _SSHFP.findall(_read_text(path)):
        content = digest.replace(" ", "")
        if len(content) == 2 * hashlib.sha256().digest_size:
            text = "SHA256:" + base64.b64encode(bytes.fromhex(content)).decode().rstrip("=")
            records.setdefault(name.rstrip("."), []).append((_SSHFP_KEY_TYPES[algorithm], text))
    yield from records.items()


def _read_text(path: Path, limit: int = MAX_FILE_BYTES, *, from_end: bool = False) -> str:
    try:
        with path.open("rb") as opened:
            if from_end:
                opened.seek(max(0, path.stat().st_size - limit))
            return opened.read(limit).decode(errors="replace")
    except OSError as error:
        raise SourceUnreadable(f"{path}: {error.strerror}; name a file that you can read") from error
