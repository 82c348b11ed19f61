"""Launch, probe and stop over a Remote: what starts, what must not, and what a cut connection leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.bench_worker import NO_METADATA, Node, eventually, node
from tests.kits.local_remote import LocalRemote
from tpucare.adapters.runner import answers, launcher, scripts
from tpucare.model.errors import AuthRefused, CommandFailed, ConfigError, HostKeyChanged, RemoteError, WorkerSilent
from tpucare.model.resources import Job, Ran, Worker
from tpucare.model.runs import Contact, Failure, LaunchResult, NoticeOrder, Phase, ProbeOrder, WorkerReport

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed"),
]

ROOT = Path(__file__).parents[2]
COUNT_STARTS = 'echo "$TPUCARE_RUN" >>"$HOME/starts"; sleep 300'


@pytest.fixture
def one() -> Iterator[Node]:
    with node() as made:
        yield made


def starts(made: Node, worker: int = 0) -> list[str]:
    path = made.homes[worker] / "starts"
    return path.read_text().split() if path.exists() else []


def content(path: Path) -> bytes:
    """Nothing, of a file or process that went since it was listed."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_fresh_worker_says_so(one: Node) -> None:
    report = one.probe()
    assert (report.contact, report.token, report.alive, report.phase) == (Contact.ANSWERED, "", False, Phase.NONE)
    assert report.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert one.stop().quiet


def test_the_run_lives_in_a_screen_session_of_its_slot(one: Node) -> None:
    one.start("sleep 300")
    sockets = [path.name for path in (one.homes[0].parent / "s").iterdir()]
    assert [name.partition(".")[2] for name in sockets] == [f"tpucare-{one.slot}"]


def test_without_screen_the_run_starts_all_the_same(tmp_path: Path) -> None:
    # A socket path of more than 108 bytes: screen starts nothing and exits 0.
    deep = tmp_path / ("d" * 120)
    deep.mkdir(mode=0o700)
    with node() as made:
        made.remote._env["SCREENDIR"] = str(deep)
        made.start("true")
        assert made.ended().exit_status == 0


def test_the_same_token_again_leaves_the_run_alone(one: Node) -> None:
    for _ in range(2):
        one.start(COUNT_STARTS)
    eventually(lambda: starts(one))
    assert one.stop().quiet
    assert starts(one) == [one.token()]


def test_another_token_is_refused_while_a_run_lives(one: Node) -> None:
    one.start(COUNT_STARTS)
    (error,) = one.launch(Job(run=COUNT_STARTS), 2).workers
    assert isinstance(error, CommandFailed)
    assert one.token() in str(error)
    assert one.probe().token == one.token()
    assert one.stop().quiet
    one.start("true", 3)
    assert one.ended().last_number == 3


def test_a_run_that_was_stopped_before_it_began_never_begins(one: Node) -> None:
    """
    A launch that arrived after the stop of its run would have started the run again. A stop leaves a tombstone for the
    token, and a relaunch takes a new run number.
    """
    order = one.order(Job(run=COUNT_STARTS))
    push = scripts.launch_command(order, 0, push=True)
    assert one.remote.run(one.workers[0], push, stdin=launcher.payload_of(order, {}).full).exit_status == 0
    assert one.stop().quiet
    (error,) = one.launch(Job(run=COUNT_STARTS)).workers
    assert "stopped" in str(error)
    assert starts(one) == []


@pytest.mark.parametrize("numbers", [(1, 2), (1, 1)], ids=["two runs", "the same run"])
def test_two_launches_race(one: Node, numbers: tuple[int, int]) -> None:
    results: list[LaunchResult] = []
    threads = [
        threading.Thread(target=lambda n=number: results.append(one.launch(Job(run=COUNT_STARTS), n)))
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result.complete for result in results) == (1 if numbers[0] != numbers[1] else 2), results
    eventually(lambda: starts(one))
    assert one.stop().quiet
    assert len(starts(one)) == 1


