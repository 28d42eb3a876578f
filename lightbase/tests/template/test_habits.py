"""What surrounds the template's code agrees with it: versions, pages, the checks of a
commit and of CI."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from pages import PACKAGE, REPO, commands, text_of

PAGES = [REPO / "README.md", *(REPO / "docs").glob("*.md")]


def test_the_version_is_that_of_the_citation_and_of_the_newest_release() -> None:
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version
    released = re.findall(r"^## (\d.*)$", text_of("CHANGELOG.md"), re.M)
    assert re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", released[0])


def test_two_commands_install_train_and_test_and_ci_runs_them_as_they_stand() -> None:
    _, _, start = text_of("README.md").partition("## Start\n")
    typed = commands(start.partition("## What you see\n")[0])
    assert typed[0].startswith("git clone ")
    install = [command for command in typed if command.startswith("pip install ")]
    assert install == typed[-2:]
    assert install[0].endswith(" && python scripts/train.py")
    assert install[1].endswith(" && pytest")
    lines = "sed -n '/^## Start$/,/^## What you see$/p' README.md | grep '^pip install'"
    assert lines in text_of(".ci/run")


def test_the_project_imports_public_names_only() -> None:
    for path in (REPO / PACKAGE).rglob("*.py"):
        assert not re.search(r"(from|import) lightbase\.", path.read_text()), path


def test_the_layout_names_the_scripts_and_the_pages() -> None:
    _, _, layout = text_of("README.md").partition("## Layout")
    for path in (*(REPO / "scripts").glob("*.*"), *(REPO / "docs").glob("*.md")):
        assert re.search(rf"\b{path.stem}\b", layout), path.stem


def test_the_readme_is_read_in_four_minutes_and_code_fits_into_a_window() -> None:
    without_code = re.sub(r"```.*?```", " ", text_of("README.md"), flags=re.S)
    words = [text for text in without_code.split() if re.search(r"\w", text)]
    assert len(words) <= 700
    for page in PAGES:
        for block in re.findall(r"```.*?```", page.read_text(), re.S):
            assert not re.search(".{98}", block), page.name


RESULT = r"\d+\.\d+ ± \d*\.?\d+ \((\d+) seeds\)"
"""Such as 0.871 ± 0.004 (3 seeds)."""
DIFFERENCE = r"\d\.\d+\s\(95 % confidence interval [^)]*\)"
SENTENCES, PARAGRAPHS = r"(?<=[.;:])\s+", r"\n\s*\n|\n- "


def texts_about_tests() -> dict[str, list[str]]:
    """Return {file: texts with the word "test"}. The texts are sentences of the headers
    of the YAMLs, and paragraphs of the pages of docs/tasks. Code is left out."""
    texts = {}
    for path in (REPO / "configs").glob("*.yaml"):
        header = re.match(r"(?:#.*\n)*", path.read_text())
        assert header
        texts[path.name] = re.split(SENTENCES, header[0].replace("\n#", "\n"))
    for path in (REPO / "docs" / "tasks").glob("*.md"):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        texts[path.name] = re.split(PARAGRAPHS, text)
    return {
        name: [part for part in parts if re.search(r"\btest\b", part, re.I)]
        for name, parts in texts.items()
    }


def test_a_test_number_has_its_seeds_and_its_deviation() -> None:
    for name, texts in texts_about_tests().items():
        text = "\n".join(texts)
        assert all(int(num) >= 3 for num in re.findall(RESULT, text)), name
        rest = re.sub(f"{RESULT}|{DIFFERENCE}|`[^`]*`", "", text)
        alone = re.findall(r"\d\.\d+(?! s\b)", rest)
        assert not alone, f"{name}: {alone} without seeds and deviation"


def test_links_and_pictures_are_there() -> None:
    for page in [*PAGES, *(REPO / "docs" / "tasks").glob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([\w-]*)\)", text):
            path = page.parent / (target or page.name)
            assert path.stat().st_size < 200_000, target
            heading = "# " + anchor.replace("-", r"\W+")
            if anchor:
                assert re.search(heading, path.read_text(), re.I), (target, anchor)


@pytest.mark.slow
def test_the_shipped_project_has_right_types() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", PACKAGE]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert not done.returncode, done.stdout
