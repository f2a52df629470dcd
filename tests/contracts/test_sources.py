"""The contract of ports.Sources, for its fake and for git and a disk."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest

from rolloutd.adapters.sources import TreeStore
from rolloutd.errors import NotFound, Refused, SourceFailed, StoreFailed
from rolloutd.files.source_archive import MAX_TREE_BYTES, pack_tree, tree_hash
from rolloutd.ports import PinnedSource, SourceStore
from tests.contracts.fakes.sources import FakeSourceStore
from tests.support.git_repository import Repository

MISSING = "0" * 40


class SourcesBackend(Protocol):
    """Sources, and a remote repository with commits, branches and tags."""

    sources: SourceStore
    url: str

    def commit(self, text: str, *, branch: str = "main", tag: str | None = None) -> str: ...


class FakeBackend:
    """The fake."""

    def __init__(self, directory: Path) -> None:
        self.url = "https://git.example/playbooks.git"
        self._sources = FakeSourceStore(directory / "trees")
        self.sources: SourceStore = self._sources

    def commit(self, text: str, *, branch: str = "main", tag: str | None = None) -> str:
        return self._sources.commit(self.url, {"site.yml": text}, [branch], [tag] if tag else [])


class GitBackend:
    """git on a local repository."""

    def __init__(self, directory: Path) -> None:
        self.repository = Repository(directory / "playbooks")
        self.url = self.repository.url
        self.sources: SourceStore = TreeStore(directory / "state", allow_local=True)

    def commit(self, text: str, *, branch: str = "main", tag: str | None = None) -> str:
        self.repository.git("checkout", "--quiet", "-B", branch)
        commit = self.repository.commit("site.yml", text)
        if tag:
            self.repository.git("tag", "--annotate", "-m", tag, tag)
        return commit


BACKENDS: list[Callable[[Path], SourcesBackend]] = [FakeBackend, GitBackend]


@pytest.fixture(params=BACKENDS, ids=["fake", "git"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> SourcesBackend:
    """Each backend in turn."""
    made: SourcesBackend = request.param(tmp_path)
    return made


async def test_a_branch_is_pinned_to_its_commit_and_stays_there(backend: SourcesBackend) -> None:
    first = backend.commit("one\n")
    pinned = await backend.sources.pin_git(backend.url, "main")
    assert pinned == PinnedSource("git", first)
    assert (pinned.url, pinned.ref, pinned.ref_kind) == (backend.url, "main", "branch")
    second = backend.commit("two\n")
    assert await backend.sources.pin_git(backend.url, "main") == PinnedSource("git", second)
    assert (backend.sources.tree_path(pinned) / "site.yml").read_text() == "one\n"
    assert (backend.sources.tree_path(PinnedSource("git", second)) / "site.yml").read_text() == "two\n"


async def test_a_tag_is_pinned_to_the_commit_it_names(backend: SourcesBackend) -> None:
    tagged = backend.commit("one\n", tag="v1.0")
    backend.commit("two\n")
    pinned = await backend.sources.pin_git(backend.url, "v1.0")
    assert pinned == PinnedSource("git", tagged)
    assert (pinned.ref, pinned.ref_kind) == ("v1.0", "tag")


async def test_a_commit_is_its_own_pin(backend: SourcesBackend) -> None:
    first = backend.commit("one\n")
    backend.commit("two\n")
    for _ in range(2):  # the second time the tree is there
        pinned = await backend.sources.pin_git(backend.url, first)
        assert pinned == PinnedSource("git", first)
        assert (pinned.url, pinned.ref, pinned.ref_kind) == (backend.url, first, "commit")
    assert (backend.sources.tree_path(PinnedSource("git", first)) / "site.yml").read_text() == "one\n"


@pytest.mark.parametrize("ref", ["nowhere", "v9", MISSING])
async def test_a_ref_that_is_not_there_fails_by_name(backend: SourcesBackend, ref: str) -> None:
    backend.commit("one\n")
    with pytest.raises(SourceFailed) as told:
        await backend.sources.pin_git(backend.url, ref)
    assert backend.url in str(told.value)


@pytest.mark.parametrize("ref", ["--upload-pack=touch x", "-x", "a..b", "main@{1}", "", "a b", "x.lock"])
async def test_a_ref_that_could_be_an_option_is_refused(backend: SourcesBackend, ref: str) -> None:
    with pytest.raises(Refused):
        await backend.sources.pin_git(backend.url, ref)


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch x",
        "ext::sh -c touch% x",
        "/etc",
        "../playbooks",
        "playbooks",
        "fd::17",
        "ssh://-oProxyCommand=x/y",
        "-oProxyCommand=x:y",
        "host:-x",
        "https://a b",
        "",
    ],
)
async def test_what_is_no_server_is_refused(tmp_path: Path, url: str) -> None:
    for sources in (FakeSourceStore(tmp_path / "fake"), TreeStore(tmp_path / "state")):
        with pytest.raises(Refused):
            await sources.pin_git(url, "main")


async def test_an_upload_is_kept_under_its_content(backend: SourcesBackend, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "mine")
    pinned = await backend.sources.store_upload(pack_tree(tree))
    assert pinned == PinnedSource("tree", tree_hash(tree))
    kept = backend.sources.tree_path(pinned)
    assert (kept / "roles/web/run.sh").read_text() == "#!/bin/sh\n"
    assert os.access(kept / "roles/web/run.sh", os.X_OK)
    assert not os.access(kept / "site.yml", os.X_OK)
    assert (kept / "link.yml").readlink() == Path("site.yml")
    assert tree_hash(kept) == pinned.pin
    assert await backend.sources.store_upload(pack_tree(tree)) == pinned


def test_compiled_python_is_no_content(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "mine")
    before = tree_hash(tree)
    for directory in (tree, tree / "roles/web"):
        (directory / "__pycache__").mkdir()
        (directory / "__pycache__" / "filters.cpython-311.pyc").write_bytes(b"\xa7\r\r\n")
    assert tree_hash(tree) == before


@pytest.mark.parametrize(
    "pinned",
    [
        PinnedSource("git", MISSING),
        PinnedSource("tree", "0" * 64),
        PinnedSource("tree", "../../etc"),
        PinnedSource("x", "y"),
    ],
)
async def test_a_tree_that_is_not_kept_is_not_found(backend: SourcesBackend, pinned: PinnedSource) -> None:
    with pytest.raises(NotFound):
        backend.sources.tree_path(pinned)


def make_tree(directory: Path) -> Path:
    """Write a small tree with a program and a link."""
    (directory / "roles/web").mkdir(parents=True)
    (directory / "empty").mkdir()
    (directory / ".git").mkdir()
    (directory / ".git/config").write_text("[core]")
    (directory / "site.yml").write_text("- hosts: all\n")
    (directory / "roles/web/run.sh").write_text("#!/bin/sh\n")
    (directory / "roles/web/run.sh").chmod(0o755)
    (directory / "link.yml").symlink_to("site.yml")
    return directory


# -- uploads with bad intentions ----------------------------------------------


def archive(*members: tuple[str, bytes | None, bytes, str]) -> bytes:
    """Return a tar of (name, content, type, link target)."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w") as tar:
        for name, content, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(content or b"")
            tar.addfile(member, io.BytesIO(content) if content is not None else None)
    return kept.getvalue()


