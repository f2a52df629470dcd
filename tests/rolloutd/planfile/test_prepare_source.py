"""What prepare stages find in their source: manifests, and digests of playbooks with what they import."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from machines.model.node import Node
from rolloutd.errors import InvalidFile
from rolloutd.planfile import PlanFile, digest, playbooks, prepare_source, read
from rolloutd.planfile.playbooks import playbook_digest
from rolloutd.planfile.prepare_source import ForcedStages, resolve_prepare
from rolloutd.settings.compile import compile_plan
from tests.rolloutd.planfile.plan_samples import SMALLEST_PLAN

PIN = {"kind": "tree", "pin": "00" * 32}
MANIFEST = f"""\
artifacts:
  - {{name: app, version: "1.2", path: app.tar, sha256: "{hashlib.sha256(b"app").hexdigest()}", size: 3,
     select: "arch=amd64"}}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "install.yml": "- hosts: all\n  roles: [web]\n  tasks:\n    - import_tasks: more.yml\n",
        "more.yml": "- copy: {src: app.conf, dest: /etc/app.conf}\n",
        "files/app.conf": "a=1\n",
        "roles/web/tasks/main.yml": "- debug: {msg: hello}\n",
        "configure.yml": "- hosts: all\n  tasks: []\n",
        "artifacts.yml": MANIFEST,
        "app.tar": "app",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def plan_with(prepare: str) -> PlanFile:
    return read((SMALLEST_PLAN + f"  prepare: {prepare}\n").encode(), "plan.yaml")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"ap", "app 1.2: the file has 2 bytes, not 3 (found app.tar;"),
        (
            b"APP",
            f"app 1.2: the file is altered: sha256 {hashlib.sha256(b'APP').hexdigest()} (found app.tar;",
        ),
        (None, "app 1.2: the file cannot be read: No such file or directory (found app.tar;"),
    ],
    ids=["truncated", "altered", "missing"],
)
def test_file_that_differs_is_refused_at_its_line(tree: Path, content: bytes | None, problem: str) -> None:
    (tree / "app.tar").unlink()
    if content is not None:
        (tree / "app.tar").write_bytes(content)
    with pytest.raises(InvalidFile) as refused:
        resolve_prepare(plan_with("[{stage: {}}]"), tree)
    assert str(refused.value).startswith(f"artifacts.yml:2:39: artifacts[0].path: {problem}")
    assert str(refused.value.diagnostics[-1]).startswith(
        "plan.yaml:8:21: spec.prepare[0].stage.manifest: the manifest of stage stage has mistakes"
    )
    # A mirror and a user's playbook have files of their own.
    (tree / "bring.yml").write_text("- hosts: all\n")
    for method in ("method: url, url: https://mirror.example", "method: playbook, playbook: bring.yml"):
        resolve_prepare(plan_with(f"[{{stage: {{{method}}}}}]"), tree)


def test_file_beyond_the_limit_is_compared_by_size(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_source, "MAX_COMPARED_BYTES", 2)
    (tree / "app.tar").write_bytes(b"APP")
    resolve_prepare(plan_with("[{stage: {}}]"), tree)
    (tree / "app.tar").write_bytes(b"APPS")
    with pytest.raises(InvalidFile, match="has 4 bytes"):
        resolve_prepare(plan_with("[{stage: {}}]"), tree)


@pytest.mark.parametrize("name", ["install.yml", "more.yml", "files/app.conf", "roles/web/tasks/main.yml"])
def test_imported_file_changes_digest(tree: Path, name: str) -> None:
    before = playbook_digest(tree, "install.yml")
    (tree / name).write_text((tree / name).read_text() + "# changed\n")
    assert playbook_digest(tree, "install.yml") != before


def test_file_of_another_playbook_keeps_digest(tree: Path) -> None:
    before = playbook_digest(tree, "install.yml")
    (tree / "configure.yml").write_text("- hosts: none\n")
    assert playbook_digest(tree, "install.yml") == before


