"""A work tree is packed as git tells, or not at all: what git ignores may be secret."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tpucare import bundle
from tpucare.errors import ConfigError


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text(".env\nbuild/\n")
    (tmp_path / ".env").write_text("TOKEN=s3cr3t")
    (tmp_path / "train.py").touch()
    (tmp_path / "build").mkdir()
    (tmp_path / "build/out.bin").touch()
    return tmp_path


def test_a_folder_below_a_work_tree_is_packed_as_git_tells(
    repo: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (repo / "src").mkdir()
    (repo / "src/model.py").touch()
    (repo / "src/.env").write_text("TOKEN=s3cr3t")
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(repo / "src")
    assert bundle._names(repo / "src") == ["model.py"]
    assert bundle._names(link) == ["model.py"]


def test_a_work_tree_of_somebody_else_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Git's own way to test this without another account.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(ConfigError, match=r"job\.workdir.*dubious ownership.*safe\.directory"):
        bundle.pack(str(repo))


def test_a_work_tree_that_git_cannot_read_is_refused(repo: Path) -> None:
    (repo / ".git/HEAD").unlink()
    with pytest.raises(ConfigError, match="not a git repository"):
        bundle.pack(str(repo))
    (repo / "src").mkdir()
    with pytest.raises(ConfigError, match="not a git repository"):
        bundle.pack(str(repo / "src"))


def test_a_work_tree_is_refused_where_git_is_not_installed(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repo))
    with pytest.raises(ConfigError, match="install it"):
        bundle.pack(str(repo))


def test_git_that_does_not_answer_is_no_reason_to_send_everything(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (repo / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(repo))
    monkeypatch.setattr(bundle, "GIT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="no answer"):
        bundle.pack(str(repo))


def test_a_folder_of_which_git_ignores_everything_is_refused(repo: Path) -> None:
    with pytest.raises(ConfigError, match="git ignores every file"):
        bundle.pack(str(repo / "build"))


def test_a_work_tree_without_files_is_an_empty_bundle(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert bundle._names(tmp_path) == []
