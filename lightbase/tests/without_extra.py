"""Takes an extra out of a copy of the library, as a user would by hand.

As a program it imports the tests that are left in the copy and trains:
`python without_extra.py FOLDER` writes the run below FOLDER.
"""

import ast
import importlib
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
OTHER_TESTS = {
    "dry_run": ["test_checks.py", "test_splits.py"],
    "environment": ["test_commit.py"],
    "figures": ["test_prediction_figures.py"],
    "report": ["test_report.py", "test_statistics.py"],
    "stop_on_nan": ["test_finite.py"],
}
"""The tests of the extras whose name does not tell it."""
RESULTS = ast.Return | ast.Yield | ast.YieldFrom
BLOCKS = ast.FunctionDef | ast.If | ast.For | ast.While | ast.With


class Prune(ast.NodeTransformer):
    """Leaves out what mentions something that is gone: names in imports, elements of
    lists, pairs of dicts, and statements. A function that loses a `return` or a `yield`,
    or all of its statements, is left out, too.

    gone: Modules and module-level names that are gone, such as "lightbase.watch.x".
    names: Names in this file that are gone.
    """

    def __init__(self, gone: set[str]) -> None:
        self.gone = gone
        self.names: set[str] = set()

    def mentions(self, node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self.names:
                return True
            is_text = isinstance(part, ast.Constant)  # as of modules in `__init__.py`
            if is_text and f"lightbase.{part.value}" in self.gone:
                return True
        return False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        for alias in [*node.names]:
            if {node.module, f"{node.module}.{alias.name}"} & self.gone:
                node.names.remove(alias)
                self.names.add(alias.asname or alias.name)
        return node if node.names else None

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [element for element in node.elts if not self.mentions(element)]
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        pairs = zip(node.keys, node.values, strict=True)
        kept = [pair for pair in pairs if not self.mentions(ast.List([*pair]))]
        node.keys = [key for key, _ in kept]
        node.values = [value for _, value in kept]
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> ast.AST | None:
        num_results = count_results(node)
        pruned: ast.AST | None = super().visit(node)
        if not isinstance(pruned, ast.stmt):
            return pruned
        is_function = isinstance(pruned, ast.FunctionDef)
        is_changed = is_function and count_results(pruned) < num_results
        is_empty = isinstance(pruned, BLOCKS) and not pruned.body
        if not (is_changed or is_empty or self.mentions(pruned)):
            return pruned
        if is_function:
            self.names.add(pruned.name)
        elif isinstance(pruned, ast.Assign):
            self.names |= {x.id for x in pruned.targets if isinstance(x, ast.Name)}
        return None


def count_results(node: ast.AST) -> int:
    return sum(isinstance(part, RESULTS) for part in ast.walk(node))


def delete_extra(library: Path, name: str) -> None:
    """Delete the file of an extra, its command, its scripts and its tests. Take what
    mentions it out of commands/ and `__init__.py`."""
    tests = OTHER_TESTS.get(name, [f"test_{name}.py"])
    files = [f"watch/{name}.py", f"commands/{name}.py", f"tests/scripts/{name}.py"]
    for file in [*files, *(f"tests/{test}" for test in tests)]:
        (library / file).unlink(missing_ok=True)
    gone = {f"lightbase.watch.{name}", f"lightbase.commands.{name}"}
    changed = [*library.glob("__init__.py*"), *library.glob("com*/*.py")]
    prunes = {path: Prune(gone) for path in changed}
    num_before = 0
    while len(gone) > num_before:
        num_before = len(gone)
        for path, prune in prunes.items():
            tree = prune.visit(ast.parse(path.read_text()))
            path.write_text(ast.unparse(tree))
            gone |= {f"lightbase.commands.{path.stem}.{x}" for x in prune.names}


if __name__ == "__main__":
    for path in sorted(HERE.rglob("test_*.py")):
        if path.parent.name != "template":
            sys.path.append(str(path.parent))
            importlib.import_module(path.stem)
    script = str(HERE / "scripts" / "train.py")
    config = ["--config", str(HERE / "tiny.yaml"), "--trainer.max_epochs", "1"]
    sys.argv = [script, *config, "--trainer.default_root_dir", sys.argv[1]]
    runpy.run_path(script, run_name="__main__")
