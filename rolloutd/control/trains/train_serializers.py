"""Serializers of trains."""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.train import Train
from rolloutd.control.trains import wire_trains


def rollout_train(index: Index, rollout_id: str) -> wire_trains.RolloutTrain | None:
    """Return the train of a rollout, approved or not, and what it has saved for this rollout."""
    train = next((each for each in index.trains if rollout_id in each.rollouts), None)
    if train is None:
        return None
    return {
        "name": train.name,
        "rollouts": list(train.rollouts),
        "state": train_state(index, train),
        "missing": [each for each in train.rollouts if each not in train.approvals],
        "outages_saved": len(index.counters(rollout_id).joined_outages),
    }


def train_state(index: Index, train: Train) -> wire_trains.TrainState:
    is_open = any(each in index.rollouts and not index.rollouts[each].closed for each in train.rollouts)
    return "ended" if not is_open else "active" if train.is_approved else "waiting"
