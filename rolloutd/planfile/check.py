"""Holds a document against its types and rules, and names every mistake at once.

A mistake carries the line a person must edit: a wrong value its own, an unknown
key the key's, a missing key that of the mapping which lacks it.  Rules that tie
several keys together are handed in; they look at what was written, so that one
bad section does not hide what is wrong in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rolloutd.counting import count
from rolloutd.errors import InvalidFile, Mistake
from rolloutd.planfile.document import MAX_MISTAKES, Document, Place, Value
from rolloutd.planfile.schema import at_path, known_keys, schema_of_model
from rolloutd.planfile.wording import Path, cut, dotted, shown

JSON = Any
M = TypeVar("M", bound=BaseModel)

_KEY_MARK = "[key]"
"""What pydantic puts behind a mapping's key when the key itself is wrong."""

ONE_OR_MANY = "a mapping (key: value) or a list of them"

_SHAPES = {
    "model_type": "a mapping (key: value)",
    "dict_type": "a mapping (key: value)",
    "list_type": "a list (- item)",
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
}


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a document breaks; the place is that of the path, or of its last key."""

    path: Path
    found: str
    allowed: str
    message: str
    at_key: bool = False


Rule = Callable[[Value], Iterable[Breach]]


@dataclass(frozen=True, slots=True)
class Format:
    """What a kind of file is held against.

    `reserved` says what to tell a person who uses a key that cannot be used
    yet, by dotted path without indices; `*` stands for any key.
    """

    title: str
    rules: tuple[Rule, ...] = ()
    reserved: Mapping[str, str] = field(default_factory=dict)


def check(model: type[M], document: Document, form: Format) -> M:
    """Return the document as its type; raises InvalidFile with all mistakes, in the file's order."""
    mistakes = list(document.mistakes)
    if document.root is None:
        raise InvalidFile(tuple(mistakes))
    reader = _Translator(model, document.root, form)
    result: M | None = None
    try:
        result = model.model_validate(document.root.plain)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:MAX_MISTAKES]
        mistyped = {reader.meant(detail) for detail in details if detail["type"] == "extra_forbidden"}
        # A key that stands there mistyped is not missing as well: one mistake is told once.
        told = [each for each in details if each["type"] != "missing" or reader.path(each) not in mistyped]
        mistakes += _worth_saying(mistakes, [(reader.mistake(detail), detail["type"]) for detail in told])
    breaches = islice((breach for rule in form.rules for breach in rule(document.root)), MAX_MISTAKES)
    mistakes += _worth_saying(mistakes, [(reader.breach(breach), "rule") for breach in breaches])
    if mistakes or result is None:
        raise InvalidFile(tuple(sorted(mistakes, key=_order)[:MAX_MISTAKES]))
    return result


def _order(mistake: Mistake) -> tuple[str, int, int]:
    return mistake.file, mistake.line, mistake.column


def _worth_saying(known: list[Mistake], found: Iterable[tuple[Mistake, str]]) -> list[Mistake]:
    """Leave out what only repeats a known mistake: at its place, or of the shape of what is spoilt."""
    places = {(mistake.file, mistake.line, mistake.column, mistake.path) for mistake in known}
    spoilt = {mistake.path for mistake in known}
    return [
        mistake
        for mistake, kind in found
        if (mistake.file, mistake.line, mistake.column, mistake.path) not in places
        and not (kind in _SHAPES and mistake.path in spoilt)
    ]


