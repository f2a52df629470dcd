"""Label selectors in the grammar of Kubernetes (k8s.io/apimachinery, labels.Parse).

`k`, `!k`, `k=v`, `k==v`, `k!=v`, `k in (a,b)`, `k notin (a,b)`, `k>1`, `k<9`; commas mean "and".  `!=` and
`notin` also match nodes without the key; an empty selector matches every node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

MAX_SELECTOR_LENGTH = 65_536
"""Characters of one selector: room for a thousand node names, as many as a person can review."""

MAX_NAME_LENGTH = 63
"""Characters of a label's name and of a label's value, as in Kubernetes."""

MAX_PREFIX_LENGTH = 253
"""Characters of a label key's DNS prefix, as in Kubernetes."""

_NAME = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_INT64 = 2**63
_TOKEN = re.compile(r"[ \t\r\n]*(?:(?P<symbol>==|!=|[=!(),<>])|(?P<word>[^ \t\r\n=!(),<>]+)|(?P<end>$))")
_END_TEXT = "the end"

_KEY_RULE = "a label key: [dns-prefix/]name, letters, digits, '-', '_' and '.', at most 63 characters"
_VALUE_RULE = (
    "a label value: letters, digits, '-', '_' and '.', a letter or digit at both ends, "
    "at most 63 characters, or nothing"
)


class SelectorError(ValueError):
    """A selector does not match the grammar; `position` counts characters from 0."""

    def __init__(self, message: str, *, position: int, found: str, allowed: str) -> None:
        super().__init__(f"{message} at character {position + 1}: found {found}; allowed: {allowed}")
        self.message = message
        self.position = position
        self.found = found
        self.allowed = allowed


