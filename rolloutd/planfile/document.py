"""YAML reader whose values carry their line and column.

It uses PyYAML's events (libyaml if available), not its constructors: nothing is executed or recurses, every
mistake has a place, and one mistake does not hide the next.  Scalars follow YAML 1.2; where 1.1 disagrees
(`yes`, `on`, `0123`, `1_000`) the value is refused, because the author and Ansible might have read it
differently.  It does not know plans or settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile.yaml_scalars import AmbiguousScalar, parse_plain_scalar

JSON = Any
Path = tuple[str | int, ...]

MAX_BYTES = 1024 * 1024
"""Larger files are refused unread: a plan is a page or two, and reviewers do not read ten."""

MAX_DEPTH = 32
"""Levels of nesting: four times what a plan needs, far below Python's recursion limit."""

MAX_VALUES = 20_000
"""Values after aliases are followed: a hundred times what plans hold, and a limit to alias bombs."""

MAX_DIAGNOSTICS = 500
"""Mistakes reported per file: more than a person reads, fewer than garbage can cause."""

MAX_FOUND_CHARS = 60
"""Characters shown of a value: enough to find it, too few to print a key or a certificate."""

ROOT_PATH = "(file)"
"""The path of a mistake that concerns the whole file."""

_WELL_FORMED = (
    "YAML: two spaces for each level, `key: value`, `- item`; text with `: `, ` #` or `{{` in quotes"
)
_NO_COLON = "could not find expected ':'"
_PROBLEMS = {
    _NO_COLON: "the key lacks `: `, a colon and a blank",
    "did not find expected key": "the line's indentation fits no line above it, or its `- ` is missing",
    "did not find expected '-' indicator": "the line stands in a list and lacks its `- `",
    "did not find expected ',' or '}'": "the `{{`{opened} is not closed, or a `,` is missing",
    "did not find expected ',' or ']'": "the `[`{opened} is not closed, or a `,` is missing",
    "found unexpected end of stream": "the quote{opened} is not closed",
    "mapping values are not allowed in this context": "`: ` stands in a text without quotes, or the line is"
    " indented too far",
    "found character that cannot start any token": "a text that begins with this character needs quotes",
}
"""What libyaml's messages mean to the author of a plan."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_STRING_TAGS = frozenset({None, "!", "tag:yaml.org,2002:str"})
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, order=True)
class SourceLocation:
    """A position in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def diagnostic(self, path: Path, found: str, allowed: str, message: str) -> Diagnostic:
        """Return a mistake at this position; `found` is cut short, because it may be a secret."""
        text = truncate(found) or "nothing"
        return Diagnostic(self.file, self.line, self.column, format_path(path), text, allowed, message)


@dataclass(slots=True)
class Value:
    """One value and its location; `keys` holds the locations of a mapping's keys.

    `size` counts the value and all below it, `height` the levels below it.
    """

    data: JSON
    location: SourceLocation
    children: dict[str, Value] | list[Value] | None = None
    keys: dict[str, SourceLocation] = field(default_factory=dict)
    size: int = 1
    height: int = 0

    def child(self, part: str | int) -> Value | None:
        """Return the value under a key or an index, None if there is none."""
        children = self.children
        if isinstance(children, dict):
            return children.get(part) if isinstance(part, str) else None
        if isinstance(children, list) and isinstance(part, int) and 0 <= part < len(children):
            return children[part]
        return None


def locate(root: Value, loc: Iterable[str | int]) -> tuple[Path, Value | None, Value]:
    """Follow a path as far as the document goes; return it, the value and the section that it is in.

    An index into a single item means the item, a key of a list the list: it stands for the section.  What
    follows a text or a number is not of the document: pydantic names a type there that the value might have.
    """
    path: list[str | int] = []
    value: Value | None = root
    parent = root
    for part in loc:
        if value is not None and value.children is None:
            break
        stands_for = dict if isinstance(part, int) else list
        if value is not None and isinstance(value.children, stands_for):
            continue
        path.append(part)
        if value is not None:
            parent, value = value, value.child(part)
    return tuple(path), value, parent


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: `root` is None if it could not be parsed; all mistakes in order."""

    file: str
    root: Value | None
    diagnostics: tuple[Diagnostic, ...]


def read_document(text: bytes, file: str, *, empty_is_mapping: bool = False) -> Document:
    """Read one YAML document; never raises for its content.

    A file that holds only comments is a mistake, or an empty mapping with `empty_is_mapping`.
    """
    composer = _Composer(file)
    try:
        composer.read(_decode(text, file))
    except InvalidFile as fatal:
        return Document(file, None, (*composer.diagnostics, *fatal.diagnostics))
    root = composer.root
    if root is None or (root.data is None and empty_is_mapping):
        root = Value({}, SourceLocation(file, 1, 1), {})
        if not empty_is_mapping:
            mistake = root.location.diagnostic((), "nothing", "one YAML document", "the file is empty")
            return Document(file, None, (mistake,))
    return Document(file, root, tuple(composer.diagnostics))


def describe_value(value: JSON) -> str:
    """Return a value as a mistake shows it: one line, cut."""
    match value:
        case None:
            text = "nothing"
        case bool():
            text = "true" if value else "false"
        case dict():
            text = "a mapping with " + (", ".join(map(str, list(value)[:8])) or "no keys")
        case list():
            text = f"a list of {len(value)}"
        case _:
            text = str(value) or "empty text"
    return truncate(text)


def truncate(text: str) -> str:
    """Return text on one line, without control characters, of at most MAX_FOUND_CHARS characters."""
    line = "".join(
        character if character.isprintable() else " " for character in text[: MAX_FOUND_CHARS * 2]
    ).strip()
    return (
        line
        if len(line) <= MAX_FOUND_CHARS and len(text) <= MAX_FOUND_CHARS * 2
        else line[: MAX_FOUND_CHARS - 1] + "…"
    )


def format_path(path: Path) -> str:
    """Return a path as people write it: `spec.verify[0].ssh`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")[: MAX_FOUND_CHARS * 4] or ROOT_PATH


