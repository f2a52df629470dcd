"""Checks of the playbooks that a plan names, and digests of playbooks with what they import.

Variables can change the rest, so only these are mistakes: a missing file, invalid YAML, not a list of plays.
A digest counts every file that a text in the playbook names, every role, and what Ansible reads unasked;
where a path or a command on localhost is a template, a file cannot be read, or it is too much work, it
counts the whole source.  Files below the given directory are read, nothing is run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from rolloutd.errors import Diagnostic
from rolloutd.planfile import PlanFile
from rolloutd.planfile.document import LOADER

# Every scalar stays a text: a constructor fails on some (`!!bool maybe`), and merge keys multiply in it.
_TEXT_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

MAX_PLAYBOOK_BYTES = 1024 * 1024
"""A larger playbook is left to Ansible, so that its parsing delays no user."""

_VAULT_HEADER = b"$ANSIBLE_VAULT;"
_COLLECTIONS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)


def playbook_diagnostics(plan: PlanFile, tree: Path) -> tuple[Diagnostic, ...]:
    """Return a mistake for each playbook of the plan that is missing or unreadable; reads files."""
    if not _is_directory(tree):
        missing = plan.diagnostic(
            ("spec", "source", "path"),
            found=str(tree),
            allowed="the directory of the playbooks, relative to the plan's file",
            message=f"{tree} is not a directory",
        )
        return (missing,)
    cached_error = cache(_playbook_error)
    diagnostics = []
    for path, name in plan.named_playbooks():
        playbook = tree / name
        if not os.path.isfile(playbook):  # noqa: PTH113  # Path.is_file raises for a name that is too long
            found, message = name, "there is no such playbook in the source"
            allowed = "a playbook in the source, by its path within it"
        elif (fault := cached_error(playbook)) is not None:
            found, message = f"{name}:{fault}", "the playbook cannot be read"
            allowed = "a list of plays in YAML (ansible-playbook --syntax-check)"
        else:
            continue
        diagnostics.append(plan.diagnostic(path, found=found, allowed=allowed, message=message))
    return tuple(sorted(diagnostics, key=lambda each: (each.line, each.column)))


def _is_directory(tree: Path) -> bool:
    try:
        return tree.is_dir()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def _playbook_error(path: Path) -> str | None:
    """Return the first mistake as `LINE:COLUMN: TEXT`, None if there is none."""
    try:
        text = _read_start(path)
    except OSError as error:
        return f"1:1: {error.strerror}"
    if len(text) > MAX_PLAYBOOK_BYTES or text.startswith(_VAULT_HEADER):
        return None
    try:
        return _structure_error(yaml.parse(text, Loader=LOADER))
    except yaml.MarkedYAMLError as error:
        return _error_at(error.problem_mark or error.context_mark, error.problem or "no YAML")
    except yaml.YAMLError as error:
        return f"1:1: {str(error).splitlines()[0]}"


def _read_start(path: Path) -> bytes:
    """Return a file, or one byte more than a playbook may have."""
    with path.open("rb") as file:
        return file.read(MAX_PLAYBOOK_BYTES + 1)


def _structure_error(events: Iterable[yaml.Event]) -> str | None:
    """Return the first mistake: it is not a list of plays, or braces lack quotes. None if there is none."""
    # One item per open collection: whether a mapping's key comes next; None for a list.
    opened: list[bool | None] = []
    empty = True
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        collection = isinstance(event, _COLLECTIONS)
        if not opened:
            if not empty:
                return _error_at(event.start_mark, "a second document begins, and Ansible reads only one")
            if not isinstance(event, yaml.SequenceStartEvent):
                return _error_at(event.start_mark, "it is not a list of plays")
        elif opened[-1] is not None:
            if opened[-1] and collection:
                return _error_at(event.start_mark, 'braces stand as a key: quote it, "{{ name }}"')
            opened[-1] = not opened[-1]
        if collection:
            opened.append(True if isinstance(event, yaml.MappingStartEvent) else None)
        empty = False
    return "1:1: it is empty" if empty else None


def _error_at(mark: Any, text: str) -> str:
    return f"1:1: {text}" if mark is None else f"{mark.line + 1}:{mark.column + 1}: {text}"


# -- digests ------------------------------------------------------------------

MAX_FILES = 10_000
"""Files of one digest; a source is at most 64 MiB."""

MAX_NESTING = 100
"""Levels of a followed file: libyaml's loader recurses in C, and some 100,000 levels end the process."""

