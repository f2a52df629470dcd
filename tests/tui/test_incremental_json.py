"""A long answer read in slices is the answer, and what is no answer is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.connection.incremental_json import decode_object

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(rest=st.dictionaries(st.text(), values), each=st.lists(values), spaces=st.sampled_from((None, 0, 2)))
def test_decoder_agrees_with_json(rest: dict[str, Any], each: list[Any], spaces: int | None) -> None:
    answer = {**rest, "nodes": each}
    assert decode_object(json.dumps(answer, indent=spaces), "nodes", lambda value: value) == answer


def test_decoder_converts_each_element() -> None:
    assert decode_object('{"seq": 3, "nodes": [1, 2]}', "nodes", str) == {"seq": 3, "nodes": ["1", "2"]}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"nodes": [1', '{"nodes": [1 2]}', '{"nodes": 3}', '{"a": 1 "b": 2}']
)
def test_invalid_response_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no '|Expecting"):
        decode_object(text, "nodes", str)
