"""Plan files: validation with all mistakes at once, canonical form, hashes, schema.

The client reads plans with this package offline, the daemon reads them again on submit, so it imports nothing
heavy.  It does not know what a plan means to the core: rolloutd/settings/compile.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolloutd.errors import Diagnostic
from rolloutd.errors import InvalidFile as InvalidFile
from rolloutd.planfile.content import canonical_json as canonical_json
from rolloutd.planfile.content import digest as digest
from rolloutd.planfile.content import plan_content
from rolloutd.planfile.content import selector_digest as selector_digest
from rolloutd.planfile.content import written_content as written_content
from rolloutd.planfile.document import JSON, Path, Value, locate, read_document
from rolloutd.planfile.model import PlanDocument
from rolloutd.planfile.schema import json_values_of_format, schema_of_model, values_of_format
from rolloutd.planfile.validation import validate_document

TITLE = "rolloutd maintenance plan"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan without mistakes: `content` is JSON, every default filled in.

    `root` is the plan as written, for mistakes that only the daemon can find: a playbook that its source
    lacks, an owner that is not a team.
    """

    file: str
    content: dict[str, JSON]
    root: Value

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def owner(self) -> str:
        return str(self.content["metadata"]["owner"])

    @property
    def source(self) -> dict[str, str]:
        """The source of the playbooks: `{git, ref}` or `{path}`."""
        return {key: value for key, value in self.content["spec"]["source"].items() if value is not None}

    def diagnostic(self, path: Path, *, found: str, allowed: str, message: str) -> Diagnostic:
        """Return a mistake at the line of this part of the plan."""
        path, value, parent = locate(self.root, path)
        return (value or parent).location.diagnostic(path, found, allowed, message)

    def named_playbooks(self) -> list[tuple[Path, str]]:
        """Return every playbook the plan names, with its path in the plan."""
        return [
            (path, str(value.data)) for path, value, _ in values_of_format(schema(), self.root, "playbook")
        ]


def read(text: bytes, file: str) -> PlanFile:
    """Read a plan; `file` is the name in its mistakes.

    Raises InvalidFile with every mistake, each with its line.
    """
    document = read_document(text, file)
    content = plan_content(validate_document(PlanDocument, document, TITLE))
    assert document.root is not None  # check() raises where there is no document
    return PlanFile(file, content, document.root)


def run_by_plan(content: Mapping[str, JSON], name: str) -> list[tuple[Path, str]]:
    """Return each playbook or each command (`name` says which) of a plan's content, with its path."""
    return list(json_values_of_format(schema(), content, name))


def variables_of_plan(content: Mapping[str, JSON]) -> list[tuple[Path, Mapping[str, JSON]]]:
    """Return the extra variables of each run of a plan's content, with their paths."""
    return list(json_values_of_format(schema(), content, "variables"))


def run_by_check(kind: str, params: Mapping[str, JSON], name: str) -> list[tuple[Path, str]]:
    """Return the same of one check, such as a team's own."""
    return list(json_values_of_format(schema(), [{kind: params}], name, ("spec", "verify")))


def schema() -> dict[str, JSON]:
    return schema_of_model(PlanDocument, TITLE)
