"""How the store writes kept forecasts."""

from __future__ import annotations

import json

from rolloutd.store.queries import NODES_PER_LINE, _forecast_text, _read_forecast


def test_forecast_of_many_nodes_is_encoded_in_slices() -> None:
    nodes = [{"node": f"n{number}"} for number in range(2 * NODES_PER_LINE + 1)]
    answer = {"rollout": "r1", "nodes": nodes, "gates": []}
    text = _forecast_text(answer)
    assert [len(json.loads(line)) for line in text.split("\n")[1:]] == [NODES_PER_LINE, NODES_PER_LINE, 1]
    assert _read_forecast(text) == answer


def test_forecast_of_an_earlier_version_is_read() -> None:
    answer = {"rollout": "r1", "nodes": [{"node": "n1"}]}
    assert _read_forecast(json.dumps(answer)) == answer