def regular(name: str, content: bytes = b"x") -> tuple[str, bytes, bytes, str]:
    """Return a regular member."""
    return name, content, tarfile.REGTYPE, ""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[str, None, bytes, str]:
    """Return a link member."""
    return name, None, kind, target


BAD: dict[str, Callable[[], bytes]] = {
    "absolute": lambda: archive(regular("/etc/passwd")),
    "upwards": lambda: archive(regular("a/../../b")),
    "link out": lambda: archive(regular("a"), link("b", "../x")),
    "absolute link": lambda: archive(regular("a"), link("b", "/etc/passwd")),
    "link by link": lambda: archive(
        regular("d/a"), link("self", "."), link("out", "self/../x"), link("e", "out/y")
    ),
    "hard link": lambda: archive(regular("a"), link("b", "a", tarfile.LNKTYPE)),
    "device": lambda: archive(("null", None, tarfile.CHRTYPE, "")),
    "fifo": lambda: archive(("pipe", None, tarfile.FIFOTYPE, "")),
    "twice": lambda: archive(regular("a"), regular("./a")),
    "below a file": lambda: archive(regular("a"), regular("a/b")),
    "below a link": lambda: archive(link("a", "b"), regular("a/c")),
    "a link to itself": lambda: archive(regular("x"), link("a", "a")),
    "nothing": lambda: archive(),
    "no tar": lambda: b"hello" * 1000,
    "empty": lambda: b"",
    "cut gzip": lambda: gzip.compress(archive(regular("a")))[:-20],
    "bomb": lambda: gzip.compress(bytes(MAX_TREE_BYTES * 2)),
    "name too long": lambda: archive(regular("a/" + "n" * 256)),
    "path too long": lambda: archive(regular("a/" * 1100 + "x")),
    "too large": lambda: archive(regular("a", bytes(MAX_TREE_BYTES + 1))),
    "too many": lambda: archive(*(regular(f"f{n}", b"") for n in range(20_001))),
}
"""Functions, because some archives are large and every worker collects every test."""


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_upload_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    sources = TreeStore(tmp_path / "state")
    with pytest.raises(Refused):
        await sources.store_upload(BAD[name]())
    assert not [
        path for path in (tmp_path / "state").glob("trees/*") if path.is_file() or any(path.iterdir())
    ]


