"""Give your package another name: its folder, and each mention of it in the repository.

python scripts/rename.py my_project
"""

import contextlib
import importlib.util
import keyword
import re
import subprocess
from pathlib import Path

from lightbase.commands.arguments import ScriptParser
from lightbase.commands.script import short_errors, starting
from lightbase.core.errors import UserError
from lightbase.core.folder import PROJECT

with starting(__file__, default_model="project.classifier.Classifier"):
    pass  # it knows the folder of the repository now

SKIPPED = ("lightbase/", "CHANGELOG.md", "logs/", "data/")


def main() -> None:
    parser = ScriptParser("rename")
    parser.add_argument("name", help="the new name")
    with short_errors():
        new = parser.parse_args().name
        check_name(new)
        old, counts = PROJECT.package, []
        for path in files():
            with contextlib.suppress(UnicodeDecodeError):
                renamed, num = mention(old, path.suffix).subn(
                    new, path.read_bytes().decode()
                )
                if num:
                    path.write_bytes(renamed.encode())
                    counts.append(num)
        (PROJECT.root / old).rename(PROJECT.root / new)
    print(
        f"{old} is {new} now: the folder, and {sum(counts)} places in {len(counts)} files"
    )
    print(
        f"next: pip uninstall -y {old} && pip install -e . && ruff check --fix && ruff format"
    )


def check_name(name: str) -> None:
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
    """The files that git tracks or would add."""
    git = ["git", "-C", str(PROJECT.root), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(
            f"rename.py changes what git lists: {done.stderr.strip()}", "type git init"
        )
    names = [
        name for name in done.stdout.split("\0")[:-1] if not name.startswith(SKIPPED)
    ]
    return [PROJECT.root / name for name in names if (PROJECT.root / name).is_file()]


def mention(name: str, suffix: str) -> re.Pattern[str]:
    """Matches the name where it means the package, in a file of this suffix."""
    modules = "|".join(re.escape(path.stem) for path in (PROJECT.root / name).iterdir())
    # in Python a variable of that name has other attributes; the second also skips
    # TOML's tables
    attribute = rf"(?:{modules})\b" if suffix == ".py" else r"[a-zA-Z_]\w*(?![\w-]*\])"
    return re.compile(
        rf"""(?<=\bfrom\ ){name}(?=\ import\b)
        | (?<=\bimport\ ){name}\b
        | (?<![\w./\\$~-]){name}(?=\\?\.{attribute})
        | (?:(?<![\w./\\$~-])|(?<=\./)|(?<=\}}/)){name}(?=/)
        | (?<=["'`])(?<![\w)\]]\[.){name}(?=(?:\.?\*|\[[\w,-]+\])?["'`])(?!["']\ *:\ *\S)""",
        re.VERBOSE,
    )


if __name__ == "__main__":
    main()
