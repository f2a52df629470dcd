"""Each example plan on real sshd nodes: its preview, a run to done, and an undo that gives the bytes back.

What differs from the files beside the plan: soak and probation last a second, there is no window, a stage
may see changes of this machine's network, which the nodes share, and of some only the canary is a target.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.cli.example_plans import PREVIEW, example_files, example_names, write_example
from rolloutd.control.client import api_path
from rolloutd.files.source_archive import pack_tree
from tests.docs.example_previews import EXAMPLES, render_preview
from tests.support.cluster_sandbox import ClusterSandbox, KubernetesApi
from tests.support.debian_repository import publish
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.haproxy import Haproxy
from tests.support.overlay_nodes import OverlayNodes, can_overlay
from tests.support.prepared_fleet import SHARED_BY_NODES

LIMIT_S = 300.0

RECORDS = "var/lib/rolloutd-playbooks"
"""Directory of the playbooks' records, which an undo empties."""

WEB = {
    "web-1": {"team": "web", "role": "web", "rack": "r1", "canary": "true"},
    "web-2": {"team": "web", "role": "web", "rack": "r2", "canary": "false"},
}
GPU = {
    "gpu-1": {"team": "ml", "role": "gpu", "rack": "r1", "canary": "true"},
    "gpu-2": {"team": "ml", "role": "gpu", "rack": "r2", "canary": "false"},
}

NETPLAN = "#!/bin/sh\ncat /etc/netplan/*.yaml > /run/network-in-force\n"

NVIDIA_SMI = """#!/bin/sh
case $1 in
--query-gpu*) cat /run/gpu/loaded.nvidia ;;
esac
"""

MODPROBE = """#!/bin/sh
# A kernel that loads the installed version of one driver.
cd /run/gpu || exit 1
case $1 in
-r) rm -f "loaded.$2" ;;
*) cp /usr/lib/gpu/version "loaded.$1" ;;
esac
for file in loaded.*; do [ -e "$file" ] && echo "${file#loaded.} 4096 0 - Live 0x0"; done > modules
exit 0
"""

RENEW = """#!/bin/sh
# Stands for an authority: a new key, and a certificate for a year.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=new \
    -keyout "$1/web.key" -out "$1/web.pem" 2>/dev/null
"""


@dataclass(frozen=True)
class Example:
    """Where an example changes a node, and what its run must have done there."""

    name: str
    paths: tuple[str, ...]
    has_changed: Callable[[OverlayNodes, str], bool]
    undo: bool = True
    only_canary: bool = False
    """Whether its playbooks' tasks cost too much for two nodes; what a second node shows, others show."""


def read(nodes: OverlayNodes, node: str, path: str) -> str:
    file = nodes.root(node) / path
    return file.read_text() if file.exists() else ""


def version_of(nodes: OverlayNodes, node: str, package: str) -> str:
    """Return the version of a package by the node's own dpkg."""
    command = [
        "chroot",
        str(nodes.root(node)),
        "dpkg-query",
        "-W",
        "-f",
        "${db:Status-Status} ${Version}",
        package,
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.removeprefix("installed ") if found.stdout.startswith("installed ") else ""


def certificate_end(nodes: OverlayNodes, node: str) -> int:
    """Return whether the certificate is good for 100 days, as openssl's exit code."""
    file = nodes.root(node) / "etc/ssl/web/web.pem"
    return subprocess.run(["openssl", "x509", "-noout", "-checkend", "8640000", "-in", file]).returncode


PLAIN = [
    Example(
        "sysctl", ("etc/sysctl.d", "run/kernel", RECORDS),
        lambda nodes, node: read(nodes, node, "run/kernel/net.core.somaxconn") == "65535\n",
    ),
    Example(
        "certificate", ("etc/ssl/web", RECORDS),
        lambda nodes, node: certificate_end(nodes, node) == 0
        and "reload nginx" in read(nodes, node, "run/services.log"),
        only_canary=True,
    ),
    Example(
        "reboot", ("etc", RECORDS),
        # web-2 does not ask for a reboot.
        lambda nodes, node: (read(nodes, node, "proc/sys/kernel/random/boot_id") != BOOTS[node])
        is (node == "web-1"),
        undo=False,
    ),
    Example(
        "packages", ("etc/apt", "usr/share/tool", "usr/share/library", RECORDS),
        lambda nodes, node: version_of(nodes, node, "tool") == "2.0-1",
        only_canary=True,
    ),
    Example(
        "network", ("etc/netplan", "run/network-in-force", RECORDS),
        lambda nodes, node: "mtu: 9000" in read(nodes, node, "run/network-in-force"),
        only_canary=True,
    ),
    Example(
        "release", ("opt/app", RECORDS),
        lambda nodes, node: "restart app" in read(nodes, node, "run/services.log"),
        only_canary=True,
    ),
    Example(
        "gpu-driver", ("usr/lib/gpu", "run/gpu", RECORDS),
        lambda nodes, node: read(nodes, node, "run/gpu/loaded.nvidia") == "570.86.10\n",
        only_canary=True,
    ),
    Example("hello", ("etc", RECORDS), lambda nodes, node: True, undo=False),
]  # fmt: skip
IN_NORMAL_RUN = {"sysctl", "certificate"}

BOOTS: dict[str, str] = {}
"""The boot of each node before an example."""


@pytest.mark.parametrize("name", example_names())
async def test_preview_is_as_beside_the_plan(tmp_path: Path, name: str) -> None:
    """If it differs on purpose: `make docs`."""
    assert await render_preview(name, tmp_path) == (EXAMPLES / name / PREVIEW).read_text()


def test_example_is_written_once_and_whole(tmp_path: Path) -> None:
    for name in example_names():
        files = example_files(name)
        assert {"plan.yml", "README.md", "config.yaml"} <= set(files), name
        assert ("playbooks/sysctl.yml" in files) is (name != "clusters"), name
        assert not any("tree" in path or path == PREVIEW for path in files)
    written = write_example("reboot", tmp_path)
    before = (tmp_path / "plan.yml").read_bytes()
    (tmp_path / "plan.yml").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_example("reboot", tmp_path)
    assert ((tmp_path / "plan.yml").read_bytes(), before != b"mine") == (b"mine", True)
    assert all(path.is_relative_to(tmp_path) for path in written)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverlayNodes]:
    """Two web servers behind HAProxy and two GPU hosts, with all that the examples change."""
    if not can_overlay():
        pytest.skip("needs root and overlayfs")
    directory = tmp_path_factory.mktemp("p")
    gpu = {name: {"gpu_driver_loaded": "/run/gpu/modules"} for name in GPU}
    nodes = OverlayNodes(directory, {**WEB, **GPU}, gpu)
    balancer = Haproxy(directory / "lb", dict.fromkeys(WEB, 9)).start()
    try:
        for name in WEB:
            furnish_web_server(nodes, name)
        for name in GPU:
            furnish_gpu_host(nodes, name)
        nodes.start_nodes()
        lb1 = {"socket": str(balancer.socket)}
        # Pipelined, a task costs half; the kernel's example is not.
        nodes.write_settings(haproxy={"lb1": lb1}, ansible={"pipelining": "on"})
        nodes.start_daemon()
        yield nodes
    finally:
        nodes.stop()
        balancer.stop()


