"""Comparison of staged files with their manifests on the nodes, before a node takes a slot.

A checkpoint says what a stage did, not what is on the node now.  What differs is staged again on that node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from machines.model.decision import CompareStaged
from machines.model.events import Event, PreparationRecorded
from machines.model.node import Node
from machines.model.preparation import Preparation, PreparationState, PrepareStage, StagedComparison
from machines.workflow import prepare_try
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.session import render_for_host
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Host, StagedFile, StagedFiles, Unknown, staged_artifact


async def compare_stages(
    staged_files: StagedFiles, host: Host, node: Node, stages: Iterable[PrepareStage]
) -> Mapping[str, str]:
    """Return by stage the first of its files that differs on the node, and how; one command for all files.

    A stage has computed the same digests within its own limit, so the limits of the stages suffice.
    Raises NodeUnreachable, TimeoutError and AdapterFailed.
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
    differences = await staged_files.compare(host, wanted, timeout_s=timeout_s)
    problems: dict[str, str] = {}
    for path, difference in differences.items():
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
    comparing = compare_stages(adapters.preparation_adapters.staged_files, host, node, stages)
    problems = await capture_errors(state, host.name, comparing)
    if isinstance(problems, Failed | Unknown):
        record(problems.text)
    elif not problems:
        record()
    else:
        await stage_again(state, request.rollout, request.node, problems)


async def stage_again(
    state: State, rollout: str, node: str, problems: Mapping[str, str], begun: Preparation | None = None
) -> None:
    """Make stages due again whose files differ on the node; `problems` says how, by stage.

    `begun` is the row of the stage that was to read them: it waits for them.
    """
    async with state.exclusive_commit() as commit:
        index, now = state.index, state.now()
        known, found = index.preparations(rollout), index.nodes.get(node)
        if known is None or found is None or index.rollout(rollout).closed:
            return
        events: list[Event] = []
        for stage in known.compared_stages(found):
            row = known.rows.get((node, stage.name))
            if stage.name not in problems or row is None or not known.is_done(stage, found):
                continue  # it is due already
            events.append(PreparationRecorded(prepare_try.due_again(row, problems[stage.name], now)))
        recorded = None if begun is None else known.rows.get((node, begun.stage))
        if begun is not None and recorded is not None and recorded.state is PreparationState.RUNNING:
            text = f"waits for {', '.join(problems)}"
            events.append(PreparationRecorded(prepare_try.waiting_for_files(begun, text, now)))
        await commit(events, f"staged files differ: {'; '.join(problems.values())}")