class Cut(LocalRemote):
    """The connection of the next command is cut: after some bytes of its input, or when it ran for some time."""

    after_bytes: int | None = None
    after_seconds: float | None = None

    def run(self, worker: Worker, command: str, *, stdin: bytes = b"", **more: timedelta | int) -> Ran:
        bytes_left, seconds = self.after_bytes, self.after_seconds
        self.after_bytes = self.after_seconds = None
        if bytes_left is not None:
            stdin = stdin[:bytes_left]
        if seconds is not None:
            command = f"timeout -s KILL {seconds} bash -c {shlex.quote(command)}"
        ran = super().run(worker, command, stdin=stdin, **more)  # type: ignore[arg-type]
        if bytes_left is not None or seconds is not None:
            raise WorkerSilent("cut")
        return ran


@pytest.fixture
def cut() -> Iterator[tuple[Cut, Node]]:
    remote = Cut(env=NO_METADATA)
    try:
        yield remote, Node(remote, 1, {})
    finally:
        remote.close()


def test_a_push_that_is_cut_leaves_nothing_that_matters(cut: tuple[Cut, Node]) -> None:
    remote, made = cut
    job = Job(run=COUNT_STARTS, files={"big": b"x" * 5000})
    whole = len(launcher.payload_of(made.order(job), {}).full)
    for remote.after_bytes in (0, 700, 1024, whole // 2 // 512 * 512, whole - 10240, whole - 10240 + 512):
        assert isinstance(made.launch(job).workers[0], WorkerSilent)
        assert not made.folder().exists()
        assert made.probe().token == ""
    assert made.launch(job).complete
    eventually(lambda: starts(made))
    assert made.stop().quiet
    assert starts(made) == [made.token()]


@pytest.mark.parametrize("seconds", [0.005, 0.01, 0.02, 0.03, 0.05, 0.08])
def test_a_launch_that_is_killed_at_any_step_can_be_said_again(cut: tuple[Cut, Node], seconds: float) -> None:
    remote, made = cut
    remote.after_seconds = seconds
    made.launch(Job(run=COUNT_STARTS))
    assert made.launch(Job(run=COUNT_STARTS)).complete
    eventually(lambda: starts(made))
    assert made.stop().quiet
    assert starts(made) == [made.token()]


def test_a_stop_that_is_cut_is_brought_to_its_end(cut: tuple[Cut, Node]) -> None:
    remote, made = cut
    made.start(COUNT_STARTS)
    remote.after_seconds = 0.1
    made.stop()
    assert made.stop().quiet


def test_secrets_are_in_one_file_and_in_the_run_alone() -> None:
    value = "s3cr3t'\"$HOME\nsecond line"
    with node(secrets={"KEY": value}) as made:
        check = f"[ ${{#KEY}} = {len(value)} ] && echo same; sleep 300"
        job = Job(run="bash check.sh", files={"check.sh": check.encode()}, secrets=("KEY",))
        assert made.launch(job).complete
        eventually(lambda: "same" in made.log())
        home = made.homes[0] / ".tpucare"
        holders = [path for path in home.rglob("*") if path.is_file() and b"s3cr3t" in content(path)]
        assert holders == [made.folder() / "env"]
        assert (made.folder() / "env").stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700
        lines = [content(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert any(b"check.sh" in line for line in lines), "those of the run are among them"
        assert not [line for line in lines if b"s3cr3t" in line]
        assert "s3cr3t" not in made.log()


def test_a_missing_secret_is_named_and_nothing_starts(one: Node) -> None:
    result = one.launch(Job(run=COUNT_STARTS, secrets=("WANDB_API_KEY",)))
    (error,) = result.workers
    assert isinstance(error, ConfigError)
    assert "WANDB_API_KEY" in str(error)
    assert not (one.homes[0] / ".tpucare").exists()


# --- code ---


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repo with space"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    commit(path, "first")
    return path


def git(path: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *identity, *arguments], cwd=path, check=True, capture_output=True, text=True).stdout


def commit(path: Path, text: str) -> str:
    (path / "version").write_text(text)
    git(path, "add", "version")
    git(path, "commit", "-q", "-m", text)
    return git(path, "rev-parse", "HEAD").strip()


def test_every_worker_of_a_gang_gets_the_commit_that_the_branch_had(repository: Path) -> None:
    with node(2) as made:
        job = Job(run='cat version; echo; echo "$TPUCARE_COMMIT"', repository=str(repository), branch="main")
        head = git(repository, "rev-parse", "HEAD").strip()
        assert made.launch(job).complete
        for worker in (0, 1):
            assert made.ended(worker).exit_status == 0
            assert f"first\n{head}" in made.log(worker)
        head = commit(repository, "second")
        assert made.launch(job, 2).complete
        assert made.ended().exit_status == 0
        assert f"second\n{head}" in made.log()


def test_follow_takes_the_branch_as_it_is(one: Node, repository: Path) -> None:
    assert one.launch(Job(run="cat version", repository=str(repository), follow=True)).complete
    assert one.ended().exit_status == 0
    assert "first" in one.log()


def test_a_branch_that_is_not_there_is_a_failed_fetch(repository: Path) -> None:
    with node(2) as made:
        assert made.launch(Job(run="true", repository=str(repository), branch="nope")).complete
        for worker in (0, 1):
            report = made.ended(worker)
            assert (report.exit_status, report.failure) == (1, Failure.FETCH)
            assert "no branch or tag named nope" in report.detail


def test_no_worker_of_a_gang_starts_when_one_is_out_of_reach(repository: Path) -> None:
    with node(3) as made:
        made.remote.silence(made.workers[2])
        result = made.launch(Job(run=COUNT_STARTS, repository=str(repository)))
        assert [type(error) for error in result.workers] == [CommandFailed, CommandFailed, WorkerSilent]
        assert not made.probe().alive


def test_a_local_folder_is_sent_and_what_left_it_leaves_the_worker(one: Node, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "old name").write_text("old")
    (folder / "pkg/run.sh").write_text("ls; echo made >output; exit 0")
    assert one.launch(Job(run="bash pkg/run.sh", workdir=str(folder))).complete
    assert one.ended().exit_status == 0
    (folder / "old name").rename(folder / "new name")
    assert one.launch(Job(run="bash pkg/run.sh", workdir=str(folder)), 2).complete
    assert one.ended().last_number == 2
    assert {path.name for path in (one.homes[0] / ".tpucare/work").iterdir()} == {"new name", "pkg", "output"}
    # A third launch of the same content sends no bundle; a worker that lost it asks for it.
    for bundle in (one.homes[0] / ".tpucare").glob("bundle.*"):
        bundle.unlink()
    assert one.launch(Job(run="cat 'new name'", workdir=str(folder)), 3).complete
    assert one.ended().exit_status == 0


def replace_code(folder: Path, files: dict[str, str]) -> Job:
    """A job of *folder* with just these files; a text that begins with -> is a link."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in {"run.sh": "true", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            (folder / name).symlink_to(text[2:])
        else:
            (folder / name).write_text(text)
    return Job(run="bash run.sh", workdir=str(folder))


@pytest.mark.parametrize(
    ("before", "made", "after", "kept"),
    [
        ({"mod/a.py": "1"}, "mkdir -p mod/__pycache__; echo 1 >mod/__pycache__/a.pyc", {"mod": "2"}, "mod.before-1"),
        ({}, "mkdir -p out/7; echo saved >out/7/model", {"out": "->/tmp"}, "out.before-1"),
        ({}, "echo made >out", {"out/deep/a": "2"}, "out.before-1"),
        ({"mod/deep/a.py": "1"}, "mkdir mod.before-1; touch mod/mine", {"mod": "2"}, "mod.before-2"),
        ({"mod/a.py": "1"}, "mkdir mod/mine; touch mod/mine/b", {"mod/mine/b": "2"}, ""),
        ({"mod/a.py": "1"}, "", {"mod": "2"}, ""),
    ],
    ids=["file for folder", "link for folder", "folder for file", "the name is taken", "the same", "an empty folder"],
)
def test_what_a_job_made_where_new_code_comes_is_kept_and_in_nobodys_way(
    one: Node, tmp_path: Path, before: dict[str, str], made: str, after: dict[str, str], kept: str
) -> None:
    work, folder = one.homes[0] / ".tpucare/work", tmp_path / "code"
    for number, (files, run) in enumerate([(before, made or "true"), (after, "true")], 1):
        assert one.launch(replace_code(folder, {**files, "run.sh": run}), number).complete
        report = one.ended()
        assert (report.last_number, report.exit_status) == (number, 0), one.log()
    for name, text in after.items():
        path = work / name
        assert (f"->{path.readlink()}" if path.is_symlink() else path.read_text()) == text
    assert (f"renamed to {kept}\n" in one.log()) == bool(kept)
    assert not kept or (work / kept).exists()
    assert [path.name for path in work.glob("*.before-*") if path.name > (kept or "")] == []


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_name_of_any_letters_leaves_the_worker_with_its_file(tmp_path: Path, locale: str) -> None:
    gone = ["é 'x'.py", "a\\303.py", "tab\there", "-dash"]
    with node(LC_ALL=locale) as made:
        folder = tmp_path / "code"
        assert made.launch(replace_code(folder, {**dict.fromkeys(gone, "1"), "é/ü": "1"})).complete
        made.ended()
        assert {*gone, "é"} < set(os.listdir(made.homes[0] / ".tpucare/work"))
        assert made.launch(replace_code(folder, {"é/ü": "2", "link": "->/tmp"}), 2).complete
        assert made.ended().last_number == 2
        assert sorted(os.listdir(made.homes[0] / ".tpucare/work")) == ["link", "run.sh", "é"]
        assert made.launch(replace_code(folder, {"é/ü": "3"}), 3).complete
        assert made.ended().last_number == 3
        assert sorted(os.listdir(made.homes[0] / ".tpucare/work")) == ["run.sh", "é"]


def test_a_folder_that_is_too_large_names_its_largest_files(one: Node, tmp_path: Path) -> None:
    with (tmp_path / "huge.bin").open("wb") as stream:
        stream.truncate(300 << 20)
    (error,) = one.launch(Job(run="true", workdir=str(tmp_path))).workers
    assert isinstance(error, ConfigError)
    assert "huge.bin" in str(error)


# --- probes ---


@pytest.mark.parametrize(
    ("error", "contact"),
    [
        (WorkerSilent("x"), Contact.SILENT),
        (AuthRefused("x"), Contact.AUTH_REFUSED),
        (HostKeyChanged("x"), Contact.HOST_KEY_CHANGED),
    ],
)
def test_a_worker_out_of_reach_is_part_of_the_report(error: RemoteError, contact: Contact) -> None:
    with node(2) as made:
        made.remote.fail(made.workers[1], error)
        report = made.launcher.probe(ProbeOrder(made.workers, made.slot, 1))
        assert [worker.contact for worker in report.workers] == [Contact.ANSWERED, contact]


def test_a_worker_that_talks_nonsense_has_not_said_that_it_is_free(one: Node) -> None:
    one.start("true")
    one.ended()
    (tools,) = (one.homes[0] / ".tpucare").glob("*/tools-*")
    (tools / "probe.py").write_text("def main(arguments): print('[1, 2')")
    assert one.probe().contact is Contact.SILENT


def test_tools_of_another_version_are_replaced(one: Node) -> None:
    one.start("sleep 300")
    (tools,) = (one.homes[0] / ".tpucare").glob("*/tools-*")
    tools.rename(tools.with_name("tools-0123456789abcdef"))
    assert one.probe().alive
    assert one.stop().quiet


def test_what_a_probe_leaves_is_closed_to_others(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker whose sessions hide nothing, and a probe that loads the tools before the runner has."""
    # Otherwise the runner loads one more tool into the folder, perhaps while it is removed or looked at.
    monkeypatch.setattr(scripts, "WATCH_AFTER_SECONDS", 3600)
    one.start("sleep 300")
    (tools,) = (one.homes[0] / ".tpucare").glob("*/tools-*")
    shutil.rmtree(tools / "__pycache__")
    mask = os.umask(0)
    try:
        assert one.probe().alive
    finally:
        os.umask(mask)
    kept = [tools / "__pycache__", *(tools / "__pycache__").iterdir()]
    assert len(kept) > 1
    assert [str(path) for path in kept if path.stat().st_mode & 0o077] == []
    assert one.stop().quiet


def test_a_notice_reaches_the_run(one: Node) -> None:
    one.start('while [ ! -s "$TPUCARE_NOTICE" ]; do sleep 0.05; done; cat "$TPUCARE_NOTICE"')
    one.launcher.notice(NoticeOrder(one.workers, one.token(), "save 'now' $(date)"))
    report = one.ended()
    assert (report.exit_status, report.signalled) == (0, True)
    assert "save 'now' $(date)" in one.log()


def advised(made: Node, text: str, number: int = 1) -> WorkerReport:
    order = ProbeOrder(made.workers, made.slot, 1, cadence=text, run=made.token(number))
    return made.launcher.probe(order).workers[0]


def test_a_probe_brings_the_run_its_cadence_and_what_its_saves_cost_back(one: Node) -> None:
    """The real `Saves` on the worker's side: it obeys the file that a probe wrote, and its measure comes back."""
    one.start(f"cd {ROOT} && exec {sys.executable} -c {shlex.quote(SAVER)}")
    eventually(lambda: "begin 600.0" in one.log())
    assert one.probe().cadence_seconds is None
    report = advised(one, '{"interval_seconds": 0.2, "since": "it\'s $(date)"}')
    assert report.cadence_seconds == 0.2
    report = one.ended()
    assert (report.exit_status, report.cadence_seconds) == (0, 0.2)
    assert report.save_seconds == pytest.approx(0.01, abs=0.5)
    assert "saved each 0.2" in one.log()


SAVER = """
import time
from tpucare.training import Saves
saves = Saves()
print("begin", saves.interval_seconds, flush=True)
while not saves.due():
    time.sleep(0.01)
with saves:
    time.sleep(0.01)
print("saved each", saves.interval_seconds, flush=True)
"""


def test_the_cadence_of_another_run_is_not_written(one: Node) -> None:
    one.start("sleep 300")
    assert advised(one, '{"interval_seconds": 60}', number=2).cadence_seconds is None
    assert not (one.folder() / "cadence").exists()
    assert one.stop().quiet


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"save_seconds": "x"}', '{"save_seconds": -1}', '{"save_seconds": true}', '\0\\"' * 300]
)
def test_whatever_a_run_writes_there_is_no_answer_in_pieces(one: Node, text: str) -> None:
    one.start("sleep 300")
    (one.folder() / "saves").write_text(text)
    report = one.probe()
    assert (report.contact, report.alive, report.save_seconds) == (Contact.ANSWERED, True, None)
    assert one.stop().quiet


