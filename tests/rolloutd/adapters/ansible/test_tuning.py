"""Runs of one tree share the built modules of ansible-core, and nothing else; nodes compile a module once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rolloutd.adapters.ansible.environment import RunPaths
from tests.support.fast_environment import fast_environment

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
import zipimport
from ansible.module_utils.basic import AnsibleModule
AnsibleModule({}).exit_json(msg="%s", compiled=zipimport._compile_source.cache_info()._asdict())
"""
FAILING_PLAY = """\
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {ansible_python_interpreter: "{{ ansible_playbook_python }}"}
  tasks:
    - acme.tools.probe: {way: "{{ item }}"}
      ignore_errors: true
      loop: [raise, raise in utils, interrupt, invalid argument, own source]
"""
PROBE_MODULE = """\
import inspect
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.acme.tools.plugins.module_utils import parts
module = AnsibleModule({"way": {"choices": ["raise", "raise in utils", "interrupt", "own source"]}})
if module.params["way"] == "raise":
    raise ValueError("in the module")
if module.params["way"] == "raise in utils":
    parts.fail()
if module.params["way"] == "interrupt":
    raise KeyboardInterrupt
found = parts.__file__, parts.fail.__code__.co_filename, inspect.getsource(parts), repr(parts.__spec__)
module.exit_json(found=found)
"""
UTILITY = """\
def fail():
    raise ValueError("in the utilities")
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


def play(playbook: str, tree: Path, environment: Mapping[str, str]) -> str:
    """Run a playbook to its good end; return its output."""
    ended = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-v", "-i", "localhost,", playbook],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_environment(tmp_path: Path, tree: Path, number: int) -> Mapping[str, str]:
    """Return the environment of a run of rolloutd."""
    scratch = tmp_path / f"run{number}"
    scratch.mkdir()
    paths = RunPaths("r", scratch / "events", scratch, scratch, None)
    return fast_environment(paths, tree, tmp_path / "cache" / "modules")


def run(tmp_path: Path, tree: Path, number: int) -> str:
    """Run the playbook as rolloutd does; return its output."""
    return play("play.yml", tree, run_environment(tmp_path, tree, number))


def test_core_modules_are_shared_and_others_built_anew(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    assert "POLL 0.01" in run(tmp_path, tree, 1)
    (shared,) = (tmp_path / "cache" / "modules").iterdir()
    assert [path.name.partition("-")[0] for path in shared.iterdir()] == ["ansible.modules.command"]
    assert shared.stat().st_mode & 0o077 == 0
    (module,) = shared.iterdir()
    before = module.stat().st_ino, module.stat().st_mtime_ns
    (tree / "library/mine.py").write_text(OWN_MODULE % "second")
    second = run(tmp_path, tree, 2)
    assert '"msg": "second"' in second
    found = re.search(r'"hits": (\d+), "maxsize": 1, "misses": (\d+)', second)
    assert found is not None
    assert int(found[1]) >= int(found[2]) > 30
    assert (module.stat().st_ino, module.stat().st_mtime_ns) == before
    assert not any(path.is_symlink() or "ansiballz" in path.name for path in (tmp_path / "run2").rglob("*"))


def test_tree_with_module_utils_shares_nothing_and_keeps_its_interval(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    (tree / "roles/web/module_utils").mkdir(parents=True)
    (tree / "ansible.cfg").write_text("[defaults]\ninternal_poll_interval = 0.002\n")
    assert "POLL 0.002" in run(tmp_path, tree, 1)
    assert not os.path.lexists(tmp_path / "cache")


@pytest.mark.long
def test_failing_module_shows_what_bare_ansible_shows(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    plugins = tree / "collections/ansible_collections/acme/tools/plugins"
    for name, text in (("modules/probe.py", PROBE_MODULE), ("module_utils/parts.py", UTILITY)):
        (plugins / name).parent.mkdir(parents=True)
        (plugins / name).write_text(text)
    (tree / "failing.yml").write_text(FAILING_PLAY)
    settings = "collections_path = collections\ndisplay_traceback = always"
    (tree / "ansible.cfg").write_text(f"[defaults]\n{settings}\n")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    shown = play("failing.yml", tree, {**bare, "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"})
    for text in ("parts.py", "line 2, in fail", "in the module", "KeyboardInterrupt", "ModuleSpec"):
        assert text in shown
    ours = play("failing.yml", tree, run_environment(tmp_path, tree, 1))
    assert normal(ours) == normal(shown)


def normal(output: str) -> str:
    """Return an output without times, temporary names and built modules, whose archives have times."""
    output = re.sub(r"[A-Za-z0-9+/=]{1000,}", "", output)
    return re.sub(r"0x[0-9a-f]+|(?<=_payload_)\w+|/\S*ansible-tmp-[\d.-]+|\d+:\d\d:\d\d\.\d+", "", output)
