"""`make docs`: writes the tables of keys into the documents, from the types."""

from __future__ import annotations

from pathlib import Path

from rolloutd import planfile, settings
from rolloutd.planfile.reference import BEGIN, END, reference

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write both references anew."""
    for name, schema in (("plan-file.md", planfile.schema()), ("settings.md", settings.schema())):
        text = (DOCS / name).read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        (DOCS / name).write_text(before + reference(schema) + after)


if __name__ == "__main__":
    main()