MAX_WORK = 200_000
"""Work of one digest, about two seconds; values, names and directory entries count by their time."""

_LOOKUP_WORK = 5
"""Work of a name that is searched for, of a place where it is found, and of a directory entry."""

_YAML = frozenset({".yml", ".yaml", ".json"})
_YAML_IMPORTS = frozenset(
    {
        *("import_playbook", "import_tasks", "include_tasks", "include", "import_role", "include_role"),
        *("include_vars", "vars_files", "roles"),
    }
)
"""Keys whose values name files that Ansible reads as YAML, whatever their names end with, or roles."""

_IMPORTS = _YAML_IMPORTS | {"src", "script"}
"""Keys whose values name files or roles; a template in one of them can name any file."""

_COMMANDS = frozenset({"command", "shell", "raw", "cmd", "argv", "_raw_params", "chdir", "executable"})
"""Keys whose values name programs; on localhost, a template in one of them can name any file."""

_ACTIONS = frozenset({"action", "local_action"})
"""Keys whose values begin with the name of a module."""

_LOCALHOST = re.compile(r"(?<![\w.!-])(?:localhost|127\.0\.0\.1|(?<!:)::1)(?![\w.-])|\{[{%]")
"""A pattern of hosts that names localhost, or may do so."""

_CONNECTION = "ansible_connection"
"""The variable that says how a host is reached; one that says `local` makes tasks run on localhost."""

_SETS_LOCAL = re.compile(r"\bansible_connection\s*=\s*(?:['\"]?(?:\w+\.)*local\b|\S{0,512}\{[{%]|\S{513})")
"""Arguments, such as those of `set_fact` and `add_host`, that set this variable to `local`, or may do so, as
a long one may: a text that repeats the name would be searched to its end for each of them."""

_CONFIG_LOCAL = re.compile(rb"(?im)^[ \t]*transport[ \t]*[=:](?:.*\blocal\b|.*\{[{%])")
"""A setting of ansible.cfg that makes `local` the connection of all hosts, or may do so."""

_VARIABLE_FILES = ("group_vars", "host_vars")
"""Directories whose files of variables may have no suffix."""

_ANY_FILE = re.compile(r"\b(?:(?:lookup|query|q)\s*\(|playbook_dir\b|role_path\b|inventory_dir\b)")
"""A lookup may read any file, and a path may begin with these variables."""

_TEMPLATE_IMPORT = re.compile(rb"\{%[-+]?\s*(?:include|import|extends|from)\b|\b(?:lookup|query|q)\s*\(")
"""A template that may read any other file."""

_CONFIG_PATH = re.compile(
    rb"(?im)^[ \t]*(?!(?:control|log|retry_files_save)_path)"
    rb"[a-z_]*(?:_plugins|_paths?|library|module_utils|_file|executable|script)[ \t]*[=:]|\{\{|\{%"
)
"""A setting of ansible.cfg that may name files of the source; one with a template may have any value."""

_CONFIG_UNUSED = re.compile(rb"(?im)^[ \t]*[#;].*|\s;.*|^inventory[ \t]*[=:].*")
"""Comments of ansible.cfg, and its inventory: each run names another one."""

_CONFIG_WORDS = re.compile(r"[^\s=:,;@'\"]+")
"""Words of ansible.cfg that may name a program, such as `dev@./vault.sh` and `-o ProxyCommand=./proxy.sh`."""

