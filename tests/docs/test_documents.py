"""The documents agree with the product: links, commands, make targets, glossary, plans."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from machines.model.events import Event
from machines.model.plan import GateName
from machines.model.reasons import ReasonCode
from machines.states import Outcome, Phase, mermaid_diagram
from rolloutd import planfile

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")

CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize("document", named(DOCUMENTS))
def test_links_resolve(document: Path) -> None:
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (document.parent / place).resolve() if place else document
        assert file.exists(), f"{target} does not exist"
        assert file.is_relative_to(ROOT), f"{target} leads outside"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_make_targets_are_in_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)[0].split()) - {"help"}
    output = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert phony <= set(re.findall(r"make ([\w-]+)", output))


def test_readme_plan_is_valid() -> None:
    plans = [text for _, text in FENCE.findall((ROOT / "README.md").read_text()) if "MaintenancePlan" in text]
    assert plans
    for text in plans:
        planfile.read(text.encode(), "README.md")


def test_glossary_words_are_unique_identifiers() -> None:
    rows = re.findall(
        r"^\| ([^|]+?) \| `(\w+)` \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 50
    assert len(rows) == len({word for word, _ in rows}), "a word is explained twice"
    assert {name for _, name in rows} <= identifiers()


def identifiers() -> set[str]:
    """Return the modules, definitions, fields and arguments of the code."""
    found: set[str] = set()
    for place in ("machines", "rolloutd", "tui", "tests/contracts"):
        for path in (ROOT / place).rglob("*.py"):
            found |= {path.stem, path.parent.name}
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case (
                        ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
                    ):
                        found.add(name)
                    case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                        found.add(name)
    return found


@pytest.mark.parametrize("name", [*Phase, *Outcome, *GateName])
def test_glossary_names_every_state(name: str) -> None:
    assert str(name) in (ROOT / "docs" / "glossary.md").read_text()


def test_changelog_format_is_valid() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    for version in versions[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", version)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= CHANGES
    for line in re.split(r"\n(?=- )", text.partition("### ")[2])[1:]:
        assert re.split(r"\n\n|\n#", line)[0].rstrip().endswith((".", ":")), line


def test_every_event_has_a_text() -> None:
    from rolloutd.texts import event_text

    for event in Event.__args__:
        assert event.__name__ in event_text._FORMATTERS


def test_every_reason_is_explained() -> None:
    text = (ROOT / "docs" / "why-a-node-waits.md").read_text()
    assert {str(code) for code in ReasonCode} - set(re.findall(r"`([a-z-]+)`", text)) == set()


def test_index_lists_every_document() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert set((ROOT / "docs").glob("*.md")) - {index} <= linked


def test_architecture_has_the_diagram_of_the_table() -> None:
    assert f"```mermaid\n{mermaid_diagram()}```" in (ROOT / "ARCHITECTURE.md").read_text()