def test_logs_of_runs_one_after_another_are_kept_and_outlive_the_node(one: Node) -> None:
    one.start("echo one; printf '\\033[31mred\\033[0m \\033]0;title\\007end\\n'; exit 3")
    one.ended()
    one.start("echo two", 2)
    one.ended()
    kept = one.log()
    assert kept.index("one") < kept.index(f"--- run {one.token(2)} ---") < kept.index("two")
    assert "red end" in kept
    one.launcher.forget_node(one.key)
    assert one.launcher.logs.read(one.slot, 1).decode() == kept
    one.probe()
    assert one.launcher.logs.read(one.slot, 1).decode() == kept


def read(said: object) -> WorkerReport:
    return answers.read_probe(Ran(0, json.dumps(said).encode(), b"")).report


BASE = {"token": "n.1", "alive": True, "chips_free": False, "last_number": 1, "boot_id": "", "told": False}


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": "../../etc.1"},
        {"token": "x" * 300 + ".1"},
        {"alive": "no"},
        {"last_number": -1},
        {"last_number": 10**30},
        {"exit": [1]},
        {"exit": {"status": "0"}},
        {"state": {"phase": 3}},
        {"log": {"token": "n.1", "start": 0, "data": "%%%"}},
        {"step": 1.5},
    ],
)
def test_an_answer_that_does_not_fit_is_no_answer(wrong: dict[str, object]) -> None:
    assert read(BASE).alive
    with pytest.raises(answers.MalformedAnswer):
        read({**BASE, **wrong})


def test_what_a_worker_says_for_people_is_one_plain_line() -> None:
    report = read({**BASE, "detail": "a\x1b[31m\nb", "state": {"maintenance": "x\ry"}})
    assert (report.detail, report.maintenance) == ("a b", "x y")
