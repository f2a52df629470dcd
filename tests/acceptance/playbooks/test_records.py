"""Records by rollout: the filters of the playbooks, and the variables that the runner gives them."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

import rolloutd
from tests.support.playbook_node import PLAYBOOKS, Node


def load(name: str) -> ModuleType:
    """Import a filter plugin as Ansible does: by its path."""
    spec = importlib.util.spec_from_file_location(name, PLAYBOOKS / "filter_plugins" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORDS, SYSCTL = load("rollout_records"), load("sysctl_files")

NAMES_ITS_ROLLOUT = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: compare
      ansible.builtin.assert:
        that: [rolloutd_rollout == 'a-b12', rolloutd_attempt == 1]
"""


class Values:
    """A node with two values, and rollouts that set them."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 1}
        self.records: dict[str, Any] = {}

    def run(self, rollout: str, history: int = 20, **values: int) -> None:
        before = {name: self.values[name] for name in values}
        items = RECORDS.to_items(before, values)
        self.records = RECORDS.record_items(self.records, rollout, 1, items, history)
        self.values |= values

    def undo(self, rollout: str) -> None:
        self.values |= RECORDS.items_to_restore(self.records, rollout)
        self.records = RECORDS.without_rollout(self.records, rollout)


def test_undo_in_any_order_leaves_other_rollouts() -> None:
    rollouts = {"r1": {"a": 2}, "r2": {"a": 3, "b": 3}, "r3": {"a": 4}}
    for order in (["r1", "r2", "r3"], ["r3", "r1", "r2"], ["r2", "r3", "r1"], ["r3", "r2", "r1"]):
        node, left = Values(), dict(rollouts)
        for rollout, values in rollouts.items():
            node.run(rollout, **values)
        for rollout in order:
            node.undo(rollout)
            del left[rollout]
            expected = {"a": 1, "b": 1}
            for values in left.values():
                expected |= values
            assert node.values == expected, (order, rollout)
        assert node.records == {"layers": [], "dropped": []}


@pytest.mark.parametrize("order", [["r1", "r2"], ["r2", "r1"]])
def test_two_rollouts_of_equal_values_are_undone_alone(order: list[str]) -> None:
    node = Values()
    for rollout in ("r1", "r2"):
        node.run(rollout, a=2)
    for rollout, value in zip([order[0], *order], [2, 2, 1], strict=True):
        node.undo(rollout)
        assert node.values["a"] == value


def test_parameter_has_one_name() -> None:
    names = ["net/ipv4/conf/eth0.1/rp_filter", "net.ipv4.conf.eth0/1.rp_filter"]
    assert {next(iter(SYSCTL.by_sysctl_name({name: 1}))) for name in names} == {names[1]}


def test_retry_keeps_what_first_attempt_found() -> None:
    node = Values()
    node.run("r1", a=2)
    node.run("r1", a=2, b=2)
    node.run("r1", a=5)
    node.undo("r1")
    assert node.values == {"a": 1, "b": 1}


def test_rollout_that_runs_after_another_restores_that_one() -> None:
    node = Values()
    node.run("r1", a=2, b=2)
    node.run("r2", a=3)
    node.run("r1", a=2)
    node.undo("r1")
    assert node.values == {"a": 3, "b": 1}
    node.undo("r2")
    assert node.values == {"a": 1, "b": 1}


def test_value_of_a_person_between_two_rollouts_stays() -> None:
    node = Values()
    node.run("r1", a=2)
    node.values["a"] = 7
    node.run("r2", a=3)
    node.undo("r1")
    node.undo("r2")
    assert node.values["a"] == 7


def test_what_a_rollout_did_not_change_is_left() -> None:
    node = Values()
    node.run("r1", a=1, b=2)
    node.values |= {"a": 7}
    node.undo("r1")
    assert node.values == {"a": 7, "b": 1}
    node.run("r2", a=8)
    node.run("r3", a=8)
    node.undo("r2")
    assert node.values["a"] == 8
    node.undo("r3")
    assert node.values["a"] == 7


def test_undo_of_a_dropped_rollout_fails() -> None:
    node = Values()
    for number in range(4):
        node.run(f"r{number}", history=2, a=10 + number)
    assert [layer["rollout"] for layer in node.records["layers"]] == ["r2", "r3"]
    with pytest.raises(AnsibleFilterError, match="record of rollout r1: newer ones displaced it"):
        node.undo("r1")
    node.undo("r3")
    node.undo("r2")
    assert node.values["a"] == 11
    node.undo("r9")


@pytest.mark.parametrize("text", ["", "a = 1\n", "a = 1", "# one\n\na=1\n\n"])
def test_blocks_leave_the_other_text(text: str) -> None:
    first = [{"items": {"b": {"after": "2"}, "file x": {"after": "text"}}}]
    second = [{"items": {"a": {"after": "3"}}}]
    both = SYSCTL.with_blocks(SYSCTL.with_blocks(text, "r1", first), "r1.2", second)
    assert SYSCTL.with_blocks(both, "r1", first) == both, "the order of blocks stays"
    assert "b = 2" in both.splitlines()
    assert both.splitlines()[-2] == "a = 3", "the later rollout's line is the last"
    ended = text if not text or text.endswith("\n") else f"{text}\n"
    assert SYSCTL.without_blocks(SYSCTL.without_blocks(both, "r1"), "r1.2") == ended


def test_block_without_its_end_takes_no_other() -> None:
    layers = [{"items": {"b": {"after": "2"}}}]
    both = SYSCTL.with_blocks(SYSCTL.with_blocks("", "r1", layers), "r2", layers)
    broken = both.replace("# rolloutd: r1 ends\n", "")
    assert SYSCTL.without_blocks(broken, "r1") == broken
    assert "r2" not in SYSCTL.without_blocks(broken, "r2")


def test_last_line_of_a_boot_counts() -> None:
    output = """\
