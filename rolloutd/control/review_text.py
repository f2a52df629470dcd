"""What a voter reads before approving, as sections of lines, for the command line and the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rolloutd.control import response_text
from rolloutd.texts import event_text
from rolloutd.texts.formats import pluralize

if TYPE_CHECKING:  # the command line's start-up counts
    from rolloutd.control.plans.wire_plans import PlaybookText, Review
    from rolloutd.control.rollouts.wire import Gate, PilotEvidence, Rollout

Kind = Literal["", "added", "removed", "context", "warning", "strong"]


class ReviewLine(NamedTuple):
    """A line: what it is about, what it says, and how much that matters."""

    label: str
    text: str
    kind: Kind = ""


class ReviewSection(NamedTuple):
    """Lines under a title; a text is long and read as a whole, `otherwise` stands for no lines."""

    title: str
    note: str
    lines: Sequence[ReviewLine]
    is_text: bool = False
    otherwise: str = "nothing"


def change_sections(review: Review) -> Iterator[ReviewSection]:
    """Yield what is new against the previous rollout, the files, the commands, and what failed before."""
    if review["previous"] is None:
        yield ReviewSection("CHANGE", "no earlier rollout of this plan", (), otherwise="")
    else:
        note = f"differences to {review['previous']}, the previous rollout"
        lines = [_difference(line) for line in response_text.difference_lines(review)]
        yield ReviewSection("CHANGE", note, lines, True, "none: the same plan and the same source as before")
    if review["unseen"]:
        note = "an approval must confirm them: with --unseen, or with the word in the console"
        lines = [ReviewLine("", each, "warning") for each in review["unseen"]]
        yield ReviewSection("NOT SHOWN", note, lines)
    yield from (_file_section("PLAYBOOK", file) for file in review["playbooks"])
    yield from (_file_section("FILE", file) for file in review["files"])
    if review["commands"]:
        lines = [
            ReviewLine(f"{each['path']}: ", line)
            for each in review["commands"]
            for line in each["text"].splitlines()
        ]
        yield ReviewSection("COMMANDS", "of the plan and of the teams' own checks", lines)
    if review["overrides"]:
        lines = [
            ReviewLine("", f"{each['node']} in {each['rollout']}, {each['step']}: {each['text']}", "warning")
            for each in review["overrides"]
        ]
        yield ReviewSection("FAILED BEFORE", "with the same content", lines)


def scope_sections(rollout: Rollout, review: Review | None, gates: Iterable[Gate]) -> Iterator[ReviewSection]:
    """Yield what the gates start, the checks, and what is not probed."""
    lines: list[ReviewLine] = []
    for gate in gates:
        found = None if review is None else response_text.find_gate(review, gate)
        if found is not None:
            radius = response_text.describe_blast_radius(found["blast_radius"])
            lines.append(ReviewLine(f"gate {event_text.gate_label(gate)} starts: ", radius, "strong"))
            approval = response_text.describe_approval(found["your_approval"], rollout["owner"])
            lines.append(ReviewLine("", approval))
    for pool in rollout["pools"]:
        budget = f"{pluralize(pool['total'], 'node')}, {pool['max_unavailable']} at a time"
        lines.append(ReviewLine(f"{pool['pool']}: ", budget))
    yield ReviewSection("TARGETS", pluralize(rollout["total"], "node"), lines)
    if review is not None:
        lines = [ReviewLine("", check) for check in review["checks"]]
        yield ReviewSection("CHECKS", "each node must pass these before it serves again", lines)
    missing = [("not probed: ", each) for each in rollout["not_probed"]]
    missing += [("not isolated: ", each) for each in rollout["not_isolated"]]
    lines = [ReviewLine(label, each, "warning") for label, each in missing]
    lines += [ReviewLine("traffic probe: ", each) for each in rollout["traffic_probes"]]
    yield ReviewSection("NOT PROBED", "" if missing else "nothing is left out", lines, otherwise="")


def pilot_section(evidence: PilotEvidence) -> ReviewSection:
    """Return what the pilot showed: its steps with their times, changed tasks with their diffs, and logs."""
    attempts = pluralize(evidence["attempts"], "attempt")
    team = f" of {evidence['team']}" if evidence["team"] else ""
    note = f"{evidence['node']}{team}: {evidence['outcome']}, {attempts}"
    lines = [ReviewLine("", evidence["reason"] or f"outcome {evidence['outcome']}", "strong")]
    for step in evidence["steps"]:
        took = f"{event_text.step_label(step['step'])}: {step['state']} in {step['seconds']:g} s: "
        lines.append(ReviewLine(took, step["text"], "" if step["state"] == "ok" else "removed"))
    for change in evidence["changes"]:
        lines.append(ReviewLine("changed: ", change["task"]))
        lines += [_difference(f"  {line}") for line in (change["diff"] or "").splitlines()]
    for log in evidence["logs"]:
        length = f"{pluralize(log['lines'], 'line')}, sha256 {log['sha256']}"
        lines.append(ReviewLine(f"log of {event_text.step_label(log['step'])}: ", length))
    return ReviewSection("PILOT", note, lines)


def plan_section(review: Review) -> ReviewSection:
    lines = [ReviewLine(f"{each['path']}: ", each["value"]) for each in review["plan"]]
    return ReviewSection("THE PLAN", "without defaults", lines)


def _difference(line: str) -> ReviewLine:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    return ReviewLine("", line, kinds.get(line.strip()[:1], "context"))


def _file_section(title: str, file: PlaybookText) -> ReviewSection:
    if file["text"] is None:
        return ReviewSection(title, file["path"], (), otherwise=file["note"] or "")
    lines = [ReviewLine("", line) for line in file["text"].splitlines()]
    return ReviewSection(title, f"{file['path']}, {pluralize(len(lines), 'line')}", lines, True)
