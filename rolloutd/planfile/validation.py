"""Validation of a document by its model, all mistakes at once.

A mistake carries the line to edit: a wrong value its own, an unknown key the key's, a missing key that of its
mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile.document import (
    JSON,
    MAX_DIAGNOSTICS,
    Document,
    Path,
    SourceLocation,
    Value,
    describe_value,
    locate,
    truncate,
)
from rolloutd.planfile.schema import known_keys, schema_at, schema_of_model
from rolloutd.plugin.field_types import InvalidValue, InvalidValues
from rolloutd.texts.formats import pluralize

ModelT = TypeVar("ModelT", bound=BaseModel)

_KEY_MARK = "[key]"
"""pydantic's mark behind a mapping's key when the key itself is wrong."""

_QUOTED = re.compile("'([^']*)'")

MAX_SHOWN_KEYS = 8
"""Keys of a mapping that are shown where something else stands for it."""

ONE_OR_MANY = "a mapping (key: value) or a list of them"

_SHAPE_NAMES = {
    "model_type": "a mapping (key: value)",
    "dict_type": "a mapping (key: value)",
    "list_type": "a list (- item)",
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
}


def validate_document(model: type[ModelT], document: Document, title: str) -> ModelT:
    """Return the document as its type; raises InvalidFile with all mistakes, in the file's order."""
    diagnostics = list(document.diagnostics)
    if document.root is None:
        raise InvalidFile(tuple(diagnostics))
    result: ModelT | None = None
    try:
        result = model.model_validate(document.root.data)
    except ValidationError as error:
        builder = _DiagnosticBuilder(schema_of_model(model, title), document.root)
        # Without the input: a value may be a secret, and a mistake shows it cut.
        details = error.errors(include_url=False, include_input=False)[:MAX_DIAGNOSTICS]
        mistyped = {
            builder.intended_path(detail) for detail in details if detail["type"] == "extra_forbidden"
        }
        # A mistyped key is not also missing: one mistake is reported once.
        distinct = [
            each for each in details if each["type"] != "missing" or builder.error_path(each) not in mistyped
        ]
        diagnostics += _without_repeats(
            diagnostics,
            [(found, detail["type"]) for detail in distinct for found in builder.from_error(detail)],
        )
    if diagnostics or result is None:
        raise InvalidFile(tuple(sorted(diagnostics, key=_position)[:MAX_DIAGNOSTICS]))
    return result


def _position(mistake: Diagnostic) -> tuple[str, int, int]:
    return mistake.file, mistake.line, mistake.column


def _without_repeats(known: list[Diagnostic], found: Iterable[tuple[Diagnostic, str]]) -> list[Diagnostic]:
    """Leave out mistakes at the location of a known one, and shape mistakes of a value known to be wrong."""
    places = {(mistake.file, mistake.line, mistake.column, mistake.path) for mistake in known}
    broken_paths = {mistake.path for mistake in known}
    distinct = dict.fromkeys(
        mistake
        for mistake, kind in found
        if (mistake.file, mistake.line, mistake.column, mistake.path) not in places
        and not (kind in _SHAPE_NAMES and mistake.path in broken_paths)
    )
    return list(distinct)