def _decode(text: bytes, file: str) -> str:
    """Return the text of a file; raises InvalidFile."""
    start = SourceLocation(file, 1, 1)
    if len(text) > MAX_BYTES:
        allowed = f"at most {MAX_BYTES // 1024} KiB"
        raise _fatal(start, f"{len(text)} bytes", allowed, "the file is too large, it was not read")
    try:
        # Some editors write a byte order mark.
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", "replace")
        found = f"byte 0x{error.object[error.start]:02x}"
        raise _fatal(_end_of(file, before), found, "UTF-8", "the file is not UTF-8 text") from None
    control = _CONTROL_CHARACTERS.search(decoded)
    if control is not None:
        place, found = _end_of(file, decoded[: control.start()]), f"U+{ord(control[0]):04X}"
        allowed, message = "printable text, tabs only inside text", "the file holds a control character"
        raise _fatal(place, found, allowed, message)
    return decoded


def _end_of(file: str, before: str) -> SourceLocation:
    return SourceLocation(file, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _fatal(place: SourceLocation, found: str, allowed: str, message: str, path: Path = ()) -> InvalidFile:
    """Return a mistake after which nothing more can be read."""
    return InvalidFile((place.diagnostic(path, found, allowed, message),))


@dataclass(slots=True)
class _Frame:
    value: Value
    anchor: str | None
    key: str | None = None
    key_location: SourceLocation | None = None
    awaits_key: bool = True
    is_dropped: bool = False


class _Composer:
    """Builds values from events, with a stack of its own instead of recursion."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []
        self.root: Value | None = None
        self._stack: list[_Frame] = []
        self._anchors: dict[str, Value] = {}
        self._count = 0
        self._documents = 0
        self._lines: list[str] = []

    def read(self, text: str) -> None:
        self._lines = text.splitlines()
        try:
            for event in yaml.parse(text, Loader=LOADER):
                self._handle_event(event)
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from None
        except yaml.YAMLError as error:
            start = SourceLocation(self.file, 1, 1)
            raise _fatal(start, str(error), _WELL_FORMED, "this is not YAML") from None

    def _handle_event(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._scalar(event)
            case yaml.MappingStartEvent():
                self._open(event, Value({}, self._location(event), {}))
            case yaml.SequenceStartEvent():
                self._open(event, Value([], self._location(event), []))
            case yaml.CollectionEndEvent():
                frame = self._stack.pop()
                self._add(frame.value, frame.anchor)
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    place = self._location(event)
                    raise self._fatal(place, "---", "one document", "the file holds more than one document")

    # -- places and paths ------------------------------------------------------

    def _location(self, event: Any) -> SourceLocation:
        mark = event.start_mark
        return SourceLocation(self.file, mark.line + 1, mark.column + 1)

    def _path(self) -> Path:
        parts: list[str | int] = []
        for frame in self._stack:
            if isinstance(frame.value.children, list):
                parts.append(len(frame.value.children))
            elif frame.key is not None and not frame.awaits_key:
                parts.append(frame.key)
        return tuple(parts)

    def _add_diagnostic(
        self, place: SourceLocation, found: str, allowed: str, message: str, path: Path | None = None
    ) -> None:
        if len(self.diagnostics) < MAX_DIAGNOSTICS:
            path = self._path() if path is None else path
            self.diagnostics.append(place.diagnostic(path, found, allowed, message))

    def _fatal(self, place: SourceLocation, found: str, allowed: str, message: str) -> InvalidFile:
        return _fatal(place, found, allowed, message, self._path())

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> InvalidFile:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "it cannot be read"
        opened = "" if error.context_mark is None else f" of line {error.context_mark.line + 1}"
        if problem == _NO_COLON:
            mark = error.context_mark or mark  # libyaml notices it only in the next line
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        # libyaml may place a mistake behind the last line.
        line = min(line, max(len(self._lines), 1))
        source = self._lines[line - 1] if self._lines else ""
        meaning = _PROBLEMS[problem].format(opened=opened) if problem in _PROBLEMS else problem
        message = f"this is not YAML: {meaning}"
        if source[: len(source) - len(source.lstrip())].count("\t") or source[column - 1 : column] == "\t":
            message = "a tab where YAML requires spaces"
        place = SourceLocation(self.file, line, column)
        return self._fatal(place, truncate(source) or "the end", _WELL_FORMED, message)

    # -- values ----------------------------------------------------------------

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        place, text = self._location(event), event.value
        if event.tag not in _STRING_TAGS:
            self._reject_tag(place, event.tag)
        plain: JSON = text
        if event.implicit[0]:  # unquoted, and no tag says what it is
            try:
                plain = parse_plain_scalar(text)
            except AmbiguousScalar as ambiguous:
                self._add_diagnostic(place, text, ambiguous.allowed, str(ambiguous))
        if isinstance(plain, str) and _CONTROL_CHARACTERS.search(plain):
            self._add_diagnostic(place, text, "printable text", "the text holds a control character")
        self._add(Value(plain, place), event.anchor)

    def _open(self, event: Any, value: Value) -> None:
        if event.tag is not None:
            self._reject_tag(value.location, event.tag)
        if len(self._stack) >= MAX_DEPTH:
            raise self._fatal(
                value.location,
                "a deeper level",
                f"at most {MAX_DEPTH} levels",
                "the file is nested too deeply",
            )
        self._stack.append(_Frame(value, event.anchor))

    def _alias(self, event: yaml.AliasEvent) -> None:
        place, name = self._location(event), str(event.anchor)
        if any(frame.anchor == name for frame in self._stack):
            self._add_diagnostic(
                place,
                f"*{name}",
                "a value that does not hold itself",
                "the alias is inside its own anchor",
            )
            self._add(Value(None, place), None)
            return
        original = self._anchors.get(name)
        if original is None:
            self._add_diagnostic(
                place, f"*{name}", "the name of an anchor above (&name)", "there is no such anchor"
            )
            original = Value(None, place)
        if len(self._stack) + original.height > MAX_DEPTH:
            raise self._fatal(
                place, f"*{name}", f"at most {MAX_DEPTH} levels", "the file is nested too deeply"
            )
        copy = Value(original.data, place, original.children, original.keys, original.size, original.height)
        # Counted at each use, so that aliases of aliases end at the limit.
        self._add(copy, None, counts=original.size)

    def _reject_tag(self, place: SourceLocation, tag: str | None) -> None:
        self._add_diagnostic(
            place, str(tag), "no tags: text, numbers, true, false, lists, mappings", "tags are not read here"
        )

    def _add(self, value: Value, anchor: str | None, counts: int = 1) -> None:
        self._count += counts
        if self._count > MAX_VALUES:
            allowed = f"at most {MAX_VALUES} values, aliases followed"
            raise self._fatal(
                value.location, f"more than {MAX_VALUES} values", allowed, "the file holds too much"
            )
        if anchor is not None:
            self._anchors[anchor] = value
        if not self._stack:
            self.root = value
            return
        frame = self._stack[-1]
        if isinstance(frame.value.children, list):
            frame.value.children.append(value)
            frame.value.data.append(value.data)
            _update_size(frame.value, value)
        elif frame.awaits_key:
            self._add_key(frame, value)
        else:
            self._add_value(frame, value)

    def _add_key(self, frame: _Frame, key: Value) -> None:
        name = key.data
        path = self._path()
        frame.awaits_key, frame.key, frame.key_location = False, str(name), key.location
        frame.is_dropped = True
        if not isinstance(name, str):
            frame.key = truncate(describe_value(name))
            message = "a key must be text; put it in quotes, and also a value that begins with {{"
            self._add_diagnostic(key.location, describe_value(name), "text", message, path)
        elif name == "<<":
            message = "merge keys are not part of YAML 1.2; write the keys out"
            self._add_diagnostic(key.location, "<<", "the keys themselves", message, path)
        elif name in frame.value.keys:
            first = frame.value.keys[name].line
            self._add_diagnostic(
                key.location, name, "each key once", f"the key is already in line {first}", (*path, name)
            )
        else:
            frame.is_dropped = False

    def _add_value(self, frame: _Frame, value: Value) -> None:
        assert frame.key is not None
        assert frame.key_location is not None
        if not frame.is_dropped:
            assert isinstance(frame.value.children, dict)
            frame.value.children[frame.key] = value
            frame.value.keys[frame.key] = frame.key_location
            frame.value.data[frame.key] = value.data
            _update_size(frame.value, value)
        frame.awaits_key, frame.key = True, None


def _update_size(parent: Value, child: Value) -> None:
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
