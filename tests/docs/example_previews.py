"""The previews beside the example plans: made by `make docs`, compared by a test.

Each is of the example's own settings and inventory, at a fixed instant inside its window.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from datetime import datetime
from pathlib import Path

import yaml

from rolloutd.admin.init.offline_preview import preview_offline
from rolloutd.admin.systems import open_systems, read_sources
from rolloutd.cli.example_plans import PREVIEW, example_names, write_example
from rolloutd.cli.plans import print_preview
from rolloutd.settings import load
from tests.support.cluster_fleet import ClusterFleet
from tests.support.cluster_sandbox import KubernetesApi
from tests.support.fake_kubernetes import FakeKubernetes

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"

NOW = datetime.fromisoformat("2026-11-24T10:00:00+01:00").timestamp()
"""A Tuesday morning in Amsterdam: the windows of the examples are open."""

CHANGING = ("source ", "digest ")
"""Lines that differ with every change of a playbook."""


async def render_preview(name: str, directory: Path) -> str:
    """Return what `rolloutctl plan preview` prints for an example, which is written to an empty directory."""
    await asyncio.to_thread(write_example, name, directory)
    async with contextlib.AsyncExitStack() as stack:
        nodes = directory / "nodes.yaml"
        if nodes.exists():
            cluster = await stack.enter_async_context(FakeKubernetes())
            api = KubernetesApi(cluster.kubeconfig(directory / "ams.kubeconfig"))
            await api.open()
            stack.push_async_callback(api.close)
            for node in yaml.safe_load(nodes.read_text()):
                await api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": node})
        clusters = directory / "clusters.yaml"
        if clusters.exists():
            hub = await stack.enter_async_context(FakeKubernetes())
            fleet = await stack.enter_async_context(
                ClusterFleet(hub.kubeconfig(directory / "hub.kubeconfig"))
            )
            for cluster in yaml.safe_load(clusters.read_text()):
                await fleet.add_cluster(cluster["name"], cluster["labels"])
        settings = load(directory / "config.yaml")
        async with open_systems(settings) as systems:
            readings = await read_sources(systems)
    assert all(reading.check.ok for reading in readings), [reading.check for reading in readings]
    reported = [node for reading in readings for node in reading.nodes]
    plan, tree = directory / "plan.yml", directory / "playbooks"
    tree.mkdir(exist_ok=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        print_preview(preview_offline(settings, reported, plan, tree, "alice", NOW))
    return "".join(f"{line}\n" for line in output.getvalue().splitlines() if not line.startswith(CHANGING))


def main() -> None:
    for name in example_names():
        with tempfile.TemporaryDirectory() as directory:
            (EXAMPLES / name / PREVIEW).write_text(asyncio.run(render_preview(name, Path(directory))))


if __name__ == "__main__":
    main()
