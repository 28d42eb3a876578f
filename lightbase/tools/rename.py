r"""Give the Python package another name: its folder, and every mention of it in the files of this
repository.

python scripts/rename.py my_project

A mention is
  an import       from my import models; import my
  a dotted path   my.models.mlp.MLP, in code, strings, YAML, documentation
  a path          my/models/mlp.py, ./my/, my\models
  a whole string  "my", 'my', `my`, "my*", "my[dev]"
  an argument     python -m my, --cov=my, mypy my

No mention is the word in a sentence, a part of a word or of another path, a key, an index, an
attribute, a TOML table, a variable where the package is not imported, or what ends its line with
the comment `rename: keep`. The files are those that git knows or would add, without git all but
hidden ones; never those in logs/ and data/.
"""

import ast
import contextlib
import importlib.util
import keyword
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lightbase.cli.script import ScriptParser, short_errors
from lightbase.errors import UserError
from lightbase.folder import PROJECT, write_whole

HIDDEN = re.compile(
    r"(.*/)?(\.(?!ci/|github/|devcontainer/|pre-commit)|venv/|__pycache__/|[^/]*\.egg-info/)"
)


def text_files() -> Iterator[tuple[Path, str]]:
    git, names = ["git", "-C", str(PROJECT.root), "ls-files", "-coz", "--exclude-standard"], []
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no checkout
        names = subprocess.run(git, capture_output=True, encoding="utf-8", check=True).stdout.split(
            "\0"
        )[:-1]
    if not names:
        names = [
            name
            for path in PROJECT.root.rglob("*")
            if not HIDDEN.match(name := path.relative_to(PROJECT.root).as_posix())
        ]
    for path in (
        PROJECT.root / name for name in sorted(names) if not name.startswith(("logs/", "data/"))
    ):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(UnicodeDecodeError):  # a picture
                yield path, path.read_bytes().decode()


def mention(name: str, package: Path) -> re.Pattern[str]:
    """Matches a mention, up to the end of the name."""
    modules = "|".join(re.escape(path.stem) for path in package.iterdir())
    return re.compile(
        rf"""(?<![\w.])from\s+{name}(?=\s+import\b)
        | (?<![\w.])import\s+(?:[\w.]+\s*,\s*)*{name}(?=\s+as\b|\s*(?:[,;\#)\\"'`]|$))
        | (?<![\w./\\$~-]){name}(?!\.(?:[a-z-]+\]|entry-points))(?=\\?\.[A-Za-z_])
        | (?:(?<![\w./\\$~-])|(?<=\./)|(?<=\.\\)){name}(?=/|\\{{1,2}}(?:{modules})\b)
        | (?<=["'`])(?<![\w\])]\[.)(?<!(?:get|pop)\(.)
          {name}(?=(?:\.?\*|\.|\[[\w,-]+\])?["'`])(?!["']\s*:\s*\S)
        | (?:(?<=-m\s)|(?<=--cov[=\s])|(?<=mypy\s)){name}(?![\w-])""",
        re.VERBOSE,
    )


def code_lines(text: str, name: str) -> tuple[set[int], bool]:
    """Numbers of the lines of Python whose code, not a string, uses `name`, and whether that is an
    imported package."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return set(), False
    aliases = [
        alias
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.asname
    ]
    lines = {node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == name}
    return lines, name in [alias.name.split(".")[0] for alias in aliases]


def replace(path: Path, text: str, old: str, new: str, package: Path) -> tuple[str, list[int]]:
    """The text with `new` in each mention of `old`, and the line number of each."""
    if old not in text:
        return text, []
    code, imported = code_lines(text, old) if path.suffix == ".py" else (set(), False)
    strict, loose = mention(old, package), re.compile(rf"(?<![\w.]){old}\b(?!\s*=[^=])")
    lines, places = text.split("\n"), []
    for i, line in enumerate(lines):
        if not line.rstrip().endswith("# rename: keep") and (imported or i + 1 not in code):
            lines[i], count = (loose if i + 1 in code else strict).subn(
                lambda m: m[0].removesuffix(old) + new, line
            )
            places += [i + 1] * count
    return "\n".join(lines), places


def check_name(name: str) -> None:
    if not re.fullmatch(
        r"[a-z](\w*[a-z0-9])?", name, re.ASCII | re.IGNORECASE
    ) or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot name a package: take letters, digits and _ between them", 2
        )
    patterns = (name, f"{name}.py", f"*/{name}.py")
    found = [
        path.relative_to(PROJECT.root)
        for pattern in patterns
        for path in PROJECT.root.glob(pattern)
    ]
    if found or importlib.util.find_spec(name):
        raise UserError(
            f"{name!r} is taken: there is {[*found, 'a Python module of that name'][0]}", 2
        )


def main() -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("name", help="the new name")
    with short_errors():
        new = parser.parse_args().name
        package, changed, num_places = PROJECT.root / PROJECT.package, {}, 0
        check_name(new)
        for path, text in text_files():
            if uses := replace(path, text, new, new, package)[1]:
                raise UserError(
                    f"{new!r} is taken: {path.relative_to(PROJECT.root)} uses it in line {uses[0]}",
                    2,
                )
            renamed, places = replace(path, text, package.name, new, package)
            if places:
                changed[path] = renamed, path.stat().st_mode
                num_places += len(places)
        for path, (text, mode) in changed.items():
            write_whole(path, text)
            path.chmod(mode)
        package.rename(PROJECT.root / new)
    print(
        f"{package.name} is {new} now: the folder, and {num_places} places in {len(changed)} files"
    )
    print(
        f"next: pip uninstall -y {package.name} && pip install -e . && ruff check --fix && "
        "ruff format"
    )
