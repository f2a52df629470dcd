"""What a plan's prepare stages find in their source: manifests, and digests of playbooks.

It becomes part of the plan's content, so people vote for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from rolloutd.errors import InvalidFile
from rolloutd.planfile import PlanFile
from rolloutd.planfile.document import JSON
from rolloutd.planfile.document import Path as KeyPath
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, read_manifest
from rolloutd.planfile.playbooks import playbook_digest, read_content_digest


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
    # Stages mostly share a playbook, or its roles; each file is read once for all of them.
    digest_of = cache(partial(playbook_digest, tree, content_digest=cache(read_content_digest)))
    for number, item in enumerate(prepare["stages"]):
        for kind, stage in item.items():
            found: dict[str, JSON] = {}
            if stage["playbook"]:
                found["playbook"] = digest_of(stage["playbook"])
            # A manifest that a build of this plan makes is known only then.
            if kind == "stage" and stage["manifest"] not in built:
                path = ("spec", "prepare", "stages", number, kind, "manifest")
                found["artifacts"] = _read_manifest(plan, path, tree, stage["manifest"])
            if kind == "build":
                built.add(stage["manifest"])
            resolved[stage["name"]] = found
    forced = {"force": sorted(force.stages)} if force.stages else {}
    if force.nodes:
        forced["force_nodes"] = sorted(force.nodes)
    spec = {**plan.content["spec"], "prepare": {**prepare, "resolved": resolved, **forced}}
    return replace(plan, content={**plan.content, "spec": spec})


def _read_manifest(plan: PlanFile, path: KeyPath, tree: Path, name: str) -> list[JSON]:
    text = None
    with suppress(OSError), (tree / name).open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if text is None:
        allowed = (
            "a manifest in the source (rolloutctl artifacts manifest DIR), or a `build` before this stage"
        )
        message = "there is no such manifest in the source"
        raise InvalidFile((plan.diagnostic(path, found=name, allowed=allowed, message=message),))
    if len(text) > MAX_MANIFEST_BYTES:
        message = "the manifest is too large"
        raise InvalidFile((plan.diagnostic(path, found=name, allowed="at most 4 MiB", message=message),))
    return read_manifest(text, name)


def _require_known_stages(plan: PlanFile, prepare: JSON, force: tuple[str, ...]) -> None:
    stages = () if prepare is None else prepare["stages"]
    known = [stage["name"] for item in stages for stage in item.values()]
    for name in force:
        if name not in known:
            allowed = f"one of: {', '.join(known)}" if known else "nothing: the plan has no prepare stages"
            message = "there is no such stage to force"
            path = ("spec", "prepare")
            raise InvalidFile((plan.diagnostic(path, found=name, allowed=allowed, message=message),))
