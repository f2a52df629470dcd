"""Shell completion: the words of the command line, and names that the shell asks the daemon for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rolloutd.cli.command_group import CommandGroup, Invocation, Parser
from rolloutd.cli.contexts import context_names
from rolloutd.cli.field_help import field_names
from rolloutd.cli.output import print_line
from rolloutd.cli.status import GATES
from rolloutd.cli.watch import STATES
from rolloutd.control.client import api_path
from rolloutd.texts import event_text

SHELLS = ("bash", "zsh", "fish")

_KINDS_BY_METAVAR: Mapping[str, str] = {
    "ROLLOUT": "rollouts",
    "PLAN": "plans",
    "NODE": "nodes",
    "TEAM": "teams",
    "SCOPE": "scopes",
    "WAVE": "waves",
    "VERDICT": "verdicts",
    "SOURCE": "sources",
    "LABEL": "labels",
    "EVENT": "events",
    "POOL": "pools",
    "CONTEXT": "contexts",
    "TRAIN": "trains",
    "FIELD": "fields",
    "CONDITION": "conditions",
    "SCOPE:WHEN": "scopes",
    "FILE": "file",
    "PATH": "file",
    "DIR": "directory",
}
"""What completes an argument, by the name of its value in the help; files are the shell's own."""

_PREAMBLES = {
    "bash": '{function}() {{ compgen -W "{verbs} $(rolloutctl names {kinds} 2>/dev/null)" -- "$1"; }}\n',
    "zsh": (
        "{function}() {{ local -a names;"
        ' names=({verbs} ${{(f)"$(rolloutctl names {kinds} 2>/dev/null)"}}); compadd -a names }}\n'
    ),
    "fish": ("function {function}; string split ' ' '{verbs}'; rolloutctl names {kinds} 2>/dev/null; end\n"),
}
"""A function for an argument's verbs and kinds of names: shells ask the daemon when they complete."""

_BASH_POSTAMBLE = r"""
_rolloutctl_whole_words() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n' word prefix
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *[[:space:]] ]] && COMP_WORDS+=('')
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  _shtab_rolloutctl
  word=${COMP_WORDS[COMP_CWORD]}
  prefix=${word%"${word##*[=:]}"}
  COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -o filenames -F _rolloutctl_whole_words rolloutctl
"""
"""Bash breaks words at `=` and `:`, as in `--for gate=start`, and replaces only what follows them."""

_PLAIN_WORD = re.compile(r"[\w.:/@%+=,-]+")
"""Names that a shell reads as they are: bash expands the words that it completes with."""


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("names", names, "print the names that completion offers", formats=())
    parser.add_argument("kinds", metavar="KIND", nargs="+", choices=tuple(_READERS), help=", ".join(_READERS))
    complete = partial(completion, commands.root_parser)
    parser = commands.add_command(
        "completion", complete, "print a completion script, to evaluate in your shell", formats=()
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def completion(root_parser: argparse.ArgumentParser, call: Invocation) -> None:
    """Print a completion script of the whole command line."""
    import shtab

    shell = call.args.shell
    functions: dict[str, tuple[str, str]] = {}
    _set_completers(root_parser, {"file": shtab.FILE, "directory": shtab.DIRECTORY}, functions)
    preamble = "".join(
        _PREAMBLES[shell].format(function=function, verbs=verbs, kinds=kinds)
        for function, (verbs, kinds) in functions.items()
    )
    postamble = _BASH_POSTAMBLE if shell == "bash" else ""
    print_line(shtab.complete(root_parser, shell, preamble=preamble) + postamble)


def completes(metavar: str) -> bool:
    """Return whether an argument with this name of its value is completed."""
    return any(word in _KINDS_BY_METAVAR for word in metavar.split(" | "))


def _set_completers(
    parser: argparse.ArgumentParser, own: Mapping[str, Any], functions: dict[str, tuple[str, str]]
) -> None:
    """Let a shell complete each argument of a parser and its subcommands; `own` are the shell's.

    `functions` gets the shell functions that this needs, each with its verbs and kinds of names.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _set_completers(below, own, functions)
        elif isinstance(action.metavar, str) and action.choices is None:
            kinds = [_KINDS_BY_METAVAR[word] for word in action.metavar.split(" | ") if completes(word)]
            of_verbs = parser.verbs if isinstance(parser, Parser) and not action.option_strings else None
            verbs = [*of_verbs.choices] if of_verbs is not None else []
            if kinds and kinds[0] in own:
                action.complete = own[kinds[0]]  # type: ignore[attr-defined]
            elif kinds:
                function = "_".join(("_rolloutctl", *verbs, *kinds))
                functions[function] = (" ".join(verbs), " ".join(kinds))
                asks_daemon = {"bash": function, "zsh": function, "fish": f"({function})"}
                action.complete = asks_daemon  # type: ignore[attr-defined]


def names(call: Invocation) -> None:
    """Print the names of some kinds, one per line."""
    for name in dict.fromkeys(name for kind in call.args.kinds for name in _READERS[kind](call)):
        if name and _PLAIN_WORD.fullmatch(name):
            print_line(name)


def _rollouts(call: Invocation) -> Iterable[str]:
    lines = call.get(api_path("rollouts"))["rollouts"]
    return (name for each in lines for name in (each["rollout"], each["plan"]))


def _nodes(call: Invocation, key: str = "node") -> Iterable[str | None]:
    return (node[key] for node in call.get(api_path("inventory"))["nodes"])


def _labels(call: Invocation) -> Iterable[str]:
    return sorted({key for node in call.get(api_path("inventory"))["nodes"] for key in node["labels"]})


def _scopes(call: Invocation) -> Iterable[str]:
    pools = (lock["pool"] for lock in call.get(api_path("locks"))["pools"])
    nodes: list[dict[str, Any]] = call.get(api_path("inventory"))["nodes"]
    teams = (f"team/{node['team']}" for node in nodes if node["team"])
    return ("all", *teams, *pools, *(f"node/{node['node']}" for node in nodes))


def _conditions(call: Invocation) -> Iterable[str]:
    gates = (f"gate={gate}" for gate in GATES)
    return (*STATES, *gates, *(f"node/{name}=done" for name in _nodes(call) if name))


def _waves(call: Invocation) -> Iterable[str | None]:
    return (gate["wave"] for each in call.get(api_path("status"))["rollouts"] for gate in each["gates"])


_READERS: Mapping[str, Callable[[Invocation], Iterable[str | None]]] = {
    "rollouts": _rollouts,
    "plans": lambda call: (each["plan"] for each in call.get(api_path("rollouts"))["rollouts"]),
    "nodes": _nodes,
    "teams": partial(_nodes, key="team"),
    "scopes": _scopes,
    "waves": _waves,
    "verdicts": lambda call: (each["id"] for each in call.get(api_path("verdicts"))["verdicts"]),
    "sources": lambda call: (each["source"] for each in call.get(api_path("inventory"), limit=1)["sources"]),
    "labels": _labels,
    "events": lambda _: event_text.EVENT_NAMES,
    "pools": lambda call: (each["pool"] for each in call.get(api_path("locks"))["pools"]),
    "trains": lambda call: (each["name"] for each in call.get(api_path("trains"))["trains"]),
    "contexts": lambda _: context_names(),
    "fields": lambda _: field_names(),
    "conditions": _conditions,
}
"""How the names of each kind are read from the daemon."""
