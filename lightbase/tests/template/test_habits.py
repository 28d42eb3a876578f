"""What surrounds the template's code agrees with it: versions, pages, the checks of a
commit and of CI."""

import re
import tomllib

import yaml
from pages import PACKAGE, REPO, commands, text_of

PAGES = [REPO / "README.md", *(REPO / "docs").glob("*.md")]


def test_the_version_is_that_of_the_citation_and_of_the_newest_release():
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version
    released = re.findall(r"^## (\d.*)$", text_of("CHANGELOG.md"), re.M)
    assert re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", released[0])


def test_two_commands_install_train_and_test_and_ci_runs_them_as_they_stand():
    _, _, start = text_of("README.md").partition("## Start\n")
    typed = commands(start.partition("## What you see\n")[0])
    assert typed[0].startswith("git clone ")
    install = [command for command in typed if command.startswith("pip install ")]
    assert install == typed[-2:]
    assert install[0].endswith(" && python scripts/train.py")
    assert install[1].endswith(" && pytest")
    lines = "sed -n '/^## Start$/,/^## What you see$/p' README.md | grep '^pip install'"
    assert lines in text_of(".ci/run")


def test_the_project_imports_public_names_only():
    for path in (REPO / PACKAGE).rglob("*.py"):
        assert not re.search(r"(from|import) lightbase\.", path.read_text()), path


def test_links_and_pictures_are_there():
    for page in [*PAGES, *(REPO / "docs" / "tasks").glob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([\w-]*)\)", text):
            path = page.parent / (target or page.name)
            assert path.stat().st_size < 200_000, target
            heading = "# " + anchor.replace("-", r"\W+")
            if anchor:
                assert re.search(heading, path.read_text(), re.I), (target, anchor)
