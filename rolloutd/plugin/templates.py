"""Rendering of `{{ ... }}` templates in the parameters of a step.

In a shell command every value is quoted, so that a label cannot become a command; `| raw` leaves it as it is
and is refused for what inventories give.  In other texts, such as a query or a path, it stays in its place.

Statements and comments are disabled, so `${#x}` and `{%` in a shell command
stay as they are.  The names are `node.name`, `node.address`, `node.labels.X`
and `vars.X`.  Calls, arithmetic and loops are refused, so a template cannot reach the daemon's
objects or exhaust its memory.  Ansible renders the variables of a stage.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, nodes
from jinja2.sandbox import SandboxedEnvironment

from rolloutd.errors import RolloutdError

JSON = Any

MAX_RENDERED_CHARS = 65_536
"""Characters of one rendered text: half of what one argument of a Linux command may be."""

MAX_EXPRESSIONS, MAX_DEPTH = 500, 20
"""Parts of one template and their nesting, limited because Jinja's compiler and Python's parser recurse."""

ALLOWED = (
    "{{ node.name }}, {{ node.address }}, {{ node.labels.KEY }}, {{ vars.NAME }}, "
    "also with | default(...), quote, lower, trim"
)

_HARMLESS = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")
"""Texts that mean the same to a shell within quotes and without."""

_PLAIN_CONTEXT = re.compile(
    r"""(?:[^'"\\`$\#<(\[]|'[^']*'|"(?:[^"\\`$]|\\.|\$(?=\w)|\$\{\w+\})*"|\\.|\$(?!['"\[])"""
    r"""|(?<=[^\s;|&()])\#|<(?!<)"""
    # A shell computes what is within (( )), [[ ]] or an index, and runs the commands in a quoted value there.
    r"""|\((?!\()|\(\([^()$`'"\\<\#]*\)\)"""
    r"""|(?<!\w)\[(?!\[)|\[\[[^][$`'"\\<\#]*\]\]|(?<=\w)\[[^][$`'"\\<\#]*\])*""",
    re.DOTALL,
)
"""A part of a command after which a shell is within no quotes, comment, computation or here-document."""

_READ_AGAIN = re.compile(
    r"(?:^|[\s;|&({])(?:(?:eval|let|ssh|trap|watch)\s[^;|&\n]*|[\w/]*(?:sh|su|runuser)\s[^;|&\n]*-[a-z]*c\s+)$"
)
"""An end of a part of a command after which a word, also a quoted one, is read as a command once more."""

_LEAVES_ITS_PLACE = re.compile(r"['\"`\\\x00-\x1f\x7f]|(?:^|/)\.\.(?:/|$)")
"""What ends a string of a query, or leads out of a directory."""

_WORD_BEGINS = re.compile(r"""(?:.*[\s;|&(`]|)['"]?""", re.DOTALL)
"""A part of a command after which a word begins."""

_AFTER_OPTIONS = re.compile(r"(?:^|\s)--\s[^;|&\n]*$")
"""An end of a part of a command after which a word is no option."""

_NEVER_MATCHES = "\x01never"
"""Part of the delimiters of statements and comments, which disables both: no file may contain it."""

_ALLOWED_FILTERS = frozenset({"default", "d", "lower", "upper", "trim", "int", "length", "quote", "raw"})
_ALLOWED_TESTS = frozenset({"defined", "undefined", "none"})
_ALLOWED_NODES = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Name,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Const,
    nodes.Filter,
    nodes.Test,
    nodes.Concat,
    nodes.CondExpr,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
)
_NODE_FIELDS = ("name", "address", "labels")


class TemplateInvalid(ValueError):
    """A template that is not allowed; `allowed` describes those that are."""

    def __init__(self, message: str, allowed: str = ALLOWED) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed


class _Raw(str):
    """A value that goes into a command as it is."""

    __slots__ = ()


class _Unquotable(ValueError):
    """A value that its place in a command cannot take safely; the text ends with what to do."""


class RenderFailed(RolloutdError):
    """A valid template cannot be rendered for this node: a label or a variable is missing."""


@lru_cache(maxsize=1024)
def validate_template(text: str) -> None:
    """Raise TemplateInvalid unless the text is plain or an allowed template."""
    try:
        tree = _environment().parse(text)
        for number, (node, depth) in enumerate(_all_nodes(tree)):
            if number > MAX_EXPRESSIONS or depth > MAX_DEPTH:
                raise TemplateInvalid("the template is too long or nested too deeply", "a simpler one")
            _check_node(node)
    except TemplateInvalid:
        raise
    except (TemplateError, ValueError) as error:
        raise TemplateInvalid(f"the template cannot be read: {str(error)[:200]}") from None
    except RecursionError:
        raise TemplateInvalid("the template is nested too deeply") from None


def render(
    value: JSON,
    *,
    node: str,
    address: str,
    labels: Mapping[str, str],
    variables: Mapping[str, JSON],
    commands: Collection[str] = (),
) -> JSON:
    """Return the value with every text rendered, also in lists and mappings.

    `commands` are the keys of shell commands.  Raises RenderFailed with the text and what it lacks.
    """
    names = {
        "node": {"name": node, "address": address, "labels": dict(labels)},
        "vars": dict(variables),
    }
    return _render_value(value, names, commands, is_command=False)


def variables_named_in(value: JSON) -> frozenset[str]:
    """Return the names of the variables that the templates within a value name."""
    return frozenset(name for text in _templates_in(value) for name in _variables_of(text))


def rendered_texts(
    value: Mapping[str, JSON],
    named: Collection[str],
    *,
    node: str,
    address: str,
    labels: Mapping[str, str],
    variables: Mapping[str, JSON],
    commands: Collection[str],
) -> dict[str, str]:
    """Return the templates within a value that name one of these variables, by what they are rendered to."""
    names = {"node": {"name": node, "address": address, "labels": dict(labels)}, "vars": dict(variables)}
    found = {}
    for key, item in value.items():
        for text in _templates_in(item):
            if not _variables_of(text).isdisjoint(named):
                with suppress(RenderFailed):  # then nothing was given to the adapter either
                    found[_render_text(text, names, is_command=key in commands)] = text
    return found


def _templates_in(value: JSON) -> Iterator[str]:
    match value:
        case str():
            if "{{" in value:
                yield value
        case list() | tuple():
            for item in value:
                yield from _templates_in(item)
        case Mapping():
            for item in value.values():
                yield from _templates_in(item)


@lru_cache(maxsize=1024)
def _variables_of(text: str) -> frozenset[str]:
    """Return the names of the variables in a valid template."""
    tree, names = _environment().parse(text), set()
    for attribute in tree.find_all(nodes.Getattr):
        if isinstance(attribute.node, nodes.Name) and attribute.node.name == "vars":
            names.add(attribute.attr)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.node, nodes.Name) and item.node.name == "vars":
            names.add(str(getattr(item.arg, "value", "")))
    return frozenset(names)


