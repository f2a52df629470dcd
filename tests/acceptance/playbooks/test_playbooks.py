"""What holds for all reference playbooks: companions, check mode, and records by rollout.

The other tests here play them by real Ansible: they do it, do it once, prove it, and take it back.  The
runner starts them as in the daemon.  Connections are local; the playbooks run over ssh in the demo and in
test_reboot.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.playbook_node import PLAYBOOKS

COMMANDS = {
    "ansible.builtin.command",
    "ansible.builtin.shell",
    "ansible.builtin.raw",
    "ansible.builtin.script",
}

NAMES = sorted(path.stem.removesuffix("-undo") for path in PLAYBOOKS.glob("*-undo.yml"))


def tasks_of(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each task of a file, and the conditions of it and of its blocks."""
    for each in yaml.safe_load(path.read_text()):
        yield from _walk(each["tasks"] if "hosts" in each else [each], "")


def _walk(tasks: list[dict[str, Any]], conditions: str) -> Iterator[tuple[dict[str, Any], str]]:
    for task in tasks:
        own = f"{conditions} {task.get('when', '')}"
        if "block" in task:
            yield from _walk([*task["block"], *task.get("rescue", []), *task.get("always", [])], own)
        else:
            yield task, own


def test_every_playbook_has_its_two_companions_and_parses() -> None:
    playbooks = sorted(PLAYBOOKS.glob("*.yml"))
    for path in playbooks:
        name = path.stem.removesuffix("-verify").removesuffix("-undo")
        assert all((PLAYBOOKS / f"{name}{end}.yml").exists() for end in ("", "-verify", "-undo"))
    binary = Path(sys.executable).with_name("ansible-playbook")
    parsed = subprocess.run(
        [binary, "-i", "n0,", "--syntax-check", *playbooks], capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.parametrize("path", sorted(PLAYBOOKS.rglob("*.yml")), ids=lambda path: path.stem)
def test_check_mode_skips_no_command(path: Path) -> None:
    """A command that check mode skips makes drift and compliance unknown."""
    for task, conditions in tasks_of(path):
        if COMMANDS & task.keys():
            is_read_only = task.get("check_mode") is False and task.get("changed_when") is False
            assert is_read_only or "not ansible_check_mode" in conditions, task["name"]


@pytest.mark.parametrize("name", NAMES)
def test_every_playbook_is_killed_checked_and_undone(name: str) -> None:
    text = (Path(__file__).parent / f"test_{name.replace('-', '_')}.py").read_text()
    for end in ("", "-undo"):
        assert f'play_killed("{name}{end}.yml"' in text
        assert f'check("{name}{end}.yml"' in text
    assert f'play("{name}-verify.yml"' in text


@pytest.mark.parametrize("name", NAMES)
def test_every_undo_takes_its_own_record(name: str) -> None:
    for end, change in (("", "record_items(rollout"), ("-undo", "without_rollout(rollout)")):
        tasks = [task for task, _ in tasks_of(PLAYBOOKS / f"{name}{end}.yml")]
        included = {task.get("ansible.builtin.include_tasks"): task.get("vars", {}) for task in tasks}
        assert "tasks/read-records.yml" in included
        records = included["tasks/write-records.yml"]["new_records"]
        assert change in records
        assert end or "playbook_history | default(20)" in records
    restored = (PLAYBOOKS / f"{name}-undo.yml").read_text()
    assert "rollout_records | items_to_restore(rollout)" in restored
