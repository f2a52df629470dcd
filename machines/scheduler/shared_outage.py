"""The next action of an attempt whose outage others may share, by the facts of its node.

It records how far the attempt is: the others of its train and the scheduler wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines.facts.projection import Projection
from machines.model.actions import Action
from machines.model.train import Train
from machines.rules.trains import next_joiner
from machines.states import Phase
from machines.workflow.next_action import next_action, outage_progress
from machines.workflow.outage import Outage, outage_peers
from machines.workflow.situation import Situation


def next_shared_action(
    index: Projection, situation: Situation, held: Mapping[str, Any]
) -> tuple[Action, bool]:
    """Return the next action, and whether the others of the outage may do more since then.

    `held`: the isolators of this attempt that another one has in effect too, with the state before both.
    """
    target = situation.target
    others = [each for each in index.targets_on(target.node) if each.rollout != target.rollout]
    if others or held:
        progress_of = {each.rollout: index.outage_progress(each) for each in others}
        outage = Outage(outage_peers(target, others, progress_of), held=held)
        situation = replace(situation, outage=outage)
    train = index.train_of(target.rollout)
    if target.phase is not Phase.VERIFYING or not (situation.outage.peers or train):
        return next_action(situation), False
    before = index.outage_progress(target)
    if train is not None and target.isolated:
        situation = _with_joiner(index, situation, train)
    action = next_action(situation)
    progress = outage_progress(situation, action)
    index.record_outage(target.rollout, target.node, progress)
    return action, progress != before


def _with_joiner(index: Projection, situation: Situation, train: Train) -> Situation:
    """Return the situation with the rollout that may join, while the node may wait for it."""
    target, now, progress = situation.target, situation.now, outage_progress(situation)
    latest = max((record.at for record in situation.records), default=now)
    until = latest + train.wait_s
    if not progress.has_passed or not latest <= now < until:
        return situation
    # The question is whether another one may join while this one waits; nothing is awaited in between.
    index.record_outage(target.rollout, target.node, replace(progress, waits=True))
    joiner = next_joiner(index, target, now)
    return replace(situation, outage=replace(situation.outage, joiner=joiner, joiner_until=until))
