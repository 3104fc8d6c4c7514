"""Which commit a report states: that of the checkout that the code is in, never another repository's."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from headstart.inference import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
WHO = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")


def git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", *WHO, *command], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit_in(package: Path) -> str:
    """What ``commit`` says where the package lies in this folder."""
    (package / "inference").mkdir(parents=True, exist_ok=True)
    file = shutil.copy(provenance.__file__, package / "inference")
    spec = importlib.util.spec_from_file_location("a_copy", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.commit()
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    made.mkdir()
    (made / ".gitignore").write_text(".venv\n__pycache__\n")
    git(made, "init", "-q")
    commit_in(made)
    git(made, "add", "-A")
    git(made, "commit", "-q", "-m", "first")
    return made


def test_a_checkout_and_a_worktree_state_their_commit(repository: Path, tmp_path: Path) -> None:
    """By whatever path: an editable install, or a link."""
    first = git(repository, "rev-parse", "HEAD")
    (tmp_path / "link").symlink_to(repository)
    assert commit_in(repository) == commit_in(tmp_path / "link") == first
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert commit_in(tmp_path / "tree") == second != first
    (repository / "benchmarks" / "results").mkdir(parents=True)
    (repository / "benchmarks" / "results" / "new.json").touch()  # a result of one benchmark changes nothing for the next
    assert commit_in(repository) == first
    (repository / "new").touch()
    assert commit_in(repository) == f"{first}-dirty"


def test_a_wheel_does_not_state_the_commit_of_the_repository_around_it(repository: Path, tmp_path: Path) -> None:
    assert commit_in(repository / ".venv" / "lib" / "python3" / "site-packages" / "headstart") == "unknown"
    assert commit_in(tmp_path / "elsewhere") == "unknown"
