"""Plan files: read with every mistake at once, made canonical, hashed, described as a schema.

The client reads plans with this offline, the daemon reads them again when they
are submitted.  So it imports nothing heavy, and of the core only selectors and
windows.  What a plan means to the core is rolloutd.compile's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolloutd.errors import InvalidFile, Mistake
from rolloutd.planfile import rules
from rolloutd.planfile.check import Format, check
from rolloutd.planfile.content import (
    canonical_json,
    change_content,
    content_of,
    digest,
    policy_content,
    scope_content,
    selector_digest,
)
from rolloutd.planfile.document import Value, read_document, walk
from rolloutd.planfile.model import RESERVED, PlanDocument
from rolloutd.planfile.schema import schema_of_model
from rolloutd.planfile.steps import CHECKS, ISOLATORS, PROBES
from rolloutd.planfile.wording import Path, cut, dotted

JSON = Any

__all__ = [
    "InvalidFile",
    "Mistake",
    "PlanFile",
    "canonical_json",
    "change_content",
    "digest",
    "policy_content",
    "read",
    "schema",
    "scope_content",
    "selector_digest",
]

TITLE = "rolloutd maintenance plan"

FORMAT = Format(
    title=TITLE,
    rules=(
        rules.source_is_one,
        lambda root: rules.step_rules(root, ("spec", "traffic"), tuple(PROBES)),
        lambda root: rules.step_rules(root, ("spec", "isolate"), tuple(ISOLATORS)),
        lambda root: rules.step_rules(root, ("spec", "verify"), tuple(CHECKS)),
        lambda root: rules.step_rules(root, ("spec", "rollback", "verify"), tuple(CHECKS)),
        rules.gates_need_somebody,
        rules.names_are_single,
        rules.expected_fits_timeout,
        rules.windows_are_open,
        rules.plan_fits_a_window,
        rules.no_text_is_blank,
    ),
    reserved=RESERVED,
)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan without mistakes: `content` is JSON, every default filled in.

    `root` is the plan as it was written, for mistakes that only the daemon can
    find: a playbook that its source lacks, an owner that no team is.
    """

    file: str
    content: dict[str, JSON]
    root: Value

    @property
    def name(self) -> str:
        """The plan's name."""
        return str(self.content["metadata"]["name"])

    @property
    def owner(self) -> str:
        """The team whose members own the plan."""
        return str(self.content["metadata"]["owner"])

    @property
    def source(self) -> dict[str, str]:
        """Where the playbooks come from: `{git, ref}` or `{path}`."""
        return {key: value for key, value in self.content["spec"]["source"].items() if value is not None}

    def mistake(self, path: Path, *, found: str, allowed: str, message: str) -> Mistake:
        """Return a mistake at the line where this part of the plan stands."""
        place = self.root.place
        value: Value | None = self.root
        for part in path:
            value = None if value is None else value.child(part)
            place = place if value is None else value.place
        return Mistake(place.file, place.line, place.column, dotted(path), cut(found), allowed, message)

    def playbooks(self) -> list[tuple[Path, str]]:
        """Return every playbook the plan names, with the place where it does."""
        return [
            (path, str(value.plain))
            for path, value in walk(self.root)
            if path[:1] == ("spec",) and path[1:2] and path[1] in _PLAYBOOK_PARTS and _names_playbook(path)
        ]


_PLAYBOOK_PARTS = frozenset({"maintain", "rollback", "isolate"})


def _names_playbook(path: Path) -> bool:
    """Whether a playbook stands at this path: of a stage or a rollback, or of an isolator."""
    if "vars" in path:
        return False
    return (
        path[-1] == "playbook"
        if path[1] != "isolate"
        else path[-2:-1] == ("playbook",) and path[-1] in ("file", "undo")
    )


def read(text: bytes, file: str) -> PlanFile:
    """Read a plan; `file` is the name that mistakes carry.

    Raises InvalidFile with every mistake, each with its line.
    """
    document = read_document(text, file)
    content = content_of(check(PlanDocument, document, FORMAT))
    assert document.root is not None  # check() raises where there is no document
    return PlanFile(file, content, document.root)


def schema() -> dict[str, JSON]:
    """Return the JSON Schema of plan files, made from the types that read them."""
    return schema_of_model(PlanDocument, TITLE)
