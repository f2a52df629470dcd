"""The tables in the documents, written from the types and the routes: `make docs`."""

from __future__ import annotations

from pathlib import Path

from rolloutd import planfile, settings
from rolloutd.control.route_table import ROUTES
from rolloutd.planfile import manifest
from tests.docs.reference_tables import (
    AWX_BEGIN,
    AWX_END,
    BEGIN,
    END,
    ROLES_BEGIN,
    ROLES_END,
    render_awx_rights,
    render_reference,
    render_roles,
)

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Rewrite the tables."""
    replace_table("plan-file.md", BEGIN, END, render_reference(planfile.schema()))
    replace_table(
        "settings.md", BEGIN, END, render_reference(settings.schema(), planfile.schema(), "plan-file.md")
    )
    replace_table("artifacts.md", BEGIN, END, render_reference(manifest.schema()))
    replace_table("awx.md", AWX_BEGIN, AWX_END, render_awx_rights())
    replace_table("api.md", ROLES_BEGIN, ROLES_END, render_roles(ROUTES))


def replace_table(name: str, begin: str, end: str, table: str) -> None:
    text = (DOCS / name).read_text()
    (DOCS / name).write_text(text.split(begin)[0] + table + text.split(end)[1])


if __name__ == "__main__":
    main()
