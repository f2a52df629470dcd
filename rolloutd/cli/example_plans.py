"""The command plan new: an example plan with its playbooks, in the current directory.

The examples and the reference playbooks are in the package, so it needs no checkout and no daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import rolloutd
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import print_line, print_message
from rolloutd.texts.formats import pluralize

PACKAGE = Path(rolloutd.__file__).parent

EXAMPLES, PLAYBOOKS = PACKAGE / "examples", PACKAGE / "playbooks"

TREE = "tree"
"""Directory of an example with what its source has besides the reference playbooks."""

PREVIEW = "preview.txt"
"""The preview that the tests expect; it is of the example's own inventory, so it is not copied."""

README = "README.md"

EXCLUDED = frozenset({"__pycache__"})


def register(group: CommandGroup) -> None:
    summary = "write an example plan with its playbooks into the current directory; without --like list them"
    parser = group.add_command("new", new, summary, formats=())
    text = "the example to copy, such as reboot"
    parser.argument("--like", metavar="EXAMPLE", text=text, choices=example_names())


def example_names() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/plan.yml"))


def example_files(name: str) -> dict[str, bytes]:
    """Return the files of an example by relative path, with the reference playbooks if its plan uses them."""
    own = dict(_read_tree(EXAMPLES / name))
    files: dict[str, bytes] = {}
    if b"path: ./playbooks" in own["plan.yml"]:
        files = {f"playbooks/{path}": content for path, content in _read_tree(PLAYBOOKS) if path != README}
    for path, content in own.items():
        if path.startswith(f"{TREE}/"):
            files[f"playbooks/{path.removeprefix(f'{TREE}/')}"] = content
        elif path != PREVIEW:
            files[path] = content
    return files


def write_example(name: str, directory: Path) -> list[Path]:
    """Write an example into a directory; raises FileExistsError before it writes if a file is there."""
    files = {directory / path: content for path, content in example_files(name).items()}
    for path in files:
        if path.exists() or path.is_symlink():
            raise FileExistsError(str(path))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as opened:
            opened.write(content)
    return list(files)


def new(call: Invocation) -> int:
    name = call.args.like
    if name is None:
        for each in example_names():
            title = (EXAMPLES / each / README).read_text(encoding="utf-8").splitlines()[0]
            print_line(title.removeprefix("# "))
        return exits.OK
    try:
        written = write_example(name, Path())
    except FileExistsError as error:
        raise exits.Exit(
            exits.REFUSED, f"{error}: it exists, and nothing was written; use an empty directory"
        ) from error
    print_message(f"{name}: {pluralize(len(written), 'file')} written; {README} says what to change")
    print_message("next: rolloutctl plan validate plan.yml, and rolloutctl plan preview plan.yml")
    return exits.OK


def _read_tree(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not EXCLUDED.intersection(path.parts):
            yield path.relative_to(directory).as_posix(), path.read_bytes()