==> /usr/lib/sysctl.d/50-default.conf
# net.core.somaxconn = 1
-net.core.somaxconn=2
net.ipv4.conf.*.rp_filter = 2
==> /etc/sysctl.d/90-rolloutd.conf
net/core/somaxconn = 3
net.ipv4.tcp_rmem = 1	2  3
==> /etc/sysctl.d/99-local.conf
  net.core.somaxconn   =   4
net.ipv4.conf.eth0/1.rp_filter = 1
"""
    names = [
        "net.core.somaxconn",
        "net/core/somaxconn",
        "net.ipv4.tcp_rmem",
        "net.ipv4.conf.lo.rp_filter",
        "x",
    ]
    values = SYSCTL.boot_values(output, names)
    assert [values[name]["value"] for name in names] == ["4", "4", "1 2 3", "2", ""]
    assert values["net.core.somaxconn"]["file"] == "/etc/sysctl.d/99-local.conf"


async def test_playbook_knows_its_rollout_and_attempt(node: Node) -> None:
    (node.tree / "names.yml").write_text(NAMES_ITS_ROLLOUT)
    await node.play("names.yml", rollout="a-b12", rolloutd_rollout="of the plan")
    assert await node.check("names.yml", rollout="a-b12") == []


async def test_record_is_on_disk_before_the_change(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that outlasts a loss of power without its record is not undone, and nothing says so."""
    program, log = node.directory / "bin" / "sync", node.directory / "log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$* $(cat {node.kernel}/vm.swappiness)" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (node.kernel / "vm.swappiness").write_text("60\n")
    file = node.directory / "x.conf"
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}
    await node.play("sysctl.yml", sysctl_settings={"vm.swappiness": 10}, **where)
    assert log.read_text().splitlines() == [f"{node.directory}/rolloutd-sysctl.json 60"]


async def test_run_leaves_no_file_in_the_tree(node: Node) -> None:
    """What a vote is for is the whole tree: a compiled plugin would be in it, and nobody could read it."""
    files = set(node.tree.rglob("*"))
    await node.play("sysctl-undo.yml", sysctl_file=str(node.directory / "sysctl.d" / "90-rolloutd.conf"))
    assert set(node.tree.rglob("*")) == files


def test_every_run_names_its_rollout() -> None:
    requests = [
        {keyword.arg for keyword in call.keywords}
        for path in Path(rolloutd.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "RunRequest"
    ]
    assert len(requests) >= 4
    assert all("rollout" in names for names in requests)