_WORDS = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|[^\s='\"]+")

MAX_WORDS = 50
"""Words of a text that may name a file, such as `sh files/x.sh` and `src=x dest=/y`."""

_LOOPS = ("with_file", "with_first_found", "with_lines")
"""Beginnings of the names of loops over files."""

_ALWAYS = (
    *("ansible.cfg", "requirements.yml", "collections", "group_vars", "host_vars", "library", "module_utils"),
    *("doc_fragments", "action_plugins", "become_plugins", "cache_plugins", "callback_plugins"),
    *("cliconf_plugins", "connection_plugins", "filter_plugins", "httpapi_plugins", "inventory_plugins"),
    *("lookup_plugins", "netconf_plugins", "shell_plugins", "strategy_plugins", "terminal_plugins"),
    *("test_plugins", "vars_plugins"),
)
"""What Ansible reads without being asked, next to the playbook and at the top of the source."""

_PLACES = ("", "tasks", "handlers", "files", "templates", "vars", "defaults", "meta")
"""Directories, next to a playbook or in a role, in which Ansible searches for a name."""


def read_content_digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def playbook_digest(
    tree: Path,
    playbook: str,
    content_digest: Callable[[Path], bytes] = read_content_digest,
    *,
    is_local: bool = False,
) -> str:
    """Return the digest of a playbook inside a source, with all that it imports.

    `content_digest`: a cache of read_content_digest() for the other playbooks of the source.  `is_local`: it
    runs on localhost, as that of a build does.
    """
    try:
        files = sorted(_find_files(tree, playbook, is_local=is_local))
    except (OSError, ValueError, yaml.YAMLError, _AnyFile):
        files = sorted(_files_below(tree))
    # Once per file, because thousands of links may lead to one large file.
    digest_once = cache(content_digest)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(tree)}\0".encode("utf-8", "surrogateescape"))
        digest.update(digest_once(path.resolve()))
    return digest.hexdigest()


def playbook_files(tree: Path, playbooks: Mapping[str, bool]) -> set[str]:
    """Return the paths of playbooks inside a source and of all that they import; of all files, if unknown.

    `playbooks`: whether each runs on localhost, as one of a build does.
    """
    found: set[Path] = set()
    for playbook, is_local in playbooks.items():
        try:
            if "{{" in playbook:  # each node may have another one
                raise _AnyFile
            found |= _find_files(tree, playbook, is_local=is_local)
        except (OSError, ValueError, yaml.YAMLError, _AnyFile):
            found |= set(_files_below(tree))
    return {path.relative_to(tree).as_posix() for path in found}


def _find_files(tree: Path, playbook: str, *, is_local: bool) -> set[Path]:
    try:
        return _Closure(tree, is_local=is_local).of_playbook(tree / playbook)
    except _MayBeLocal:
        return _Closure(tree, is_local=True).of_playbook(tree / playbook)


class _AnyFile(Exception):
    """The playbook may import any file of the source."""


class _MayBeLocal(Exception):
    """A variable that outlasts its task may let any task run on localhost."""


