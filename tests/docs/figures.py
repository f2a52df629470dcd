"""The size of the product's code as a table: `make figures`.

With directories as arguments it prints one column for each, for a comparison.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("machines", "rolloutd", "tui")

BLOCK_LINES = 6
"""Equal lines in sequence that count as a duplicated block; imports and blank lines do not count."""


def main() -> None:
    """Print the figures of this checkout, or of the given directories."""
    roots = [Path(each) for each in sys.argv[1:]] or [ROOT]
    columns = [measure(root) for root in roots]
    for name in columns[0]:
        print(f"{name:<46}" + "".join(f"{column[name]:>12}" for column in columns))


def measure(root: Path) -> dict[str, str]:
    """Return the figures of one checkout, by name."""
    paths = [path for place in PRODUCT for path in sorted((root / place).rglob("*.py"))]
    texts = [path.read_text() for path in paths]
    trees = [ast.parse(text) for text in texts]
    modules = {module_name(path.relative_to(root)): tree for path, tree in zip(paths, trees, strict=True)}
    classes = {each.name: each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
    sizes = [text.count("\n") for text in texts]
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno)
    short = [node for node in functions if body_lines(node) <= 3]
    uses = Counter(name for tree in trees for name in used_names(tree))
    used_once = [node for node in short if uses[node.name] <= 1 and not node.name.startswith("__")]
    comments = sum(count_comments(text) for text in texts)
    lines = sum(sizes)
    return {
        "product lines": f"{lines:,}",
        "files": f"{len(sizes)}",
        "median file, lines": f"{statistics.median(sizes):.0f}",
        "files above 500 lines": f"{sum(size > 500 for size in sizes)}",
        "files below 60 lines": f"{sum(size < 60 for size in sizes)}",
        "functions": f"{len(functions):,}",
        "functions in 100 lines": f"{100 * len(functions) / lines:.1f}",
        "function, median lines": f"{statistics.median(lengths):.0f}",
        "function, 90th percentile": f"{lengths[int(0.9 * len(lengths))]}",
        "function, longest": f"{lengths[-1]}",
        "functions of three lines or fewer": f"{100 * len(short) / len(functions):.0f} %",
        "functions of three lines or fewer, used once": f"{100 * len(used_once) / len(functions):.0f} %",
        "duplicated blocks of six lines": f"{count_duplicates(texts)}",
        "comment lines": f"{100 * comments / lines:.1f} %",
        "longest chain of imports": f"{len(longest_import_chain(modules))}",
        "classes": f"{len(classes):,}",
        "classes with one subclass": f"{len(with_one_subclass(classes))}",
        "protocols with one implementation": f"{len(with_one_implementation(classes))}",
        "classes that are named once": f"{sum(uses[name] == 1 for name in classes)}",
    }


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def used_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name and attribute that the code reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def longest_import_chain(modules: Mapping[str, ast.Module]) -> list[str]:
    """Return the longest chain of modules of which each imports the next when it is imported."""
    imports = {name: set(imported_modules(tree, modules)) - {name} for name, tree in modules.items()}
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(imports).static_order():
        chains[name] = [name, *max((chains[each] for each in imports[name]), key=len, default=[])]
    return max(chains.values(), key=len)


def imported_modules(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield which of the modules a module imports at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name if name in modules else str(node.module) for name in names)


def base_names(definition: ast.ClassDef) -> list[str]:
    bases = [each.value if isinstance(each, ast.Subscript) else each for each in definition.bases]
    return [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in bases]


def with_one_subclass(classes: Mapping[str, ast.ClassDef]) -> list[str]:
    subclasses = Counter(base for each in classes.values() for base in base_names(each))
    return sorted(name for name in classes if subclasses[name] == 1)


def with_one_implementation(classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Return the protocols whose members one class alone has, and no protocol extends."""
    members = {name: set(member_names(each, classes)) for name, each in classes.items()}
    protocols = {name for name, each in classes.items() if "Protocol" in base_names(each)}
    subclasses = Counter(base for each in classes.values() for base in base_names(each))
    implementing = {
        name: sum(members[name] <= members[each] for each in classes.keys() - protocols) for name in protocols
    }
    return sorted(name for name, count in implementing.items() if count == 1 and not subclasses[name])


def member_names(definition: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the names of methods and attributes, also of those that the class inherits."""
    for node in ast.walk(definition):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
    for base in base_names(definition):
        if base in classes and base != definition.name:
            yield from member_names(classes[base], classes)


def count_comments(text: str) -> int:
    """Return how many comments a file has."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def count_duplicates(texts: list[str]) -> int:
    """Return how many places repeat a block of lines that stands elsewhere too."""
    blocks: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        lines = [line.strip() for line in text.splitlines()]
        code = [line for line in lines if line and not line.startswith(("import ", "from ", "#"))]
        seen = {tuple(code[start : start + BLOCK_LINES]) for start in range(len(code) - BLOCK_LINES + 1)}
        blocks.update(block for block in seen)
    return sum(count - 1 for count in blocks.values() if count > 1)


if __name__ == "__main__":
    main()
