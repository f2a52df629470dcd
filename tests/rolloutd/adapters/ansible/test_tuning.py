"""Runs of one tree share the built modules of ansible-core, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rolloutd.adapters.ansible.environment import RunPaths, TreeConfig, build_environment

PLAY = """\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.command: uname -r
      changed_when: false
    - mine: {}
"""
OWN_MODULE = """\
from ansible.module_utils.basic import AnsibleModule
AnsibleModule({}).exit_json(msg="%s")
"""
REPORT = """\
from ansible import constants
from ansible.plugins.callback import CallbackBase
class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_NAME, CALLBACK_NEEDS_ENABLED = 2.0, "report", False
    def v2_playbook_on_stats(self, stats):
        print("POLL", constants.DEFAULT_INTERNAL_POLL_INTERVAL)
"""


def write_tree(tree: Path) -> Path:
    """Write a tree with a module and a callback of its own."""
    for name, text in (
        ("play.yml", PLAY),
        ("library/mine.py", OWN_MODULE % "first"),
        ("callback_plugins/report.py", REPORT),
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree


def run(tmp_path: Path, tree: Path, number: int) -> str:
    """Run the playbook as rolloutd does; return its output."""
    scratch = tmp_path / f"run{number}"
    scratch.mkdir()
    paths = RunPaths("r", scratch / "events", scratch, scratch, None, None, tmp_path / "cache" / "modules")
    ended = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-v", "-i", "localhost,", "play.yml"],
        cwd=tree,
        env=build_environment(paths, TreeConfig.load(tree)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_core_modules_are_shared_and_others_built_anew(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    assert "POLL 0.01" in run(tmp_path, tree, 1)
    (shared,) = (tmp_path / "cache" / "modules").iterdir()
    assert [path.name.partition("-")[0] for path in shared.iterdir()] == ["ansible.modules.command"]
    assert shared.stat().st_mode & 0o077 == 0
    (module,) = shared.iterdir()
    before = module.stat().st_ino, module.stat().st_mtime_ns
    (tree / "library/mine.py").write_text(OWN_MODULE % "second")
    assert '"msg": "second"' in run(tmp_path, tree, 2)
    assert (module.stat().st_ino, module.stat().st_mtime_ns) == before
    assert not any(path.is_symlink() or "ansiballz" in path.name for path in (tmp_path / "run2").rglob("*"))


def test_tree_with_module_utils_shares_nothing_and_keeps_its_interval(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    (tree / "roles/web/module_utils").mkdir(parents=True)
    (tree / "ansible.cfg").write_text("[defaults]\ninternal_poll_interval = 0.002\n")
    assert "POLL 0.002" in run(tmp_path, tree, 1)
    assert not os.path.lexists(tmp_path / "cache")
