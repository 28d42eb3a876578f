"""Give your package another name: rename its folder, and change each mention of it in
the repository.

python scripts/rename.py my_project

A mention is an import, a dotted path, a path of a file, or a string in quotes that is
the name. The word in a sentence, as a key, as an index or as a variable stays. So do
lightbase/, CHANGELOG.md, logs/, data/, and the files that git ignores. The program git
has to be installed. `mention` has the rules.
"""

import importlib.util
import keyword
import re
import subprocess
from pathlib import Path

from lightbase.commands.flags import Parser
from lightbase.commands.script import short_errors
from lightbase.config.errors import UserError
from lightbase.config.paths import PROJECT

SKIPPED = ("lightbase", "CHANGELOG.md", "logs", "data")
"""Paths in which the name stays."""


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("name", help="the new name")
    old = PROJECT.package
    with short_errors():
        new = parser.parse_args().name
        check_name(new)
        pattern = mention(old)
        for path in files_with(old):
            # bytes, because text would lose the line ends of the file
            path.write_bytes(pattern.sub(new.encode(), path.read_bytes()))
        (PROJECT.root / old).rename(PROJECT.root / new)
    print(f"{old} is {new} now: the folder, and its mentions in files (see git diff)")
    print(
        f"next: pip uninstall -y {old} && pip install -e . && ruff check --fix && "
        "ruff format"
    )


def check_name(name: str) -> None:
    """Raise UserError if the name cannot be the name of a new package."""
    if (
        not name.isidentifier()
        or keyword.iskeyword(name)
        or (PROJECT.root / name).exists()
        or importlib.util.find_spec(name)
    ):
        problem = f"{name!r} cannot name a package"
        way_out = "take letters, digits and _, and no name of a folder or a module"
        raise UserError(problem, way_out, 2)


def files_with(name: str) -> list[Path]:
    """Return the text files with the name, but for SKIPPED and files that git
    ignores."""
    git = ["git", "grep", "--no-index", "--exclude-standard", "-Ilzw"]
    excluded = [f":!{path}" for path in SKIPPED]
    command = [*git, name, "--", *excluded]
    done = subprocess.run(command, cwd=PROJECT.root, check=True, stdout=subprocess.PIPE)
    return [PROJECT.root / path for path in done.stdout.decode().split("\0") if path]


def mention(name: str) -> re.Pattern[bytes]:
    """Return a pattern that finds the name where it means the package.

    Its alternatives are: from NAME import; import NAME; a dotted path, NAME.module or
    NAME.new.Class; a path of a file, NAME/; and a string in quotes that is the name,
    also with an end such as .* or [extra], but no key or index.
    """
    modules = "|".join(path.stem for path in (PROJECT.root / name).iterdir())
    pattern = rf"""(?<=\bfrom\ ){name}(?=\ import\b)
        | (?<=\bimport\ ){name}\b
        | (?<![\w./\\$~-]){name}(?=\\?\.(?:(?:{modules})\b|\w+\.[A-Z]))
        | (?:(?<![\w./\\$~-])|(?<=\./)|(?<=\}}/)){name}(?=/)
        | (?<=["'`])(?<![\w)\]]\[.){name}
          (?=(?:\.?\*|\[[\w,-]+\])?["'`])(?!["']\ *:\ *\S)"""
    return re.compile(pattern.encode(), re.VERBOSE)


if __name__ == "__main__":
    main()
