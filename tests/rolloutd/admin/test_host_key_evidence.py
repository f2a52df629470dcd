"""Second sources of host keys, in the forms in which OpenSSH writes them, and what is made of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rolloutd.admin.host_keys import known_hosts
from rolloutd.admin.host_keys.evidence import Evidence, HostKey, SecondSources, SourceUnreadable
from rolloutd.admin.host_keys.known_hosts import KeyChange, SharedLine
from rolloutd.admin.host_keys.scan import KeyState, judge

pytestmark = pytest.mark.servers

NAME = "[10.0.0.7]:2222"


def make_key(directory: Path, kind: str, name: str = "key") -> HostKey:
    file = directory / f"{name}_{kind}"
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "root@n1", "-f", file]
    subprocess.run(command, check=True)
    algorithm, blob = Path(f"{file}.pub").read_text().split()[:2]
    return HostKey(algorithm, blob)


def keygen(*words: object) -> str:
    return subprocess.run(["ssh-keygen", *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_each_source_names_the_key(tmp_path: Path, kind: str) -> None:
    key = make_key(tmp_path, kind)
    public = tmp_path / f"key_{kind}.pub"
    console, zone, known = (tmp_path / name for name in ("console", "zone", "known"))
    console.mkdir()
    (console / "n1.txt").write_text(keygen("-lf", public))
    zone.write_text(keygen("-r", "n1.example.org.", "-f", public))
    known.write_text(f"{NAME} {key.algorithm} {key.blob}\n")
    keygen("-H", "-f", known)
    known.write_text(f"not a line\n{known.read_text()}")
    assert NAME not in known.read_text(), "hashed"
    sources = SecondSources([known], [console], [zone])
    evidence = sources.find("n1", NAME, ("10.0.0.7",), {"host_key": public.read_text()})
    assert {(each.source, each.key_type, each.fingerprint) for each in evidence} == {
        (source, key.key_type, key.fingerprint)
        for source in ("inventory", str(known), str(console / "n1.txt"), str(zone))
    }
    assert key.fingerprint in keygen("-lf", public)
    [judged] = judge([key], [], evidence, [])
    assert (judged.state, len(judged.confirmed_by)) == (KeyState.CONFIRMED, 4)


def test_weak_and_foreign_records_count_nothing(tmp_path: Path) -> None:
    zone = tmp_path / "zone"
    records = (f"n1 IN SSHFP 4 1 {'0a' * 20}", f"other SSHFP 4 2 {'0a' * 32}", f"n10 SSHFP 4 2 {'0a' * 32}")
    zone.write_text("\n".join(records))
    assert SecondSources(zones=[zone]).find("n1", "n1", (), {"host_key": 7}) == []
    with pytest.raises(SourceUnreadable):
        SecondSources(known_hosts=[tmp_path / "nosuch"])


def test_state_follows_from_stored_and_evidence(tmp_path: Path) -> None:
    key, other = make_key(tmp_path, "ed25519"), make_key(tmp_path, "ed25519", "other")
    rsa = make_key(tmp_path, "rsa")
    wrong = [Evidence("zone", "ED25519", other.fingerprint)]

    def states(offered: list[HostKey], stored: list[HostKey], evidence: list[Evidence]) -> list[str]:
        return [each.state.value for each in judge(offered, stored, evidence, [])]

    assert states([key], [], []) == ["unconfirmed"]
    assert states([key], [], wrong) == ["contradicted"]
    assert states([key, rsa], [key], []) == ["stored", "unconfirmed"]
    assert states([key], [other], []) == ["changed"]
    assert states([rsa], [key], []) == ["changed"], "the stored key is not offered"
    assert states([rsa], [], wrong) == ["unconfirmed"], "a source of another type says nothing"


def test_only_lines_of_the_node_are_replaced(tmp_path: Path) -> None:
    old, new = make_key(tmp_path, "ed25519"), make_key(tmp_path, "ed25519", "new")
    line = f"{NAME} {old.algorithm} {old.blob}"
    kept = f"# a comment\n[10.0.0.8]:2222 {old.algorithm} {old.blob}\n@revoked {line}\n"
    change = KeyChange("n1", NAME, (new,), (old,), ())
    after = known_hosts.apply(f"{kept}{line}\n", [change])
    assert after == f"{kept}{NAME} {new.algorithm} {new.blob}\n"
    with pytest.raises(SharedLine):
        known_hosts.apply(f"{NAME},n2 {old.algorithm} {old.blob}\n", [change])