def furnish_web_server(nodes: OverlayNodes, name: str) -> None:
    for parameter, value in (("net.core.somaxconn", 4096), ("net.ipv4.tcp_max_syn_backlog", 1024)):
        nodes.write(name, f"run/kernel/{parameter}", f"{value}\n")
    nodes.write(name, "etc/netplan/50-cloud-init.yaml", "network: {version: 2}\n", mode=0o600)
    nodes.write(name, "run/network-in-force", "network: {version: 2}\n")
    nodes.write(name, "usr/sbin/netplan", NETPLAN, mode=0o755)
    nodes.write(name, "opt/app/releases/app-1.3.0", '#!/bin/sh\necho "app 1.3.0"\n', mode=0o755)
    (nodes.private(name) / "opt/app/current").symlink_to("/opt/app/releases/app-1.3.0")
    nodes.write(name, "run/services/app", "")
    nodes.write(name, "usr/local/sbin/renew-certificate", RENEW, mode=0o755)
    ssl = nodes.private(name) / "etc/ssl/web"
    ssl.mkdir(parents=True)
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=old -keyout web.key -out web.pem"
    subprocess.run(command.split(), cwd=ssl, check=True, capture_output=True)
    (ssl / "web.key").chmod(0o640)
    repository = nodes.private(name) / "srv/repository"
    for version in ("1.0-1", "2.0-1"):
        publish(repository, "library", version)
        publish(repository, "tool", version, depends=f"library (= {version})")


def furnish_gpu_host(nodes: OverlayNodes, name: str) -> None:
    old = "#!/bin/sh\nmkdir -p /usr/lib/gpu && echo 550.54.15 > /usr/lib/gpu/version\n"
    nodes.write(name, "opt/drivers/driver-550.54.15.run", old)
    nodes.write(name, "usr/lib/gpu/version", "550.54.15\n")
    nodes.write(name, "usr/bin/nvidia-smi", NVIDIA_SMI, mode=0o755)
    nodes.write(name, "usr/sbin/modprobe", MODPROBE, mode=0o755)
    nodes.write(name, "run/gpu/loaded.nvidia", "550.54.15\n")
    nodes.write(name, "run/gpu/modules", "nvidia 4096 0 - Live 0x0\n")
    nodes.write(name, "run/services/nvidia-persistenced", "")


@pytest.mark.servers("haproxy")
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, id=each.name, marks=() if each.name in IN_NORMAL_RUN else pytest.mark.long)
        for each in PLAIN
    ],
)
def test_example_runs_and_undo_restores(fleet: OverlayNodes, tmp_path: Path, example: Example) -> None:
    targets = GPU if example.name == "gpu-driver" else {**WEB, **(GPU if example.name == "hello" else {})}
    if example.name == "reboot":
        fleet.write("web-1", "run/reboot-required", "")
    walk(fleet, example, tmp_path, list(targets)[:1] if example.only_canary else list(targets))


