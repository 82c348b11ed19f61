"""What tells progress on a worker goes on, whatever vanishes or breaks off under it: the tools by themselves."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.local_server import serving
from tpucare.adapters.runner.scripts import DEFAULT_PROGRESS

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "worker"
BOOT = "import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1]); exec(sys.argv[2])"


def command(code: str) -> list[str]:
    """*code* as a worker's Python runs it, with the tools on its path."""
    return [sys.executable, "-I", "-S", "-c", BOOT, str(TEMPLATES), code]


def said_by(code: str) -> str:
    return subprocess.run(command(code), capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_a_part_of_the_log_that_is_dropped_while_it_is_looked_at_is_passed_by(tmp_path: Path) -> None:
    """A link to nothing is in the folder and cannot be asked for its size, as a file that was just removed."""
    (tmp_path / "log.0").symlink_to("gone")
    (tmp_path / "log.100").write_bytes(b"x" * 7)
    assert said_by(f"import files; print(files.log_end({str(tmp_path)!r}))") == "107"


def test_what_vanishes_while_old_runs_are_removed_ends_nothing(tmp_path: Path) -> None:
    for number in range(1, 9):
        (tmp_path / f"pod-a1.{number}").mkdir()
    (tmp_path / ".in-1-2").symlink_to("gone")
    for name, age in ((".in-old", 7200), (".in-new", 0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    said_by(f"import processes; processes.prune_runs({str(tmp_path)!r}, 'pod-a1.8')")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".in-1-2", ".in-new", *(f"pod-a1.{number}" for number in range(4, 9))]


# --- steps of a log --------------------------------------------------------------------------------------------------


def test_a_step_is_read_from_the_last_line_that_is_whole_whatever_ends_it(tmp_path: Path) -> None:
    bar = "Epoch 3: {}%|█ | {}/1000 [00:17<00:21]"
    log = f"{bar.format(44, 449)}\r{bar.format(45, 450)}\r{bar.format(46, 460)}"
    (tmp_path / "log.0").write_text(log)
    question = {"progress": DEFAULT_PROGRESS, "rescan": "1"}
    code = f"import probe; print(probe._step({str(tmp_path)!r}, {question!r}, 0, {len(log.encode())}))"
    assert said_by(code) == "450"


@pytest.mark.parametrize(
    ("text", "count"),
    [("450", "450"), ("1.02k", "1020"), ("24.0k", "24000"), ("3M", "3000000"), ("", "None"), ("k", "None"),
     ("1.2.3k", "None"), ("²k", "None"), ("12x", "None"), ("-1k", "None")],
)  # fmt: skip
def test_counts_that_bars_shorten_are_numbers(text: str, count: str) -> None:
    assert said_by(f"import probe; print(probe._count({text!r}))") == count


# --- what a run was told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notices", "stopped", "told"),
    [
        ([], False, "False"),
        ([], True, "True"),
        (["maintenance: TERMINATE_ON_HOST_MAINTENANCE"], False, "False"),
        (["maintenance: MIGRATE", "preempted: the cloud takes this machine back; save now"], False, "True"),
        (["a preemptible node ends after 24 hours: please save"], False, "True"),
    ],
)
def test_a_maintenance_alone_asks_no_run_to_end(
    tmp_path: Path, notices: list[str], *, stopped: bool, told: str
) -> None:
    if notices:
        (tmp_path / "notice").write_text("".join(f"2026-11-01T12:00:00Z {notice}\n" for notice in notices))
    if stopped:
        (tmp_path / "stopped").write_text("30")
    assert said_by(f"import files; print(files.was_asked_to_end({str(tmp_path)!r}))") == told


def test_a_maintenance_that_is_long_over_makes_no_end_doubtful(tmp_path: Path) -> None:
    """
    A maintenance notice of days ago made exit 0 doubtful, and the finished job began anew. Only SIGTERM, `preempted`
    and a request to save do, and a maintenance while it is on.
    """
    code = f"""
import files, runner
made = runner.Runner.__new__(runner.Runner)
made._folder, made._maintained_at, made.note = {str(tmp_path)!r}, None, lambda text: None
made._state = dict(signalled=False, preempted=False, maintenance="")
def tell(value):
    made._handle_news("maintenance-event", value)
    print(made._is_maintained(), made._state["signalled"], end=" ")
tell("NONE"); tell("TERMINATE_ON_HOST_MAINTENANCE"); tell("NONE")
runner.MAINTENANCE_COUNTS_SECONDS = 0
print(made._is_maintained())
"""
    assert said_by(code) == "False False True False True False False"
    assert "maintenance: TERMINATE" in (tmp_path / "notice").read_text()


# --- checkpoints of a bucket -----------------------------------------------------------------------------------------


class Storage(http.server.ThreadingHTTPServer):
    """Cloud Storage with one complete step, 7; while `is_cut`, its listings break off in the body."""

    daemon_threads = True
    is_cut = True
    asked = 0


class StorageRequest(http.server.BaseHTTPRequestHandler):
    server: Storage
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_listing = "prefix=" in self.path
        body = json.dumps({"prefixes": ["run/7/"]} if is_listing else {"name": "x"}).encode()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.server.asked += is_listing
        self.wfile.write(b"%x\r\n" % len(body) + body[:5])
        if not (is_listing and self.server.is_cut):
            self.wfile.write(body[5:] + b"\r\n0\r\n\r\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def storage() -> AbstractContextManager[Storage]:
    return serving(Storage(("127.0.0.1", 0), StorageRequest))


@contextmanager
def watching(answer: Path, env: Mapping[str, str]) -> Iterator[None]:
    """The runner's watch of a bucket, which looks much more often than it would."""
    code = (
        "import checkpoints, threading; checkpoints.PERIOD_SECONDS = 0.05; "
        f"checkpoints.watch('gs://bucket/run', {str(answer)!r}); threading.Event().wait()"
    )
    process = subprocess.Popen(command(code), env={"PATH": "/nowhere", "GCE_METADATA_HOST": "127.0.0.1:9", **env})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_an_answer_that_is_cut_does_not_end_the_watch_of_a_bucket(tmp_path: Path) -> None:
    answer = tmp_path / "checkpoint"
    with storage() as server:
        with watching(answer, {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{server.server_port}"}):
            eventually(lambda: server.asked)
            server.is_cut = False
            eventually(answer.exists)
        assert answer.read_text() == "7"


@pytest.mark.parametrize("name", ["²", "9" * 5000], ids=["no digit of ours", "endless"])
def test_a_folder_that_only_looks_like_a_step_is_none_for_a_tool_either(tmp_path: Path, name: str) -> None:
    listing = tmp_path / "listing"
    listing.write_text("".join(f"gs://bucket/run/{step}/commit_success.txt\n" for step in ("12", name, "3")))
    assert said_by(f"import checkpoints; print(checkpoints._listed_by(['cat', {str(listing)!r}]))") == "12"
