"""Quotes of a shell command that are never closed.

The rest of its syntax is not judged, because the shell that runs the command is the node's.  A command whose
quotes depend on that syntax is accepted.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\\.|\$['(]|['\"`()#]|[^\\$'\"`()#]+|.", re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'[^']*'|\$'(?:[^'\\]|\\.)*'", re.DOTALL)

_DOUBTFUL = re.compile(r"<<|\bcase\b|\$\{(?!\w+\})|\$'[^']*\\'")
"""Here-documents, patterns of `case`, operators in `${...}`, and `\\'` in `$'...'`, where dash differs from
bash: quotes follow other rules there."""

_BEFORE_COMMENT = frozenset(" \t\n;|&()")
"""Letters after which `#` begins a comment."""


def unclosed_quote(command: str) -> str | None:
    """Return the first quote or substitution that the command opens and never closes."""
    if _DOUBTFUL.search(command) or ("`" in command and ("#" in command or "\\" in command)):
        return None  # in backticks, comments and escapes end differently too
    opened: list[str] = []
    position = 0
    while match := _PART.match(command, position):
        part, start, position = match[0], position, match.end()
        within = opened[-1] if opened else ""
        if part == (")" if within in ("$(", "(") else within):
            opened.pop()
        elif part in ('"', "`", "$(") or (part == "(" and within in ("$(", "(")):
            opened.append(part)
        elif within == '"':
            continue
        elif part in ("'", "$'"):
            quoted = _SINGLE_QUOTED.match(command, start)
            if quoted is None:
                return opened[0] if opened else "'"
            position = quoted.end()
        elif part == "#" and (start == 0 or command[start - 1] in _BEFORE_COMMENT):
            newline = command.find("\n", start)
            position = len(command) if newline < 0 else newline
    return opened[0] if opened else None
