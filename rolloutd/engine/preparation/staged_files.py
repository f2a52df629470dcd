"""Comparison of staged files with their manifests on the nodes, before a node takes a slot.

A checkpoint says what a stage did, not what is on the node now.  What differs is staged again on that node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from machines.model.decision import CompareStaged
from machines.model.node import Node
from machines.model.preparation import PrepareStage, StagedComparison
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.journal import PrepareJournal, render_for_host
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import StoreFailed
from rolloutd.ports import Failed, Host, StagedFile, StagedFiles, Unknown, staged_artifact

MAX_CONCURRENT = 16
"""Nodes at a time: each has one of the daemon's connections for as long as a disk takes to read its files."""

STORE_RETRY_S = 5.0
"""Pause before a node is compared again whose difference could not be written."""


async def compare_stages(
    staged_files: StagedFiles, host: Host, node: Node, stages: Iterable[PrepareStage]
) -> Mapping[str, str] | Failed | Unknown:
    """Return by stage the first of its files that differs on the node, and how; one command for all files.

    A stage has computed the same digests within its own limit, so the limits of the stages suffice.
    """
    files: dict[str, tuple[str, str, StagedFile]] = {}
    timeout_s = 0.0
    for stage in stages:
        artifacts = stage.artifacts_for(node)
        timeout_s += stage.timeout_s if artifacts else 0.0
        for each in artifacts:
            staged = staged_artifact(render_for_host(stage.to, host), each)
            file = StagedFile(staged.path, each.size, each.sha256, staged.unpacked)
            files.setdefault(staged.path, (stage.name, f"{each.name} {each.version}", file))
    if not files:
        return {}
    wanted = [file for _, _, file in files.values()]
    found = await capture_errors(host.name, staged_files.compare(host, wanted, timeout_s=timeout_s))
    if isinstance(found, Failed | Unknown):
        return found
    problems: dict[str, str] = {}
    for path, difference in found.items():
        stage_name, title, _ = files[path]
        problems.setdefault(stage_name, f"{title}: {path} {difference}; staged again")
    return problems


class StagedComparer:
    """The comparisons under way of nodes that could start."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._journal = PrepareJournal(state)
        self._jobs: BackgroundJobs[CompareStaged] = BackgroundJobs(
            "compare-staged", state, lambda: state.wake_up(), MAX_CONCURRENT
        )

    def request(self, tasks: asyncio.TaskGroup, wanted: Sequence[CompareStaged]) -> None:
        """Start the comparisons that are not under way yet."""
        for each in wanted:
            self._jobs.start(tasks, self._compare, each, name=f"compare {each.rollout}/{each.node}")

    async def _compare(self, request: CompareStaged) -> None:
        # It only reads, so no other work waits for it: nothing removes what an open rollout wants.
        index = self._state.index
        known, node = index.preparations(request.rollout), index.nodes.get(request.node)
        if known is None or node is None:
            return  # the rollout was deleted, or the node left, before the task began
        if self._state.awaited_sources(node.name):
            self._record(request, "its inventory source has not answered since the daemon started")
            return
        stages, host = known.compared_stages(node), self._state.host(node.name)
        staged_files = self._adapters.preparation_adapters.staged_files
        problems = await compare_stages(staged_files, host, node, stages)
        if isinstance(problems, Failed | Unknown):
            self._record(request, problems.text)
        elif not problems:
            self._record(request)
        else:
            await self._stage_again(request, problems)

    def _record(self, request: CompareStaged, problem: str = "") -> None:
        comparison = StagedComparison(request.rollout, request.node, self._state.now(), problem)
        self._state.index.record_comparison(comparison)

    async def _stage_again(self, request: CompareStaged, problems: Mapping[str, str]) -> None:
        try:
            await self._journal.stage_again(request.rollout, request.node, problems)
        except StoreFailed as failure:
            self._state.last_write_error = str(failure)
            await self._state.clock.sleep(STORE_RETRY_S)
