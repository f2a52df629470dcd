"""Builds: a playbook makes the artifacts of a rollout, once, and writes their manifest."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from machines.model.events import ArtifactsBuilt, Event, PreparationRecorded
from machines.model.preparation import entry_of_record
from machines.workflow import prepare_try
from rolloutd.concurrency import threads
from rolloutd.engine.preparation.session import StageSession
from rolloutd.engine.state import State
from rolloutd.errors import AdapterFailed, NotFound
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, read_manifest
from rolloutd.ports import Ok, StepResult

MANIFEST_VARIABLE = "rolloutd_manifest"
"""Variable of a build's playbook: where, on the daemon's machine, it puts the manifest and its files."""

ARTIFACTS_DIRECTORY = "artifacts"


def built_name(rollout: str, stage: str) -> str:
    """Return the name of a build's directory among those of all builds."""
    return f"{rollout}/{stage}"


def built_directory(state: State, rollout: str, stage: str) -> Path:
    """Return where a build puts its manifest and files on the daemon's machine."""
    return state.settings.files_dir / ARTIFACTS_DIRECTORY / built_name(rollout, stage)


async def build(session: StageSession) -> StepResult | None:
    """Run a build's playbook and record the manifest that it wrote; None if that is recorded.

    Raises NotFound, AdapterFailed and InvalidFile.
    """
    state, stage, rollout = session.state, session.stage, session.rollout.id
    path = built_directory(state, rollout, stage.name) / PurePosixPath(stage.manifest_file).name
    await threads.FILES.run(path.parent.mkdir, parents=True, exist_ok=True)
    if not prepare_try.is_acting(session.row):  # a new try: the manifest of an earlier one is not its result
        path.unlink(missing_ok=True)
    session.change(handle=session.run_handle, content=stage.playbook_digest)
    if not await session.begin():
        return None
    variables = {**stage.variables, MANIFEST_VARIABLE: str(path)}
    result = await session.run(stage.playbook, variables, stage.timeout_s)
    if not isinstance(result, Ok):
        return result
    manifest = tuple(map(entry_of_record, await threads.FILES.run(_read_built_manifest, path)))
    await session.preparation_adapters.built.share(built_name(rollout, stage.name))
    now = state.now()
    done = PreparationRecorded(prepare_try.ended(session.row, Ok(), now))
    # One commit: with the manifest nodes may begin to stage, so the build must be over.
    events: list[Event] = [ArtifactsBuilt(rollout, stage.name, manifest, now), done]
    await state.commit(events, cause=f"stage {stage.name} is built")
    return None


def _read_built_manifest(path: Path) -> list[dict[str, Any]]:
    """Return the artifacts that a build made; raises NotFound, AdapterFailed and InvalidFile."""
    if not path.is_file():
        raise NotFound(f"{path.name}: the build has not written it; write it to {MANIFEST_VARIABLE}")
    with path.open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise AdapterFailed(f"{path.name}: the manifest is too large; build one of at most 4 MiB")
    return read_manifest(text, path.name)
