"""Long answers in slices: the loop turns between them, and other work of the daemon continues.

A thread would not help: Python's parser holds the interpreter until a text ends.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rolloutd.adapters.kubernetes.api_errors import check_object, malformed_answers
from rolloutd.ports import JSON

SLICE_CHARS = 128 * 1024
"""Text that is parsed between two turns of the loop: some 3 ms; an object has 1.5 MiB at most."""

Convert = Callable[[Mapping[str, JSON]], Any]

_DECODER = json.JSONDecoder()

_BLANKS = re.compile("[ \\t\\n\\r]*")


def unchanged(item: Mapping[str, JSON]) -> Mapping[str, JSON]:
    return item


async def parse_answer(body: bytes, convert: Convert = unchanged) -> dict[str, JSON]:
    """Return an answer that is an object, or a list of objects with each item converted.

    What check_object() refuses raises ValueError.  An item is dropped once it is converted: to free thousands
    of them at once takes as long as to parse them.
    """
    reader = _Reader(body.decode(errors="surrogatepass"))
    answer: dict[str, JSON] = {}
    reader.expect("{")
    while not reader.is_at("}"):
        if answer:
            reader.expect(",")
        name = reader.read_value()
        if not isinstance(name, str):
            raise ValueError("a name in the answer is not a text")
        reader.expect(":")
        if name == "items" and reader.is_at("["):
            answer[name] = await _read_items(reader, convert)
        else:
            answer[name] = reader.read_value()
    reader.expect("}")
    reader.expect_end()
    # The items were checked one by one.
    check_object({**answer, "items": []} if isinstance(answer.get("items"), list) else answer)
    return answer


async def _read_items(reader: _Reader, convert: Convert) -> list[Any]:
    items: list[Any] = []
    reader.expect("[")
    slice_began = reader.position
    while not reader.is_at("]"):
        if items:
            reader.expect(",")
        item = reader.read_value()
        check_object({"items": [item]})
        with malformed_answers():
            items.append(convert(item))
        if reader.position - slice_began >= SLICE_CHARS:
            slice_began = reader.position
            await asyncio.sleep(0)
    reader.expect("]")
    return items


class _Reader:
    """Reads a JSON text value by value; every method raises ValueError for a text of another form."""

    def __init__(self, text: str) -> None:
        self.position = 0
        self._text = text

    def is_at(self, mark: str) -> bool:
        blanks = _BLANKS.match(self._text, self.position)
        self.position = self.position if blanks is None else blanks.end()
        return self._text.startswith(mark, self.position)

    def expect(self, mark: str) -> None:
        if not self.is_at(mark):
            raise ValueError(f"the answer lacks {mark!r} at character {self.position}")
        self.position += len(mark)

    def expect_end(self) -> None:
        self.is_at("")
        if self.position != len(self._text):
            raise ValueError("the answer continues after its end")

    def read_value(self) -> JSON:
        self.is_at("")
        value, self.position = _DECODER.raw_decode(self._text, self.position)
        return value
