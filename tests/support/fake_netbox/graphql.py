"""The part of GraphQL that an inventory uses: one list, its filters, its page, the selected fields."""

from __future__ import annotations

import json
import re
from typing import Any

JSON = Any

MAX_PAGE_SIZE = 1000

_WORD = re.compile(r'\s*([A-Za-z_]\w*|"(?:[^"\\]|\\.)*"|-?\d+|[{}()\[\]:])[\s,]*')


class QueryError(Exception):
    """The query is answered with HTTP 200 and `errors`."""


def parse(text: str) -> list[dict[str, JSON]]:
    """Return the selected fields of a query, each with name, alias, arguments and fields of its own."""
    words = [match[1] for match in _WORD.finditer(text)]
    if "".join(words) != re.sub(r"[\s,]+(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", "", text):
        raise QueryError("Syntax Error: unexpected character")
    return _Parser(words).selection()


class _Parser:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0

    def selection(self) -> list[dict[str, JSON]]:
        self._expect("{")
        fields = []
        while not self._skip("}"):
            name = alias = self._next()
            if self._skip(":"):
                name = self._next()
            arguments = self._mapping(")") if self._skip("(") else {}
            inner = self.selection() if self._peek() == "{" else []
            fields.append({"name": name, "alias": alias, "arguments": arguments, "fields": inner})
        return fields

    def _mapping(self, end: str) -> dict[str, JSON]:
        found = {}
        while not self._skip(end):
            name = self._next()
            self._expect(":")
            found[name] = self._value()
        return found

    def _value(self) -> JSON:
        if self._skip("{"):
            return self._mapping("}")
        if self._skip("["):
            items = []
            while not self._skip("]"):
                items.append(self._value())
            return items
        word = self._next()
        if word[0] == '"':
            return json.loads(word)
        return int(word) if word.lstrip("-").isdecimal() else word

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self) -> str:
        self._at += 1
        if self._at > len(self._words):
            raise QueryError("Syntax Error: Expected Name, found <EOF>.")
        return self._words[self._at - 1]

    def _skip(self, word: str) -> bool:
        if self._peek() == word:
            self._at += 1
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._skip(word):
            raise QueryError(f"Syntax Error: Expected '{word}'.")


def run(query: str, lists: dict[str, list[dict[str, JSON]]], hidden: frozenset[str]) -> dict[str, JSON]:
    """Return the data of a query; nested objects in `hidden` are null, as without the right to view them."""
    data = {}
    for field in parse(query):
        if field["name"] not in lists:
            raise QueryError(f"Cannot query field '{field['name']}' on type 'Query'.")
        page = field["arguments"].get("pagination", {})
        records = sorted(lists[field["name"]], key=lambda record: record["id"])
        records = [each for each in records if _matches(each, field["arguments"].get("filters", {}))]
        if "start" in page:
            records = [each for each in records if each["id"] >= page["start"]]
        records = records[page.get("offset", 0) :][: min(page.get("limit", MAX_PAGE_SIZE), MAX_PAGE_SIZE)]
        data[field["alias"]] = [_select(_graphql_form(each), field["fields"], hidden) for each in records]
    return data


def _matches(record: dict[str, JSON], filters: dict[str, JSON]) -> bool:
    for name, wanted in filters.items():
        match name:
            case "status":
                found = {f"STATUS_{record['status']['value'].upper()}"}
            case "name":
                found = {record["name"]}
            case "tags":
                found, wanted = {tag["slug"] for tag in record["tags"]}, wanted["slug"]
            case "site" | "tenant" | "role" | "platform":
                found, wanted = {(record[name] or {}).get("slug")}, wanted["slug"]
            case _:
                raise QueryError(f"Field '{name}' is not defined by type 'DeviceFilter'.")
        if not found & set(wanted.get("in_list", [wanted.get("exact")])):
            return False
    return True


def _graphql_form(record: dict[str, JSON]) -> dict[str, JSON]:
    custom = {
        name: value["id"] if isinstance(value, dict) and "slug" in value else value
        for name, value in record["custom_fields"].items()
    }
    without = {key: value for key, value in record.items() if key not in ("primary_ip", "url", "display")}
    return {
        **without,
        "id": str(record["id"]),
        "status": record["status"]["value"],
        "custom_fields": custom,
    }


def _select(record: dict[str, JSON], fields: list[dict[str, JSON]], hidden: frozenset[str]) -> JSON:
    selected = {}
    for field in fields:
        name, inner = field["name"], field["fields"]
        if name not in record:
            raise QueryError(f"Cannot query field '{name}' on type 'DeviceType'.")
        value = None if name in hidden else record[name]
        if inner and isinstance(value, list):
            value = [_select(each, inner, frozenset()) for each in value]
        elif inner and value is not None:
            value = _select(value, inner, frozenset())
        selected[field["alias"]] = value
    return selected