def _render_value(
    value: JSON, names: Mapping[str, JSON], commands: Collection[str], *, is_command: bool
) -> JSON:
    match value:
        case str():
            return _render_text(value, names, is_command=is_command)
        case list() | tuple():
            return [_render_value(item, names, (), is_command=is_command) for item in value]
        case Mapping():
            return {
                key: _render_value(item, names, (), is_command=is_command or key in commands)
                for key, item in value.items()
            }
        case _:
            return value


def _render_text(text: str, names: Mapping[str, JSON], *, is_command: bool) -> str:
    if "{{" not in text:
        return text
    validate_template(text)
    node, rendered = names["node"]["name"], ""
    try:
        for part in _compile_template(text, is_command=is_command).generate(names):
            # Part by part, so that a text that grows is stopped before it is whole.
            rendered += part[: MAX_RENDERED_CHARS + 1]
            if len(rendered) > MAX_RENDERED_CHARS:
                raise RenderFailed(f"cannot fill {text[:100]!r} for node {node}: it grows too long")
    except _Unquotable as error:
        raise RenderFailed(f"cannot fill {text!r} for node {node}: {error}") from None
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RenderFailed(
            f"cannot fill {text!r} for node {node}: {error}; "
            "give the node the label or the plan the variable, or use | default(...)"
        ) from None
    return rendered


@lru_cache(maxsize=256)
def _compile_template(text: str, *, is_command: bool) -> Template:
    environment = _environment()
    tree = environment.parse(text)
    before = ""
    if is_command:  # where all values are quoted, once
        for filter_ in tree.find_all(nodes.Filter):
            filter_.name = "_same" if filter_.name == "quote" else filter_.name
    # One output, because statements are disabled.
    for output in tree.find_all(nodes.Output):
        for number, part in enumerate(output.nodes):
            if isinstance(part, nodes.TemplateData):
                before += part.data
            else:
                for name in _filters_of_place(part, before, is_command=is_command):
                    part = nodes.Filter(part, name, [], [], None, None, lineno=part.lineno)
                output.nodes[number] = part
    return environment.from_string(tree)


