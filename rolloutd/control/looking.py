"""What is looked at before a node is touched, and what is not: said wherever people decide."""

from __future__ import annotations

from machines.plan import Plan, StepSpec

TRAFFIC = "client traffic (the plan has no traffic probe)"
"""What a plan without probes does not look at."""


def looked_at(plan: Plan) -> list[str]:
    """Say what each traffic probe of a plan looks at, before a node starts and before it is isolated."""
    return [f"client traffic: {spec.kind} {_told(spec)}" for spec in plan.traffic]


def not_looked_at(plan: Plan) -> list[str]:
    """Say what somebody who decides might think is looked at, and is not."""
    return [] if plan.traffic else [TRAFFIC]


def _told(spec: StepSpec) -> str:
    said = {key: value for key, value in spec.params.items() if key != "timeout"}
    words = (f"{key} {', '.join(value) if isinstance(value, list) else value}" for key, value in said.items())
    return "; ".join(words)
