"""The manifest of artifacts: what is read, and each mistake with its line."""

from __future__ import annotations

import pytest

from machines.model.preparation import entry_of_record, entry_record
from rolloutd.errors import InvalidFile
from rolloutd.planfile.manifest import format_manifest, read_manifest

DIGEST = "ab" * 32
APP = (
    f'{{name: app, version: "1.2.3", kind: archive, path: files/app.tar.gz, sha256: "{DIGEST}", size: 5,'
    ' select: "arch in (amd64)", mode: "0644", owner: "root:root", unpack: true}'
)
URL = f'{{name: app, version: "1.2.3", url: "https://mirror/app", sha256: "{DIGEST}", size: 5}}'

OTHER = URL.replace("app,", "other,")


def read(*artifacts: str) -> list[dict[str, object]]:
    lines = "".join(f"  - {artifact}\n" for artifact in artifacts)
    return read_manifest(f"artifacts:\n{lines}".encode(), "artifacts.yml")


def test_manifest_is_read_with_all_keys() -> None:
    records = read(APP, URL)
    assert records[0] == {
        "name": "app",
        "version": "1.2.3",
        "kind": "archive",
        "path": "files/app.tar.gz",
        "url": "",
        "sha256": DIGEST,
        "size": 5,
        "select": "arch=amd64",
        "mode": "0644",
        "owner": "root:root",
        "unpack": True,
    }
    assert (records[1]["kind"], records[1]["select"], records[1]["path"]) == ("file", None, "")
    assert read_manifest(format_manifest(records).encode(), "again.yml") == records


@pytest.mark.parametrize(
    ("artifact", "message"),
    [
        (APP.replace(DIGEST, "AB"), "wrong form"),
        (APP.replace("files/", "../"), "leaves the manifest's directory"),
        (APP.replace("files/", "/"), "leaves the manifest's directory"),
        (APP.replace("0644", "rw-r"), "wrong form"),
        (APP.replace("root:root", "root; reboot"), "wrong form"),
        (APP.replace("name: app", "name: ../app"), "wrong form"),
        (APP.replace('"1.2.3"', "1.2"), "put it in quotes"),
        (APP.replace("archive", "file"), "not unpacked"),
        (APP.replace("path: files/app.tar.gz,", ""), "nothing says where"),
        (APP.replace("size: 5", "size: -1"), "greater than or equal"),
        (APP.replace("select", "selct"), "did you mean `select`"),
        (APP.replace("amd64)", "amd64"), "selector"),
    ],
)
def test_mistake_is_named_with_its_line(artifact: str, message: str) -> None:
    with pytest.raises(InvalidFile) as raised:
        read(OTHER, artifact)
    assert [(d.line, message in d.message or message in str(d)) for d in raised.value.diagnostics] == [
        (3, True)
    ]


def test_selector_of_all_nodes_is_none() -> None:
    assert read(APP.replace("arch in (amd64)", ""))[0]["select"] is None


def test_entry_of_record_has_the_same_record() -> None:
    records = read(APP, URL.replace("app,", "other,"))
    assert [entry_record(entry_of_record(record)) for record in records] == records


def test_two_artifacts_for_the_same_nodes_refused() -> None:
    with pytest.raises(InvalidFile, match="same nodes"):
        read(URL, URL)


def test_empty_manifest_is_refused() -> None:
    for text in (b"", b"artifacts: []\n", b"- a\n"):
        with pytest.raises(InvalidFile):
            read_manifest(text, "artifacts.yml")