async def test_the_hash_does_not_know_owners_times_order_or_compression(tmp_path: Path) -> None:
    sources = TreeStore(tmp_path)
    one = archive(regular("a"), regular("b/c", b"y"))
    two = archive(("b", None, tarfile.DIRTYPE, ""), regular("./b/c", b"y"), regular("./a"))
    pins = [await sources.store_upload(data) for data in (one, two, gzip.compress(one))]
    assert len(set(pins)) == 1
    assert await sources.store_upload(archive(regular("a"), regular("b/c", b"z"))) not in pins


async def test_source_leaves_free_space_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(tmp_path / "playbooks")
    repository.commit("site.yml", "x")
    sources = TreeStore(tmp_path, allow_local=True)
    kept = await sources.store_upload(archive(regular("a")))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**40, free=2**20))
    for asked in (sources.store_upload(archive(regular("b"))), sources.pin_git(repository.url, "main")):
        with pytest.raises(StoreFailed, match="too little to store a source"):
            await asked
    assert await sources.store_upload(archive(regular("a"))) == kept


async def test_trees_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    sources = TreeStore(tmp_path)
    data = archive(regular("a"))
    pins = await asyncio.gather(*(sources.store_upload(data) for _ in range(8)))
    assert len(set(pins)) == 1
    assert [path.name for path in (tmp_path / "trees").iterdir()] == [f"tree-{pins[0].pin}"]


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not a directory"):
        pack_tree(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="pipe is neither a file nor a link"):
        pack_tree(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / "out").symlink_to("/etc/passwd")
    with pytest.raises(Refused, match="out: links to '/etc/passwd', outside"):
        pack_tree(tmp_path)
    (tmp_path / "out").unlink()
    with (tmp_path / "big").open("wb") as big:
        big.truncate(MAX_TREE_BYTES + 1)
    with pytest.raises(Refused, match="larger than 64 MiB"):
        pack_tree(tmp_path)


def test_packing_is_the_same_bytes_for_the_same_content(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "one")
    first = pack_tree(tree)
    os.utime(tree / "site.yml", (1, 1))
    (tree / "site.yml").chmod(0o600)
    assert pack_tree(tree) == first


# -- git alone ----------------------------------------------------------------


