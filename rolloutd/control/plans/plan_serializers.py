"""Serializers of digests, verdicts and the values of targets."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from machines.model.plan import Digest, Plan
from machines.model.rollout import Verdict
from rolloutd.configuration.target_values import shown_value
from rolloutd.control.formats import fill
from rolloutd.control.plans import wire_plans


def hashes(digest: Digest) -> wire_plans.Hashes:
    return cast("wire_plans.Hashes", asdict(digest))


def verdict(found: Verdict) -> wire_plans.Verdict:
    host_class = ",".join(f"{key}={value}" for key, value in found.host_class.items()) or "all"
    return fill(wire_plans.Verdict, found, **{"class": host_class})


def target_values(plan: Plan) -> list[wire_plans.PreviewValue]:
    """Return the values that submit resolved for each target."""
    names = {stage.step: stage.name for stage in plan.stages}
    return [
        {"node": node, "stage": names[step], "name": name, "value": shown_value(value)}
        for node, steps in plan.values.items()
        for step, values in steps.items()
        for name, value in values.items()
    ]