class _Closure:
    def __init__(self, tree: Path, *, is_local: bool) -> None:
        self._tree = tree.resolve()
        self._root = tree
        self._found: set[Path] = set()
        # Whether what is followed now runs on localhost, where files of the source are.
        self._is_local = self._is_all_local = is_local
        self._unread: list[tuple[Path, bool]] = []
        self._read: set[tuple[Path, bool]] = set()
        self._playbooks: set[Path] = set()
        self._templates: set[Path] = set()
        self._followed: set[tuple[Path, str, str, bool]] = set()
        self._places = cache(self._existing_places)
        self._work = 0

    def of_playbook(self, playbook: Path) -> set[Path]:
        for place in {playbook.parent, self._root}:
            self._add_unasked(place)
            config = place / "ansible.cfg"
            if config.is_file():
                self._follow_config(config)
        self._add(playbook, "import_playbook")
        # A list, not recursion: files that import each other in a chain would exceed Python's limit.
        while self._unread:
            path, is_local = self._unread.pop()
            document = _load(path, self._spend)
            texts = _texts(document, self._spend, self._require_all_local, is_local=is_local)
            for key, text, runs_here in texts:
                if _SETS_LOCAL.search(text):
                    self._require_all_local()
                self._is_local = runs_here
                self._follow(path.parent, key, text)
        return self._found

    def _add_unasked(self, place: Path) -> None:
        """Add what Ansible reads without being asked where a playbook is."""
        for name in _ALWAYS:
            self._add_all(place / name, name)

    def _follow_config(self, config: Path) -> None:
        text = _CONFIG_UNUSED.sub(b"", config.read_bytes())
        if _CONFIG_PATH.search(text):
            raise _AnyFile
        if _CONFIG_LOCAL.search(text):
            self._require_all_local()
        for word in _CONFIG_WORDS.finditer(text.decode(errors="surrogateescape")):
            # A user or a plugin may have the name of a directory.
            is_path = "/" in word[0] or "." in word[0]
            self._follow_name(config.parent, "", word[0], os.path.exists if is_path else os.path.isfile)

    def _require_all_local(self) -> None:
        if not self._is_all_local:
            raise _MayBeLocal

    def _spend(self, work: int) -> None:
        """Count work, which is the same in any order of the files; raises _AnyFile above the limit."""
        self._work += work
        if self._work > MAX_WORK:
            raise _AnyFile

    def _add(self, path: Path, key: str = "") -> None:
        """Add a file that a value of a key names, and read it if it may name others."""
        if not self._is_inside(path):
            return
        self._found.add(path)
        if len(self._found) > MAX_FILES:
            raise _AnyFile
        if key == "import_playbook" and path not in self._playbooks:
            self._playbooks.add(path)
            self._add_unasked(path.parent)
        is_yaml = key in _YAML_IMPORTS or path.suffix in _YAML or (key in _VARIABLE_FILES and not path.suffix)
        if is_yaml and (path, self._is_local) not in self._read:
            self._read.add((path, self._is_local))
            self._unread.append((path, self._is_local))
        is_template = key == "src" or path.suffix == ".j2" or path.parent.name == "templates"
        if is_template and path not in self._templates:
            self._templates.add(path)
            self._require_no_import(path)

    def _require_no_import(self, template: Path) -> None:
        text = _read_start(template)
        self._spend(len(text) // 256)
        # A larger one is no template but an archive.
        if len(text) <= MAX_PLAYBOOK_BYTES and _TEMPLATE_IMPORT.search(text):
            raise _AnyFile

    def _follow(self, directory: Path, key: str, text: str) -> None:
        if (directory, key, text, self._is_local) in self._followed:
            return
        self._followed.add((directory, key, text, self._is_local))
        names_file = key in _IMPORTS or (self._is_local and _is_command(key, text))
        if (
            (names_file and ("{{" in text or "{%" in text))
            or _ANY_FILE.search(text)
            or _has_templated_src(text)
        ):
            raise _AnyFile
        whole = text.strip()
        self._follow_name(directory, key, whole)
        for number, word in enumerate(islice(_WORDS.finditer(whole), MAX_WORDS)):
            name = word[0].strip("'\"")
            if name != whole and (number == 0 or "." in name or "/" in name):  # few further words name files
                self._follow_name(directory, key, name)

    def _follow_name(
        self, directory: Path, key: str, name: str, is_there: Callable[[str], bool] = os.path.exists
    ) -> None:
        if not name.strip("./") or len(name) > 512 or "\0" in name or "\n" in name:
            return
        work = _LOOKUP_WORK + len(name) // 8  # the kernel walks each part of a long name
        self._spend(work)
        for place in self._places(directory):
            # Most texts name no file, and a Path costs more than this call.
            if is_there(os.path.join(place, name)):  # noqa: PTH118
                self._spend(work)
                self._add_all(place / name, key)

    def _existing_places(self, directory: Path) -> list[Path]:
        """Return the directories in which Ansible searches for a name that a file of this directory has."""
        bases = (directory, directory.parent, self._root)
        places = {base / place for base in bases for place in (*_PLACES, "roles")}
        return [place for place in places if os.path.isdir(place)]  # noqa: PTH112  # a link to itself is none

    def _add_all(self, path: Path, key: str = "") -> None:
        if not self._is_inside(path) or path.resolve() == self._tree:
            return
        if path.is_dir():
            for file in _files_below(path, self._spend):
                self._add(file, key if key in _VARIABLE_FILES else "")
        elif path.is_file():
            self._add(path, key)

    def _is_inside(self, path: Path) -> bool:
        # A name may have `..`; no link of a stored tree leads out of it.
        # Path.resolve fails on a link that leads to itself; os.path.exists does not.
        return os.path.exists(path) and path.resolve().is_relative_to(self._tree)  # noqa: PTH110


def _has_templated_src(text: str) -> bool:
    """Return whether a module's `src=` has a template; in linear time, which a pattern does not have."""
    return "src=" in text and any("{{" in word.partition("src=")[2] for word in text.split())


def _load(path: Path, spend: Callable[[int], None]) -> Any:
    """Return a YAML document of texts; raises _AnyFile for one that cannot be followed."""
    text = _read_start(path)
    spend(len(text) // 256)
    if len(text) > MAX_PLAYBOOK_BYTES:
        raise _AnyFile
    depth = 0
    for event in yaml.parse(text, Loader=_TEXT_LOADER):  # events do not recurse
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        # A tag such as `!vault` hides what the value is.
        if depth > MAX_NESTING or getattr(event, "tag", None) is not None:
            raise _AnyFile
        spend(1)
    document = yaml.load(text, Loader=_TEXT_LOADER)  # noqa: S506  # it constructs nothing but texts
    return [] if document is None else document  # a file without a document, often a group_vars/all.yml


def _is_command(key: str, text: str) -> bool:
    return key in _COMMANDS or (key in _ACTIONS and _short(text.partition(" ")[0]) in _COMMANDS)


def _runs_on_localhost(value: dict[str, Any]) -> bool:
    hosts, variables = value.get("hosts"), value.get("vars")
    own = variables.get(_CONNECTION) if isinstance(variables, dict) else None
    if "local_action" in value or any(map(_is_maybe_local, (value.get("connection"), own))):
        return True
    places = (value.get("delegate_to"), *(hosts if isinstance(hosts, list) else [hosts]))
    names = (each for each in places if isinstance(each, str))
    # A text of a megabyte may have many aliases.
    return any(len(each) > 512 or _LOCALHOST.search(each) for each in names)


def _is_maybe_local(connection: Any) -> bool:
    """Return whether a connection is `local`, or a template; a text of a megabyte counts as one."""
    if not isinstance(connection, str):
        return False
    return len(connection) > 512 or "{{" in connection or "{%" in connection or _short(connection) == "local"


def _short(name: str) -> str:
    """Return a module's name without its collection."""
    return name.rpartition(".")[2]


def _texts(
    document: Any, spend: Callable[[int], None], require_all_local: Callable[[], None], *, is_local: bool
) -> Iterator[tuple[str, str, bool]]:
    """Yield each text of a document, with the nearest key that names files, and whether localhost runs it.

    `require_all_local` is called for a variable that lets every task run on localhost, or may do so.
    """
    pending: list[tuple[str, Any, bool]] = [("", document, is_local)]
    scoped: set[int] = set()  # the variables of one play, block or task, which _runs_on_localhost() asks
    while pending:
        key, value, is_local = pending.pop()
        if isinstance(value, str):
            yield key, value, is_local
            continue
        # Before they are added: by its aliases a document may hold itself, or a billion copies of a text.
        spend(len(value))
        if isinstance(value, list):
            pending += [(key, inner, is_local) for inner in value]
            continue
        if id(value) not in scoped and _is_maybe_local(value.get(_CONNECTION)):
            require_all_local()
        scoped.add(id(value.get("vars")))
        is_local = is_local or _runs_on_localhost(value)
        for name, inner in value.items():
            short = _short(name)
            if short.startswith(_LOOPS):
                raise _AnyFile
            if short == "src" and str(value.get("remote_src")).lower() in ("true", "yes", "on"):
                continue  # a file of the node
            is_named = short in _IMPORTS or (key not in _IMPORTS and short in _COMMANDS | _ACTIONS)
            pending.append((short if is_named else key, inner, is_local))


def _files_below(directory: Path, spend: Callable[[int], None] = lambda _: None) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        spend(_LOOKUP_WORK * (1 + len(names)))
        # In place, so that os.walk does not enter it.
        directories[:] = [name for name in directories if name != ".git"]
        for name in names:
            path = Path(parent, name)
            if os.path.isfile(path):  # noqa: PTH113  # Path.is_file raises for a link whose target is too long
                yield path
