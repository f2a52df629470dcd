"""Fuzz target of the second sources of host keys: known_hosts, consoles, zones and variables."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from rolloutd.admin.host_keys.evidence import SecondSources

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIFdFs/wVhYTv3EpWJLYnhh5DCVJ0v0Qm+9ZrnG3n0qMP"
FINGERPRINT = "SHA256:" + "a" * 43

HOST_KEY_SOURCES = (
    f"n1,[10.0.0.1]:2222 ssh-ed25519 {KEY} root@n1\n|1|c2FsdA==|aGFzaA== ssh-ed25519 {KEY}\n".encode(),
    f"@cert-authority *.example ssh-ed25519 {KEY}\n@revoked n1 ssh-ed25519 {KEY}\n".encode(),
    f"ci-info: 256 {FINGERPRINT} root@n1 (ED25519)\n3072 {FINGERPRINT} no comment (RSA)\n".encode(),
    f"n1.example. 300 IN SSHFP 4 2 {'0a' * 32}\nn1 SSHFP 1 1 {'0b' * 20}\n".encode(),
    f"n1 IN SSHFP 3 2 {'0c ' * 32}\n".encode(),
    f"ssh-ed25519 {KEY}".encode(),
)


def read_second_sources(data: bytes, _: Path) -> None:
    """Give the input to every kind of source; what leaves them are fingerprints."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "n1").write_bytes(data)
        (directory / "file").write_bytes(data)
        sources = SecondSources([directory / "file"], [directory], [directory / "file"])
        variables = {"host_key": data.decode(errors="replace")}
        for evidence in sources.find("n1", "[10.0.0.1]:2222", ("10.0.0.1",), variables):
            assert re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", evidence.fingerprint), evidence
            assert evidence.key_type.isprintable(), evidence
