"""Builds: a playbook makes the artifacts of a rollout, once, and writes their manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from machines.model.events import ArtifactsBuilt, PreparationRecorded
from machines.model.preparation import PreparationState, entry_of_record
from rolloutd.concurrency import threads
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.journal import PrepareJob, PrepareJournal
from rolloutd.engine.preparation.runs import PrepareRuns
from rolloutd.engine.state import State
from rolloutd.errors import AdapterFailed, NotFound
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, read_manifest
from rolloutd.ports import Failed, Ok, Unknown

MANIFEST_VARIABLE = "rolloutd_manifest"
"""Variable of a build's playbook: where, on the daemon's machine, it puts the manifest and its files."""

ARTIFACTS_DIRECTORY = "artifacts"


def built_name(rollout: str, stage: str) -> str:
    """Return the name of a build's directory among those of all builds."""
    return f"{rollout}/{stage}"


def built_directory(state: State, rollout: str, stage: str) -> Path:
    """Return where a build puts its manifest and files on the daemon's machine."""
    return state.settings.files_dir / ARTIFACTS_DIRECTORY / built_name(rollout, stage)


class Builder:
    """Carries out the builds of all rollouts."""

    def __init__(
        self, state: State, adapters: AdapterSet, journal: PrepareJournal, runs: PrepareRuns
    ) -> None:
        self._state = state
        self._adapters = adapters
        self._journal = journal
        self._runs = runs

    async def build(self, job: PrepareJob) -> None:
        """Run a build's playbook and record the manifest that it wrote."""
        directory = built_directory(self._state, job.rollout.id, job.stage.name)
        path = directory / PurePosixPath(job.stage.manifest_file).name
        await threads.FILES.run(directory.mkdir, parents=True, exist_ok=True)
        if not job.row.content:  # a new try: the manifest of an earlier one is not its result
            path.unlink(missing_ok=True)
        row = replace(job.row, handle=self._runs.handle_of(job.row), content=job.stage.playbook_digest)
        if not await self._journal.begin(row):
            return
        variables = {**job.stage.variables, MANIFEST_VARIABLE: str(path)}
        job = replace(job, row=row)
        request = await self._runs.request(
            row, job.host.name, job.stage.playbook, variables, job.stage.timeout_s
        )
        result, row = await self._runs.run(row, request)
        if not isinstance(result, Ok):
            await self._journal.fail(row, result.text)
            return
        found = await capture_errors(row.rollout, threads.FILES.run(_read_built_manifest, path))
        if isinstance(found, Failed | Unknown):
            await self._journal.fail(row, found.text)
            return
        name = built_name(job.rollout.id, job.stage.name)
        shared = await capture_errors(row.rollout, self._adapters.preparation_adapters.built.share(name))
        if isinstance(shared, Failed | Unknown):
            await self._journal.fail(row, shared.text)
            return
        now = self._state.now()
        done = replace(row, state=PreparationState.DONE, at=now)
        manifest = tuple(map(entry_of_record, found))
        built = ArtifactsBuilt(row.rollout, row.stage, manifest, now)
        # One commit: with the manifest nodes may begin to stage, so the build must be over.
        await self._state.commit([built, PreparationRecorded(done)], cause=f"stage {row.stage} is built")


def _read_built_manifest(path: Path) -> list[dict[str, Any]]:
    """Return the artifacts that a build made; raises NotFound, AdapterFailed and InvalidFile."""
    if not path.is_file():
        raise NotFound(f"{path.name}: the build has not written it; write it to {MANIFEST_VARIABLE}")
    with path.open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise AdapterFailed(f"{path.name}: the manifest is too large; build one of at most 4 MiB")
    return read_manifest(text, path.name)
