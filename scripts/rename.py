"""Give your package another name: rename its folder, and change each mention of it in
the repository.

python scripts/rename.py my_project

A mention is an import, a dotted path, a path of a file, or a string that is the name.
The name as a word in a sentence stays. `mention` has the rules.
"""

import importlib.util
import keyword
import re
import subprocess
from pathlib import Path

from lightbase.commands.arguments import ScriptParser
from lightbase.commands.script import short_errors, starting
from lightbase.core.errors import UserError
from lightbase.core.project import PROJECT

with starting(__file__, default_model="project.classifier.Classifier"):
    pass  # PROJECT has the folder of the repository now

SKIPPED = ("lightbase/", "CHANGELOG.md", "logs/", "data/")
"""Beginnings of paths in which the name stays."""


def main() -> None:
    """Change the name in all files, then rename the folder. Print the number of changed
    places, and the commands to run next.

    A UserError is printed in two lines. It can only come before the first change.
    """
    parser = ScriptParser("rename")
    parser.add_argument("name", help="the new name")
    old = PROJECT.package
    with short_errors():
        new = parser.parse_args().name
        check_name(new)
        num = sum(replace_mentions(path, old, new) for path in files())
        (PROJECT.root / old).rename(PROJECT.root / new)
    print(f"{old} is {new} now: the folder, and {num} places in files")
    print(
        f"next: pip uninstall -y {old} && pip install -e . && ruff check --fix && "
        "ruff format"
    )


def replace_mentions(path: Path, old: str, new: str) -> int:
    """Change each mention of the name in a file. Return the number of changed places. A
    file that is not UTF-8, such as a picture, stays as it is.

    Bytes are read and written, because text would lose the line ends of the file.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return 0
    text, num = mention(old, path.suffix).subn(new, text)
    if num:
        path.write_bytes(text.encode())
    return num


def check_name(name: str) -> None:
    """Raise UserError if the name cannot be the name of a new package: it is no Python
    name or it is a keyword, or it is the name of a folder or of a module that Python
    can import."""
    is_name = re.fullmatch(r"[a-zA-Z]\w*", name, re.ASCII)
    if (
        not is_name
        or keyword.iskeyword(name)
        or (PROJECT.root / name).exists()
        or importlib.util.find_spec(name)
    ):
        raise UserError(
            f"{name!r} cannot name a package: take letters, digits and _, and no name "
            "of a folder or a Python module",
            status=2,
        )


def files() -> list[Path]:
    """Return the files that git tracks, and new files that it does not ignore, without
    SKIPPED. Raise UserError if the folder is no git repository."""
    git = ["git", "-C", str(PROJECT.root), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(
            f"rename.py changes what git lists: {done.stderr.strip()}", "type git init"
        )
    names = done.stdout.split("\0")
    paths = [PROJECT.root / name for name in names if not name.startswith(SKIPPED)]
    return [path for path in paths if path.is_file()]


def mention(name: str, suffix: str) -> re.Pattern[str]:
    """Return a pattern that finds the name where it means the package.

    The alternatives of the pattern are, in this order: from NAME import; import NAME; a
    dotted path, NAME.module; a path of a file, NAME/; and a string in quotes that is
    the name, also with an end such as .* or [extra]. A string is left out if it is a
    key or an index.

    name: The present name of the package. Its folder must exist.
    suffix: The suffix of the file. In a Python file a variable may have the name, too,
        and NAME.x is one of its attributes. So there x must be a module of the package.
    """
    # not followed by "]": the header of a TOML table, such as [project.scripts]
    attribute = r"[a-zA-Z_]\w*(?![\w-]*\])"
    if suffix == ".py":
        modules = [re.escape(path.stem) for path in (PROJECT.root / name).iterdir()]
        attribute = rf"(?:{'|'.join(modules)})\b"
    return re.compile(
        rf"""(?<=\bfrom\ ){name}(?=\ import\b)
        | (?<=\bimport\ ){name}\b
        | (?<![\w./\\$~-]){name}(?=\\?\.{attribute})
        | (?:(?<![\w./\\$~-])|(?<=\./)|(?<=\}}/)){name}(?=/)
        | (?<=["'`])(?<![\w)\]]\[.){name}
          (?=(?:\.?\*|\[[\w,-]+\])?["'`])(?!["']\ *:\ *\S)""",
        re.VERBOSE,
    )


if __name__ == "__main__":
    main()