async def test_git_refuses_local_paths_unless_told(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    repository.commit("site.yml", "x")
    for url in (repository.url, str(repository.directory)):
        with pytest.raises(Refused, match="never a path of the daemon's machine"):
            await TreeStore(tmp_path / "state").pin_git(url, "main")


async def test_git_gives_short_commits_files_modes_and_links(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    (repository.directory / "run.sh").write_text("#!/bin/sh\n")
    (repository.directory / "run.sh").chmod(0o755)
    (repository.directory / "link").symlink_to("run.sh")
    commit = repository.commit("site.yml", "x")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    pinned = await sources.pin_git(repository.url, commit[:10])
    assert pinned.pin == commit
    tree = sources.tree_path(pinned)
    assert sorted(path.name for path in tree.iterdir()) == ["link", "run.sh", "site.yml"]
    assert os.access(tree / "run.sh", os.X_OK)
    assert (tree / "link").readlink() == Path("run.sh")


@pytest.mark.parametrize("target", ["../x", "/etc/passwd", "self/../x", "b"])
async def test_link_out_of_tree_is_refused_with_one_sentence(tmp_path: Path, target: str) -> None:
    """In a git source, in an upload, and in the directory of a plan; nothing of the tree is kept."""
    repository = Repository(tmp_path / "playbooks")
    (repository.directory / "self").symlink_to(".")
    (repository.directory / "b").symlink_to(target)
    repository.commit("site.yml", "x")
    git, uploads = TreeStore(tmp_path / "git", allow_local=True), TreeStore(tmp_path / "uploads")
    data = archive(regular("site.yml"), link("self", "."), link("b", target))
    texts = set()
    for asked in (
        git.pin_git(repository.url, "main"),
        uploads.store_upload(data),
        asyncio.to_thread(pack_tree, repository.directory),
    ):
        with pytest.raises(Refused) as refused:
            await asked
        texts.add(str(refused.value))
    leads_to_itself = "b: links to 'b', which leads to itself; remove it"
    outside = f"b: links to {target!r}, outside of the tree; replace it with a file"
    assert texts == {leads_to_itself if target == "b" else outside}
    assert not [*tmp_path.glob("git/trees/*"), *tmp_path.glob("uploads/trees/*")]


async def test_git_finds_an_old_commit_after_a_shallow_fetch(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    old = repository.commit("site.yml", "one")
    repository.commit("site.yml", "two")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    await sources.pin_git(repository.url, "main")
    assert await sources.pin_git(repository.url, old[:12]) == PinnedSource("git", old)


async def test_git_says_that_submodules_are_not_fetched(tmp_path: Path) -> None:
    inner, outer = Repository(tmp_path / "inner"), Repository(tmp_path / "outer")
    inner.commit("a", "b")
    outer.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", inner.url, "roles")
    outer.git("commit", "--quiet", "-m", "roles")
    with pytest.raises(SourceFailed, match="roles is a git submodule"):
        await TreeStore(tmp_path / "state", allow_local=True).pin_git(outer.url, "main")


async def test_git_is_not_led_astray_by_a_hooks_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(tmp_path / "playbooks")
    commit = repository.commit("site.yml", "x")
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nonexistent/index")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    assert await sources.pin_git(repository.url, "main") == PinnedSource("git", commit)


async def test_git_that_fails_tells_no_password(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed) as told:
        await TreeStore(tmp_path).pin_git("https://ops:geheim@127.0.0.1:1/x.git", "main")
    assert "geheim" not in str(told.value)
    assert "https://127.0.0.1:1/x.git" in str(told.value)


async def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "trees" / ".staged-x"
    left.mkdir(parents=True)
    (tmp_path / "trees" / ".staged-x.index").touch()
    TreeStore(tmp_path)
    assert list((tmp_path / "trees").iterdir()) == []


async def test_stale_git_locks_do_not_block(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    repository.commit("site.yml", "one")
    sources = TreeStore(tmp_path / "state", allow_local=True)
    await sources.pin_git(repository.url, "main")
    (cache,) = (tmp_path / "state" / "git").iterdir()
    for lock in ("shallow.lock", "HEAD.lock", "refs/rolloutd/x.lock"):
        (cache / lock).touch()
    second = repository.commit("site.yml", "two")
    assert await sources.pin_git(repository.url, "main") == PinnedSource("git", second)
