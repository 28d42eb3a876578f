"""The folder of a run and what the run writes down about itself."""

from pathlib import Path

import pytest

from lightbase.core.errors import UserError
from lightbase.core.folder import Run


def test_versions_count_up_and_never_reuse_a_folder(tmp_path: Path) -> None:
    assert Run(tmp_path, "a").folder == tmp_path / "a" / "version_0"
    assert Run(tmp_path, "a").folder == tmp_path / "a" / "version_1"
    (tmp_path / "a" / "version_9").mkdir()
    (tmp_path / "a" / "version_x").mkdir()
    assert Run(tmp_path, "a").folder.name == "version_10"


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    first = Run(tmp_path, "a")
    with pytest.raises(UserError, match="in use"):
        Run(tmp_path, "a", first.folder)
    first.close()
    Run(tmp_path, "a", first.folder).close()
    assert not list(first.folder.iterdir())


def test_discarding_removes_what_the_run_made_and_nothing_else(tmp_path: Path) -> None:
    Run(tmp_path, "b/c").discard()
    assert not list(tmp_path.iterdir())
    kept = Run(tmp_path, "a")
    Run(tmp_path, "a").discard()
    assert kept.folder.is_dir()
