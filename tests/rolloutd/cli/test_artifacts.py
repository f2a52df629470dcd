"""Commands for manifests: written from a directory, verified against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolloutd.cli.main import main
from rolloutd.planfile.manifest import read_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/app-1.2.3-amd64.tar.gz").write_bytes(b"app")
    (tmp_path / "tool").write_bytes(b"tool")
    (tmp_path / ".cache").write_bytes(b"")
    return tmp_path


def manifest(directory: Path) -> list[dict[str, object]]:
    file = directory / "artifacts.yml"
    return read_manifest(file.read_bytes(), str(file))


def test_manifest_is_written_and_keeps_what_people_added(directory: Path) -> None:
    assert main(["artifacts", "manifest", str(directory)]) == 0
    app, tool = manifest(directory)
    assert (app["name"], app["version"], app["kind"], app["size"]) == ("app", "1.2.3", "archive", 3)
    assert (tool["name"], tool["path"], tool["kind"]) == ("tool", "tool", "file")
    file = directory / "artifacts.yml"
    url = '  - {name: url, version: "1", url: "https://h/x", size: 1, sha256: "' + "0" * 64 + '"}\n'
    file.write_text(file.read_text().replace("size: 3", 'size: 3, select: "arch=amd64"') + url)
    (directory / "files/app-1.2.3-amd64.tar.gz").write_bytes(b"other")
    assert main(["artifacts", "manifest", str(directory)]) == 0
    app, tool, remote = manifest(directory)
    assert (app["size"], app["select"], remote["name"]) == (5, "arch=amd64", "url")


def test_each_altered_file_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["artifacts", "manifest", str(directory)])
    assert main(["artifacts", "verify", str(directory / "artifacts.yml")]) == 0
    wanted = [str(record["sha256"]) for record in manifest(directory)]
    (directory / "files/app-1.2.3-amd64.tar.gz").write_bytes(b"ap")
    (directory / "tool").write_bytes(b"loot")
    capsys.readouterr()
    assert main(["artifacts", "verify", str(directory)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "app 1.2.3: files/app-1.2.3-amd64.tar.gz is truncated to 2 bytes" in lines[0]
    assert "tool is altered" in lines[1]
    assert all(digest in line for digest, line in zip(wanted, lines, strict=True))
    (directory / "tool").unlink()
    assert main(["artifacts", "verify", str(directory), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [each["valid"] for each in answer["artifacts"]] == [False, False]
    assert answer["artifacts"][1]["text"].endswith(
        "tool cannot be read: No such file or directory; build it again"
    )


def test_empty_directory_has_no_manifest(tmp_path: Path) -> None:
    assert main(["artifacts", "manifest", str(tmp_path)]) == 1
    assert not (tmp_path / "artifacts.yml").exists()
