"""The tables of keys in the documents, written from the types: `make docs`."""

from __future__ import annotations

from pathlib import Path

from rolloutd import planfile, settings
from tests.docs.reference_tables import BEGIN, END, render_reference

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Rewrite both references."""
    for name, schema in (("plan-file.md", planfile.schema()), ("settings.md", settings.schema())):
        text = (DOCS / name).read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        (DOCS / name).write_text(before + render_reference(schema) + after)


if __name__ == "__main__":
    main()
