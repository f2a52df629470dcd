"""Signatures of tags and commits, verified by git against the keys of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rolloutd.adapters.sources.git_command import run_git
from rolloutd.errors import SourceFailed

_NO_PROGRAM = "/bin/false"
"""What verifies signatures of a kind for which no key is trusted: the daemon user's own keys do not count."""


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Keys whose signatures count: a file of allowed ssh signers, a GnuPG home with OpenPGP keys, or both."""

    allowed_signers: Path | None
    gnupg_home: Path | None

    async def verify_tag(self, cache: Path, tag: str, name: str) -> None:
        """Raise SourceFailed unless the tag object is signed and has this name.

        A server could otherwise show an old signed tag under a new name.
        """
        header = (await run_git(cache, "cat-file", "tag", tag)).partition("\n\n")[0]
        if f"tag {name}" not in header.splitlines():
            raise SourceFailed(f"the tag object of {name} was made for another name")
        await self._verify(cache, "verify-tag", tag)

    async def verify_commit(self, cache: Path, commit: str) -> None:
        """Raise SourceFailed unless the commit is signed."""
        await self._verify(cache, "verify-commit", commit)

    async def _verify(self, cache: Path, command: str, object_id: str) -> None:
        config = {f"gpg.{kind}program": _NO_PROGRAM for kind in ("", "ssh.", "x509.")}
        environment = {}
        if self.allowed_signers is not None:
            config["gpg.ssh.allowedSignersFile"] = str(self.allowed_signers)
            del config["gpg.ssh.program"]
        if self.gnupg_home is not None:
            environment["GNUPGHOME"] = str(self.gnupg_home)
            del config["gpg.program"]
        await run_git(cache, command, object_id, config=config, environment=environment)