def walk(nodes: OverlayNodes, example: Example, directory: Path, targets: list[str]) -> None:
    """Run an example to done, and undo it."""
    BOOTS.update({node: read(nodes, node, "proc/sys/kernel/random/boot_id") for node in targets})
    before = {node: nodes.snapshot(node, example.paths) for node in targets}
    rollout = submit(nodes, example, directory)
    nodes.finish(rollout, LIMIT_S)
    states = {name: node["phase"] for name, node in nodes.nodes(rollout).items()}
    assert states == dict.fromkeys(targets, "done")
    assert [node for node in targets if not example.has_changed(nodes, node)] == []
    if not example.undo:
        assert {node: nodes.snapshot(node, example.paths) for node in targets} == before
        return
    assert all(nodes.snapshot(node, example.paths) != before[node] for node in targets)
    nodes.client.post(api_path("rollouts", rollout, "rollback"), {"reason": "undo", "all": True})

    def are_undone() -> bool:
        listed = nodes.nodes(rollout).values()
        assert not [node["failure"] for node in listed if node.get("failure")], listed
        return all(node["outcome"] == "rolled-back" for node in listed)

    nodes.wait_until(are_undone, f"{rollout} is undone", LIMIT_S)
    assert {node: nodes.snapshot(node, example.paths) for node in targets} == before


def submit(nodes: OverlayNodes, example: Example, directory: Path) -> str:
    """Write an example, shorten its waits, and submit it."""
    write_example(example.name, directory)
    plan: dict[str, Any] = yaml.safe_load((directory / "plan.yml").read_text())
    spec = plan["spec"]
    spec |= {"soak": "1s", "probation": "1s"}
    spec.pop("windows", None)
    if example.only_canary:
        spec["targets"] += ",canary=true"
    for stage in spec.get("prepare", ()):
        stage["stage"]["may_change"] = SHARED_BY_NODES
    upload = nodes.client.upload("/v1/uploads", pack_tree(directory / "playbooks"))["upload"]
    body = {"file": "plan.yml", "text": yaml.safe_dump(plan), "upload": upload}
    return str(nodes.client.post("/v1/plans/submit", body)["rollout"])


# -- the example of Kubernetes ---------------------------------------------------

KERNEL = Example(
    "kernel", ("usr/share/linux-image-amd64", RECORDS),
    lambda nodes, node: version_of(nodes, node, "linux-image-amd64") == "6.1.170-3"
    and read(nodes, node, "proc/sys/kernel/random/boot_id") != BOOTS[node],
)  # fmt: skip

ASKS_FOR_REBOOT = "#!/bin/sh\ntouch /run/reboot-required\n"


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[OverlayNodes]:
    """A cluster whose two nodes are real sshds, with an old kernel and a repository that has the new one."""
    async with FakeKubernetes() as fake:
        kubeconfig = fake.kubeconfig(directory / "ams.kubeconfig")
        api = KubernetesApi(kubeconfig)
        await api.open()
        workers = {
            each["name"]: each["labels"]
            for each in yaml.safe_load((EXAMPLES / "kernel/nodes.yaml").read_text())
        }
        async with ClusterSandbox(api, ready_s=0.3, end_s=0.2) as sandbox:
            sandbox.prefix = "worker"
            for name, labels in workers.items():
                await sandbox.node(name.removeprefix("worker-"), labels)
            nodes = OverlayNodes(directory, {name: {"team": "web"} for name in workers})
            for name in workers:
                repository = nodes.private(name) / "srv/repository"
                for version in ("6.1.150-1", "6.1.170-3"):
                    publish(repository, "linux-image-amd64", version, postinst=ASKS_FOR_REBOOT)
                nodes.write(name, "etc/apt/sources.list.d/local.list", "")
            try:
                await asyncio.to_thread(nodes.start_nodes)
                for name in workers:
                    root = nodes.root(name)
                    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/repository ./\n")
                    (root / "var/lib/rolloutd-test").mkdir()
                    package = f"{root}/srv/repository/linux-image-amd64_6.1.150-1_all.deb"
                    install = ["chroot", str(root), "dpkg", "-i", package.removeprefix(str(root))]
                    subprocess.run(install, check=True, capture_output=True)
                    (root / "run/reboot-required").unlink()
                source = yaml.safe_load((EXAMPLES / "kernel/config.yaml").read_text())["inventory"][0]
                source["kubernetes"]["kubeconfig"] = str(kubeconfig)
                ansible = {"path": str(directory / "hosts.yml"), "labels": []}
                nodes.write_settings(inventory=[{"ansible": ansible}, source])
                await asyncio.to_thread(nodes.start_daemon)
                yield nodes
            finally:
                await asyncio.to_thread(nodes.stop)
        await api.close()


@pytest.mark.long
@pytest.mark.servers
async def test_kernel_example_runs_on_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not can_overlay():
        pytest.skip("needs root and overlayfs")
    directory = tmp_path_factory.mktemp("k")
    async with cluster(directory) as nodes:
        plan = directory / "plan"
        plan.mkdir()
        await asyncio.to_thread(walk, nodes, KERNEL, plan, list(nodes.labels))