class _DiagnosticBuilder:
    """Turns errors of pydantic into mistakes with a location."""

    def __init__(self, schema: dict[str, JSON], root: Value) -> None:
        self._schema = schema
        self._root = root

    def from_error(self, error: ErrorDetails) -> Iterator[Diagnostic]:
        """Yield the mistakes of an error: several only for a rule on several keys."""
        loc = error["loc"]
        cause = error.get("ctx", {}).get("error")
        if loc and loc[-1] == _KEY_MARK:
            yield self._bad_key(error)
        elif error["type"] == "missing":
            yield self._missing(self.error_path(error))
        elif error["type"] == "extra_forbidden":
            yield self._unknown_key(self.error_path(error))
        elif isinstance(cause, InvalidValue | InvalidValues):
            for each in cause.errors if isinstance(cause, InvalidValues) else (cause,):
                yield self._invalid_value(loc, each)
        else:
            path, value, _ = locate(self._root, loc)
            schema = self._schema_at(path)
            allowed, message = _allowed_text(error, schema), _message(error, value)
            is_scalar = value is not None and value.children is None
            if is_scalar and path and loc[-1] != path[-1]:  # one of several types, none of which fits
                allowed, message = _describe_schema(schema or {}), "the value is not allowed here"
            yield self._wrong_value(path, value, allowed, message)

    def _invalid_value(self, loc: Sequence[str | int], error: InvalidValue) -> Diagnostic:
        parts = list(loc)
        for part in error.at:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        path, value, _ = locate(self._root, parts)
        if error.at_key and value is not None:
            found = describe_value(value.data) if error.found is None else error.found
            return self._key_location(path).diagnostic(path, found, error.allowed, error.message)
        return self._wrong_value(path, value, error.allowed, error.message, error.found)

    def _wrong_value(
        self, path: Path, value: Value | None, allowed: str, message: str, found: str | None = None
    ) -> Diagnostic:
        place = self._key_location(path) if value is None else value.location
        if found is None:
            found = "nothing" if value is None else describe_value(value.data)
        return place.diagnostic(path, found, allowed, message)

    def _bad_key(self, error: ErrorDetails) -> Diagnostic:
        path = locate(self._root, error["loc"][:-1])[0]
        message, allowed = "this is not a valid variable name", _allowed_text(error, None)
        return self._key_location(path).diagnostic(path, str(path[-1]), allowed, message)

    def error_path(self, error: ErrorDetails) -> Path:
        return locate(self._root, error["loc"])[0]

    def intended_path(self, error: ErrorDetails) -> Path:
        """Return the path of the key that an unknown key seems to mean, else that of the unknown key."""
        path = self.error_path(error)
        near = self._nearest_key(path)
        return (*path[:-1], near) if near else path

    def _missing(self, path: Path) -> Diagnostic:
        schema = self._schema_at(path) or {}
        key = path[-1]
        message = f"`{key}` is missing: {schema.get('description', 'it must be given')}"
        return self._key_location(path[:-1]).diagnostic(path, "nothing", _describe_schema(schema), message)

    def _unknown_key(self, path: Path) -> Diagnostic:
        key, place = str(path[-1]), self._key_location(path)
        parent = self._schema_at(path[:-1]) or {}
        known = known_keys(self._schema, path[:-1])
        allowed = "one of: " + ", ".join(known) if known else "no keys here"
        near = self._nearest_key(path)
        hint = f"; did you mean `{near}`?" if near else ""
        if parent.get("maxProperties") == 1:  # a step: its one key is the kind of an adapter
            hint = hint or "; install the package that provides it"
            return place.diagnostic(path, key, allowed, f"no adapter `{truncate(key)}` is installed{hint}")
        return place.diagnostic(path, key, allowed, f"there is no key `{truncate(key)}` here{hint}")

    def _nearest_key(self, path: Path) -> str:
        """Return the known key that is most like the last one of the path, "" for none."""
        near = get_close_matches(str(path[-1])[:100], known_keys(self._schema, path[:-1]), n=1, cutoff=0.5)
        return near[0] if near else ""

    # -- locations --------------------------------------------------------------

    def _key_location(self, path: Path) -> SourceLocation:
        """Return the location of the path's last key, or of the nearest one to it."""
        place, value = self._root.location, self._root
        for part in path:
            child = value.child(part)
            place = value.keys.get(part, place) if isinstance(part, str) else (child or value).location
            if child is None:
                break
            value = child
        return place

    def _schema_at(self, path: Path) -> dict[str, JSON] | None:
        return schema_at(self._schema, path)


def _message(error: ErrorDetails, value: Value | None) -> str:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(getattr(cause, "message", cause))
    kind = error["type"]
    if kind == "string_type" and value is not None and isinstance(value.data, bool | int | float):
        return "YAML does not read this as text; put it in quotes"
    if kind == "int_type" and value is not None and str(value.data).isdecimal():
        return "the number is text; remove its quotes"
    if kind in _SHAPE_NAMES:
        return "the value has the wrong type"
    if kind == "literal_error" and value is not None:
        choices = _QUOTED.findall(str(error["ctx"]["expected"]))
        near = get_close_matches(str(value.data)[:100], choices, n=1, cutoff=0.5)
        return "unknown value" + (f"; did you mean `{near[0]}`?" if near else "")
    message = (
        error["msg"].replace("Input", "value").replace("input", "value").replace(" after validation", "")
    )
    return f"the {message[:1].lower()}{message[1:]}"


def _allowed_text(error: ErrorDetails, schema: dict[str, JSON] | None) -> str:
    ctx = error.get("ctx", {})
    allowed = getattr(ctx.get("error"), "allowed", None)
    if allowed is not None:
        return str(allowed)
    if error["type"] == "model_type" and (keys := list((schema or {}).get("properties", ()))):
        one_of = "one of " if (schema or {}).get("maxProperties") == 1 else ""
        return f"a mapping with {one_of}{', '.join(keys[:MAX_SHOWN_KEYS])}"
    if error["type"] in _SHAPE_NAMES:
        # Where one item may replace a list, either is right.
        may_be_one = error["type"] == "list_type" and "anyOf" in (schema or {})
        return ONE_OR_MANY if may_be_one else _SHAPE_NAMES[error["type"]]
    if "expected" in ctx:
        return str(ctx["expected"])
    if "pattern" in ctx:
        return f"text of the form {ctx['pattern']}"
    return _describe_schema(schema or {})


def _describe_schema(schema: Mapping[str, JSON]) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    words = {
        "object": _SHAPE_NAMES["dict_type"],
        "array": _SHAPE_NAMES["list_type"],
        "integer": "a whole number",
    }
    words |= {"boolean": "true or false", "string": "text"}
    text = words.get(kind if isinstance(kind, str) else "", "what the reference says")
    if "anyOf" in schema and kind is None:
        choices = schema["anyOf"]
        if all("type" in choice and choice["type"] not in ("object", "array") for choice in choices):
            return " or ".join(_describe_schema(each) for each in choices if each["type"] != "null")
        text = ONE_OR_MANY
    bounds = [
        f"{name} {pluralize(schema[key], unit) if unit else schema[key]}"
        for key, name, unit in (
            ("minimum", "at least", ""),
            ("maximum", "at most", ""),
            ("minItems", "at least", "item"),
            ("maxItems", "at most", "item"),
            ("maxLength", "at most", "character"),
        )
        if key in schema
    ]
    examples = [f"such as {schema['examples'][0]}"] if schema.get("examples") else []
    return ", ".join([text, *bounds, *examples])
