"""Runs the front end in Kubernetes: the objects' controller, and the listener for votes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from rolloutd.adapters.kubernetes.factory import find_cluster
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.operator.controller import Controller
from rolloutd.operator.vote_objects import VoteCounter
from rolloutd.operator.votes import VoteServer, serve_votes
from rolloutd.ports import AdapterContext, SourceStore
from rolloutd.settings.operator import OperatorVotes

log = logging.getLogger(__name__)


async def run_operator(state: State, sources: SourceStore, context: AdapterContext) -> None:
    """Run until cancelled; what cannot run is shown in the daemon's status, and the rest runs."""
    settings = state.settings.operator
    assert settings is not None
    cluster = find_cluster(context, settings.cluster)
    if cluster is None:
        problem = f"operator.cluster: {settings.cluster} is no kubernetes source of `inventory`; name one"
        state.conditions["operator"] = problem
        log.error("%s", problem)
        return
    running: list[Coroutine[None, None, None]] = [Controller(state, sources, cluster, settings).run()]
    if settings.vote_objects:
        running.append(VoteCounter(state, sources, cluster, settings).run())
    if settings.votes is not None:
        server = VoteServer(state, sources, cluster, settings)
        running.append(_serve_votes(server, settings.votes, state))
    async with asyncio.TaskGroup() as tasks:
        for each in running:
            tasks.create_task(each)


async def _serve_votes(server: VoteServer, settings: OperatorVotes, state: State) -> None:
    try:
        async with serve_votes(server, settings):
            log.info("operator: votes are taken at %s", settings.listen)
            await asyncio.Event().wait()
    except (RolloutdError, OSError) as error:
        state.conditions["operator votes"] = f"operator.votes: not served: {error}"
        log.error("operator.votes: not served: %s", error)
