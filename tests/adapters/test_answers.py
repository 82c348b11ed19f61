"""What workers answer, as it comes: with greetings before it, and from shells that say something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.bench_worker import node
from tpucare.adapters.runner import answers
from tpucare.model.resources import Job, Ran

GREETING = b"Welcome to TPU land\n\nstarted is what this is not\n"


@pytest.mark.parametrize("said", [b"started\n", b"alive\n", b"over", b"started\r\n\n"])
@pytest.mark.parametrize("before", [b"", GREETING], ids=["bare", "greeted"])
def test_the_last_line_tells_of_a_start(before: bytes, said: bytes) -> None:
    assert answers.read_start(Ran(0, before + said, b""), "w") is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (GREETING + b"busy pod-0-a1.4\n", "run pod-0-a1.4 lives there"),
        (GREETING + b"silent no python\n", "the runner did not start: no python"),
        (b"started\nlogout\n", "unknown answer 'logout'"),
        (b"", "unknown answer ''"),
    ],
)
def test_what_is_in_the_way_is_told_behind_a_greeting_too(said: bytes, words: str) -> None:
    assert words in str(answers.read_start(Ran(0, said, b""), "w"))


@pytest.mark.machines
def test_a_worker_whose_shell_greets_is_launched_on(tmp_path: Path) -> None:
    """What BASH_ENV names is read before the command, as ~/.bashrc is by a bash that sshd started."""
    greeting = tmp_path / "greeting"
    greeting.write_text("[ -n \"$TPUCARE_RUN\" ] || echo 'Welcome to TPU land'\n")
    with node(BASH_ENV=str(greeting)) as made:
        result = made.launch(Job(run="echo here"))
        assert result.complete, result
        assert made.ended().exit_status == 0
        assert "here" in made.log()
        assert made.stop().quiet


NOWHERE = """\
Warning: Permanently added 'github.com' (ED25519) to the list of known hosts.
fatal: '/home/me/nowhere.git' does not appear to be a git repository
fatal: Could not read from remote repository.

Please make sure you have the correct access rights
and the repository exists.
"""
ASK = " (private? name GIT_TOKEN or GIT_SSH_KEY in job.secrets)"


@pytest.mark.parametrize(
    ("stderr", "secrets", "text"),
    [
        (NOWHERE, (), f"'/home/me/nowhere.git' does not appear to be a git repository{ASK}"),
        (NOWHERE, ("GIT_TOKEN",), "'/home/me/nowhere.git' does not appear to be a git repository"),
        ("remote: Repository not found.\nfatal: repository 'x' not found\n", (), f"Repository not found.{ASK}"),
        (
            "git@h: Permission denied (publickey).\nfatal: Could not\n",
            (),
            f"git@h: Permission denied (publickey).{ASK}",
        ),
        ("https://h/x has no branch or tag named b\n", (), "https://h/x has no branch or tag named b"),
        ("", (), "git ended with status 81"),
    ],
)
def test_of_git_the_first_line_that_says_it_is_told(stderr: str, secrets: tuple[str, ...], text: str) -> None:
    assert answers.git_failed(Ran(81, b"", stderr.encode()), secrets) == text
