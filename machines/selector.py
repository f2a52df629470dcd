"""Label selectors: which nodes a plan, a canary or a wave means.

The grammar is that of Kubernetes (k8s.io/apimachinery, labels.Parse), so that
an operator who knows `kubectl -l` knows ours: `k`, `!k`, `k=v`, `k==v`, `k!=v`,
`k in (a,b)`, `k notin (a,b)`, `k>1`, `k<9`, joined by commas, which mean "and".
`!=` and `notin` also match nodes that lack the key; an empty selector matches
every node.  It knows labels only, never a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

MAX_TEXT = 65_536
"""Characters of one selector: room for a thousand named nodes, no more than a person can review."""

MAX_NAME = 63
"""Characters of a label's name and of a label's value, as in Kubernetes."""

MAX_PREFIX = 253
"""Characters of a label key's DNS prefix, as in Kubernetes."""

_NAME = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_INT64 = 2**63
_TOKEN = re.compile(r"[ \t\r\n]*(?:(?P<symbol>==|!=|[=!(),<>])|(?P<word>[^ \t\r\n=!(),<>]+)|(?P<end>$))")
_END = "the end"

_KEY_RULE = "a label key: [dns-prefix/]name, letters, digits, '-', '_' and '.', at most 63 characters"
_VALUE_RULE = (
    "a label value: letters, digits, '-', '_' and '.', a letter or digit at both ends, "
    "at most 63 characters, or nothing"
)


class SelectorError(ValueError):
    """A selector is not in the grammar; `position` counts characters from 0."""

    def __init__(self, message: str, *, position: int, found: str, allowed: str) -> None:
        super().__init__(f"{message} at character {position + 1}: found {found}; allowed: {allowed}")
        self.message = message
        self.position = position
        self.found = found
        self.allowed = allowed


class Operator(StrEnum):
    """How a requirement compares a label; `=`, `==` and one-valued `in` are the same."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "!"
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on one label; `values` is sorted and without doubles."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Say whether the labels fulfil the condition."""
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
        """Compare as 64-bit integers; a label that is none never matches, as in Kubernetes."""
        number = None if label is None else _integer(label)
        if number is None:
            return False
        bound = int(self.values[0])
        return number > bound if self.operator is Operator.GREATER else number < bound

    def canonical(self) -> str:
        """Return the one spelling of this condition."""
        match self.operator:
            case Operator.IN:
                return _set_text(self.key, "=", "in", self.values)
            case Operator.NOT_IN:
                return _set_text(self.key, "!=", "notin", self.values)
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
    """Conditions that must all hold; `text` is what the person wrote."""

    requirements: tuple[Requirement, ...] = ()
    text: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Say whether a node with these labels is meant; an empty selector means every node."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    def canonical(self) -> str:
        """Return the one spelling that all selectors with the same conditions share, for hashing."""
        return ",".join(sorted({requirement.canonical() for requirement in self.requirements}))

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Selector:
    """Parse a selector; raises SelectorError naming the position and what is allowed there."""
    if len(text) > MAX_TEXT:
        raise SelectorError(
            "the selector is too long",
            position=MAX_TEXT,
            found=f"{len(text)} characters",
            allowed=f"at most {MAX_TEXT} characters",
        )
    tokens = _Tokens(text)
    requirements: list[Requirement] = []
    if tokens.peek() != "":
        requirements.append(_requirement(tokens))
        while tokens.peek() == ",":
            tokens.take()
            requirements.append(_requirement(tokens))
        tokens.expect_end()
    return Selector(tuple(requirements), text)


class _Tokens:
    """The words and symbols of a selector, one ahead; the end is the empty token."""

    __slots__ = ("_after", "_text", "_token", "position")

    def __init__(self, text: str) -> None:
        self._text = text
        self._after = 0
        self.position = 0
        self._token = ""
        self._advance()

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._after)
        assert match is not None, "every character is blank, symbol or word"
        self._token = match["symbol"] or match["word"] or ""
        self._after = match.end()
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
        found = f"'{self._token}'" if self._token else _END
        return SelectorError(message, position=self.position, found=found, allowed=allowed)

    def expect_end(self) -> None:
        if self._token:
            raise self.error("',' or the end")


def _requirement(tokens: _Tokens) -> Requirement:
    if tokens.peek() == "!":
        tokens.take()
        return Requirement(_key(tokens), Operator.ABSENT)
    key = _key(tokens)
    match tokens.peek():
        case "" | ",":
            return Requirement(key, Operator.EXISTS)
        case "=" | "==":
            tokens.take()
            return Requirement(key, Operator.IN, (_exact_value(tokens),))
        case "!=":
            tokens.take()
            return Requirement(key, Operator.NOT_IN, (_exact_value(tokens),))
        case ">" | "<" as symbol:
            tokens.take()
            return Requirement(key, Operator(symbol), (_number(tokens),))
        case "in" | "notin" as word:
            tokens.take()
            return Requirement(key, Operator(word), _value_set(tokens))
        case _:
            raise tokens.error("=, ==, !=, in (...), notin (...), >, <, ',' or the end")


def _key(tokens: _Tokens) -> str:
    if not tokens.is_word():
        raise tokens.error("a label key or !key")
    key = tokens.peek()
    prefix, slash, name = key.rpartition("/")
    good_prefix = not slash or (len(prefix) <= MAX_PREFIX and _PREFIX.fullmatch(prefix))
    if not good_prefix or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise tokens.error(_KEY_RULE, "this is no label key")
    return tokens.take()


def _exact_value(tokens: _Tokens) -> str:
    """Read a value; before a comma or the end it is the empty value, as in Kubernetes."""
    return "" if tokens.peek() in ("", ",") else _value(tokens)


def _value(tokens: _Tokens) -> str:
    value = tokens.peek()
    if not tokens.is_word() or len(value) > MAX_NAME or not _NAME.fullmatch(value):
        raise tokens.error(_VALUE_RULE, "this is no label value")
    return tokens.take()


def _number(tokens: _Tokens) -> str:
    if not _NAME.fullmatch(tokens.peek()) or _integer(tokens.peek()) is None:
        raise tokens.error("a whole number", "only whole numbers can be compared")
    return tokens.take()


def _value_set(tokens: _Tokens) -> tuple[str, ...]:
    if tokens.peek() != "(":
        raise tokens.error("'('")
    tokens.take()
    if tokens.peek() == ")":
        raise tokens.error(_VALUE_RULE, "the set of values is empty")
    values: set[str] = set()
    while True:
        values.add("" if tokens.peek() in (",", ")") else _value(tokens))
        match tokens.peek():
            case ",":
                tokens.take()
            case ")":
                tokens.take()
                return tuple(sorted(values))
            case _:
                raise tokens.error("',' or ')'")


def _integer(text: str) -> int | None:
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if -_INT64 <= number < _INT64 else None


def _set_text(key: str, symbol: str, word: str, values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f"{key}{symbol}{values[0]}"
    return f"{key} {word} ({','.join(values)})"
