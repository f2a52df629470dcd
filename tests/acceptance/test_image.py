"""The OCI image: it runs without root under the manifests' security, and survives a kill during a playbook.

crun runs it with what the manifest says.  The kubelet's own parts are not here: the token's renewal, and the
owner that it gives to volumes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.packages import image
from deploy.packages.release import open_release
from rolloutd import __version__
from tests.support.container import OUTER_USER, SECCOMP, Container
from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, plan
from tests.support.release import CHECKOUT, build_release, left_out
from tests.support.shared_directory import memory_directory, shared_directory

POD_FILE = CHECKOUT / "deploy/kubernetes/in-cluster.yaml"

NODES = {name: {"team": "t1", "role": "worker"} for name in ("n1", "n2")}


@pytest.fixture
def archive(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The image of this checkout."""
    lacking = [name for name in ("mmdebstrap", "umoci", "crun") if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        left_out(f"only root with mmdebstrap, umoci and crun can run the image; missing: {lacking}")
    if not SECCOMP.exists():
        left_out(f"there is no {SECCOMP} (apt-get install golang-github-containers-common)")
    (package,) = build_release(shared_directory(tmp_path_factory.getbasetemp())).glob("*.deb")
    if (memory := memory_directory()) is not None:
        monkeypatch.setattr(tempfile, "tempdir", memory)
        monkeypatch.setenv("TMPDIR", memory)
    with open_release(CHECKOUT, tmp_path / "image") as release:
        yield image.build(release, package)
    shutil.rmtree(tmp_path / "image")


@pytest.fixture
def pod() -> dict[str, Any]:
    """The pod of the manifest."""
    documents = {each["kind"]: each for each in yaml.safe_load_all(POD_FILE.read_text())}
    spec: dict[str, Any] = documents["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[DaemonEnvironment]:
    """Two nodes, without a daemon."""
    nodes = DaemonEnvironment(tmp_path / "fleet", NODES)
    try:
        nodes.start_nodes()
        yield nodes
    finally:
        nodes.stop()


@pytest.mark.long
@pytest.mark.servers
def test_rootless_image_survives_kill_during_playbook(
    archive: Path, pod: dict[str, Any], nodes: DaemonEnvironment
) -> None:
    container = Container()
    try:
        container.unpack(archive, __version__)
        container.configure(pod, make_volumes(nodes, container.directory / "volumes"))
        container.start()
        nodes.wait_until(lambda: container.probe(pod, "startupProbe"), "the pod has started")
        runs_without_rights(container)

        rollout = submit(container, nodes)
        vote(container, rollout, "start")
        nodes.wait_until(lambda: gate(container, rollout, "continue") == "waiting", "the canary is done")
        nodes.pause_playbooks()
        vote(container, rollout, "continue")
        nodes.wait_until(lambda: len(nodes.spans()) == 2, "the second playbook has begun")
        first = container.pid()
        container.kill()
        nodes.resume_playbooks()
        container.start()
        nodes.wait_until(lambda: container.probe(pod, "readinessProbe"), "the next pod is ready")
        assert container.pid() != first
        nodes.wait_until(lambda: status(container, rollout)["state"] == "done", "the rollout ends")
        ended = [(span.node, span.end is not None) for span in nodes.spans()]
        assert ended[0] == ("n1", True), "the first node was not touched again"
        assert ended[-1] == ("n2", True), "the plan repeats a run with an unknown result"
        assert {node for node, _ in ended[1:]} == {"n2"}
        assert container.probe(pod, "livenessProbe")
        container.run("rolloutctl", "audit", "verify")
    except AssertionError as error:
        error.add_note(container.log[-4000:])
        raise
    finally:
        container.stop()


def runs_without_rights(container: Container) -> None:
    """Check what the kernel says of the processes in the container."""
    assert container.run("cat", "/proc/1/comm") == "tini\n"
    assert container.run("id", "-u") == f"{image.USER}\n"
    lines = container.run("cat", "/proc/1/status").splitlines()
    of = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
    assert {of[name].strip("0") for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {""}
    assert (of["NoNewPrivs"], of["Seccomp"]) == ("1", "2")
    with pytest.raises(RuntimeError, match="Read-only file system"):
        container.run("touch", "/here")
    assert container.run("cat", "/proc/self/uid_map").split() == [str(image.USER), str(OUTER_USER), "1"]
    assert "core 2.19" in container.run("ansible-playbook", "--version")


def make_volumes(nodes: DaemonEnvironment, directory: Path) -> dict[str, Path | None]:
    """Write what the ConfigMap, the Secret and the claim have, but with nodes from a file."""
    settings, ssh, state, token = (directory / name for name in ("settings", "ssh", "state", "token"))
    for place in (settings, ssh, state, token):
        place.mkdir(parents=True)
    shutil.copy(nodes.directory / "known_hosts", ssh / "known_hosts")
    hosts = {}
    for name, sshd in nodes.sshds.items():
        key = ssh / f"{name}.key"
        shutil.copy(sshd.key_file, key)
        # As the kubelet mounts a Secret: root's, readable for the group of the pod.
        os.chown(key, 0, OUTER_USER)
        key.chmod(0o440)
        connection = {**sshd.connection(), "ansible_ssh_private_key_file": f"/etc/rolloutd-ssh/{name}.key"}
        hosts[name] = {**connection, **NODES[name]}
    (settings / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    documents = {each["kind"]: each for each in yaml.safe_load_all(POD_FILE.read_text())}
    shipped = yaml.safe_load(documents["ConfigMap"]["data"]["config.yaml"])
    del shipped["observe_only"], shipped["ssh"]["key_file"], shipped["ssh"]["user"]
    own = {
        "inventory": [{"ansible": {"path": "hosts.yml", "labels": ["team", "role"]}}],
        "teams": {**shipped["teams"], "t1": {"members": ["rolloutd"]}},
        "ansible": {"fence_dir": str(nodes.directory / "fence")},
    }
    (settings / "config.yaml").write_text(yaml.safe_dump({**shipped, **own}))
    os.chown(state, OUTER_USER, OUTER_USER)
    return {"settings": settings, "ssh": ssh, "state": state, "token": token, "socket": None, "tmp": None}


def submit(container: Container, nodes: DaemonEnvironment) -> str:
    """Submit a plan whose run is repeated if its result is unknown; return the rollout."""
    change = {"playbook": "change.yml", "vars": {"log_file": str(nodes.log_file)}, "on_unknown": "rerun"}
    files = {
        "plan.yml": yaml.safe_dump(plan("contained", soak="0s", maintain=change)),
        "playbooks/change.yml": CHANGE_PLAYBOOK,
    }
    for name, text in files.items():
        write = 'mkdir -p "$(dirname "$1")" && printf %s "$2" > "$1"'
        container.run("sh", "-c", write, "sh", f"/tmp/change/{name}", text)
    submitted = container.run("rolloutctl", "plan", "submit", "--json", "/tmp/change/plan.yml")
    return str(json.loads(submitted)["rollout"])


def vote(container: Container, rollout: str, name: str) -> None:
    """Approve a gate."""
    container.run("rolloutctl", "approve", rollout, name, "--reason", "seen")


def status(container: Container, rollout: str) -> dict[str, Any]:
    """Return a rollout's status."""
    answer: dict[str, Any] = json.loads(container.run("rolloutctl", "status", rollout, "--json"))
    return answer


def gate(container: Container, rollout: str, name: str) -> str:
    """Return the state of a gate."""
    return next(str(each["state"]) for each in status(container, rollout)["gates"] if each["gate"] == name)