def test_templated_import_makes_every_file_count(tree: Path) -> None:
    (tree / "install.yml").write_text("- hosts: all\n  tasks:\n    - include_tasks: '{{ what }}.yml'\n")
    before = playbook_digest(tree, "install.yml")
    (tree / "configure.yml").write_text("- hosts: none\n")
    assert playbook_digest(tree, "install.yml") != before


@pytest.mark.parametrize(
    "task",
    [
        "template: {src: '{{ item }}.j2', dest: /etc/a}",
        "copy: {src: '{{ x }}', dest: /etc/a}",
        "copy: src={{ x }} dest=/etc/a",
        "copy: {content: \"{{ lookup('file', 'configure.yml') }}\", dest: /etc/a}",
        "{copy: {dest: /etc/}, with_fileglob: ['*.yml']}",
    ],
)
def test_file_that_only_ansible_finds_changes_digest(tree: Path, task: str) -> None:
    (tree / "install.yml").write_text(f"- hosts: all\n  tasks:\n    - {task}\n")
    before = playbook_digest(tree, "install.yml")
    (tree / "configure.yml").write_text("- hosts: none\n")
    assert playbook_digest(tree, "install.yml") != before


def test_role_of_roles_path_changes_digest(tree: Path) -> None:
    (tree / "ansible.cfg").write_text("[defaults]\nroles_path = shelf\n")
    before = playbook_digest(tree, "install.yml")
    (tree / "configure.yml").write_text("- hosts: none\n")
    assert playbook_digest(tree, "install.yml") != before


BOMB = "- &b0 [x, x]\n" + "".join(f"- &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 60))
MERGES = "- &m0 {a: 1}\n" + "".join(
    f"- &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000 + "]" * 100_000, "- hosts: &a [*a]\n", BOMB, MERGES, "- debug: !!bool maybe\n"),
        "- copy: src={{ x }}\n",
    ],
    ids=["deep", "holds-itself", "alias-bomb", "merge-bomb", "tag", "template"],
)
def test_file_that_cannot_be_followed_includes_all(
    tree: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playbooks, "MAX_WORK", 10_000)
    (tree / "more.yml").write_text(text)
    assert counts_every_file(tree)


def counts_every_file(tree: Path) -> bool:
    before = playbook_digest(tree, "install.yml")
    (tree / "configure.yml").write_text("- hosts: none\n")
    return playbook_digest(tree, "install.yml") != before


@pytest.mark.parametrize(
    "text",
    [
        "- when: 2026-13-45\n",
        "- &m {a: 1}\n- {<<: *m, b: 2}\n",
        "- debug: {msg: " + "src=" * 50_000 + "}\n",
        "",
    ],
    ids=["no-such-date", "merge-key", "long-word", "empty"],
)
def test_unusual_text_is_followed(tree: Path, text: str) -> None:
    (tree / "more.yml").write_text(text)
    assert not counts_every_file(tree)


def test_list_that_holds_itself_keeps_little_memory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playbooks, "MAX_WORK", 10_000)
    (tree / "more.yml").write_text(f"- &a [{'0,' * 2_000}*a]\n")
    tracemalloc.start()
    assert counts_every_file(tree)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 1024 * 1024


def test_too_many_followed_texts_make_every_file_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playbooks, "MAX_WORK", 2_000)
    (tree / "more.yml").write_text("".join(f"- same{n % 5}\n" for n in range(500)))
    assert not counts_every_file(tree)
    (tree / "more.yml").write_text("".join(f"- other{n}\n" for n in range(500)))
    (tree / "configure.yml").write_text("- hosts: all\n")
    assert counts_every_file(tree)


