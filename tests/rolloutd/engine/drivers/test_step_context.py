"""The context of a step: what is kept between the steps of a node, and until when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.events import NodesDiscovered
from rolloutd.engine import connection_variables
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

TEXT = PLAN.replace('{do: "true", undo: "true"}', '{do: "drain {{ node.labels.team }}", undo: "true"}')


async def session_of(inside: ControlEnvironment) -> NodeSession:
    rollout = await inside.start(text=TEXT)
    return NodeSession(
        inside.state, AdapterSet(FakeRunner(inside.run_host), {}, {}, find_source), rollout, "p1"
    )


async def test_changed_label_fills_parameters_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        session = await session_of(inside)
        spec, node = session.plan.isolate[0], inside.state.index.nodes["p1"]
        assert (await session.step_context(spec)).params["do"] == f"drain {node.labels['team']}"
        moved = replace(node, labels={**node.labels, "team": "other"})
        await inside.commit(NodesDiscovered((moved,)))
        assert (await session.step_context(spec)).params["do"] == "drain other"


async def test_adapter_changes_parameters_of_one_step(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        session = await session_of(inside)
        (await session.step_context(session.plan.isolate[0])).params.clear()
        assert (await session.step_context(session.plan.isolate[0])).params["do"] == "drain payments"


async def test_host_in_use_outlasts_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as inside:
        monkeypatch.setattr(connection_variables, "MAX_KEPT_HOSTS", 2)
        in_flight, *peers = list(inside.state.index.nodes)[:4]
        kept = inside.state.host(in_flight)
        for peer in peers:
            inside.state.host(peer)
            assert inside.state.host(in_flight) is kept
