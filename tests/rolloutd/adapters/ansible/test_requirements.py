"""Collections and roles of a tree, installed by ansible-galaxy from files of the tree: no network."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rolloutd.adapters.ansible.environment import RunPaths, TreeConfig, build_environment
from rolloutd.adapters.ansible.requirements import read_requirements
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.adapters.sources import TreeStore
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.errors import SourceFailed
from rolloutd.ports import Host, InventorySnapshot, RunRequest
from tests.contracts.runner_backends import source_of, tree_of
from tests.support.git_repository import Repository

REQUIREMENTS = """\
collections:
  - name: vendor/acme-tools-1.0.0.tar.gz
  - name: here.already
roles:
  - {name: greet, src: vendor/greet.tar.gz}
  - present
"""
PLAY = """\
- hosts: localhost
  connection: local
  gather_facts: false
  roles: [greet]
  tasks:
    - ansible.builtin.debug: {msg: "{{ 'x' | acme.tools.shout }}"}
"""
FILTER = (
    "class FilterModule:\n    def filters(self):\n        return {'shout': lambda text: text.upper() + '!'}\n"
)


def archive(path: Path, files: dict[str, str], directories: tuple[str, ...] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name in directories:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o644
            tar.addfile(member, io.BytesIO(text.encode()))


def write_collection(path: Path) -> None:
    """Write a collection as ansible-galaxy builds it."""
    entry = {"chksum_type": "sha256", "format": 1}
    directories = ("plugins", "plugins/filter")
    listed = [{**entry, "name": name, "ftype": "dir", "chksum_sha256": None} for name in (".", *directories)]
    listed.append(
        {**entry, "name": "plugins/filter/shout.py", "ftype": "file", "chksum_sha256": sha256(FILTER)}
    )
    contents = json.dumps({"files": listed, "format": 1})
    info = {"namespace": "acme", "name": "tools", "version": "1.0.0", "dependencies": {}, "authors": ["a"]}
    manifest = {**entry, "name": "FILES.json", "ftype": "file", "chksum_sha256": sha256(contents)}
    whole = json.dumps({"collection_info": info, "file_manifest_file": manifest, "format": 1})
    files = {"MANIFEST.json": whole, "FILES.json": contents, "plugins/filter/shout.py": FILTER}
    archive(path, files, directories)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fill(tree: Path) -> None:
    """Write a tree that vendors archives, a collection and a role."""
    write_collection(tree / "vendor/acme-tools-1.0.0.tar.gz")
    task = "- ansible.builtin.debug: {msg: hello from greet}\n"
    archive(tree / "vendor/greet.tar.gz", {"greet/meta/main.yml": "{}\n", "greet/tasks/main.yml": task})
    (tree / "collections/ansible_collections/here/already").mkdir(parents=True)
    (tree / "collections/ansible_collections/here/already/README").touch()
    (tree / "roles/present/tasks").mkdir(parents=True)
    (tree / "roles/present/tasks/main.yml").touch()
    (tree / "requirements.yml").write_text(REQUIREMENTS)
    (tree / "site.yml").write_text(PLAY)


async def test_vendored_requirements_are_installed_for_the_commit(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "playbooks")
    fill(repository.directory)
    repository.commit("README", "one")
    cache = TreeCache(tmp_path / "state" / "ansible")
    sources = TreeStore(tmp_path / "state", prepare=cache.prepare, allow_local=True)
    pinned = await sources.pin_git(repository.url, "main")
    tree = sources.tree_path(pinned)
    installed = cache.requirements_of(tree)
    assert installed is not None
    assert pinned.requirements == await cache.prepare(tree)
    assert {path.name for path in installed.iterdir()} == {"collections", "roles"}
    assert not (installed / "collections/ansible_collections/here").exists()
    paths = RunPaths("r", tmp_path / "run" / "events", tmp_path / "tmp", tmp_path / "s", None, installed)
    ended = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "site.yml"],
        cwd=tree,
        env=build_environment(paths, TreeConfig.load(tree)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hello from greet" in ended.stdout, ended.stderr
    assert "X!" in ended.stdout
    # The commit's requirements are there: nothing is installed again, and they go with their tree.
    before = installed.stat().st_ino
    await sources.pin_git(repository.url, pinned.pin)
    assert cache.requirements_of(tree) == installed
    assert installed.stat().st_ino == before
    (stored,) = await cache.list_artifacts()
    assert stored.name == tree.name
    assert await cache.remove(stored.name, unmodified_since=stored.modified_at)
    assert cache.requirements_of(tree) is None


async def test_digest_is_of_what_is_installed(tmp_path: Path) -> None:
    """The same entry of the file installs other content, as a tag that moved or a range of versions does."""
    tree = tmp_path / "trees" / "git-1"
    (tree / "vendor").mkdir(parents=True)
    (tree / "requirements.yml").write_text("roles: [{name: greet, src: vendor/greet.tar.gz}]\n")

    async def install(state: str, task: str) -> str:
        files = {"greet/meta/main.yml": "{}\n", "greet/tasks/main.yml": task}
        archive(tree / "vendor/greet.tar.gz", files)
        return await TreeCache(tmp_path / state).prepare(tree)

    first = await install("a", "- ping:\n")
    assert len(first) == 64
    assert await install("b", "- ping:\n") == first, "the time of the installation does not count"
    assert await install("c", "- shell: evil\n") != first
    assert await install("a", "- shell: evil\n") == first, "it was installed before"
    (tmp_path / "a/git-1/requirements/roles/greet/tasks/main.yml").chmod(0o755)
    assert await install("a", "- ping:\n") != first


async def test_failed_installation_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "trees" / "git-1"
    archive(tree / "bad.tar.gz", {"README": "not a role"})
    (tree / "requirements.yml").write_text("roles: [{name: bad, src: bad.tar.gz}]\n")
    cache = TreeCache(tmp_path / "ansible")
    with pytest.raises(SourceFailed, match="ansible-galaxy ended with"):
        await cache.prepare(tree)
    assert list((tmp_path / "ansible").iterdir()) == []


async def test_tree_with_everything_vendored_starts_no_program(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    fill(tree)
    (tree / "requirements.yml").write_text("collections: [here.already]\nroles: [present]\n")
    cache = TreeCache(tmp_path / "ansible", tmp_path / "missing" / "ansible-playbook")
    assert await cache.prepare(tree) == ""
    assert cache.requirements_of(tree) is None


@pytest.mark.parametrize(
    "text",
    [
        "collections: ['/etc/x.tar.gz']",
        "collections: ['../x.tar.gz']",
        "collections: ['out/x']",
        "collections: [{name: a.b, version: '--config=x'}]",
        "collections: [{name: a.b, source: 'file:///etc'}]",
        "collections: [{name: 'git+file:///etc', type: git}]",
        "collections: [{name: 'ext::sh -c x', type: git}]",
        "collections: [{name: a.b, signatures: ['file:///etc/x']}]",
        "collections: [[a]]",
        "collections: a.b",
        "roles: [{src: 'git+file:///etc'}]",
        "roles: [{src: '-x'}]",
        "roles: [{src: 'https://a/b.git', version: '--exec=x'}]",
        "roles: [{src: 'https://a/b.git', name: '../x'}]",
        "roles: [{src: 'https://a/b', scm: hg}]",
        "roles: ['/etc/passwd']",
        "- include: other.yml",
        "collections: {",
        "? [a]\n: !!python/object/apply:os.system [x]",
    ],
)
def test_requirement_outside_of_the_source_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "requirements.yml").write_text(text + "\n")
    with pytest.raises(SourceFailed, match=r"^requirements\.yml: "):
        read_requirements(tmp_path)


def test_requirements_of_awx_files_are_found(tmp_path: Path) -> None:
    for name, text in (
        ("collections/requirements.yml", "collections: ['a.b:>=1.0,<2', {name: c.d, version: 1.5}]\n"),
        (
            "roles/requirements.yml",
            "- src: https://git.example/roles/web.git\n  version: v1\n- ns.role,1.0,mine\n",
        ),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_requirements(tmp_path)
    assert found.collections == [{"name": "a.b:>=1.0,<2"}, {"name": "c.d", "version": "1.5"}]
    assert found.roles == [
        {"src": "https://git.example/roles/web.git", "version": "v1"},
        {"src": "ns.role", "version": "1.0", "name": "mine"},
    ]


def test_paths_of_the_tree_come_after_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ansible.cfg").write_text("[defaults]\nroles_path = mine:/abs\n")
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", "/of/the/daemon")
    paths = RunPaths("r", tmp_path / "e", tmp_path, tmp_path, None, tmp_path / "req")
    built = build_environment(paths, TreeConfig.load(tmp_path))
    assert built["ANSIBLE_ROLES_PATH"].split(":") == [f"{tmp_path}/req/roles", f"{tmp_path}/mine", "/abs"]
    assert built["ANSIBLE_COLLECTIONS_PATH"] == f"{tmp_path}/req/collections:/of/the/daemon"
    assert "ANSIBLE_ROLES_PATH" not in os.environ


async def test_runs_of_a_tree_use_what_is_kept_for_it(tmp_path: Path) -> None:
    cache, tree = TreeCache(tmp_path / "ansible"), tmp_path / "git-1"
    (tmp_path / "ansible" / "git-1" / "requirements").mkdir(parents=True)
    tree.mkdir()
    (tree / "site.yml").write_text(PLAY)
    shell = SshShell(None)
    runner = AnsibleRunner(
        tmp_path / "runs",
        shell,
        tree_of,
        lambda: InventorySnapshot({}),
        ansible_playbook="/bin/true",
        tree_cache=cache,
    )
    variables = {"ansible_host": "127.0.0.1", "ansible_python_interpreter": "/usr/bin/python3"}
    request = RunRequest("r1", Host("n1", connection=variables), source_of(tree), "site.yml")
    handle = await runner.start(request)
    command = (tmp_path / "runs" / handle / "command").read_text().split("\0")
    while (await runner.wait_for_change(handle)).result is None:
        pass
    await runner.close()
    await shell.close()
    # Nothing of a fast run, as the command is not that of this Python.
    assert not [
        word for word in command if word.startswith(("ROLLOUTD_MODULE_CACHE", "ANSIBLE_INVENTORY_PLUGINS"))
    ]
    assert any(f"ROLES_PATH={tmp_path}/ansible/git-1/requirements/roles:" in each for each in command)
