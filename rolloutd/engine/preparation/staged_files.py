"""Comparison of staged files with their manifests on the nodes, before a node takes a slot.

A checkpoint says what a stage did, not what is on the node now.  What differs is staged again on that node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from machines.model.decision import CompareStaged
from machines.model.node import Node
from machines.model.preparation import PrepareStage, StagedComparison
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.journal import PrepareJournal, render_for_host
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Host, StagedFile, StagedFiles, Unknown, staged_artifact


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


async def compare_staged(state: State, adapters: AdapterSet, request: CompareStaged) -> None:
    """Compare the staged files of a node that could start, and stage again what differs."""

    def record(problem: str = "") -> None:
        comparison = StagedComparison(request.rollout, request.node, state.now(), problem)
        state.index.record_comparison(comparison)

    # It only reads, so no other work waits for it: nothing removes what an open rollout wants.
    index, node = state.index, state.index.nodes[request.node]
    known = index.preparations(request.rollout)
    if known is None:
        return
    if state.awaited_sources(node.name):
        record("its inventory source has not answered since the daemon started")
        return
    stages, host = known.compared_stages(node), state.host(node.name)
    problems = await compare_stages(adapters.preparation_adapters.staged_files, host, node, stages)
    if isinstance(problems, Failed | Unknown):
        record(problems.text)
    elif not problems:
        record()
    else:
        await PrepareJournal(state).stage_again(request.rollout, request.node, problems)
