"""What the failure of a node says of the content that its run gave to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from machines.model.events import PhaseMoved
from machines.model.rollout import Target
from machines.model.verdict import Verdict


def new_verdict(
    target: Target, moved: PhaseMoved, change: str, labels: Mapping[str, str], class_keys: Iterable[str]
) -> Verdict | None:
    """Return what a transition of this target, as it was before, says of its content; None for nothing."""
    failure = moved.failure
    if failure is None or not failure.blames_change or not target.content or target.rolling_back:
        return None
    return Verdict(
        f"{target.rollout}.{failure.id.replace('#', '.')}",
        change,
        target.content,
        {key: labels.get(key, "") for key in class_keys},
        target.rollout,
        target.node,
        failure.step,
        failure.message,
        failure.at,
    )
