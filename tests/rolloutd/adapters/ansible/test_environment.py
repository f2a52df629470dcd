"""What a run is given: nothing secret inherited, the tree's configuration joined, defaults filled in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import fence
from rolloutd.adapters.ansible.environment import (
    CALLBACK_DIR,
    RunPaths,
    TreeConfig,
    build_environment,
    build_inventory,
    render_ssh_wrapper,
)
from rolloutd.ports import ConnectionDefaults


@pytest.fixture
def places(tmp_path: Path) -> RunPaths:
    return RunPaths("r1", tmp_path / "r1" / "events.jsonl", tmp_path / "tmp", tmp_path / "cp", None)


def config(tree: Path, text: str) -> TreeConfig:
    (tree / "ansible.cfg").write_text(text)
    return TreeConfig.load(tree)


def test_only_named_variables_are_inherited(
    places: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_TOKEN", "hunter2")
    monkeypatch.setenv("ANSIBLE_BECOME_PASS", "hunter2")
    given = build_environment(places, config(tmp_path, ""))
    assert "hunter2" not in given.values()
    assert given["ROLLOUTD_RUN"] == "r1"
    assert {"PATH", "HOME"} <= given.keys()
    assert "ANSIBLE_HOST_KEY_CHECKING" not in given


def test_callback_paths_are_joined(places: RunPaths, tmp_path: Path) -> None:
    given = build_environment(places, config(tmp_path, "[defaults]\ncallback_plugins = cb:/opt/cb\n"))
    assert given["ANSIBLE_CALLBACK_PLUGINS"] == f"{tmp_path}/cb:/opt/cb:{CALLBACK_DIR}"
    assert given["ANSIBLE_CONFIG"] == str(tmp_path / "ansible.cfg")


def test_sockets_stay_in_the_runs_directory(places: RunPaths, tmp_path: Path) -> None:
    given = build_environment(places, config(tmp_path, "[ssh_connection]\nssh_args = -C\n"))
    assert given["ANSIBLE_SSH_CONTROL_PATH_DIR"] == str(places.sockets)


@pytest.mark.parametrize(
    "line", ["ssh_args = -C -o ControlPath=~/cp-%%h", "control_path = ~/%%C", "control_path_dir = ~/cp"]
)
def test_control_path_of_the_user_applies(places: RunPaths, tmp_path: Path, line: str) -> None:
    given = build_environment(places, config(tmp_path, f"[ssh_connection]\n{line}\n"))
    assert not [
        name for name in given if name.startswith("ANSIBLE_SSH_CONTROL") or name == "ANSIBLE_SSH_ARGS"
    ]


def test_masters_last_unless_the_user_has_arguments(places: RunPaths, tmp_path: Path) -> None:
    assert "ControlPersist=300s" in build_environment(places, config(tmp_path, ""))["ANSIBLE_SSH_ARGS"]
    for arguments in ("-o ControlPersist=9", ""):
        text = f"[ssh_connection]\nssh_args = {arguments}\n"
        assert "ANSIBLE_SSH_ARGS" not in build_environment(places, config(tmp_path, text))


def test_defaults_count_where_the_inventory_says_nothing(tmp_path: Path) -> None:
    defaults = ConnectionDefaults(Path("/etc/kh"), "ops", Path("/etc/id"))
    hosts = {"n1": {}, "n2": {"ansible_user": "root", "ansible_ssh_private_key_file": "/k"}}
    made = build_inventory(
        hosts,
        {"web": ["n1", "gone"], "all": ["n1", "n2"]},
        defaults=defaults,
        common_args=config(tmp_path, "[ssh_connection]\nssh_common_args = -o ProxyJump=j\n").common_args,
    )["all"]
    assert made["children"] == {"web": {"hosts": {"n1": {}}}}
    common = "-o ProxyJump=j -o UserKnownHostsFile=/etc/kh"
    assert made["hosts"]["n1"] == {
        "ansible_user": "ops",
        "ansible_ssh_private_key_file": "/etc/id",
        "ansible_ssh_common_args": common,
    }
    assert made["hosts"]["n2"] == {**hosts["n2"], "ansible_ssh_common_args": common}


def test_the_ssh_script_leaves_orders_to_a_master_alone(tmp_path: Path) -> None:
    assert _through(tmp_path, ["-O", "exit", "n0"]) == ["-O", "exit", "n0"]


def test_the_ssh_script_marks_a_raw_command_in_its_own_language(tmp_path: Path) -> None:
    *options, command = _through(tmp_path, ["-p", "22", "n0", "a=(b c); echo ${#a[@]}; (exit 7)"])
    assert options == ["-p", "22", "n0"]
    assert command.startswith(": rolloutd-run-t-r1+; ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "2\n")


def test_the_ssh_script_marks_a_command_and_keeps_its_status(tmp_path: Path) -> None:
    *options, command = _through(tmp_path, ["-tt", "n0", "/bin/sh -c 'echo \"it'\"'\"'s\" $0; exit 7'"])
    assert options == ["-tt", "n0"]
    assert "rolloutd-run-t-r1+" in command
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "it's /bin/sh\n")


def _through(tmp_path: Path, arguments: list[str]) -> list[str]:
    """Return the arguments with which ssh is called in the end."""
    real = tmp_path / "real ssh"
    real.write_text('#!/bin/sh\nfor argument do printf "%s\\0" "$argument"; done\n')
    real.chmod(0o755)
    script = tmp_path / "ssh"
    host = {"ansible_ssh_executable": str(real)}
    script.write_text(
        render_ssh_wrapper("rolloutd-run-t-r1+", "~/.ansible/tmp/x", TreeConfig(None, {}), host)
    )
    done = subprocess.run(["/bin/sh", script, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_callback_knows_the_fence_by_its_name() -> None:
    """The callback cannot be imported here or there: Ansible alone loads it, and it loads Ansible."""
    path = Path(fence.__file__).with_name("callback") / "rolloutd_events.py"
    assert f'\nFENCE_PLAY_NAME = "{fence.PLAY_NAME}"\n' in path.read_text()
