"""What surrounds the template's code agrees with it: versions, pages, the checks of a commit and of
CI. Of no use in a project made from it: there these tests are skipped, or delete this file."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from pages import PACKAGE, REPO, commands

README = (REPO / "README.md").read_text() if (REPO / "README.md").exists() else ""
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.skipif(
    not README.startswith("# A PyTorch Lightning project template\n"), reason="not the template"
)


def text_of(name: str) -> str:
    return (REPO / name).read_text()


def test_the_version_is_that_of_the_citation_and_of_the_newest_release() -> None:
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == PYPROJECT["version"]
    headings = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(re.escape(PYPROJECT["version"]) + r" \(\d{4}-\d\d-\d\d\)", released[0])


def test_readme_workflow_and_container_install_as_ci_does() -> None:
    install = 'uv pip install --compile-bytecode -c constraints.txt -e ".[dev]"'
    assert install in commands(README)
    assert install in text_of(".ci/run")
    jobs = yaml.safe_load(text_of(".github/workflows/tests.yml"))["jobs"]
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert runs["linux"][-1] == "bash .ci/run"
    pip = 'pip install -c constraints.txt -e ".[dev]"'
    assert runs["macos-and-windows"][-2:] == [pip, "pytest"]
    lowest = PYPROJECT["requires-python"].removeprefix(">=")
    assert lowest in jobs["linux"]["strategy"]["matrix"]["python"]
    assert f"python:{lowest}-slim" in text_of("Dockerfile")


def test_what_the_containers_name_is_there() -> None:
    dockerfile = text_of("Dockerfile")
    for line in re.findall(r"^COPY ([^.].*) \S+$", dockerfile, re.M):
        assert all((REPO / name).exists() for name in line.split())
    text = re.sub(r"^\s*//.*", "", text_of(".devcontainer/devcontainer.json"), flags=re.M)
    container = json.loads(text)
    assert (REPO / ".devcontainer" / container["build"]["dockerfile"]).is_file()
    assert f" {container['remoteUser']}\n" in dockerfile


def test_a_commit_is_checked_as_in_ci() -> None:
    (repo,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    entries = [hook["entry"] for hook in repo["hooks"] if hook["id"] != "large"]
    assert "\n".join(entries) in text_of(".ci/run")


def test_each_package_imports_what_it_may() -> None:
    for path in (REPO / PACKAGE).rglob("*.py"):
        names = {name for name in imports(path) if name.startswith("lightbase")}
        assert names <= {"lightbase", "lightbase.data.transforms"}, path
    for path in (REPO / "lightbase").rglob("*.py"):
        assert PACKAGE not in {name.partition(".")[0] for name in imports(path)}, path


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return names | {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}


def test_the_layout_names_the_scripts_and_the_pages() -> None:
    layout = README.split("## Layout")[1]
    shipped = [path for path in (REPO / "scripts").iterdir() if path.suffix in (".py", ".sh")]
    for path in (*shipped, *(REPO / "docs").glob("*.md")):
        assert re.search(rf"\b{path.stem}\b", layout), path.stem


def test_a_shipped_config_says_how_to_run_it_and_what_to_expect() -> None:
    for config in (REPO / "configs").glob("*.yaml"):
        text = config.read_text()
        assert len(text.splitlines()) <= 35
        header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        flags = "" if config.name == "default.yaml" else f" --config configs/{config.name}"
        for word in (f"python scripts/train.py{flags}", "torch ", "2026-"):
            assert word in header, f"the header of {config.name} lacks {word!r}"
        assert re.search("accuracy|absolute error", header), config.name


def test_links_and_pictures_are_there() -> None:
    for page in [REPO / "README.md", *(REPO / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), target
            assert (page.parent / target).stat().st_size < 200_000
