"""
What `tpucare.training` promises to a script: real orbax and JAX, real signals, the real W&B client.

Notices are files as the runner on a worker writes them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.hand_clock import HandClock
from tpucare import training
from tpucare.testbed.demo.reference import free_loopback_endpoint
from tpucare.testbed.wandb.server import WandbServer
from tpucare.training import Process, Requests, Wish

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of tpucare or W&B, whatever started the tests."""
    for name in os.environ:
        if name.startswith(("TPUCARE_", "WANDB_")):
            monkeypatch.delenv(name)


def python(code: str, environ: Mapping[str, str] | None = None, *, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(environ or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_it_imports_nothing_beyond_the_standard_library_and_works_as_a_copied_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tpucare" / "training", tmp_path / "care")
    code = "import sys; import care; print([m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names])"
    out = python(code, cwd=tmp_path)
    loaded = {name.split(".")[0] for name in re.findall(r"'([^']+)'", out)}
    assert loaded & {"jax", "numpy", "wandb", "orbax", "etils", "tpucare", "google", "grpc", "pydantic"} == set()


# --- the Python of a TPU VM ------------------------------------------------------------------------------------------

TPU_VM = (3, 8)
ON_THE_TPU_VM = sorted(
    [
        *(ROOT / "tpucare" / "training").glob("*.py"),
        *(ROOT / "examples" / "sweep").glob("*.py"),
        ROOT / "examples" / "inference_server.py",
    ]
)
# What a name, a keyword or a method is newer than 3.8 for, as far as code like this is tempted to use it.
NEWER_NAMES = {
    "contextlib": {"aclosing", "chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify"},
    "functools": {"cache"},
    "itertools": {"batched", "pairwise"},
    "typing": {"Annotated", "Concatenate", "LiteralString", "Never", "NotRequired", "ParamSpec", "Required", "Self"}
    | {"TypeAlias", "TypeGuard", "TypeVarTuple", "Unpack", "assert_never", "assert_type", "override", "reveal_type"},
}
NEWER_MODULES = {"graphlib", "tomllib", "zoneinfo"}
NEWER_KEYWORDS = {"dataclass": {"kw_only", "slots", "weakref_slot"}, "zip": {"strict"}, "field": {"kw_only"}}
NEWER_METHODS = {"add_note", "is_relative_to", "removeprefix", "removesuffix", "walk", "with_stem"}


def newer_than_the_tpu_vm(source: str) -> list[str]:
    tree = ast.parse(source, feature_version=TPU_VM)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & NEWER_NAMES.get(node.module or "", set())
            found += [f"{node.module}.{name}" for name in sorted(names)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            found += [str(module) for module in modules & NEWER_MODULES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            keywords = {str(each.arg) for each in node.keywords} & NEWER_KEYWORDS.get(node.func.id, set())
            found += [f"{node.func.id}({keyword}=)" for keyword in sorted(keywords)]
            if node.func.id in ("isinstance", "issubclass") and isinstance(node.args[1], ast.BinOp):
                found.append(f"{node.func.id}(_, A | B)")
        if isinstance(node, ast.Attribute) and node.attr in NEWER_METHODS:
            found.append(f".{node.attr}")
    # Annotations are full of `X | None` and `list[X]`, which are texts there only by this import.
    if "from __future__ import annotations" not in source and any(
        isinstance(node, ast.AnnAssign | ast.arg) for node in ast.walk(tree)
    ):
        found.append("annotations that are evaluated")
    return found


@pytest.mark.parametrize("path", ON_THE_TPU_VM, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_runs_on_a_tpu_vm_uses_nothing_that_its_python_lacks(path: Path) -> None:
    assert newer_than_the_tpu_vm(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from datetime import UTC, datetime", "datetime.UTC"),
        ("@dataclass(frozen=True, slots=True)\nclass A: ...", "dataclass(slots=)"),
        ("isinstance(a, str | bytes)", "isinstance(_, A | B)"),
        ("import tomllib", "tomllib"),
        ("a.removeprefix('b')", ".removeprefix"),
        ("a: list[int] = []", "annotations that are evaluated"),
    ],
)
def test_what_a_tpu_vm_lacks_is_found(source: str, found: str) -> None:
    assert newer_than_the_tpu_vm(source) == [found]


def older_pythons() -> list[Path]:
    """One of each version from 3.8 to 3.10 that this machine has on its PATH or beside the Python of this test."""
    versions = Path(sys.base_prefix).parent
    found = []
    for minor in (8, 9, 10):
        named = [shutil.which(f"python3.{minor}"), *versions.glob(f"3.{minor}.*/bin/python")]
        found += [Path(each) for each in named if each and _works(each)][:1]
    return found


def _works(python_: str | Path) -> bool:
    """A shim of pyenv is there, and says that it has no such version."""
    return subprocess.run([python_, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0


ON_AN_OLDER_PYTHON = """
import os, signal, sys
sys.modules["jax"] = None
from tpucare import training
assert training.__file__.startswith(os.getcwd()), training.__file__
assert training.this_process() == training.Process(1, 2)
assert training.split_by_process(list("abc")) == ["b"]
assert list(training.split_by_process(iter("abcd"), even=True)) == ["b", "d"]
os.makedirs("checkpoints/10")
open("checkpoints/10/state", "w").close()
assert training.resume_step("checkpoints", wandb=12) == 10
assert training.daly_steps(2, 14400, 0.8) > 1
assert training.wandb_options()["id"] == training.wandb_run_id() != ""
os.environ["TPUCARE_NOTICE"] = "notice"
with open("notice", "w") as stream:
    stream.write("2026-11-02T03:04:05Z preempted: save\\n")
assert training.notice().preempted and training.notice().at.tzinfo is not None
with training.Requests() as requests:
    assert requests.look() is training.Wish.SAVE
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.look() is training.Wish.SAVE_AND_STOP
    requests.stop()
"""


def test_a_copy_of_the_folder_works_with_an_older_python(tmp_path: Path) -> None:
    if not (pythons := older_pythons()):
        pytest.skip("no Python 3.8, 3.9 or 3.10 on this machine")
    for python_ in pythons:
        folder = tmp_path / python_.parents[1].name / python_.name
        shutil.copytree(ROOT / "tpucare" / "training", folder / "tpucare" / "training")
        (folder / "train.py").write_text(ON_AN_OLDER_PYTHON)
        environ = {"PATH": os.environ["PATH"], "TPUCARE_WORKER": "1", "TPUCARE_WORKERS": "2", "TPUCARE_SLOT": "pod-0"}
        done = subprocess.run(
            [python_, "train.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == training.TERMINATED, f"{python_}: {done.stderr}"


# --- shards ----------------------------------------------------------------------------------------------------------


@given(items=st.lists(st.integers()), count=st.integers(1, 9), lazy=st.booleans())
def test_shares_are_all_of_it_each_item_once_and_differ_by_one_at_most(
    items: list[int], count: int, lazy: bool
) -> None:
    numbered = list(enumerate(items))
    shares = [
        list(training.split_by_process(iter(numbered) if lazy else numbered, process=Process(index, count)))
        for index in range(count)
    ]
    assert sorted(item for share in shares for item in share) == numbered
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share == sorted(share) for share in shares), "in the order they came"


@given(items=st.lists(st.integers()), count=st.integers(1, 9), lazy=st.booleans())
def test_even_shares_are_equally_long_and_leave_out_less_than_one_round(
    items: list[int], count: int, lazy: bool
) -> None:
    numbered = list(enumerate(items))
    shares = [
        list(training.split_by_process(iter(numbered) if lazy else numbered, even=True, process=Process(index, count)))
        for index in range(count)
    ]
    assert {len(share) for share in shares} == {len(items) // count}
    taken = sorted(item for share in shares for item in share)
    assert taken == numbered[: len(items) - len(items) % count]


def test_an_endless_stream_is_shared_out_lazily() -> None:
    def forever() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    for even in (False, True):
        share = training.split_by_process(forever(), even=even, process=Process(1, 3))
        assert [next(share) for _ in range(3)] == [1, 4, 7]


def test_the_process_is_the_worker_that_tpucare_names_and_alone_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.this_process() == Process(0, 1)
    assert training.split_by_process(["a", "b"]) == ["a", "b"]
    monkeypatch.setenv("TPUCARE_WORKER", "2")
    monkeypatch.setenv("TPUCARE_WORKERS", "4")
    assert training.this_process() == Process(2, 4)
    assert training.split_by_process(range(10)) == [2, 6]


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(TypeError, match="not one text"):
        training.split_by_process("gs://bucket/shard-0.tar")
    with pytest.raises(ValueError, match="no process 4 of 4"):
        training.split_by_process([], process=Process(4, 4))


# --- checkpoints -----------------------------------------------------------------------------------------------------

SAVE_FOR_EVER = """
import sys, numpy as np, orbax.checkpoint as ocp
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath
options = ocp.CheckpointManagerOptions(
    max_to_keep=3, temporary_path_class=CommitFileTemporaryPath if sys.argv[2] == "commit" else None
)
manager = ocp.CheckpointManager(sys.argv[1], options=options)
state = {str(number): np.full(20_000, number) for number in range(20)}
for step in range((manager.latest_step() or 0) + 1, 10_000):
    sys.stdin.readline()
    manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    print(step, flush=True)
"""

READ_ALL = """
import json, sys, orbax.checkpoint as ocp
manager = ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(read_only=True))
states = {step: manager.restore(step) for step in manager.all_steps()}
print(json.dumps({step: sum(float(each.sum()) for each in state.values()) for step, state in states.items()}))
"""


def _save_until_killed(folder: Path, how: str, saves: int) -> int:
    """The last step that was surely complete when the saving process was killed."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(folder), how],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert saver.stdin is not None
    assert saver.stdout is not None
    try:
        # One more than are awaited, and no other after it, however late the saver is killed.
        saver.stdin.write("\n" * (saves + 1))
        saver.stdin.flush()
        steps = [int(saver.stdout.readline()) for _ in range(saves)]
        # The next save is under way as soon as there is a trace of it.
        while not any(each.name.split(".")[0] == str(steps[-1] + 1) for each in folder.iterdir()):
            assert saver.poll() is None
    finally:
        saver.kill()
        saver.communicate()
    return steps[-1]


@pytest.mark.parametrize("how", ["rename", "commit"])
def test_of_what_killed_savers_left_the_newest_complete_checkpoint_is_taken(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for saves in (2, 3):
        last = _save_until_killed(folder, how, saves)
        seen = training.resume_step(folder, commit_marker=how == "commit")
        assert seen in (last, last + 1)
    steps = training.complete_steps(folder, commit_marker=how == "commit")
    assert steps[-1] == seen
    if how == "rename":
        # Orbax, asked in its own way, says the same, and each of them can be restored.
        sums = json.loads(python(READ_ALL.replace("sys.argv[1]", repr(str(folder)))))
        assert [int(step) for step in sums] == steps
        assert set(sums.values()) == {20_000.0 * sum(range(20))}


def _checkpoint(folder: Path, name: str, *files: str) -> None:
    (folder / name).mkdir(parents=True)
    for file in files:
        (folder / name / file).write_text("x")


def test_half_written_and_foreign_folders_are_no_checkpoints(tmp_path: Path) -> None:
    _checkpoint(tmp_path, "10", "state")
    _checkpoint(tmp_path, "00000020", "state")
    _checkpoint(tmp_path, "30.orbax-checkpoint-tmp-17", "state")
    _checkpoint(tmp_path, "40.orbax-checkpoint-tmp", "state")
    _checkpoint(tmp_path, "50")
    _checkpoint(tmp_path, "logs_2026", "events")
    _checkpoint(tmp_path, "²", "state")
    (tmp_path / "60").write_text("a file")
    assert training.complete_steps(tmp_path) == [10, 20]
    assert training.resume_step(tmp_path) == 20
    assert training.resume_step(tmp_path, commit_marker=True) is None


def test_the_first_step_is_a_step_and_nothing_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.resume_step(tmp_path / "absent") is None
    _checkpoint(tmp_path, "0", "state")
    monkeypatch.setenv("TPUCARE_CHECKPOINT", str(tmp_path))
    assert training.resume_step() == 0


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        training.resume_step(tmp_path / "file")
    with pytest.raises(ValueError, match="TPUCARE_CHECKPOINT"):
        training.resume_step()


def test_in_a_bucket_only_the_commit_marker_makes_a_checkpoint(tmp_path: Path) -> None:
    epath = pytest.importorskip("etils.epath")
    _checkpoint(tmp_path / "bucket" / "run", "10", "state", "commit_success.txt")
    _checkpoint(tmp_path / "bucket" / "run", "20", "state")

    def local(path: Any) -> Path:
        return tmp_path / str(path).removeprefix("gs://")

    looks = {
        "listdir": lambda _, path: os.listdir(local(path)),
        "exists": lambda _, path: local(path).exists(),
    }
    from etils.epath.testing import mock_epath  # type: ignore[import-untyped]

    with mock_epath(**looks):
        assert str(epath.Path("gs://bucket/run")) == "gs://bucket/run"
        assert training.complete_steps("gs://bucket/run") == [10]
        assert training.resume_step("gs://bucket/run") == 10
        assert training.resume_step("gs://bucket/other") is None


@pytest.mark.parametrize(
    ("starting_step", "said"),
    [(0, ""), (11, ""), (16, "steps 11 to 15 are trained again"), (6, "W&B never got steps 6 to 10")],
)
def test_the_step_of_wandb_is_only_a_hint(
    starting_step: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _checkpoint(tmp_path, "10", "state")
    with caplog.at_level("INFO"):
        assert training.resume_step(tmp_path, wandb=starting_step) == 10
    assert (said in caplog.text) if said else not caplog.text


def test_a_wandb_run_without_a_checkpoint_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert training.resume_step(tmp_path, wandb=401) is None
    assert "W&B has steps up to 400" in caplog.text


TWO_PROCESSES = """
import json, os, signal, sys
from pathlib import Path
index, coordinator, folder, notice = int(sys.argv[1]), *sys.argv[2:]
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, index, coordinator_bind_address=coordinator, initialization_timeout=60)
from tpucare import training
said = {"step": training.resume_step(folder), "share": training.split_by_process(list("abcde"))}
with training.Requests() as requests:
    wishes = [requests.look()]
    if index == 1:
        Path(notice).touch()
    wishes += [requests.look(), requests.look()]
    if index == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    wishes.append(requests.look())
said["wishes"] = wishes
saves = training.Saves(0.0 if index else 1000.0, environ={})
said["due"] = [saves.due(), training.Saves(1000.0, environ={}).due()]
try:
    training.resume_step(folder if index else folder + "-not-mounted")
except RuntimeError as error:
    said["error"] = str(error)
print(json.dumps(said))
jax.distributed.shutdown()
"""


@pytest.mark.machines
def test_the_processes_of_a_slice_agree(tmp_path: Path) -> None:
    coordinator = free_loopback_endpoint()
    _checkpoint(tmp_path / "shared", "10", "state")
    environ = {**os.environ, "TPUCARE_WORKERS": "7", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), coordinator, tmp_path / "shared", tmp_path / "notice"],
            env={**environ, "TPUCARE_NOTICE": str(tmp_path / "notice") if index else ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended
    said = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    assert [each["step"] for each in said] == [10, 10]
    assert [each["share"] for each in said] == [["a", "c", "e"], ["b", "d"]]
    assert [each["wishes"] for each in said] == [[Wish.NONE, Wish.SAVE, Wish.NONE, Wish.SAVE_AND_STOP]] * 2
    assert [each["due"] for each in said] == [[True, False]] * 2
    assert all("process 0 sees none: all hosts have to share this folder" in each["error"] for each in said)


# --- notices and SIGTERM ---------------------------------------------------------------------------------------------


def test_a_notice_is_read_as_the_runner_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notice"
    assert training.notice() is None
    monkeypatch.setenv("TPUCARE_NOTICE", str(file))
    assert training.notice() is None
    file.write_text("2026-11-02T03:04:05Z maintenance: TERMINATE_ON_HOST_MAINTENANCE\n")
    first = training.notice()
    assert first is not None
    assert (first.text, first.preempted) == ("maintenance: TERMINATE_ON_HOST_MAINTENANCE", False)
    with file.open("a") as stream:
        stream.write("2026-11-02T03:05:00Z preempted: the cloud takes this machine back; save now\n")
    second = training.notice()
    assert second is not None
    assert second.preempted
    assert str(second.at) == "2026-11-02 03:05:00+00:00"


def test_a_notice_that_is_half_written_is_one_nevertheless(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    for text in ("", "2026-11", "who knows"):
        file.write_text(text)
        assert training.notice({"TPUCARE_NOTICE": str(file)}) == training.Notice(None, text)


def test_each_notice_asks_once_to_save(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    requests = Requests(environ={"TPUCARE_NOTICE": str(file)})
    wishes = [requests.look()]
    for event in (1, 2):
        file.touch()
        os.utime(file, ns=(event, event))
        wishes += [requests.look(), requests.look()]
    assert wishes == [Wish.NONE, Wish.SAVE, Wish.NONE, Wish.SAVE, Wish.NONE]


class Tracker:
    """As much of a W&B run as `Requests` uses."""

    def __init__(self, patience: threading.Event | None = None) -> None:
        self.marks = 0
        self.ended: list[int] = []
        self._patience = patience

    def mark_preempting(self) -> None:
        self.marks += 1

    def finish(self, exit_code: int) -> None:
        if self._patience is not None:
            self._patience.wait()
        self.ended.append(exit_code)


def test_sigterm_marks_the_run_and_leaves_with_a_status_that_is_not_zero() -> None:
    run, before = Tracker(), signal.getsignal(signal.SIGTERM)
    with Requests(wandb=run) as requests:
        wishes = [requests.look()]
        os.kill(os.getpid(), signal.SIGTERM)
        wishes += [requests.look(), requests.look()]
        assert (run.marks, run.ended) == (1, [])
        with pytest.raises(SystemExit) as left:
            requests.stop()
    assert wishes == [Wish.NONE, Wish.SAVE_AND_STOP, Wish.SAVE_AND_STOP]
    assert left.value.code == 143
    assert (run.marks, run.ended) == (1, [143])
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_does_not_answer_does_not_hold_up_the_end() -> None:
    code = """
import threading
from tests.training.test_training import Tracker
from tpucare.training import Requests, notices
notices.FINISH_SECONDS = 0.2
with Requests(wandb=Tracker(threading.Event())) as requests:
    print("said", end="")
    requests.stop(75)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "said"), done.stderr


def test_a_thread_cannot_listen_for_signals() -> None:
    said: list[str] = []

    def enter() -> None:
        try:
            Requests().__enter__()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert said == ["Requests handles a signal: enter it in the main thread"]


# --- a checkpoint that was copied before -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "want", "looks"),
    [
        (["done 7"], True, 0),
        (["begun 7", "begun 7", "done 7"], True, 2),
        (["", "begun 7", "done 7"], True, 2),
        (["done 8"], False, 0),
        (["begun 8"], False, 0),
        (["begun 7", "failed the disk is full"], False, 1),
        ([""], False, 600),
        (["begun 7"], False, 1000),
    ],
)
def test_a_copy_under_way_is_waited_for_and_another_one_is_not(
    tmp_path: Path, states: list[str], want: bool, looks: int
) -> None:
    slept: list[float] = []

    def show() -> None:
        state = states[min(len(slept), len(states) - 1)]
        (tmp_path / "state").write_text(state) if state else (tmp_path / "state").unlink(missing_ok=True)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        show()

    show()
    environ = {"TPUCARE_PREFETCH": str(tmp_path)}
    found = training.prefetched(7, wait_seconds=100, environ=environ, sleep=sleep)
    assert found == (str(tmp_path) if want else None)
    assert abs(len(slept) - looks) <= 1


def test_without_a_prefetch_nothing_is_waited_for() -> None:
    assert training.prefetched(7, environ={}) is None
    assert training.prefetched(None, environ={"TPUCARE_PREFETCH": "/nowhere"}) is None


@pytest.mark.machines
def test_orbax_restores_from_the_copy(tmp_path: Path) -> None:
    code = f"""
import shutil
import numpy as np
import orbax.checkpoint as ocp
from pathlib import Path
from tpucare import training
there, here = Path({str(tmp_path / "there")!r}), Path({str(tmp_path / "here")!r})
with ocp.CheckpointManager(there) as manager:
    manager.save(3, args=ocp.args.StandardSave({{"a": np.arange(4)}}))
    manager.wait_until_finished()
    shutil.copytree(there / "3", here / "3")
    (here / "state").write_text("done 3")
    for path in (there / "3").rglob("*"):
        path.write_bytes(b"") if path.is_file() else None
    environ = {{"TPUCARE_PREFETCH": str(here)}}
    state = manager.restore(3, args=ocp.args.StandardRestore(), directory=training.prefetched(3, environ=environ))
    print(state["a"])
"""
    assert python(code, cwd=ROOT).splitlines()[-1] == "[0 1 2 3]"


# --- how often to save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("life_minutes", "want_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_interval_is_that_of_the_figures_in_dalys_paper(life_minutes: float, want_minutes: float) -> None:
    got = training.daly_interval(5 * 60, life_minutes * 60) / 60
    assert got == pytest.approx(want_minutes, rel=0.006)


@given(save=st.floats(1e-3, 1e5), life=st.floats(1e-3, 1e7))
def test_the_interval_is_positive_and_never_beyond_the_mean_life_of_dear_saves(save: float, life: float) -> None:
    got = training.daly_interval(save, life)
    assert got > 0
    assert got == life if save >= 2 * life else got < (2 * save * life) ** 0.5 * 1.5
    assert training.daly_steps(save, life, 1.0) >= 1


def test_steps_are_the_interval_in_steps() -> None:
    assert training.daly_steps(300, 24 * 3600, step_seconds=2) == round(training.daly_interval(300, 24 * 3600) / 2)
    for wrong in ((0, 1, 1), (1, 0, 1), (1, float("inf"), 1), (1, 1, 0), (float("nan"), 1, 1)):
        with pytest.raises(ValueError, match="seconds"):
            training.daly_steps(*wrong)


def saves_in(folder: Path, clock: HandClock, default_seconds: float = 60.0) -> training.Saves:
    environ = {"TPUCARE_CADENCE": str(folder / "cadence"), "TPUCARE_NOTICE": str(folder / "notice")}
    clock.seconds = 100.0  # no clock of a machine begins with the run
    return training.Saves(default_seconds, environ=environ, clock=clock.monotonic)


def advise(folder: Path, text: str, change: int) -> None:
    (folder / "cadence").write_text(text)
    os.utime(folder / "cadence", ns=(change, change))


def due_within(saves: training.Saves, clock: HandClock, seconds: int) -> list[int]:
    """The seconds from now at which a save was due."""
    found = []
    for second in range(1, seconds + 1):
        clock.seconds += 1
        found += [second] if saves.due() else []
    return found


def test_a_save_is_due_after_each_interval_which_changes_while_the_run_lives(tmp_path: Path) -> None:
    clock = HandClock()
    saves = saves_in(tmp_path, clock)
    assert due_within(saves, clock, 150) == [60, 120]
    advise(tmp_path, '{"interval_seconds": 40.0, "since": "2026-11-02T03:04:05+00:00"}', 1)
    assert due_within(saves, clock, 100) == [10, 50, 90]
    for change, broken in enumerate(("", "{", "[]", '{"interval_seconds": 0}', '{"interval_seconds": "1"}'), 2):
        advise(tmp_path, broken, change)
        assert saves.interval_seconds == 40.0
    (tmp_path / "cadence").unlink()
    assert due_within(saves, clock, 40) == [30]


def test_a_notice_asks_for_a_save_at_once_and_only_once(tmp_path: Path) -> None:
    clock = HandClock()
    saves = saves_in(tmp_path, clock)
    for change in (1, 2):
        (tmp_path / "notice").write_text("2026-11-02T03:04:05Z maintenance: MIGRATE")
        os.utime(tmp_path / "notice", ns=(change, change))
        assert due_within(saves, clock, 30) == [1]
    assert due_within(saves, clock, 40) == [31]


def test_the_interval_begins_at_the_end_of_a_save_whose_cost_is_told(tmp_path: Path) -> None:
    clock = HandClock()
    saves = saves_in(tmp_path, clock)
    assert saves.save_seconds is None
    for cost in (30.0, 2.0, 3.0):
        with saves:
            clock.seconds += cost
    assert due_within(saves, clock, 61) == [60]
    with pytest.raises(ZeroDivisionError), saves:
        clock.seconds += 1000 / 0
    assert saves.save_seconds == 3.0
    assert json.loads((tmp_path / "saves").read_text()) == {"save_seconds": 3.0, "saves": 3}


def test_a_folder_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    saves = saves_in(tmp_path / "gone", HandClock())
    with saves:
        pass
    assert saves.save_seconds == 0.0


def test_one_question_asks_for_notices_and_for_the_interval(tmp_path: Path) -> None:
    clock = HandClock()
    saves = saves_in(tmp_path, clock)
    requests = Requests(saves=saves, environ={"TPUCARE_NOTICE": str(tmp_path / "notice")})
    wishes = []
    for second in range(1, 100):
        clock.seconds += 1
        if second == 90:
            (tmp_path / "notice").touch()
        if requests.look():
            wishes.append(second)
    assert wishes == [60, 90]


def test_without_tpucare_a_save_is_due_now_and_then() -> None:
    code = "from tpucare import training; print(training.save_due(), training.Saves().interval_seconds)"
    assert python(code, cwd=ROOT).split() == ["False", "600.0"]


@pytest.mark.machines
def test_orbax_saves_when_the_policy_says_so(tmp_path: Path) -> None:
    code = f"""
import orbax.checkpoint as ocp
from tests.kits.hand_clock import HandClock
from tests.training.test_training import saves_in
from tpucare import training
from pathlib import Path
clock = HandClock()
saves = saves_in(Path({str(tmp_path)!r}), clock, 10.0)
options = ocp.CheckpointManagerOptions(save_decision_policy=training.SavePolicy(saves), max_to_keep=None)
with ocp.CheckpointManager({str(tmp_path / "checkpoints")!r}, options=options) as manager:
    for step in range(1, 36):
        clock.seconds += 1
        if manager.should_save(step):
            with saves:
                assert manager.save(step, args=ocp.args.JsonSave({{"step": step}}))
        if step == 15:
            # As many programs do it: `save` at every step.
            Path({str(tmp_path / "notice")!r}).touch()
        assert manager.save(step, args=ocp.args.JsonSave({{"step": step}})) is (step == 15)
    manager.wait_until_finished()
    print(manager.all_steps(), saves.save_seconds)
"""
    assert python(code, cwd=ROOT).splitlines()[-1] == "[10, 15, 25, 35] 0.0"


# --- W&B -------------------------------------------------------------------------------------------------------------

NODE = {"TPUCARE_SLOT": "big-pod-3", "TPUCARE_NODE": "big-pod-3-a1", "TPUCARE_CHECKPOINT": "gs://b/big-pod-3"}


def test_the_id_stays_over_attempts_and_changes_with_slot_and_checkpoints() -> None:
    first = training.wandb_run_id(NODE)
    assert re.fullmatch(r"big-pod-3-[0-9a-f]{8}", first)
    assert training.wandb_run_id({**NODE, "TPUCARE_NODE": "big-pod-3-a7", "TPUCARE_WORKER": "3"}) == first
    assert training.wandb_run_id({**NODE, "TPUCARE_SLOT": "big-pod-4"}) != first
    assert training.wandb_run_id({**NODE, "TPUCARE_CHECKPOINT": "gs://b/other"}) != first
    assert training.wandb_run_id({}) == ""


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, {"id": training.wandb_run_id(NODE), "resume": "allow"}),
        ({"WANDB_RUN_ID": "mine"}, {"resume": "allow"}),
        ({"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "agents"}, {"resume": "allow"}),
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, {}),
    ],
)
def test_what_wandb_is_told_goes_behind_what_the_environment_says(more: dict[str, str], want: dict[str, str]) -> None:
    options = training.wandb_options({**NODE, **more})
    assert options.pop("settings") == {"x_file_stream_transmit_interval": 5, "init_timeout": 60}
    assert options == want


def test_settings_of_wandb_in_the_environment_win() -> None:
    environ = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "2", "WANDB_INIT_TIMEOUT": "9"}
    assert training.wandb_options(environ) == {"resume": "allow", "settings": {}}


WANDB_DOWN = """
from tpucare.training import init_wandb
run = init_wandb(project="p", settings={"init_timeout": 2})
run.log({"loss": 1.0}, step=7)
print("MODE", run.settings.mode, run.id, run.starting_step)
run.finish()
"""


def test_a_wandb_server_that_is_down_does_not_stop_the_training(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    out = python(WANDB_DOWN, {**NODE, **_wandb_nowhere(tmp_path), "TPUCARE_WORKER": "0", "TPUCARE_WORKERS": "2"})
    assert f"MODE offline {training.wandb_run_id(NODE)} 0" in out
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_only_process_0_writes_to_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    out = python(WANDB_DOWN, {**NODE, **_wandb_nowhere(tmp_path), "TPUCARE_WORKER": "1", "TPUCARE_WORKERS": "2"})
    assert "MODE disabled" in out
    assert list(tmp_path.glob("wandb/*")) == []


def test_without_a_key_a_person_has_to_act(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = """
import wandb
from tpucare.training import init_wandb
try:
    init_wandb(project="p")
except wandb.errors.UsageError as error:
    print("ASKED", error)
"""
    out = python(code, _wandb_nowhere(tmp_path, key=""))
    assert "ASKED No API key configured" in out


ATTEMPT = """
import os, sys, time
from pathlib import Path
from tpucare.training import Requests, Wish, init_wandb, resume_step
folder = Path(os.environ["TPUCARE_CHECKPOINT"])
run = init_wandb(project="p", settings={"x_file_stream_transmit_interval": 1})
step = resume_step(wandb=run) or 0
print("begins", run.id, run.starting_step, step, flush=True)
with Requests(wandb=run) as requests:
    while True:
        step += 1
        run.log({"loss": 1 / step}, step=step)
        if step % 5 == 0:
            (folder / f"{step}.half").mkdir(parents=True)
            (folder / f"{step}.half" / "state").touch()
            (folder / f"{step}.half").rename(folder / str(step))
        print("step", step, flush=True)
        time.sleep(0.05)
        if requests.look() is Wish.SAVE_AND_STOP:
            requests.stop()
"""


@pytest.mark.machines
def test_attempts_are_one_run_of_wandb_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with WandbServer() as server:
        environ = {**os.environ, **_wandb_nowhere(tmp_path), **NODE, "WANDB_BASE_URL": server.url}
        environ |= {"TPUCARE_CHECKPOINT": str(tmp_path / "checkpoints"), "PYTHONPATH": str(ROOT)}
        told: list[list[str]] = []
        for number in (signal.SIGKILL, signal.SIGTERM):
            attempt = subprocess.Popen([sys.executable, "-c", ATTEMPT], env=environ, stdout=subprocess.PIPE, text=True)
            watchdog = threading.Timer(120, attempt.kill)
            watchdog.start()
            try:
                assert attempt.stdout is not None
                told.append(next(line for line in attempt.stdout if line.startswith("begins")).split()[1:])
                goal = max(training.complete_steps(tmp_path / "checkpoints"), default=0) + 7
                while goal > max((row["_step"] for row in _history(server)), default=0):
                    assert attempt.stdout.readline(), "it ended by itself"
                attempt.send_signal(number)
                attempt.communicate()
            finally:
                watchdog.cancel()
                attempt.kill()
        (first_id, *first), (second_id, *second) = told
        assert (first_id, first) == (second_id, ["0", "0"])
        assert attempt.returncode == 143
        rows = [row["_step"] for row in _history(server)]
        starting_step, resumed = map(int, second)
        assert 7 < starting_step < rows[-1]
        assert resumed % 5 == 0 < resumed < rows[-1]
        assert rows == sorted(set(rows)), "steps that were trained again are there once"
        # Only what was saved, and not yet sent, when the host was switched off.
        assert set(range(1, rows[-1] + 1)) - set(rows) <= set(range(starting_step, resumed + 1))
        (run,) = server.world.runs.values()
        assert (run.state, run.exit_code) == ("preempted", 143)


def _history(server: WandbServer) -> list[dict[str, Any]]:
    with server.lock:
        return [json.loads(line) for run in server.world.runs.values() for line in run.history]


def _wandb_nowhere(folder: Path, key: str = "k" * 40) -> dict[str, str]:
    """A server on a port that nobody listens at; no logins of the person who runs the tests."""
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    return {**nowhere, "HOME": str(folder), "NETRC": str(folder / "netrc"), **({"WANDB_API_KEY": key} if key else {})}