def _filters_of_place(part: nodes.Expr, before: str, *, is_command: bool) -> Iterator[str]:
    """Yield the filters of a value in a text, which begins with the text before it."""
    if not is_command:
        if _names_node(part):
            yield "_in_place"
        return
    if _names_node(part) and _WORD_BEGINS.fullmatch(before) and not _AFTER_OPTIONS.search(before):
        yield "_no_option"
    is_plain = _PLAIN_CONTEXT.fullmatch(before) and not _READ_AGAIN.search(before)
    yield "_in_command" if is_plain else "_in_quotes"


def _names_node(part: nodes.Node) -> bool:
    """Return whether a value may be of the inventory."""
    own = [part] if isinstance(part, nodes.Name) else []
    return any(name.name == "node" for name in (*own, *part.find_all(nodes.Name)))


@lru_cache(maxsize=1)
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        undefined=StrictUndefined,
        block_start_string=_NEVER_MATCHES + "<%",
        block_end_string="%>" + _NEVER_MATCHES,
        comment_start_string=_NEVER_MATCHES + "<#",
        comment_end_string="#>" + _NEVER_MATCHES,
        keep_trailing_newline=True,
        autoescape=False,  # the text becomes a command or a name, never HTML
    )
    environment.globals.clear()  # a template names only `node` and `vars`, and each text copies them
    environment.filters = {
        name: filter_ for name, filter_ in environment.filters.items() if name in _ALLOWED_FILTERS
    }
    environment.filters |= {
        "quote": _in_command,
        "raw": _Raw,
        "_same": str,
        "_in_command": _in_command,
        "_in_quotes": _in_quotes,
        "_no_option": _no_option,
        "_in_place": _in_place,
    }
    return environment


def _in_command(value: object) -> str:
    """Quote for the shell, so that a label cannot become a command."""
    return value if isinstance(value, _Raw) else shlex.quote(str(value))


def _in_quotes(value: object) -> str:
    """Return a value that means the same wherever it stands in a command; others cannot be quoted there."""
    text = str(value)
    if isinstance(value, _Raw) or _HARMLESS.fullmatch(text):
        return text
    # Without the value: it may be a secret.
    raise _Unquotable(
        "a value has characters that a shell interprets there; take it out of the quotes or inner command"
    )


def _no_option(value: object) -> object:
    if str(value).startswith("-"):
        raise _Unquotable("a command takes the value for an option; put -- before it")
    return value


def _in_place(value: object) -> object:
    if _LEAVES_ITS_PLACE.search(str(value)):
        raise _Unquotable("a value of the inventory has quotes, backslashes, control characters or `..`")
    return value


def _all_nodes(tree: nodes.Node) -> Iterator[tuple[nodes.Node, int]]:
    """Yield the nodes of a template with their depth, without recursion, because a template may be deep."""
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        yield node, depth
        pending.extend((child, depth + 1) for child in node.iter_child_nodes())


def _check_node(node: nodes.Node) -> None:
    match node:
        case nodes.Name() if node.name not in ("node", "vars"):
            raise TemplateInvalid(f"unknown name '{node.name}'")
        case nodes.Filter() if node.name not in _ALLOWED_FILTERS:
            raise TemplateInvalid(
                f"unknown filter '{node.name}'", "the filters " + ", ".join(sorted(_ALLOWED_FILTERS))
            )
        case nodes.Filter(name="raw") if _names_node(node):
            raise TemplateInvalid("'raw' is not allowed for what the inventory gives", "it without | raw")
        case nodes.Test() if node.name not in _ALLOWED_TESTS:
            raise TemplateInvalid(
                f"unknown test '{node.name}'", "the tests " + ", ".join(sorted(_ALLOWED_TESTS))
            )
        case nodes.Getattr() if node.attr.startswith("_"):
            raise TemplateInvalid(f"'{node.attr}' is not allowed: its name begins with an underscore")
        case nodes.Getattr() | nodes.Getitem() if (
            isinstance(node.node, nodes.Name) and node.node.name == "node"
        ):
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
            if name not in _NODE_FIELDS:
                raise TemplateInvalid(f"a node has no '{name}'")
        case _ if not isinstance(node, _ALLOWED_NODES):
            raise TemplateInvalid(f"a {type(node).__name__.lower()} is not allowed in a template")
