"""What a step is told: the node, the rendered parameters, the pinned source, the deadline."""

from __future__ import annotations

from typing import Any

from machines.plan import Plan, StepSpec
from rolloutd.driving.gear import Gear
from rolloutd.errors import NotFound
from rolloutd.planfile.render import render
from rolloutd.ports import StepContext
from rolloutd.state import State


async def step_context(
    state: State,
    gear: Gear,
    rollout: str,
    node: str,
    spec: StepSpec,
    *,
    step: str,
    number: int = 1,
    prior: Any = None,
    gentle: bool = False,
) -> StepContext:
    """Return the context of one step; the key is the same after a restart.

    Raises RolloutdError when the parameters cannot be rendered, or the source or the rollout is gone.
    """
    if rollout not in state.index.rollouts:
        raise NotFound(f"{rollout} was deleted meanwhile")
    host = state.host(node)
    attempt = state.index.target(rollout, node).attempt
    variables = variables_of(state.index.rollout(rollout).plan)
    return StepContext(
        host=host,
        rollout=rollout,
        attempt=attempt,
        step=step,
        key=f"{rollout}.{node}.{attempt}.{step}.{number}",
        params=render(spec.params, node=host.name, labels=host.labels, variables=variables),
        deadline=state.now() + spec.timeout_s,
        tree=await gear.tree(rollout),
        prior=prior,
        variables=variables,
        gentle=gentle,
        held=held_by(state, node),
    )


def held_by(state: State, node: str) -> str:
    """Say who holds the node for themselves; the slot of a node that was left isolated is no such hold."""
    now = state.now()
    holds = (hold for hold in state.index.holds_on(node) if hold.until is None or now < hold.until)
    texts = [f"held by {hold.actor.name}: {hold.reason}" for hold in holds if hold.source != "left"]
    return "; ".join(texts)


def variables_of(plan: Plan) -> dict[str, Any]:
    """Return the variables of all stages; where two set the same, the earlier stage wins."""
    return {key: value for stage in reversed(plan.stages) for key, value in stage.variables.items()}
