"""Serializers of the audit's verification."""

from __future__ import annotations

from pathlib import Path

from rolloutd.control.audit import wire_audit
from rolloutd.control.formats import fill
from rolloutd.ports import AuditBase, AuditReport
from rolloutd.texts.reason_text import describe_differences, describe_mismatch


def audit_export(base: AuditBase, directory: Path) -> wire_audit.AuditExport | None:
    return {"through": base.seq, "head": base.head, "directory": str(directory)} if base.seq else None


def audit_report(
    report: AuditReport, exported: wire_audit.AuditExport | None
) -> wire_audit.AuditVerification:
    chain, rows = report.chain, report.mismatches
    message = chain.message
    if chain.ok and report.anchor_problem:
        message = report.anchor_problem
    elif chain.ok and not report.ok:
        message = describe_differences(len(rows), len(report.unreadable), is_complete=report.is_complete)
    return {
        "ok": report.ok,
        "entries": chain.entries,
        "head": chain.head,
        "first_bad": chain.first_bad,
        "message": message,
        "mismatches": [
            fill(
                wire_audit.AuditMismatch,
                row.mismatch,
                restorable=row.is_restorable,
                text=describe_mismatch(row.mismatch.subject, row.mismatch.kind, row.mismatch.columns),
            )
            for row in rows
        ],
        "unreadable": list(report.unreadable),
        "compared": report.compared,
        "exported": exported,
    }