class _Translator:
    """Turns what pydantic and the rules say into mistakes with a place."""

    def __init__(self, model: type[BaseModel], root: Value, form: Format) -> None:
        self._schema = schema_of_model(model, form.title)
        self._root = root
        self._form = form

    def breach(self, breach: Breach) -> Mistake:
        """Place a broken rule."""
        path, value, parent = self._follow(breach.path)
        place = value.place if value is not None else parent.place
        if breach.at_key or value is None:
            place = self._key_place(path)
        return _mistake(place, path, breach.found, breach.allowed, breach.message)

    def mistake(self, error: ErrorDetails) -> Mistake:
        """Place and word one of pydantic's errors."""
        bad_key = bool(error["loc"]) and error["loc"][-1] == _KEY_MARK
        path, value, _ = self._follow(error["loc"][:-1] if bad_key else error["loc"])
        match error["type"]:
            case "missing":
                return self._missing(path)
            case "extra_forbidden":
                return self._unknown_key(path)
            case _ if bad_key:
                message = "this is no good name for a variable"
                return _mistake(
                    self._key_place(path), path, str(path[-1]), _words_allowed(error, None), message
                )
            case _:
                place = value.place if value is not None else self._key_place(path)
                found = shown(value.plain) if value is not None else "nothing"
                said = self._said_of(path)
                return _mistake(place, path, found, _words_allowed(error, said), _message(error, value, said))

    def path(self, error: ErrorDetails) -> Path:
        """Return where one of pydantic's errors is."""
        return self._follow(error["loc"])[0]

    def meant(self, error: ErrorDetails) -> Path:
        """Return the path of the key that an unknown one seems to stand for; the unknown one's without."""
        path = self.path(error)
        near = self._near(path)
        return (*path[:-1], near) if near else path

    def _missing(self, path: Path) -> Mistake:
        said = self._said_of(path) or {}
        key = path[-1]
        message = f"`{key}` is missing: {said.get('description', 'it must be given')}"
        return _mistake(self._key_place(path[:-1]), path, "nothing", _shape(said), message)

    def _unknown_key(self, path: Path) -> Mistake:
        key, place = str(path[-1]), self._key_place(path)
        names = tuple(part for part in path if isinstance(part, str))
        known = known_keys(self._schema, path[:-1])
        allowed = "one of: " + ", ".join(known) if known else "no keys here"
        for pattern, words in self._form.reserved.items():
            if fnmatchcase(".".join(names), pattern):
                return _mistake(place, path, key, allowed, words)
        near = self._near(path)
        hint = f"; did you mean `{near}`?" if near else ""
        return _mistake(place, path, key, allowed, f"there is no key `{cut(key)}` here{hint}")

    def _near(self, path: Path) -> str:
        """Return the known key that is most like the last one of the path, "" when none is."""
        near = get_close_matches(str(path[-1])[:100], known_keys(self._schema, path[:-1]), n=1, cutoff=0.5)
        return near[0] if near else ""

    # -- where ------------------------------------------------------------------

    def _follow(self, loc: Iterable[str | int]) -> tuple[Path, Value | None, Value]:
        """Follow a path as far as the document goes; an index into a single item means the item."""
        path: list[str | int] = []
        value: Value | None = self._root
        parent = self._root
        for part in loc:
            if isinstance(part, int) and value is not None and isinstance(value.children, dict):
                continue
            path.append(part)
            if value is not None:
                parent, value = value, value.child(part)
        return tuple(path), value, parent

    def _key_place(self, path: Path) -> Place:
        """Return the place of the last key of the path, or of what is nearest to it."""
        place, value = self._root.place, self._root
        for part in path:
            child = value.child(part)
            place = value.keys.get(part, place) if isinstance(part, str) else (child or value).place
            if child is None:
                break
            value = child
        return place

    def _said_of(self, path: Path) -> dict[str, JSON] | None:
        return at_path(self._schema, path)


def _mistake(place: Place, path: Path, found: str, allowed: str, message: str) -> Mistake:
    return Mistake(
        place.file, place.line, place.column, dotted(path), cut(found) or "nothing", allowed, message
    )


def _message(error: ErrorDetails, value: Value | None, said: dict[str, JSON] | None) -> str:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(getattr(cause, "message", cause))
    kind = error["type"]
    if kind == "string_type" and value is not None and isinstance(value.plain, bool | int | float):
        return "this is no text to YAML; put it in quotes"
    if kind in _SHAPES:
        return f"this must be {_shape_wanted(kind, said)}"
    message = (
        error["msg"].replace("Input", "value").replace("input", "value").replace(" after validation", "")
    )
    return f"the {message[:1].lower()}{message[1:]}"


def _words_allowed(error: ErrorDetails, said: dict[str, JSON] | None) -> str:
    ctx = error.get("ctx", {})
    allowed = getattr(ctx.get("error"), "allowed", None)
    if allowed is not None:
        return str(allowed)
    if error["type"] in _SHAPES:
        return _shape_wanted(error["type"], said)
    if "expected" in ctx:
        return str(ctx["expected"])
    if "pattern" in ctx:
        return f"text of the form {ctx['pattern']}"
    return _shape(said or {})


def _shape_wanted(kind: str, said: dict[str, JSON] | None) -> str:
    """Return the shape that was missed; where one item may stand alone, it need not be a list."""
    return ONE_OR_MANY if kind == "list_type" and "anyOf" in (said or {}) else _SHAPES[kind]


def _shape(said: Mapping[str, JSON]) -> str:
    """Say in words what the schema allows."""
    if "const" in said:
        return str(said["const"])
    if "enum" in said:
        return ", ".join(map(str, said["enum"]))
    kind = said.get("type")
    words = {"object": _SHAPES["dict_type"], "array": _SHAPES["list_type"], "integer": "a whole number"}
    words |= {"boolean": "true or false", "string": "text"}
    text = words.get(kind if isinstance(kind, str) else "", "what the reference says")
    if "anyOf" in said and kind is None:
        text = ONE_OR_MANY
    bounds = [
        f"{name} {count(said[key], unit) if unit else said[key]}"
        for key, name, unit in (
            ("minimum", "at least", ""),
            ("maximum", "at most", ""),
            ("minItems", "at least", "item"),
            ("maxItems", "at most", "item"),
            ("maxLength", "at most", "character"),
        )
        if key in said
    ]
    examples = [f"such as {said['examples'][0]}"] if said.get("examples") else []
    return ", ".join([text, *bounds, *examples])
