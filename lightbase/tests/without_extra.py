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
    "figures": ["test_prediction_figures.py", "test_report.py"],
    "step_timer": ["test_step_timer.py", "test_advice.py"],
}
"""The tests of the extras whose name does not tell it."""


class Prune(ast.NodeTransformer):
    """Leaves out what mentions one of `names`: elements of lists, pairs of dicts and
    statements. A function that loses a `return`, or all of its statements, is left out,
    too, and its name is added to `names`.

    gone: The names that are missing in each module, None for a missing module.
    """

    def __init__(self, gone: dict[str, set[str] | None]) -> None:
        self.gone = gone
        self.names: set[str] = set()
        modules = [name for name, names in gone.items() if names is None]
        self.modules = {name.removeprefix("lightbase.") for name in modules}

    def mentions(self, node: ast.AST | None) -> bool:
        for part in ast.walk(node or ast.Pass()):
            if isinstance(part, ast.Name) and part.id in self.names:
                return True
            if isinstance(part, ast.Constant) and part.value in self.modules:
                return True
        return False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        kept = []
        for alias in node.names:
            is_module = self.gone.get(f"{node.module}.{alias.name}", {}) is None
            missing = self.gone.get(node.module or "", set())
            if is_module or missing is None or alias.name in missing:
                self.names.add(alias.asname or alias.name)
            else:
                kept.append(alias)
        node.names = kept
        return node if kept else None

    def visit_List(self, node: ast.List | ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        node.elts = [element for element in node.elts if not self.mentions(element)]
        return node

    visit_Tuple = visit_List  # noqa: N815  # the name that ast looks for

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        pairs = list(zip(node.keys, node.values, strict=True))
        kept = [
            (key, value)
            for key, value in pairs
            if not self.mentions(key) and not self.mentions(value)
        ]
        node.keys = [key for key, _ in kept]
        node.values = [value for _, value in kept]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        names = set(self.names)
        num_returns = count_returns(node)
        self.generic_visit(node)
        is_header_gone = any(map(self.mentions, [node.args, *node.decorator_list]))
        self.names = names
        is_empty = all(isinstance(x, ast.Expr) and is_text(x) for x in node.body)
        if is_empty or is_header_gone or count_returns(node) < num_returns:
            self.names.add(node.name)
            return None
        return node

    def visit(self, node: ast.AST) -> ast.AST | None:
        pruned: ast.AST | None = super().visit(node)
        if pruned is None or not isinstance(pruned, ast.stmt):
            return pruned
        is_block = isinstance(pruned, ast.FunctionDef | ast.ClassDef)
        if is_block or not self.mentions(pruned):
            return pruned if getattr(pruned, "body", True) else None
        if isinstance(pruned, ast.Assign):
            self.names |= {x.id for x in pruned.targets if isinstance(x, ast.Name)}
        return None


def is_text(statement: ast.Expr) -> bool:
    return isinstance(statement.value, ast.Constant)


def count_returns(node: ast.AST) -> int:
    return sum(isinstance(part, ast.Return) for part in ast.walk(node))


def delete_extra(library: Path, name: str) -> None:
    """Delete the file of an extra, its command, its scripts and its tests. Take what
    mentions it out of commands/ and `__init__.py`."""
    tests = OTHER_TESTS.get(name, [f"test_{name}.py"])
    (library / "extras" / f"{name}.py").unlink()
    (library / "commands" / f"{name}.py").unlink(missing_ok=True)
    for path in (f"scripts/{name}.py", *tests):
        (library / "tests" / path).unlink(missing_ok=True)
    gone: dict[str, set[str] | None] = {}
    gone |= {f"lightbase.{floor}.{name}": None for floor in ("extras", "commands")}
    num_gone = -1
    while num_gone < sum(len(names or ()) for names in gone.values()):
        num_gone = sum(len(names or ()) for names in gone.values())
        for path in [library / "__init__.py", *(library / "commands").glob("*.py")]:
            prune = Prune(gone)
            prune.names |= gone.get(f"lightbase.commands.{path.stem}") or set()
            tree = prune.visit(ast.parse(path.read_text()))
            path.write_text(ast.unparse(tree))
            gone[f"lightbase.commands.{path.stem}"] = prune.names


if __name__ == "__main__":
    for path in sorted(HERE.rglob("test_*.py")):
        if path.parent.name != "template":
            sys.path.append(str(path.parent))
            importlib.import_module(path.stem)
    script = str(HERE / "scripts" / "train.py")
    config = ["--config", str(HERE / "tiny.yaml"), "--trainer.max_epochs", "1"]
    sys.argv = [script, *config, "--trainer.default_root_dir", sys.argv[1]]
    runpy.run_path(script, run_name="__main__")