class Operator(StrEnum):
    """How a requirement compares a label; `=`, `==` and `in` with one value are the same."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "!"
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on one label; `values` are sorted and distinct."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.ABSENT:
                return self.key not in labels
            case Operator.GREATER | Operator.LESS:
                return self._compare(labels.get(self.key))
            case _:
                assert_never(self.operator)

    def _compare(self, label: str | None) -> bool:
        """Compare as 64-bit integers; a label that is not an integer never matches, as in Kubernetes."""
        number = None if label is None else _to_int64(label)
        if number is None:
            return False
        bound = int(self.values[0])
        return number > bound if self.operator is Operator.GREATER else number < bound

    def canonical(self) -> str:
        match self.operator:
            case Operator.IN:
                return _format_set(self.key, "=", "in", self.values)
            case Operator.NOT_IN:
                return _format_set(self.key, "!=", "notin", self.values)
            case Operator.EXISTS:
                return self.key
            case Operator.ABSENT:
                return f"!{self.key}"
            case Operator.GREATER | Operator.LESS:
                return f"{self.key}{self.operator}{int(self.values[0])}"
            case _:
                assert_never(self.operator)


@dataclass(frozen=True, slots=True)
class Selector:
    """Conditions that must all hold; `text` is as the person wrote it."""

    requirements: tuple[Requirement, ...] = ()
    text: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the selector matches these labels; an empty selector always does."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    def canonical(self) -> str:
        """Return the spelling that all selectors with the same conditions share, for hashing."""
        return ",".join(sorted({requirement.canonical() for requirement in self.requirements}))

    def __str__(self) -> str:
        return self.text


def parse_selector(text: str) -> Selector:
    """Parse a selector; raises SelectorError with the position and what is allowed there."""
    if len(text) > MAX_SELECTOR_LENGTH:
        raise SelectorError(
            "the selector is too long",
            position=MAX_SELECTOR_LENGTH,
            found=f"{len(text)} characters",
            allowed=f"at most {MAX_SELECTOR_LENGTH} characters",
        )
    tokens = _Tokens(text)
    requirements: list[Requirement] = []
    if tokens.peek() != "":
        requirements.append(_parse_requirement(tokens))
        while tokens.peek() == ",":
            tokens.take()
            requirements.append(_parse_requirement(tokens))
        tokens.expect_end()
    return Selector(tuple(requirements), text)


class _Tokens:
    """The words and symbols of a selector; the empty token is the end."""

    __slots__ = ("_next_offset", "_text", "_token", "position")

    def __init__(self, text: str) -> None:
        self._text = text
        self._next_offset = 0
        self.position = 0
        self._token = ""
        self._advance()

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._next_offset)
        assert match is not None, "every character is blank, symbol or word"
        self._token = match["symbol"] or match["word"] or ""
        self._next_offset = match.end()
        self.position = match.end() - len(self._token)

    def peek(self) -> str:
        return self._token

    def is_word(self) -> bool:
        return self._token != "" and self._token[0] not in "=!(),<>"

    def take(self) -> str:
        token = self._token
        self._advance()
        return token

    def error(self, allowed: str, message: str = "the selector cannot be read") -> SelectorError:
        found = f"'{self._token}'" if self._token else _END_TEXT
        return SelectorError(message, position=self.position, found=found, allowed=allowed)

    def expect_end(self) -> None:
        if self._token:
            raise self.error("',' or the end")


def _parse_requirement(tokens: _Tokens) -> Requirement:
    if tokens.peek() == "!":
        tokens.take()
        return Requirement(_parse_key(tokens), Operator.ABSENT)
    key = _parse_key(tokens)
    match tokens.peek():
        case "" | ",":
            return Requirement(key, Operator.EXISTS)
        case "=" | "==":
            tokens.take()
            return Requirement(key, Operator.IN, (_parse_exact_value(tokens),))
        case "!=":
            tokens.take()
            return Requirement(key, Operator.NOT_IN, (_parse_exact_value(tokens),))
        case ">" | "<" as symbol:
            tokens.take()
            return Requirement(key, Operator(symbol), (_parse_number(tokens),))
        case "in" | "notin" as word:
            tokens.take()
            return Requirement(key, Operator(word), _parse_value_set(tokens))
        case _:
            raise tokens.error("=, ==, !=, in (...), notin (...), >, <, ',' or the end")


def _parse_key(tokens: _Tokens) -> str:
    if not tokens.is_word():
        raise tokens.error("a label key or !key")
    key = tokens.peek()
    prefix, slash, name = key.rpartition("/")
    is_valid_prefix = not slash or (len(prefix) <= MAX_PREFIX_LENGTH and _PREFIX.fullmatch(prefix))
    if not is_valid_prefix or len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise tokens.error(_KEY_RULE, "this is not a label key")
    return tokens.take()


def _parse_exact_value(tokens: _Tokens) -> str:
    """Parse a value, which may be empty before a comma or the end, as in Kubernetes."""
    return "" if tokens.peek() in ("", ",") else _parse_value(tokens)


def _parse_value(tokens: _Tokens) -> str:
    value = tokens.peek()
    if not tokens.is_word() or len(value) > MAX_NAME_LENGTH or not _NAME.fullmatch(value):
        raise tokens.error(_VALUE_RULE, "this is not a label value")
    return tokens.take()


def _parse_number(tokens: _Tokens) -> str:
    if not _NAME.fullmatch(tokens.peek()) or _to_int64(tokens.peek()) is None:
        raise tokens.error("a whole number", "only whole numbers can be compared")
    return tokens.take()


def _parse_value_set(tokens: _Tokens) -> tuple[str, ...]:
    if tokens.peek() != "(":
        raise tokens.error("'('")
    tokens.take()
    if tokens.peek() == ")":
        raise tokens.error(_VALUE_RULE, "the set of values is empty")
    values: set[str] = set()
    while True:
        values.add("" if tokens.peek() in (",", ")") else _parse_value(tokens))
        match tokens.peek():
            case ",":
                tokens.take()
            case ")":
                tokens.take()
                return tuple(sorted(values))
            case _:
                raise tokens.error("',' or ')'")


def _to_int64(text: str) -> int | None:
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if -_INT64 <= number < _INT64 else None


def _format_set(key: str, symbol: str, word: str, values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f"{key}{symbol}{values[0]}"
    return f"{key} {word} ({','.join(values)})"
