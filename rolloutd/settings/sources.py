"""The kinds of inventory sources, and what each may be told.

A new kind is one model and one line in INVENTORY_KINDS, and its paths in PATHS;
the settings file, its JSON Schema and its mistakes follow.  What a kind does is
its adapter's affair and unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from rolloutd.planfile.check import Breach
from rolloutd.planfile.document import Value
from rolloutd.planfile.model import MAX_ITEMS
from rolloutd.planfile.scalars import LabelKey, Unreadable, schema_of
from rolloutd.planfile.steps import ABSENT, Part


def read_path(value: object) -> Path:
    """Read a path that a person wrote; raises Unreadable."""
    if not isinstance(value, str) or not value.strip():
        raise Unreadable("this is no path", "a path, relative to this file")
    return Path(value)


FilePath = Annotated[Path, PlainValidator(read_path), schema_of(type="string", minLength=1)]
Word = Annotated[str, Field(min_length=1, max_length=64)]


class AnsibleInventory(Part):
    """Nodes from an Ansible inventory: a static file, a directory or a dynamic one."""

    path: FilePath = Field(description="Inventory, as `ansible-inventory -i` takes it.")
    labels: list[LabelKey] = Field(
        default=["team", "rack", "canary"],
        max_length=MAX_ITEMS,
        description="Host variables that become labels.",
    )


class KubernetesInventory(Part):
    """Nodes from a Kubernetes cluster, which is watched all the time."""

    name: Word = Field(description="What this cluster is called here; no two have one name.")
    kubeconfig: FilePath = Field(description="How the cluster is reached, as kubectl takes it.")
    context: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default=ABSENT, description="Context of the kubeconfig; its current one if not given."
    )
    labels: dict[LabelKey, LabelKey] = Field(
        default={},
        max_length=MAX_ITEMS,
        description="Labels of the fleet, each by the cluster's label whose value it takes.",
    )
    prefix: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9.-]*$")] = Field(
        default="", description="Put before each node's name, where two clusters have nodes of one name."
    )
    address: Literal["InternalIP", "ExternalIP", "Hostname", "none"] = Field(
        default="InternalIP",
        description="The node's address that becomes `ansible_host` where no other source says it.",
    )


INVENTORY_KINDS: dict[str, Any] = {"ansible": AnsibleInventory, "kubernetes": KubernetesInventory}

PATHS: tuple[tuple[str, ...], ...] = (
    ("inventory", "*", "ansible", "path"),
    ("inventory", "*", "kubernetes", "kubeconfig"),
)
"""Where paths stand in these; `*` is any item of a list."""


def clusters_differ(root: Value) -> Iterator[Breach]:
    """No two clusters have one name: a node finds its cluster by it."""
    sources = root.child("inventory")
    if sources is None or not isinstance(sources.children, list):
        return
    taken: set[str] = set()
    for number, source in enumerate(sources.children):
        cluster = source.child("kubernetes")
        name = None if cluster is None else cluster.child("name")
        if name is None or not isinstance(name.plain, str):
            continue
        if name.plain in taken:
            path = ("inventory", number, "kubernetes", "name")
            yield Breach(path, name.plain, "a name of its own", "another cluster has this name")
        taken.add(name.plain)
