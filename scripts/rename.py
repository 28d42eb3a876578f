"""Give your package another name: its folder, and each mention of it in the repository.

python scripts/rename.py my_project
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
    pass  # it knows the folder of the repository now

SKIPPED = ("lightbase/", "CHANGELOG.md", "logs/", "data/")


def main() -> None:
    """Change the name in all files, then rename the folder, and print what is next."""
    parser = ScriptParser("rename")
    parser.add_argument("name", help="the new name")
    old = PROJECT.package
    with short_errors():
        new = parser.parse_args().name
        check_name(new)
        counts = [replace_mentions(path, old, new) for path in files()]
        (PROJECT.root / old).rename(PROJECT.root / new)
    num_files = len([num for num in counts if num])
    print(
        f"{old} is {new} now: the folder, and {sum(counts)} places in {num_files} files"
    )
    commands = ("pip install -e .", "ruff check --fix", "ruff format")
    print(f"next: pip uninstall -y {old} && {' && '.join(commands)}")


def replace_mentions(path: Path, old: str, new: str) -> int:
    """Change the name in a file. Return the number of places: 0 if it is not a text."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return 0
    text, num = mention(old, path.suffix).subn(new, text)
    if num:
        path.write_bytes(text.encode())
    return num


def check_name(name: str) -> None:
    """Raise UserError if the name cannot be the name of a new package."""
    if not re.fullmatch(r"[a-zA-Z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot name a package: take letters, digits and _", status=2
        )
    if (PROJECT.root / name).exists() or importlib.util.find_spec(name):
        raise UserError(
            f"{name!r} is taken: there is a folder or a Python module of that name",
            status=2,
        )


def files() -> list[Path]:
    """Return the files that git tracks or would add. Raise UserError outside of a
    repository."""
    git = ["git", "-C", str(PROJECT.root), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(
            f"rename.py changes what git lists: {done.stderr.strip()}", "type git init"
        )
    names = done.stdout.split("\0")[:-1]
    paths = [PROJECT.root / name for name in names if not name.startswith(SKIPPED)]
    return [path for path in paths if path.is_file()]


def mention(name: str, suffix: str) -> re.Pattern[str]:
    """Return a pattern for the name where it means the package.

    suffix: The file's: in Python, a variable of that name has other attributes than
        the package has modules.
    """
    attribute = r"[a-zA-Z_]\w*(?![\w-]*\])"  # not in the tables of TOML
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
