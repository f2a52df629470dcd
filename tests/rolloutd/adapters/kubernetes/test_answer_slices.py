"""Long answers are parsed in slices: the loop turns between them, and the result is that of one parse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest

from rolloutd.adapters.kubernetes import answer_slices
from rolloutd.adapters.kubernetes.answer_slices import SLICE_CHARS, parse_answer
from rolloutd.adapters.kubernetes.api_errors import ApiError, check_object
from rolloutd.adapters.kubernetes.pods import parse_pod

T = TypeVar("T")

PODS = 10_000


def pod(number: int) -> dict[str, Any]:
    """Return a pod of some three kilobytes, as a cluster has them."""
    return {
        "metadata": {
            "name": f"p{number}",
            "namespace": "shop",
            "uid": str(number),
            "labels": {f"label-{key}": "x" * 60 for key in range(12)},
            "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{key}": {} for key in range(60)}}],
        },
        "spec": {"nodeName": "n1", "containers": [{"name": 'ä "]},{[ \\u00e4', "image": "i" * 200}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod_list(count: int) -> dict[str, Any]:
    return {
        "kind": "PodList",
        "metadata": {"resourceVersion": "7", "continue": ""},
        "items": [pod(number) for number in range(count)],
    }


async def turns_during(work: Awaitable[T]) -> tuple[T, int]:
    """Return the result of the work, and how often the loop turned meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.create_task(count())
    try:
        return await work, turns
    finally:
        counter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await counter


async def test_loop_turns_between_slices_of_long_list() -> None:
    given = pod_list(PODS)
    body = json.dumps(given, ensure_ascii=False).encode()
    found, turns = await turns_during(parse_answer(body))
    assert found == given
    slices = len(body.decode()) // (SLICE_CHARS + 5_000)  # a slice ends with the pod that fills it
    assert slices > 50
    assert turns >= slices


async def test_item_is_dropped_once_it_is_converted() -> None:
    body = json.dumps(pod_list(200)).encode()
    kept: list[weakref.ref[Any]] = []

    class Item(dict[str, Any]):
        """A mapping that can be referred to weakly."""

    def convert(item: Any) -> str:
        assert not any(ref() for ref in kept)
        copy = Item(item)
        kept.append(weakref.ref(copy))
        return parse_pod(copy).uid

    found = await parse_answer(body, convert)
    assert found["items"] == [str(number) for number in range(200)]


async def test_item_that_cannot_be_converted_is_malformed() -> None:
    body = json.dumps({"items": [pod(1), {"metadata": {}}]}).encode()
    with pytest.raises(ApiError, match="an object has an unexpected shape"):
        await parse_answer(body, lambda item: item["metadata"]["uid"])


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("order", [("kind", "metadata", "items"), ("items", "metadata", "kind")])
async def test_sliced_parse_equals_plain_one(
    monkeypatch: pytest.MonkeyPatch, indent: int | None, order: tuple[str, ...]
) -> None:
    monkeypatch.setattr(answer_slices, "SLICE_CHARS", 0)
    short = pod_list(3)
    for answer in (short, {**short, "items": []}, {**short, "items": None}, pod(1), {}):
        ordered = {key: answer[key] for key in order if key in answer} | answer
        text = json.dumps(ordered, indent=indent)
        assert await parse_answer(f" {text}\n".encode()) == answer


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "{", '{"items": [', '{"items": [{}', '{"items": [{},]}', '{"items": [{} {}]}'),
        *(
            '{"items": {}}',
            '{"items": [7]}',
            '{"items": [{"metadata": 7}]}',
            '{"a": 1,}',
            '{"a" 1}',
            "{7: 1}",
        ),
        *('{"a": 1} {}', '{"a": 1}]', '{"items": [{"metadata": {"labels": {"a": 1}}}]}', '{"metadata": []}'),
        "\x80",
    ],
)
async def test_malformed_answer_is_refused_in_slices(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    body = text.encode("latin-1")
    with pytest.raises(ValueError, match=r"."):
        check_object(json.loads(body))
    monkeypatch.setattr(answer_slices, "SLICE_CHARS", 0)
    with pytest.raises(ValueError, match=r"."):
        await parse_answer(body)
