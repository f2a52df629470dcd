"""What a plan's prepare stages find in their source: manifests, and digests of playbooks.

It becomes part of the plan's content, so people vote for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile import PlanFile
from rolloutd.planfile.document import Path as KeyPath
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, read_manifest
from rolloutd.planfile.playbooks import playbook_digest

JSON = Any


@dataclass(frozen=True, slots=True)
class ForcedStages:
    """Prepare stages that run also where they are done: on these nodes, on all if none is named."""

    stages: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


NOT_FORCED = ForcedStages()


def resolve_prepare(plan: PlanFile, tree: Path, force: ForcedStages = NOT_FORCED) -> PlanFile:
    """Return the plan with its manifests and the digests of its prepare playbooks; reads files.

    Raises InvalidFile.
    """
    prepare = plan.content["spec"].get("prepare")
    _require_known_stages(plan, prepare, force.stages)
    if prepare is None:
        return plan
    resolved: dict[str, JSON] = {}
    built: set[str] = set()
    for number, item in enumerate(prepare["stages"]):
        for kind, stage in item.items():
            found: dict[str, JSON] = {}
            if stage["playbook"]:
                found["playbook"] = playbook_digest(tree, stage["playbook"])
            manifest = tree / stage["manifest"] if kind == "stage" else None
            # A manifest that a build of this plan makes is known only then.
            if manifest is not None and stage["manifest"] not in built:
                path = ("spec", "prepare", "stages", number, kind, "manifest")
                found["artifacts"] = _read(plan, path, manifest, stage["manifest"])
            if kind == "build":
                built.add(stage["manifest"])
            resolved[stage["name"]] = found
    forced = {"force": sorted(force.stages)} if force.stages else {}
    if force.nodes:
        forced["force_nodes"] = sorted(force.nodes)
    spec = {**plan.content["spec"], "prepare": {**prepare, "resolved": resolved, **forced}}
    return replace(plan, content={**plan.content, "spec": spec})


def _read(plan: PlanFile, path: KeyPath, manifest: Path, name: str) -> list[JSON]:
    try:
        with manifest.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        allowed = (
            "a manifest in the source (rolloutctl artifacts manifest DIR), or a `build` before this stage"
        )
        message = f"there is no such manifest in the source: {error.strerror}"
        raise InvalidFile((_mistake(plan, path, name, allowed, message),)) from None
    if len(text) > MAX_MANIFEST_BYTES:
        message = "the manifest is too large"
        raise InvalidFile((_mistake(plan, path, name, "at most 4 MiB", message),))
    return read_manifest(text, name)


def _require_known_stages(plan: PlanFile, prepare: JSON, force: tuple[str, ...]) -> None:
    stages = () if prepare is None else prepare["stages"]
    known = [stage["name"] for item in stages for stage in item.values()]
    for name in force:
        if name not in known:
            allowed = f"one of: {', '.join(known)}" if known else "nothing: the plan has no prepare stages"
            message = "there is no such stage to force"
            raise InvalidFile((_mistake(plan, ("spec", "prepare"), name, allowed, message),))


def _mistake(plan: PlanFile, path: KeyPath, found: str, allowed: str, message: str) -> Diagnostic:
    return plan.diagnostic(path, found=found, allowed=allowed, message=message)
