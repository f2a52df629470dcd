"""The commands that the documents show, as words: of shell and console blocks, and of the text between."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.console_page import read_steps

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = ("CHANGELOG.md",)
"""It names commands of every version."""

SPAN_PROGRAMS = ("rolloutctl", "rolloutd", "make", "python -m", "systemctl", "curl")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(rf"`((?:{'|'.join(SPAN_PROGRAMS)})[ \n][^`]+)`")


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """One simple command; `is_whole` is false for a mention in the text, which may lack arguments."""

    document: str
    words: tuple[str, ...]
    is_whole: bool

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def documents() -> list[Path]:
    paths = (path for path in ROOT.rglob("*.md") if path.name not in LEFT_OUT)
    return sorted(p for p in paths if not any(part.startswith(".") for part in p.relative_to(ROOT).parts))


def documented_commands(path: Path) -> Iterator[DocumentedCommand]:
    """Yield the commands of one document."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    lines = [step.command for step in read_steps(text)]
    for language, block in _BLOCK.findall(text):
        if language == "sh":
            lines += [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    for line in lines:
        for words in simple_commands(line):
            yield DocumentedCommand(name, words, is_whole=True)
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        for words in simple_commands(" ".join(span.split())):
            yield DocumentedCommand(name, words, is_whole=False)


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the simple commands of a shell line without redirections; a here-document is not read."""
    substituted = re.fullmatch(r'eval "\$\((.*)\)".*', line)
    words, skips = list[str](), False
    for word in [*_tokens(substituted[1] if substituted else line), ";"]:
        if word in ("&&", "||", ";", "|"):
            if words:
                yield tuple(words)
            words = []
        elif word in (">", "<"):
            skips = True
        elif skips:
            skips = False
        else:
            words.append(word)


def _tokens(line: str) -> list[str]:
    lexer = shlex.shlex(line.partition("\n")[0], posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    tokens = list(lexer)
    # A here-document's delimiter belongs to the redirection.
    return tokens[: tokens.index("<<")] if "<<" in tokens else tokens
