"""Builds with real Ansible, on the daemon's machine and on a node, and what they make on the targets."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError, api_path
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)
from tests.support.prepared_fleet import SHARED_BY_NODES, closed_window

# The manifest is written by a shell on the machine that builds.
BUILD_HERE = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: build
      ansible.builtin.shell: |
        cd {{ rolloutd_manifest | dirname }} && echo built {{ name }} > app-{{ name }}
        {{ rolloutctl }} artifacts manifest .
"""

BUILD_THERE = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: build
      ansible.builtin.raw: mkdir -p {{ work }} && echo built {{ name }} > {{ work }}/app-{{ name }}
    - name: bring the artifact
      ansible.builtin.fetch:
        src: "{{ work }}/app-{{ name }}"
        dest: "{{ rolloutd_manifest | dirname }}/"
        flat: true
    - name: write the manifest
      ansible.builtin.command: "{{ rolloutctl }} artifacts manifest {{ rolloutd_manifest | dirname }}"
      delegate_to: localhost
"""


def test_builds_here_and_on_a_node_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a version switcher's: what Ansible's discovery would find first does not run.
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in range(8, 16))):
        (stubs / name).write_text("#!/bin/sh\necho install me >&2; exit 1\n")
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    labels = {**fleet_labels(1, 1, 1), "builder1": {"team": "infra", "role": "builder"}}
    with daemon_environment(tmp_path, labels) as env:
        playbooks = {"change.yml": CHANGE_PLAYBOOK, "here.yml": BUILD_HERE, "there.yml": BUILD_THERE}
        rollout = env.submit(building_plan(env), playbooks)
        env.finish(rollout)
        by_stage = {
            each["stage"]: each
            for each in env.client.get(api_path("rollouts", rollout, "prepare"))["preparations"]
        }
        assert [by_stage[name]["node"] for name in ("here", "there")] == ["localhost", "builder1"]
        audit = env.client.get(f"/v1/audit?rollout={rollout}&limit=200")["entries"]
        entries = [each["entry"] for each in audit]
        built = [each["fields"]["manifest"] for each in entries if each["event"] == "ArtifactsBuilt"]
        amended = {artifact["sha256"] for manifest in built for artifact in manifest}
        for name in ("here", "there"):
            digest = hashlib.sha256(f"built {name}\n".encode()).hexdigest()
            assert (tmp_path / "cache" / digest / f"app-{name}").read_text() == f"built {name}\n"
            assert (digest, digest, ["n1"]) in env.carried_artifacts(rollout)
            assert digest in amended
        for node, stage, text in (
            ("localhost", "here", "build"),
            ("builder1", "there", "write the manifest"),
            ("n1", "bring-here", "prepare stage bring-here: done, "),
        ):
            path = api_path("rollouts", rollout, "nodes", node, "log")
            followed = list(env.client.stream(path, {"stage": stage, "follow": True}))
            assert [line["offset"] for line in followed] == list(range(1, len(followed) + 1))
            assert any(line["text"].startswith(text) for line in followed), followed
        with pytest.raises(ApiError, match="no prepare stage gone"):
            list(env.client.stream(path, {"stage": "gone"}))
        assert_cancelled_rollout_is_removed(env)


def assert_cancelled_rollout_is_removed(env: DaemonEnvironment) -> None:
    """Bring an artifact by another plan, cancel, and find only what the finished rollout brought."""
    cache = env.directory / "cache"
    before = {path.name for path in cache.iterdir()} - {".incoming"}
    stage = {
        "manifest": env.write_artifacts({"brought": b"brought"}),
        "to": str(cache),
        "may_change": SHARED_BY_NODES,
    }
    other = plan("other", prepare=[{"stage": stage}], windows=[closed_window()])
    rollout = env.submit(other, {"change.yml": CHANGE_PLAYBOOK})
    env.vote(rollout, "start")
    env.wait_until(lambda: env.status(rollout)["prepared"]["done"] == 1, "the node is prepared")
    brought = cache / hashlib.sha256(b"brought").hexdigest() / "brought"
    assert brought.read_bytes() == b"brought"
    env.client.post(api_path("rollouts", rollout, "cancel"), {"reason": "wrong"})

    def is_cleaned() -> bool:
        rows = env.client.get(api_path("rollouts", rollout, "prepare"))["preparations"]
        return any((row["stage"], row["state"]) == ("cleanup", "done") for row in rows)

    env.wait_until(is_cleaned, "the node is cleaned up")
    assert {path.name for path in cache.iterdir()} == before
    found = env.client.get(api_path("nodes", "n1", "checkpoints"))["checkpoints"]
    assert {each["plan"] for each in found} == {"app"}


def building_plan(env: DaemonEnvironment) -> dict[str, Any]:
    rolloutctl = str(Path(sys.executable).with_name("rolloutctl"))
    prepare: list[dict[str, Any]] = []
    for name, host in (("here", {}), ("there", {"host": "builder1"})):
        variables = {"name": name, "work": str(env.directory / "work"), "rolloutctl": rolloutctl}
        manifest = {"manifest": f"{name}/artifacts.yml"}
        prepare.append(
            {"build": {"name": name, "playbook": f"{name}.yml", "vars": variables, **host, **manifest}}
        )
        to = {"to": str(env.directory / "cache"), "may_change": SHARED_BY_NODES}
        prepare.append({"stage": {"name": f"bring-{name}", **to, **manifest}})
    return plan(
        "app",
        prepare=prepare,
        soak="0s",
        maintain={"playbook": "change.yml", "vars": {"log_file": str(env.log_file)}},
    )
