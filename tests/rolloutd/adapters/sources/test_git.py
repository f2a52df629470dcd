"""Mirrors of git sources and the signatures of what they serve, with git itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rolloutd.adapters.sources import TreeStore, git
from rolloutd.adapters.sources.git import TrustedKeys
from rolloutd.errors import Refused, SourceFailed
from rolloutd.ports import PinnedSource
from tests.support.git_repository import Repository


async def test_unreachable_remote_leaves_pinned_trees_usable(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    commit = repository.commit("site.yml", "one")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    pinned = await sources.pin_git(repository.url, "main")
    repository.directory.rename(tmp_path / "gone")
    assert (sources.tree_path(pinned) / "site.yml").read_text() == "one"
    assert await sources.pin_git(repository.url, commit) == pinned
    with pytest.raises(SourceFailed, match="playbooks"):
        await sources.pin_git(repository.url, "main")


@pytest.mark.parametrize("ref", ["main", None])
async def test_link_out_of_tree_stored_before_upgrade_refused(tmp_path: Path, ref: str | None) -> None:
    repository = Repository(tmp_path / "playbooks")
    commit = repository.commit("site.yml", "one")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    tree = sources.tree_path(await sources.pin_git(repository.url, commit))
    tree.chmod(0o755)
    (tree / "secret").symlink_to("/etc/shadow")
    with pytest.raises(Refused, match="secret: links to '/etc/shadow', outside of the tree"):
        await sources.pin_git(repository.url, ref or commit)


async def test_removed_mirror_is_made_again(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    repository.commit("site.yml", "one")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    await sources.pin_git(repository.url, "main")
    _, mirrors = sources.artifact_stores
    (mirror,) = await mirrors.list_artifacts()
    assert not await mirrors.remove(mirror.name, unmodified_since=mirror.modified_at - 1)
    assert await mirrors.remove(mirror.name, unmodified_since=mirror.modified_at)
    assert await mirrors.list_artifacts() == []
    second = repository.commit("site.yml", "two")
    assert await sources.pin_git(repository.url, "main") == PinnedSource("git", second)


async def test_mirror_with_too_many_packs_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "MAX_MIRROR_PACKS", 1)
    repository = Repository(tmp_path / "playbooks")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    for text in ("one", "two", "three"):
        commit = repository.commit("site.yml", text)
        assert await sources.pin_git(repository.url, "main") == PinnedSource("git", commit)
        packs = list((tmp_path / "state" / "git").rglob("*.pack"))
        assert 1 <= len(packs) <= 2


async def test_oversized_transfer_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "MAX_PACK_BYTES", 64 * 1024)
    repository = Repository(tmp_path / "playbooks")
    repository.directory.joinpath("large").write_bytes(os.urandom(256 * 1024))
    repository.commit("site.yml", "one")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    with pytest.raises(SourceFailed, match="the transfer exceeds 0 MiB"):
        await sources.pin_git(repository.url, "main")
    assert not list((tmp_path / "state").rglob("tmp_*"))
    assert not list((tmp_path / "state").rglob("*.pack"))


# -- signatures -----------------------------------------------------------------


class Signer:
    """An ssh key that signs commits and tags."""

    def __init__(self, directory: Path, name: str) -> None:
        self.key = directory / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.key)]
        subprocess.run(command, check=True)
        self.allowed = f"{name}@example.com {self.key.with_suffix('.pub').read_text()}"

    def sign(self, repository: Repository, *arguments: str) -> None:
        """Run a git command that signs."""
        repository.git("-c", "gpg.format=ssh", "-c", f"user.signingKey={self.key}", *arguments)


def verified(directory: Path, *signers: Signer) -> TreeStore:
    """Return sources that trust the signers alone."""
    allowed = directory / "allowed_signers"
    allowed.write_text("".join(signer.allowed for signer in signers))
    keys = TrustedKeys(allowed_signers=allowed, gnupg_home=None)
    return TreeStore(directory / "state", trusted_keys=keys, allow_local=True)


async def test_signed_commit_accepted_unsigned_refused(tmp_path: Path) -> None:
    repository, alice = Repository(tmp_path / "playbooks"), Signer(tmp_path, "alice")
    unsigned = repository.commit("site.yml", "one")
    # A tree that was stored before signatures were required does not count as verified.
    await TreeStore(tmp_path / "state", allow_local=True).pin_git(repository.url, unsigned)
    sources = verified(tmp_path, alice)
    for ref in ("main", unsigned):
        with pytest.raises(SourceFailed, match="has no trusted signature"):
            await sources.pin_git(repository.url, ref)
    alice.sign(repository, "commit", "--quiet", "--allow-empty", "-S", "-m", "signed")
    signed = repository.git("rev-parse", "HEAD")
    for ref in ("main", signed):
        assert await sources.pin_git(repository.url, ref) == PinnedSource("git", signed)


async def test_signed_tag_vouches_for_its_commit(tmp_path: Path) -> None:
    repository, alice = Repository(tmp_path / "playbooks"), Signer(tmp_path, "alice")
    commit = repository.commit("site.yml", "one")
    repository.git("tag", "plain")
    repository.git("tag", "-a", "-m", "unsigned", "v0")
    alice.sign(repository, "tag", "-s", "-m", "signed", "v1")
    sources = verified(tmp_path, alice)
    assert await sources.pin_git(repository.url, "v1") == PinnedSource("git", commit)
    for ref in ("plain", "v0"):
        with pytest.raises(SourceFailed, match="has no trusted signature"):
            await sources.pin_git(repository.url, ref)


async def test_signed_tag_under_another_name_refused(tmp_path: Path) -> None:
    repository, alice = Repository(tmp_path / "playbooks"), Signer(tmp_path, "alice")
    repository.commit("site.yml", "one")
    alice.sign(repository, "tag", "-s", "-m", "signed", "v1")
    repository.git("update-ref", "refs/tags/v2", repository.git("rev-parse", "refs/tags/v1"))
    with pytest.raises(SourceFailed, match="made for another name"):
        await verified(tmp_path, alice).pin_git(repository.url, "v2")


async def test_signature_of_an_untrusted_key_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    alice, eve = Signer(tmp_path, "alice"), Signer(tmp_path, "eve")
    repository.commit("site.yml", "one")
    eve.sign(repository, "commit", "--quiet", "--allow-empty", "-S", "-m", "signed")
    for sources in (verified(tmp_path, alice), verified(tmp_path)):
        with pytest.raises(SourceFailed, match="has no trusted signature"):
            await sources.pin_git(repository.url, "main")
    keys = TrustedKeys(allowed_signers=None, gnupg_home=tmp_path)
    with pytest.raises(SourceFailed, match="has no trusted signature"):
        await TreeStore(tmp_path / "gpg", trusted_keys=keys, allow_local=True).pin_git(repository.url, "main")
