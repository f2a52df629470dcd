"""Fills `{{ node.name }}` and its like into the parameters of a step.

Only expressions are known, no statements and no comments, so that `${#x}` and
`{%` in a shell command stay what they are.  The names are `node.name`,
`node.labels.X` and `vars.X`; nothing can be called, multiplied or repeated, so
a template can neither reach into the daemon nor make it swell.  The variables
of a stage are not rendered here: they are Ansible's, and Ansible renders them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import SandboxedEnvironment

from rolloutd.errors import RolloutdError

JSON = Any

MAX_RENDERED = 65_536
"""Characters of one rendered text: half of what one argument of a Linux command may be."""

ALLOWED = (
    "{{ node.name }}, {{ node.labels.KEY }}, {{ vars.NAME }}, also with | default(...), quote, lower, trim"
)

_NEVER = "\x01never"
"""Marks statements and comments; no file that is read may hold it."""

_FILTERS = frozenset({"default", "d", "lower", "upper", "trim", "int", "length", "quote"})
_TESTS = frozenset({"defined", "undefined", "none"})
_NODES = (
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
_NODE_FIELDS = ("name", "labels")


class TemplateInvalid(ValueError):
    """A template cannot be used; `allowed` says what could."""

    def __init__(self, message: str, allowed: str = ALLOWED) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed


class RenderFailed(RolloutdError):
    """A good template could not be filled for this node: a label or a variable is not there."""


@lru_cache(maxsize=1024)
def check(text: str) -> None:
    """Raise TemplateInvalid unless the text is plain or a template that may be rendered."""
    try:
        tree = _environment().parse(text)
        for node in _all_nodes(tree):
            _check_node(node)
    except TemplateInvalid:
        raise
    except (TemplateError, ValueError) as error:
        raise TemplateInvalid(f"the template cannot be read: {str(error)[:200]}") from None
    except RecursionError:
        raise TemplateInvalid("the template is nested too deeply") from None


def render(value: JSON, *, node: str, labels: Mapping[str, str], variables: Mapping[str, JSON]) -> JSON:
    """Return the value with every text in it rendered, lists and mappings followed.

    Raises RenderFailed naming the text and what it lacks.
    """
    match value:
        case str():
            return _render_text(value, node, labels, variables)
        case list() | tuple():
            return [render(item, node=node, labels=labels, variables=variables) for item in value]
        case Mapping():
            return {
                key: render(item, node=node, labels=labels, variables=variables)
                for key, item in value.items()
            }
        case _:
            return value


def _render_text(text: str, node: str, labels: Mapping[str, str], variables: Mapping[str, JSON]) -> str:
    if "{{" not in text:
        return text
    check(text)
    names = {"node": {"name": node, "labels": dict(labels)}, "vars": dict(variables)}
    try:
        rendered = _environment().from_string(text).render(names)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RenderFailed(
            f"cannot fill {text!r} for node {node}: {error}; "
            "give the node the label or the plan the variable, or use | default(...)"
        ) from None
    if len(rendered) > MAX_RENDERED:
        raise RenderFailed(f"cannot fill {text[:100]!r} for node {node}: it grows too long")
    return rendered


@lru_cache(maxsize=1)
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        undefined=StrictUndefined,
        block_start_string=_NEVER + "<%",
        block_end_string="%>" + _NEVER,
        comment_start_string=_NEVER + "<#",
        comment_end_string="#>" + _NEVER,
        keep_trailing_newline=True,
        autoescape=False,  # the text becomes a command or a name, never HTML
    )
    environment.filters = {name: filter_ for name, filter_ in environment.filters.items() if name in _FILTERS}
    environment.filters["quote"] = _quote
    return environment


def _quote(value: object) -> str:
    """Quote for the shell, so that a label cannot become a command."""
    return shlex.quote(str(value))


def _all_nodes(tree: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the nodes of a template without recursion: it may be deep."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.iter_child_nodes())


def _check_node(node: nodes.Node) -> None:
    match node:
        case nodes.Name() if node.name not in ("node", "vars"):
            raise TemplateInvalid(f"there is no name '{node.name}'")
        case nodes.Filter() if node.name not in _FILTERS:
            raise TemplateInvalid(
                f"there is no filter '{node.name}'", "the filters " + ", ".join(sorted(_FILTERS))
            )
        case nodes.Test() if node.name not in _TESTS:
            raise TemplateInvalid(f"there is no test '{node.name}'", "the tests " + ", ".join(sorted(_TESTS)))
        case nodes.Getattr() if node.attr.startswith("_"):
            raise TemplateInvalid(f"'{node.attr}' is not looked at")
        case nodes.Getattr() | nodes.Getitem() if (
            isinstance(node.node, nodes.Name) and node.node.name == "node"
        ):
            _check_node_field(node)
        case _ if not isinstance(node, _NODES):
            raise TemplateInvalid(f"a {type(node).__name__.lower()} is not allowed in a template")


def _check_node_field(node: nodes.Getattr | nodes.Getitem) -> None:
    name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
    if name not in _NODE_FIELDS:
        raise TemplateInvalid(f"a node has no '{name}'")
