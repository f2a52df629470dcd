"""Reads the YAML a person wrote into values that know their line and column.

It stands on PyYAML's events (libyaml where there is one), not on its
constructors: nothing is executed, nothing recurses, every mistake has a place,
and one mistake does not hide the next.  Scalars are read as YAML 1.2 reads
them; where 1.1 and 1.2 disagree (`yes`, `on`, `0123`, `1_000`) the value is
refused with the advice to say which is meant, because the person and Ansible
might have read it differently.  It knows nothing of plans or settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from rolloutd.errors import Mistake
from rolloutd.planfile.plain import Ambiguous, plain_scalar
from rolloutd.planfile.wording import ROOT, Path, cut, dotted, shown

JSON = Any

MAX_BYTES = 1024 * 1024
"""A file larger than this is refused unread: a plan is a page or two, ten pages are reviewed by nobody."""

MAX_DEPTH = 32
"""Levels of nesting: four times what any plan needs, far below what Python's recursion bears."""

MAX_VALUES = 20_000
"""Values after aliases are followed: a hundred times what plans hold, and a limit to alias bombs."""

MAX_MISTAKES = 500
"""Mistakes reported of one file: more than a person reads, less than garbage can make."""

_WELL_FORMED = (
    "YAML: two spaces for each level, `key: value`, `- item`; text with `: `, ` #` or `{{` in quotes"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_STRING_TAGS = frozenset({None, "!", "tag:yaml.org,2002:str"})
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something stands in a file; line and column count from 1."""

    file: str
    line: int
    column: int


@dataclass(slots=True)
class Value:
    """One value and its place; `keys` holds the places of a mapping's keys.

    `size` counts the value and all below it, `height` the levels below it.
    """

    plain: JSON
    place: Place
    children: dict[str, Value] | list[Value] | None = None
    keys: dict[str, Place] = field(default_factory=dict)
    size: int = 1
    height: int = 0

    def child(self, part: str | int) -> Value | None:
        """Return the value under a key or an index, if there is one."""
        children = self.children
        if isinstance(children, dict):
            return children.get(part) if isinstance(part, str) else None
        if isinstance(children, list) and isinstance(part, int) and 0 <= part < len(children):
            return children[part]
        return None


@dataclass(frozen=True, slots=True)
class Document:
    """A file as it was read: `root` is None when it could not be; all mistakes in order."""

    file: str
    root: Value | None
    mistakes: tuple[Mistake, ...]


def read_document(text: bytes, file: str, *, empty_is_mapping: bool = False) -> Document:
    """Read one YAML document; never raises for what the text holds.

    A file of nothing but comments is a mistake, or an empty mapping where that
    has a meaning.
    """
    composer = _Composer(file)
    try:
        composer.read(_decode(text, file))
    except _Stop as stop:
        composer.mistakes.append(stop.mistake)
        return Document(file, None, tuple(composer.mistakes))
    root = composer.root
    if root is None or (root.plain is None and empty_is_mapping):
        root = Value({}, Place(file, 1, 1), {})
        if not empty_is_mapping:
            mistake = Mistake(file, 1, 1, ROOT, "nothing", "one YAML document", "the file is empty")
            return Document(file, None, (mistake,))
    return Document(file, root, tuple(composer.mistakes))


class _Stop(Exception):
    """Nothing more can be read after this mistake."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(str(mistake))
        self.mistake = mistake


def _decode(text: bytes, file: str) -> str:
    """Return the text, or stop at what no YAML may hold."""
    if len(text) > MAX_BYTES:
        allowed = f"at most {MAX_BYTES // 1024} KiB"
        raise _Stop(
            Mistake(file, 1, 1, ROOT, f"{len(text)} bytes", allowed, "the file is too large, it was not read")
        )
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", "replace")
        line, column = _position(before)
        found = f"byte 0x{error.object[error.start]:02x}"
        raise _Stop(Mistake(file, line, column, ROOT, found, "UTF-8", "the file is not UTF-8 text")) from None
    control = _CONTROL.search(decoded)
    if control is not None:
        line, column = _position(decoded[: control.start()])
        found = f"U+{ord(control[0]):04X}"
        message = "the file holds a control character"
        raise _Stop(
            Mistake(file, line, column, ROOT, found, "printable text, tabs only inside text", message)
        )
    return decoded


def _position(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


@dataclass(slots=True)
class _Frame:
    """A collection that is still being read."""

    value: Value
    anchor: str | None
    key: str | None = None
    key_place: Place | None = None
    awaits_key: bool = True
    drops: bool = False


class _Composer:
    """Builds values from events, with a stack of its own instead of recursion."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.mistakes: list[Mistake] = []
        self.root: Value | None = None
        self._stack: list[_Frame] = []
        self._anchors: dict[str, Value] = {}
        self._count = 0
        self._documents = 0
        self._lines: list[str] = []

    def read(self, text: str) -> None:
        self._lines = text.splitlines()
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                self._event(event)
        except yaml.MarkedYAMLError as error:
            raise _Stop(self._malformed(error)) from None
        except yaml.YAMLError as error:
            raise _Stop(
                Mistake(self.file, 1, 1, ROOT, cut(str(error)), _WELL_FORMED, "this is not YAML")
            ) from None

    def _event(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._scalar(event)
            case yaml.MappingStartEvent():
                self._open(event, Value({}, self._place(event), {}))
            case yaml.SequenceStartEvent():
                self._open(event, Value([], self._place(event), []))
            case yaml.CollectionEndEvent():
                self._close()
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    place = self._place(event)
                    raise self._stop(place, "---", "one document", "the file holds more than one document")

    # -- places and paths ------------------------------------------------------

    def _place(self, event: Any) -> Place:
        mark = event.start_mark
        return Place(self.file, mark.line + 1, mark.column + 1)

    def _path(self) -> Path:
        """Return the path of the value that is read next."""
        parts: list[str | int] = []
        for frame in self._stack:
            if isinstance(frame.value.children, list):
                parts.append(len(frame.value.children))
            elif frame.key is not None and not frame.awaits_key:
                parts.append(frame.key)
        return tuple(parts)

    def _mistake(
        self, place: Place, found: str, allowed: str, message: str, path: Path | None = None
    ) -> None:
        if len(self.mistakes) < MAX_MISTAKES:
            text = dotted(self._path() if path is None else path)
            self.mistakes.append(
                Mistake(place.file, place.line, place.column, text, cut(found), allowed, message)
            )

    def _stop(self, place: Place, found: str, allowed: str, message: str) -> _Stop:
        path = dotted(self._path())
        return _Stop(Mistake(place.file, place.line, place.column, path, cut(found), allowed, message))

    def _malformed(self, error: yaml.MarkedYAMLError) -> Mistake:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        line = min(line, max(len(self._lines), 1))
        source = self._lines[line - 1] if self._lines else ""
        message = f"this is not YAML: {error.problem or error.context or 'it cannot be read'}"
        if source[: len(source) - len(source.lstrip())].count("\t") or source[column - 1 : column] == "\t":
            message = "a tab stands where YAML wants spaces"
        return Mistake(
            self.file, line, column, dotted(self._path()), cut(source) or "the end", _WELL_FORMED, message
        )

    # -- values ----------------------------------------------------------------

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        place, text = self._place(event), event.value
        if event.tag not in _STRING_TAGS:
            self._refuse_tag(place, event.tag)
        plain: JSON = text
        if event.implicit[0]:  # unquoted, and no tag says what it is
            try:
                plain = plain_scalar(text)
            except Ambiguous as ambiguous:
                self._mistake(place, text, ambiguous.allowed, str(ambiguous))
        if isinstance(plain, str) and _CONTROL.search(plain):
            self._mistake(place, text, "printable text", "the text holds a control character")
        self._add(Value(plain, place), event.anchor)

    def _open(self, event: Any, value: Value) -> None:
        if event.tag is not None:
            self._refuse_tag(value.place, event.tag)
        if len(self._stack) >= MAX_DEPTH:
            raise self._stop(
                value.place, "a deeper level", f"at most {MAX_DEPTH} levels", "the file is nested too deeply"
            )
        self._stack.append(_Frame(value, event.anchor))

    def _close(self) -> None:
        frame = self._stack.pop()
        self._add(frame.value, frame.anchor)

    def _alias(self, event: yaml.AliasEvent) -> None:
        place, name = self._place(event), str(event.anchor)
        if any(frame.anchor == name for frame in self._stack):
            self._mistake(
                place,
                f"*{name}",
                "a value that does not hold itself",
                "the alias stands inside its own anchor",
            )
            self._add(Value(None, place), None)
            return
        original = self._anchors.get(name)
        if original is None:
            self._mistake(place, f"*{name}", "the name of an anchor above (&name)", "there is no such anchor")
            original = Value(None, place)
        if len(self._stack) + original.height > MAX_DEPTH:
            raise self._stop(
                place, f"*{name}", f"at most {MAX_DEPTH} levels", "the file is nested too deeply"
            )
        copy = Value(original.plain, place, original.children, original.keys, original.size, original.height)
        self._add(copy, None, counts=original.size)

    def _refuse_tag(self, place: Place, tag: str | None) -> None:
        self._mistake(
            place, str(tag), "no tags: text, numbers, true, false, lists, mappings", "tags are not read here"
        )

    def _add(self, value: Value, anchor: str | None, counts: int = 1) -> None:
        self._count += counts
        if self._count > MAX_VALUES:
            allowed = f"at most {MAX_VALUES} values, aliases followed"
            raise self._stop(
                value.place, f"more than {MAX_VALUES} values", allowed, "the file holds too much"
            )
        if anchor is not None:
            self._anchors[anchor] = value
        if not self._stack:
            self.root = value
            return
        frame = self._stack[-1]
        if isinstance(frame.value.children, list):
            frame.value.children.append(value)
            frame.value.plain.append(value.plain)
            _grow(frame.value, value)
        elif frame.awaits_key:
            self._take_key(frame, value)
        else:
            self._take_value(frame, value)

    def _take_key(self, frame: _Frame, key: Value) -> None:
        name = key.plain
        path = self._path()
        frame.awaits_key, frame.key, frame.key_place = False, str(name), key.place
        frame.drops = True
        if not isinstance(name, str):
            frame.key = cut(shown(name))
            message = "a key must be text; put it in quotes, and also a value that begins with {{"
            self._mistake(key.place, shown(name), "text", message, path)
        elif name == "<<":
            message = "merge keys are not part of YAML 1.2; write the keys out"
            self._mistake(key.place, "<<", "the keys themselves", message, path)
        elif name in frame.value.keys:
            first = frame.value.keys[name].line
            self._mistake(
                key.place, name, "each key once", f"the key stands already in line {first}", (*path, name)
            )
        else:
            frame.drops = False

    def _take_value(self, frame: _Frame, value: Value) -> None:
        assert frame.key is not None
        assert frame.key_place is not None
        if not frame.drops:
            assert isinstance(frame.value.children, dict)
            frame.value.children[frame.key] = value
            frame.value.keys[frame.key] = frame.key_place
            frame.value.plain[frame.key] = value.plain
            _grow(frame.value, value)
        frame.awaits_key, frame.key = True, None


def _grow(parent: Value, child: Value) -> None:
    parent.size += child.size
    parent.height = max(parent.height, child.height + 1)


def walk(value: Value, path: Path = ()) -> Iterator[tuple[Path, Value]]:
    """Yield a value and all below it with their paths, parents first."""
    yield path, value
    match value.children:
        case dict() as mapping:
            for key, child in mapping.items():
                yield from walk(child, (*path, key))
        case list() as items:
            for index, child in enumerate(items):
                yield from walk(child, (*path, index))
