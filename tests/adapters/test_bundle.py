"""A work tree is packed as git tells, or not at all: what git ignores may be secret."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tpucare.adapters.runner import bundle
from tpucare.model.errors import ConfigError


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
    monkeypatch.setattr(bundle, "GIT_INHERITS", (*bundle.GIT_INHERITS, "GIT_TEST_ASSUME_DIFFERENT_OWNER"))
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


# --- a repository that wants to run something -------------------------------------------------------------------------


@pytest.fixture
def proof(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Is there once something of *repo* was run; all that it has is committed."""
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "first")
    return tmp_path_factory.mktemp("proof") / "executed"


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def test_a_command_in_the_config_of_a_repository_is_not_run(repo: Path, proof: Path) -> None:
    """
    `git ls-files` in a `workdir` ran commands that the repository's config names. No command of that config is run.
    """
    git(repo, "config", "core.fsmonitor", f"env > {proof}; false")
    assert bundle._names(repo) == [".gitignore", "train.py"]
    assert not proof.exists()


def test_a_bare_repository_in_a_plain_clone_is_not_obeyed(
    repo: Path, proof: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = repo / "job"
    for name in ("objects", "refs/heads"):
        (job / name).mkdir(parents=True)
        (job / name / ".keep").touch()
    (job / "HEAD").write_text("ref: refs/heads/main\n")
    config = f'[core]\nrepositoryformatversion = 0\nbare = false\nworktree = .\nfsmonitor = "env > {proof}; false"\n'
    (job / "config").write_text(config)
    git(repo, "add", "-f", "job")
    git(repo, "commit", "-qm", "second")
    clone = tmp_path_factory.mktemp("clone") / "here"
    git(repo, "clone", "-q", str(repo), str(clone))
    with pytest.raises(ConfigError, match="bare repository"):
        bundle.pack(str(clone / "job"))
    assert not proof.exists()


def test_an_object_that_is_missing_is_not_fetched(repo: Path, proof: Path) -> None:
    """
    In a partial clone git would fetch `.gitignore` to read it, and the address of its remote may be a command; where
    the fetch failed, the files that it hides were sent. Nothing is fetched, and any complaint of git refuses the
    folder.
    """
    git(repo, "update-index", "--skip-worktree", ".gitignore")
    (repo / ".gitignore").unlink()
    name = git(repo, "rev-parse", ":.gitignore")
    (repo / ".git/objects" / name[:2] / name[2:]).unlink()
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::touch {proof}",
        "protocol.allow": "always",
        "protocol.ext.allow": "always",
    }.items():
        git(repo, "config", key, value)
    with pytest.raises(ConfigError, match="git cannot list its files"):
        bundle.pack(str(repo))
    assert not proof.exists()


def test_git_is_given_no_secret_of_the_daemon(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "git").write_text("#!/bin/sh\nexport -p >&2; exit 1\n")
    (repo / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(repo))
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    with pytest.raises(ConfigError, match="GIT_ALLOW_PROTOCOL") as refused:
        bundle.pack(str(repo))
    assert "WANDB" not in str(refused.value)
