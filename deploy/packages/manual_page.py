"""A man page from a command line's parser, in a process of its own.

    python -m deploy.packages.manual_page PACKAGES MODULE SECTION VERSION

It imports MODULE from the directory PACKAGES.  A module without a function `parser` has no page.
"""

from __future__ import annotations

import importlib
import sys

from argparse_manpage.manpage import Manpage


def main(packages: str, module: str, section: str, version: str) -> None:
    """Print the page."""
    sys.path.insert(0, packages)
    make_parser = getattr(importlib.import_module(module), "parser", None)
    if make_parser is None:
        return
    parser = make_parser()
    parser._manpage = [
        {"heading": "SEE ALSO", "content": "The documents in /usr/share/doc/rolloutd."},
    ]
    page = Manpage(parser)
    page.section, page.manual, page.source = section, "rolloutd", f"rolloutd {version}"
    page.description = parser.description.strip().partition("\n")[0].rstrip(".")
    sys.stdout.write(str(page))


if __name__ == "__main__":
    main(*sys.argv[1:])
