"""The contract of ports.SharedDirectories, for a mounted directory and a bucket of a real S3 server."""

from __future__ import annotations

import os
import shutil
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutd.adapters import s3_bucket
from rolloutd.adapters.ansible import artifact_store
from rolloutd.adapters.ansible.artifact_store import SharedOutput
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.adapters.s3_bucket import S3Bucket
from rolloutd.adapters.sources import TreeStore
from rolloutd.errors import NotFound, SourceFailed
from rolloutd.files.source_archive import pack_tree, tree_hash
from tests.support.s3_server import Bucket, Fault, FaultyServer, S3Server


class Machines:
    """Stores of two machines over the same place."""

    def __init__(self, directory: Path, bucket: Bucket | None) -> None:
        self._directory, self._bucket = directory, bucket

    def open(self, machine: str) -> DirectoryStore:
        if self._bucket is None:
            return DirectoryStore(self._directory / "shared" / "things")
        return DirectoryStore(self._directory / machine, S3Bucket(self._bucket.settings(), "things"))


@pytest.fixture(params=["directory", "s3"])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Machines:
    """Two machines with one kind of shared files."""
    is_s3 = request.param == "s3"
    return Machines(tmp_path, request.getfixturevalue("s3_server").make_bucket() if is_s3 else None)


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    return s3_server.make_bucket()


