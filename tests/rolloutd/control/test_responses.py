"""Answers as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.control.responses import SLICE, encode_in_slices, encode_json


@pytest.mark.parametrize(
    "body",
    [
        {"nodes": [{"node": f"n{number}"} for number in range(2 * SLICE + 1)], "seq": 1, "é": []},
        {"nodes": list(range(SLICE + 1))},
        {"few": [1]},
        [1],
        None,
    ],
)
async def test_slices_make_the_same_json(body: Any) -> None:
    assert await encode_in_slices(body) == encode_json(body)
