"""What a plan's prepare stages find in their source: manifests, and digests of playbooks.

It becomes part of the plan's content, so people vote for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from rolloutd.errors import InvalidFile
from rolloutd.files.artifact_files import FileMismatch, compare_file
from rolloutd.planfile import PlanFile
from rolloutd.planfile.document import JSON, MAX_DIAGNOSTICS
from rolloutd.planfile.document import Path as KeyPath
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, LocatedManifest, locate_manifest
from rolloutd.planfile.playbooks import playbook_digest, read_content_digest

MAX_COMPARED_BYTES = 4 * 1024**3
"""Bytes that a submit reads to compare artifacts: some ten seconds; stages compare all of them anyway."""


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
    compared = _ComparedFiles()
    # Stages mostly share a playbook, or its roles; each file is read once for all of them.
    digest_of = cache(partial(playbook_digest, tree, content_digest=cache(read_content_digest)))
    for number, item in enumerate(prepare["stages"]):
        for kind, stage in item.items():
            found: dict[str, JSON] = {}
            if stage["playbook"]:
                found["playbook"] = digest_of(stage["playbook"], is_local=kind == "build")
            # A manifest that a build of this plan makes is known only then.
            if kind == "stage" and stage["manifest"] not in built:
                path = ("spec", "prepare", "stages", number, kind, "manifest")
                manifest = _read_manifest(plan, path, tree, stage["manifest"])
                with _naming_stage(plan, path, stage["name"], stage["manifest"]):
                    located = locate_manifest(manifest, stage["manifest"])
                    # Only these are sent from the source: a mirror or a playbook has files of its own.
                    if stage["method"] == "ssh":
                        _require_same_files(located, (tree / stage["manifest"]).parent, compared)
                found["artifacts"] = located.records
            if kind == "build":
                built.add(stage["manifest"])
            resolved[stage["name"]] = found
    forced = {"force": sorted(force.stages)} if force.stages else {}
    if force.nodes:
        forced["force_nodes"] = sorted(force.nodes)
    spec = {**plan.content["spec"], "prepare": {**prepare, "resolved": resolved, **forced}}
    return replace(plan, content={**plan.content, "spec": spec})


@dataclass(slots=True)
class _ComparedFiles:
    """The files that were compared, and how many bytes may still be read."""

    left_bytes: int = field(default_factory=lambda: MAX_COMPARED_BYTES)
    files: dict[tuple[Path, int, str], FileMismatch | None] = field(default_factory=dict)

    def compare(self, file: Path, size: int, sha256: str) -> FileMismatch | None:
        """Return how a file differs from its artifact; beyond the limit its size alone is compared."""
        key = (file, size, sha256)
        if key not in self.files:
            self.files[key] = self._compare(file, size, sha256)
        return self.files[key]

    def _compare(self, file: Path, size: int, sha256: str) -> FileMismatch | None:
        try:
            found = file.stat().st_size
        except OSError as error:
            return FileMismatch(f"cannot be read: {error.strerror or error}")
        if found != size:
            return FileMismatch(f"has {found} bytes, not {size}")
        if size > self.left_bytes:
            return None
        self.left_bytes -= size
        return compare_file(file, size, sha256)


def _require_same_files(manifest: LocatedManifest, directory: Path, compared: _ComparedFiles) -> None:
    """Raise InvalidFile for each artifact whose file is missing or another, at its line of the manifest."""
    mistakes = []
    for number, record in enumerate(manifest.records):
        path = record["path"]
        if not path:
            continue
        mismatch = compared.compare(directory / path, record["size"], record["sha256"])
        if mismatch is not None:
            digest = f": sha256 {mismatch.found}" if mismatch.found else ""
            message = f"{record['name']} {record['version']}: the file {mismatch.problem}{digest}"
            allowed = "the file of this entry (run `rolloutctl artifacts manifest` again after a build)"
            mistakes.append(manifest.diagnostic(number, "path", path, allowed, message))
    if mistakes:
        raise InvalidFile(tuple(mistakes[:MAX_DIAGNOSTICS]))


@contextmanager
def _naming_stage(plan: PlanFile, path: KeyPath, stage: str, manifest: str) -> Iterator[None]:
    """Add to the mistakes of a manifest which stage of the plan has it, and where."""
    try:
        yield
    except InvalidFile as invalid:
        message = f"the manifest of stage {stage} has mistakes"
        mistake = plan.diagnostic(path, found=manifest, allowed="a manifest without any", message=message)
        raise InvalidFile((*invalid.diagnostics, mistake)) from invalid


def _read_manifest(plan: PlanFile, path: KeyPath, tree: Path, name: str) -> bytes:
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
    return text


def _require_known_stages(plan: PlanFile, prepare: JSON, force: tuple[str, ...]) -> None:
    stages = () if prepare is None else prepare["stages"]
    known = [stage["name"] for item in stages for stage in item.values()]
    for name in force:
        if name not in known:
            allowed = f"one of: {', '.join(known)}" if known else "nothing: the plan has no prepare stages"
            message = "there is no such stage to force"
            path = ("spec", "prepare")
            raise InvalidFile((plan.diagnostic(path, found=name, allowed=allowed, message=message),))