@pytest.fixture
def faulty(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A faulty server before the bucket; nothing is tried again."""
    monkeypatch.setattr(s3_bucket, "RETRIES", 0)
    server = FaultyServer(bucket.endpoint)
    yield server
    server.stop()


@contextmanager
def _silent_server() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def write_things(directory: Path) -> Path:
    """Fill a directory with all that a tree may have."""
    (directory / "roles").mkdir(parents=True)
    (directory / "empty").mkdir()
    (directory / "site.yml").write_text("- hosts: all\n")
    (directory / "roles" / "run.sh").write_bytes(b"#!/bin/sh\n" + os.urandom(1000))
    (directory / "roles" / "run.sh").chmod(0o755)
    (directory / "link.yml").symlink_to("site.yml")
    return directory


async def publish(store: DirectoryStore, name: str) -> str:
    """Publish all that a tree may have; return its hash."""
    staged = store.stage()
    write_things(staged)
    await store.publish(staged, name)
    return tree_hash(store.parent / name)


async def test_other_machine_finds_what_was_published(machines: Machines) -> None:
    here, there = machines.open("here"), machines.open("there")
    content = await publish(here, "tree-1")
    found = await there.find("tree-1")
    assert found is not None
    assert tree_hash(found) == content
    assert (found / "link.yml").readlink() == Path("site.yml")
    assert os.access(found / "roles" / "run.sh", os.X_OK)
    assert await there.find("tree-2") is None
    assert await there.find_first("tree-") == found
    assert await there.find_first("other-") is None


async def test_directory_below_a_name_is_shared(machines: Machines) -> None:
    here, there = machines.open("here"), machines.open("there")
    for stage in ("first", "second"):
        write_things(here.parent / "net.v1" / stage)
        await here.share(f"net.v1/{stage}")
    found = await there.find("net.v1/second")
    assert found is not None
    assert tree_hash(found) == tree_hash(here.parent / "net.v1" / "second")
    assert [each.name for each in await there.list_artifacts()] == ["net.v1"]
    assert await there.remove("net.v1", unmodified_since=2e9)
    assert await machines.open("third").find("net.v1/first") is None


async def test_removed_directory_is_gone_for_others(machines: Machines) -> None:
    here = machines.open("here")
    await publish(here, "tree-1")
    await publish(here, "tree-11")
    there = machines.open("there")
    (at,) = [each.modified_at for each in await there.list_artifacts() if each.name == "tree-1"]
    assert not await there.remove("tree-1", unmodified_since=at - 1.0)
    assert await there.remove("tree-1", unmodified_since=2e9)
    assert await machines.open("third").find("tree-1") is None
    assert [each.name for each in await there.list_artifacts()] == ["tree-11"]
    assert not await there.touch("tree-1")


async def test_touched_directory_is_as_new_for_others(machines: Machines, tmp_path: Path) -> None:
    here = machines.open("here")
    await publish(here, "tree-1")
    for path in [here.parent / "tree-1", *tmp_path.rglob("tree-1"), *_objects(machines)]:
        os.utime(path, (1.0, 1.0))
    there = machines.open("there")
    assert [each.modified_at for each in await there.list_artifacts()] == [1.0]
    assert await there.touch("tree-1")
    assert not await machines.open("third").remove("tree-1", unmodified_since=1.0)


def _objects(machines: Machines) -> list[Path]:
    bucket = machines._bucket
    return [] if bucket is None else [path for path in bucket.directory.rglob("*") if path.is_file()]


async def test_equal_content_is_one_object(bucket: Bucket, tmp_path: Path) -> None:
    here, there = (DirectoryStore(tmp_path / name, S3Bucket(bucket.settings(), "t")) for name in "ab")
    write_things(here.parent / "tree-1")
    shutil.copytree(here.parent / "tree-1", there.parent / "tree-1", symlinks=True)
    os.utime(there.parent / "tree-1" / "site.yml", (5.0, 5.0))
    await here.share("tree-1")
    await there.share("tree-1")
    (only,) = (path for path in bucket.directory.rglob("*") if path.is_file())
    assert only.parent == bucket.directory / "t" / "tree-1"


async def test_large_directory_comes_in_parts(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "PART_BYTES", 5 * 1024 * 1024)
    here, there = (DirectoryStore(tmp_path / name, S3Bucket(bucket.settings(), "t")) for name in "ab")
    (here.parent / "net.v1").mkdir(parents=True)
    content = os.urandom(13 * 1024 * 1024)
    (here.parent / "net.v1" / "image").write_bytes(content)
    await here.share("net.v1")
    found = await there.find("net.v1")
    assert found is not None
    assert (found / "image").read_bytes() == content


async def test_submitted_tree_is_found_by_next_leader(bucket: Bucket, tmp_path: Path) -> None:
    def sources(machine: str) -> TreeStore:
        trees = DirectoryStore(
            tmp_path / machine / "trees", S3Bucket(bucket.settings(prefix="fleet"), "trees")
        )
        return TreeStore(tmp_path / machine, trees=trees)

    content = write_things(tmp_path / "content")
    shutil.rmtree(content / "empty")
    pinned = await sources("a").store_upload(pack_tree(content))
    other = sources("b")
    with pytest.raises(NotFound):
        other.tree_path(pinned)
    assert tree_hash(await other.find_tree(pinned)) == pinned.pin
    assert other.tree_path(pinned).is_dir()
    assert {
        path.parts[0] for path in (p.relative_to(bucket.directory) for p in bucket.directory.rglob("*"))
    } == {"fleet"}


async def test_output_is_shown_by_another_machine(machines: Machines, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run1@m1")
    run.create()
    run.events_file.write_text("{}\n")
    (run.path / "secret").write_text("secret")
    await SharedOutput(machines.open("here")).share(run)
    other = SharedOutput(machines.open("there"))
    for handle in ("run1@m1", "run1"):
        found = await other.find(handle)
        assert found is not None
        assert [path.name for path in found.path.iterdir()] == ["events.jsonl"]
    assert await other.find("run") is None
    assert await other.find("../run1@m1") is None


# -- a server that does not do what it should ---------------------------------------


@pytest.mark.parametrize(
    ("changes", "credentials", "text"),
    [
        ({}, ("daemon", "wrong"), "the secret key is wrong; check `files.s3.credentials_file`"),
        ({}, ("nobody", "wrong"), "the access key is unknown; check `files.s3.credentials_file`"),
        ({"bucket": "missing"}, ("daemon", "secret-of-the-bucket"), "there is no such bucket; create it"),
    ],
)
async def test_refusal_of_server_says_what_to_do(
    bucket: Bucket, tmp_path: Path, changes: dict[str, str], credentials: tuple[str, str], text: str
) -> None:
    bucket.write_credentials(*credentials)
    store = DirectoryStore(tmp_path / "a", S3Bucket(bucket.settings(**changes), "t"))
    name = changes.get("bucket", bucket.name)
    for call in (publish(store, "tree-1"), store.find("tree-2"), store.list_artifacts()):
        with pytest.raises(SourceFailed) as failed:
            await call
        assert str(failed.value) == f"bucket {name}: {text}"
    # Renewed credentials count at once.
    bucket.write_credentials()
    if not changes:
        assert await store.find("tree-1") is not None
        await store.share("tree-1")
        assert len(await store.list_artifacts()) == 1


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (403, "RequestTimeTooSkewed", "this machine's clock differs from the server's; synchronize it"),
        (400, "AuthorizationHeaderMalformed", "the region is wrong; check `files.s3.region`"),
        (301, "PermanentRedirect", "the region or endpoint is wrong; check `files.s3`"),
        (403, "AccessDenied", "the key may not do this; grant it reading, writing, listing and deleting"),
    ],
)
async def test_documented_error_says_what_to_do(
    bucket: Bucket, faulty: FaultyServer, tmp_path: Path, status: int, code: str, text: str
) -> None:
    faulty.answer = (status, code)
    store = DirectoryStore(tmp_path, S3Bucket(bucket.at(faulty.endpoint).settings(), "t"))
    with pytest.raises(SourceFailed) as failed:
        await store.find("tree-1")
    assert str(failed.value) == f"bucket {bucket.name}: {text}"


@pytest.mark.parametrize("fault", Fault)
async def test_spoiled_content_is_not_taken(
    bucket: Bucket,
    faulty: FaultyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    await publish(DirectoryStore(tmp_path / "here", S3Bucket(bucket.settings(), "t")), "tree-1")
    monkeypatch.setattr(s3_bucket, "SILENCE_LIMIT_S", 0.5 if fault is Fault.SILENCE else 60.0)
    there = DirectoryStore(tmp_path / "there", S3Bucket(bucket.at(faulty.endpoint).settings(), "t"))
    faulty.fault = fault
    with pytest.raises(SourceFailed):
        await there.find("tree-1")
    assert list(there.parent.iterdir()) == []
    if fault is not Fault.SILENCE:
        faulty.fault = None
        assert await there.find("tree-1") is not None


async def test_server_without_answer_delays_a_node_shortly(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(s3_bucket, "RETRIES", 0)
    monkeypatch.setattr(artifact_store, "SHARE_LIMIT_S", 0.05)
    run = RunDirectory(tmp_path / "run1@m1")
    run.create()
    with _silent_server() as endpoint:
        store = DirectoryStore(tmp_path / "here", S3Bucket(bucket.at(endpoint).settings(), "t"))
        await SharedOutput(store).share(run)
    assert "other machines cannot show its output: not within 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory; name the file with the key of the bucket"),
        ("aws_secret_access_key = s3cr3t\n", "no key of a bucket; write "),
        ("[default]\naws_access_key_id s3cr3t\n", "no key of a bucket; write "),
        ("[other]\naws_access_key_id = a\naws_secret_access_key = s3cr3t\n", "no key of a bucket; write "),
    ],
)
async def test_unusable_credentials_are_named_without_secret(
    bucket: Bucket, tmp_path: Path, content: str | None, text: str
) -> None:
    bucket.credentials_file.unlink()
    if content is not None:
        bucket.credentials_file.write_text(content)
    with pytest.raises(SourceFailed) as failed:
        await DirectoryStore(tmp_path, S3Bucket(bucket.settings(), "t")).find("tree-1")
    assert str(failed.value).startswith(f"{bucket.credentials_file}: {text}")
    assert "s3cr3t" not in f"{failed.value}{failed.value.__context__ if failed.value.__cause__ else ''}"


async def test_object_that_leads_out_of_its_directory_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    with tarfile.open(packed, "w") as tar:
        entry = tarfile.TarInfo("out")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    place = bucket.directory / "t" / "tree-1"
    place.mkdir(parents=True)
    packed.rename(place / f"{s3_bucket.file_digest(packed)}.tar")
    with pytest.raises(SourceFailed, match="cannot be unpacked"):
        await DirectoryStore(tmp_path / "a", S3Bucket(bucket.settings(), "t")).find("tree-1")