def test_link_to_itself_is_not_followed(tree: Path) -> None:
    (tree / "loop").symlink_to("loop")
    (tree / "long").symlink_to("x" * 300)
    (tree / "more.yml").write_text("- include_tasks: loop\n- include_tasks: loop/x.yml\n")
    assert not counts_every_file(tree)
    (tree / "more.yml").write_text("- include_tasks: '{{ x }}'\n")
    (tree / "configure.yml").write_text("- hosts: all\n")
    assert counts_every_file(tree)


def test_long_chain_of_imports_is_followed(tree: Path) -> None:
    for number in range(340):
        (tree / f"t{number}.yml").write_text(f"- import_tasks: t{number + 1}.yml\n")
    (tree / "more.yml").write_text("- import_tasks: t0.yml\n")
    before = playbook_digest(tree, "install.yml")
    (tree / "t339.yml").write_text("- debug: {}\n")
    assert playbook_digest(tree, "install.yml") != before


def test_each_file_is_read_once_for_all_stages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "other.yml").write_text("- import_playbook: install.yml\n")
    names = ("install.yml", "other.yml", "install.yml")
    stages = [{"install": {"name": f"s{number}", "playbook": name}} for number, name in enumerate(names)]
    plan, reads = plan_with(json.dumps(stages)), Counter[str]()
    read_bytes = Path.read_bytes

    def count(path: Path) -> bytes:
        reads[path.name] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", count)
    resolved = resolve_prepare(plan, tree).content["spec"]["prepare"]["resolved"]
    assert reads["app.conf"] == reads["install.yml"] == reads["other.yml"] == 1
    assert resolved["s0"]["playbook"] == playbook_digest(tree, "install.yml")
    assert resolved["s1"]["playbook"] == playbook_digest(tree, "other.yml")


def test_manifest_of_source_is_part_of_change(tree: Path) -> None:
    plan = resolve_prepare(plan_with("[{stage: {}}]"), tree)
    (stage,) = compile_plan(plan.content, teams={}).prepare
    assert [entry.name for entry in stage.artifacts_for(Node("n1", labels={"arch": "amd64"}))] == ["app"]
    assert stage.artifacts_for(Node("n2", labels={"arch": "arm64"})) == ()
    before = digest(plan.content, PIN, ["n1"])
    (tree / "app.tar").write_text("APP")
    digests = [hashlib.sha256(content).hexdigest() for content in (b"app", b"APP")]
    (tree / "artifacts.yml").write_text(MANIFEST.replace(*digests))
    after = digest(resolve_prepare(plan_with("[{stage: {}}]"), tree).content, PIN, ["n1"])
    assert [part for part in before if before[part] != after[part]] == ["change", "whole"]


def test_manifest_that_nothing_made_is_refused(tree: Path) -> None:
    with pytest.raises(InvalidFile) as refused:
        resolve_prepare(plan_with("[{stage: {manifest: other.yml}}]"), tree)
    (mistake,) = refused.value.diagnostics
    assert (mistake.path, mistake.line) == ("spec.prepare[0].stage.manifest", 8)
    built = "[{build: {playbook: configure.yml, manifest: other.yml}}, {stage: {manifest: other.yml}}]"
    stages = compile_plan(resolve_prepare(plan_with(built), tree).content, teams={}).prepare
    assert [stage.built_by for stage in stages] == ["", "build"]


def test_forced_stage_is_part_of_policy_and_must_exist(tree: Path) -> None:
    plan = plan_with("[{stage: {}}]")
    forced = resolve_prepare(plan, tree, ForcedStages(("stage",)))
    assert [stage.force for stage in compile_plan(forced.content, teams={}).prepare] == [True]
    before = digest(resolve_prepare(plan, tree).content, PIN, ["n1"])
    after = digest(forced.content, PIN, ["n1"])
    assert [part for part in before if before[part] != after[part]] == ["policy", "whole"]
    with pytest.raises(InvalidFile, match="no such stage"):
        resolve_prepare(plan, tree, ForcedStages(("copy",)))
