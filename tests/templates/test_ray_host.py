"""The host script of a pool: it joins, stays joined, drains, and leaves nothing behind. Ray is a stand-in here."""

from __future__ import annotations

import ast
import http.server
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kits.bench_worker import eventually

SCRIPT = Path(__file__).parents[2] / "templates" / "ray" / "host.py"
TOKEN = "ab12" * 16


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_host", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


host = load()


# --- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short_lives", "lived", "head_was_away", "want"),
    [
        (0, 1.0, False, (1, True)),
        (3, 599.0, False, (4, True)),
        (4, 599.0, False, (5, False)),
        (4, 600.0, False, (0, True)),  # it worked for ten minutes: a new row
        (4, 1.0, True, (0, True)),  # without its head Ray ends by itself
    ],
)
def test_after_an_end_of_ray(short_lives: int, lived: float, head_was_away: bool, want: tuple[int, bool]) -> None:
    assert host.after_end(short_lives, lived, head_was_away) == want


def test_the_first_start_again_is_at_once_and_later_ones_wait_longer() -> None:
    assert [host.pause_before(number) for number in range(6)] == [0, 0, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("tmpdir", "parent"),
    [("", "/tmp"), ("/tmp/w7", "/tmp/w7"), ("/" + "x" * 31, "/" + "x" * 31), ("/" + "x" * 32, "/tmp"), ("w", "/tmp")],
)
def test_the_folder_leaves_room_for_the_paths_of_sockets(tmpdir: str, parent: str) -> None:
    path = host.folder_path({"HOME": "/home/a", "TMPDIR": tmpdir}, 1000)
    assert re.fullmatch(re.escape(parent) + r"/ray-[0-9a-f]{6}", path)
    assert len(host.ray_folder(path)) <= 45
    assert path != host.folder_path({"HOME": "/home/b", "TMPDIR": tmpdir}, 1000)
    assert path != host.folder_path({"HOME": "/home/a", "TMPDIR": tmpdir}, 1001)


@pytest.mark.parametrize(
    ("text", "want"),
    [("", False), ("maintenance: x preempted\n", False), ("maintenance: x\npreempted: save now\n", True)],
)
def test_a_notice_of_preemption_is_a_line_of_its_own(text: str, want: bool) -> None:
    assert host.is_preempted(text) is want


def test_both_versions_stand_in_one_line() -> None:
    assert host.difference("2.60.0", "3.11", "2.60.0", "3.11") == ""
    for ray, python in (("2.59.0", "3.11"), ("2.60.0", "3.10"), ("", "3.11")):
        line = host.difference("2.60.0", "3.11", ray, python)
        assert {"2.60.0", "3.11", ray or "no Ray", python} <= set(re.findall(r"no Ray|[0-9][0-9.]*[0-9]", line))
        assert "\n" not in line


def test_ray_is_told_of_slot_node_and_pool_and_finds_the_rest_itself() -> None:
    given = {
        "TPUCARE_SLOT": "lab-0",
        "TPUCARE_NODE": "lab-0-a3",
        "TPUCARE_RAY_POOL": "lab",
        "TPUCARE_RAY_TOKEN_FROM": "TOKEN",
        "TOKEN": TOKEN,
        "RAY_AUTH_TOKEN": "another",
        "RAY_ADDRESS": "elsewhere",
        "MINE": "1",
    }
    env = host.ray_environment(given, "/t/token")
    assert {name for name in env if name.startswith("TPU_")} == {"TPU_NAME"}
    assert (env["TPU_NAME"], env["RAY_CLOUD_INSTANCE_ID"], env["RAY_NODE_TYPE_NAME"]) == ("lab-0", "lab-0-a3", "lab")
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"], env["MINE"]) == ("token", "/t/token", "1")
    assert not {"TOKEN", "RAY_AUTH_TOKEN", "RAY_ADDRESS"} & set(env)


def test_the_folder_of_another_user_or_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ray"
    assert host.own_folder(str(path), os.geteuid()) == str(path)
    path.chmod(0o755)
    host.own_folder(str(path), os.geteuid())
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(host.Refused, match="another user's"):
        host.own_folder(str(path), os.geteuid() + 1)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(host.Refused, match="no folder"):
        host.own_folder(str(tmp_path / "link"), os.geteuid())


def test_the_script_is_python_of_3_8_and_imports_ray_where_it_runs_it() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_what_an_ended_ray_left_is_removed_and_logs_of_three_sessions_stay(tmp_path: Path) -> None:
    for day in range(1, 6):
        session = tmp_path / f"session_2026-01-0{day}"
        for part in ("logs", "sockets", "ray_spilled_objects"):
            (session / part).mkdir(parents=True)
            (session / part / "file").touch()
        (session / "node_ip_address.json").touch()
        (session / "link").symlink_to(tmp_path)
    (tmp_path / "session_latest").symlink_to("session_2026-01-05")
    (tmp_path / "token").touch()
    host.tidy(str(tmp_path))
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert kept == [*(f"session_2026-01-0{day}/logs/file" for day in (3, 4, 5)), "token"]
    assert not (tmp_path / "session_2026-01-02").exists()
    assert host.session_of(str(tmp_path)) == ""


def test_a_connection_tells_at_once_whether_its_head_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that waits for words of a head that has none to say would take it for ended."""
    monkeypatch.setattr(host, "HEAD_CONNECT_SECONDS", 5.0)
    with socket.create_server(("127.9.0.2", 0)) as listener:
        one = host.Host.__new__(host.Host)
        one._head_address, one._line = listener.getsockname(), None
        assert not one._line_is_cut()
        assert one._head_answers()
        taken, _ = listener.accept()
        began = time.monotonic()
        assert not any(one._line_is_cut() for _ in range(100))
        assert time.monotonic() - began < 5.0, "it waited"
        taken.sendall(b"the first words of any gRPC server")
        eventually(lambda: select.select([one._line], [], [], 0)[0], 5)
        assert not one._line_is_cut()
        taken.close()
        eventually(one._line_is_cut, 5)
        assert one._head_answers()
        assert not one._line_is_cut()
    assert one._line_is_cut()
    assert not one._head_answers()
    assert not one._line_is_cut()


# --- the script with a stand-in for Ray ------------------------------------------------------------------------------

STAND_IN = """
import json, os, signal, subprocess, sys, time
BENCH = os.environ["BENCH"]
def note(kind, **more):
    at = os.path.join(BENCH, "%s-%d" % (kind, os.getpid()))
    with open(at + ".new", "w") as stream:
        json.dump({"argv": sys.argv, "env": dict(os.environ), "pid": os.getpid(), "at": time.time(), **more}, stream)
    os.rename(at + ".new", at)
def main():
    behave = open(os.path.join(BENCH, "behave")).read().split()
    busy = signal.SIG_IGN if "busy" in behave else lambda *_: sys.exit(1)
    signal.signal(signal.SIGTERM, busy)
    folder = sys.argv[sys.argv.index("--temp-dir") + 1]
    os.chmod(folder, 0o777)
    link = os.path.join(folder, "session_latest")
    if os.path.islink(link):
        os.unlink(link)
    os.symlink("/x/session_2026-01-01", link)
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note("start", orphan=orphan.pid, token=open(os.environ["RAY_AUTH_TOKEN_PATH"]).read(), sid=os.getsid(0))
    if "end" in behave:
        print("the reason of Ray")
        sys.exit(3)
    while True:
        time.sleep(0.1)
"""
DRAIN = """
import os
from ray.scripts.scripts import note
class GcsClient:
    def __init__(self, address):
        self.address = address
    def internal_kv_get(self, key, namespace, timeout):
        note("asked")
        return open(os.path.join(os.environ["BENCH"], "session"), "rb").read()
    def drain_node(self, node_id, reason, message, deadline_ms, timeout):
        note("drain-" + node_id, reason=reason, deadline_ms=deadline_ms, address=self.address)
        return True, ""
"""
STATE = """
class Node:
    def __init__(self, name, instance, ip, status):
        self.node_id, self.instance_id, self.node_ip_address, self.status = name, instance, ip, status
class State:
    node_states = [
        Node(b"1", "lab-0-a1", "127.9.0.5", 1), Node(b"2", "lab-0-a1", "127.9.0.6", 1),
        Node(b"3", "lab-0-a1", "127.9.0.5", 2), Node(b"4", "other", "127.9.0.5", 1),
    ]
def get_cluster_resource_state(client):
    return State
"""
WORDS = """
class NodeStatus:
    DEAD = 2
class DrainNodeReason:
    DRAIN_NODE_REASON_PREEMPTION = 2
"""
# The same script with shorter waits.
DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import host
host.TICK_SECONDS, host.HEAD_POLL_SECONDS, host.STOP_SECONDS, host.METADATA_TRIES = 0.1, 0.1, 1.0, 1
host.pause_before = lambda short_lives: 0.0
sys.exit(host.main(sys.argv[2:]))
"""


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/computeMetadata/v1/instance/network-interfaces/0/ip"
        body = b"127.9.0.5" if known and self.headers["Metadata-Flavor"] == "Google" else b""
        self.send_response(200 if body else 403)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Bench:
    """A host with a stand-in for Ray, a metadata server, and a head that only takes connections."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))
        for path, text in {
            "ray/__init__.py": "",
            "ray/scripts/__init__.py": "",
            "ray/scripts/scripts.py": STAND_IN,
            "ray/_raylet.py": DRAIN,
            "ray/autoscaler/v2/sdk.py": STATE,
            "ray/core/generated/autoscaler_pb2.py": WORDS,
            "driver.py": DRIVER,
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        self.metadata = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
        threading.Thread(target=self.metadata.serve_forever, daemon=True).start()
        with socket.create_server(("127.9.0.2", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.listener: socket.socket | None = None
        self.process: subprocess.Popen[str] | None = None
        self.behave("stay")
        self.session("session_2026-01-01")

    def session(self, name: str) -> None:
        """Name of the head's session; empty: it has none yet."""
        (self.folder / "session.new").write_text(name)
        (self.folder / "session.new").replace(self.folder / "session")

    def behave(self, *words: str) -> None:
        (self.folder / "behave.new").write_text(" ".join(words))
        (self.folder / "behave.new").replace(self.folder / "behave")

    def head_up(self) -> None:
        # Connections are taken by the kernel; a long queue stands for a head that accepts them.
        self.listener = socket.create_server(("127.9.0.2", self.port), backlog=4096, reuse_port=True)

    def head_down(self) -> None:
        assert self.listener is not None
        self.listener.close()

    def start(self) -> None:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TPUCARE_", "RAY_", "TPU_"))},
            "HOME": str(self.folder),
            "TMPDIR": str(self.temp),
            "BENCH": str(self.folder),
            "PYTHONPATH": str(self.folder),
            "GCE_METADATA_HOST": f"127.0.0.1:{self.metadata.server_port}",
            "TPUCARE_NOTICE": str(self.folder / "notice"),
            "TPUCARE_SLOT": "lab-0",
            "TPUCARE_NODE": "lab-0-a1",
            "TPUCARE_RAY_ADDRESS": f"127.9.0.2:{self.port}",
            "TPUCARE_RAY_POOL": "lab",
            "TPUCARE_RAY_TOKEN_FROM": "TPUCARE_RAY_TOKEN_LAB",
            "TPUCARE_RAY_TOKEN_LAB": TOKEN,
            "TPUCARE_RAY_ARGS": "--memory 5 --labels 'a b'",
        }
        words = [sys.executable, str(self.folder / "driver.py"), str(SCRIPT.parent), "run"]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True)

    def noted(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.folder.glob(f"{kind}-*[0-9]")]
        return sorted(found, key=lambda note: float(note["at"]))

    def started(self, number: int) -> dict[str, Any]:
        eventually(lambda: len(self.noted("start")) >= number, 20)
        return self.noted("start")[number - 1]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def left(self) -> list[int]:
        """Processes that this bench started in any way, but the script."""
        mark = f"BENCH={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes() and b") Z " not in (path / "stat").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return [pid for pid in found if self.process is None or pid != self.process.pid]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        if self.listener is not None:
            self.listener.close()
        self.metadata.shutdown()
        self.metadata.server_close()
        shutil.rmtree(self.temp)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_host_waits_for_its_head_and_joins_with_a_private_token(bench: Bench) -> None:
    bench.start()
    eventually(lambda: "waiting for the head at 127.9.0.2" in bench.log(), 20)
    assert bench.noted("start") == []
    bench.head_up()
    ray = bench.started(1)
    (temp,) = bench.temp.iterdir()
    assert ray["argv"] == [
        *("ray", "start", "--log-color=false", "--block", "--address", f"127.9.0.2:{bench.port}"),
        *("--node-ip-address", "127.9.0.5", "--temp-dir", f"{temp}/t", "--memory", "5", "--labels", "a b"),
    ]
    assert ray["sid"] == ray["pid"]
    assert ray["token"] == TOKEN
    # As Ray does; the folder above keeps other users out.
    assert (temp / "t").stat().st_mode & 0o777 == 0o777
    assert (temp.stat().st_mode & 0o777, (temp / "token").stat().st_mode & 0o777) == (0o700, 0o600)
    below = [pid for pid in bench.left() if bench.process and pid != bench.process.pid]
    assert len(below) == 2
    for pid in below:
        for name in ("environ", "cmdline"):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert (bench.stop(), bench.left(), TOKEN in bench.log()) == (143, [], False)
    assert not (temp / "token").exists()


def test_a_killed_ray_is_started_again_in_place_and_its_orphans_are_ended(bench: Bench) -> None:
    bench.head_up()
    bench.start()
    first = bench.started(1)
    os.kill(first["pid"], signal.SIGKILL)
    second = bench.started(2)
    assert not {first["pid"], first["orphan"]} & set(bench.left())
    assert {second["pid"], second["orphan"]} == set(bench.left())
    assert bench.stop() == 143


def test_five_short_lives_in_a_row_beside_a_living_head_end_the_run(bench: Bench) -> None:
    bench.behave("end")
    bench.head_up()
    bench.start()
    assert bench.process is not None
    assert bench.process.wait(30) == 75
    assert len(bench.noted("start")) == 5
    assert bench.left() == []
    last = bench.log().splitlines()[-1]
    assert "the reason of Ray" in bench.log()
    assert re.search(r"Ray ended 5 times in a row \(at last it ended by itself after [0-9]+ s \(status 3\)\)", last)


def test_a_head_that_goes_is_waited_for_and_no_end_counts(bench: Bench) -> None:
    bench.head_up()
    bench.start()
    for life in range(1, 7):
        ray = bench.started(life)
        bench.head_down()
        bench.behave("end" if life < 6 else "stay")
        os.kill(ray["pid"], signal.SIGKILL)
        while bench.log().count("waiting for the head") < life:
            time.sleep(0.03)
        bench.behave("stay")
        bench.head_up()
    bench.started(7)
    assert bench.stop() == 143


def test_a_head_with_a_new_session_is_joined_at_once_and_one_with_the_same_is_not_left(bench: Bench) -> None:
    """Ray waits a minute for a head that does not know it any more; after a cut of the network all goes on."""
    bench.head_up()
    bench.start()
    bench.started(1)
    bench.head_down()
    time.sleep(1)
    bench.session("")
    bench.head_up()
    eventually(lambda: len(bench.noted("asked")) >= 2, 10)
    bench.session("session_2026-01-01")
    asked = len(bench.noted("asked"))
    eventually(lambda: len(bench.noted("asked")) > asked, 10)
    time.sleep(1)
    # It is asked no more, and nothing was started again.
    settled = len(bench.noted("asked"))
    time.sleep(1)
    assert (len(bench.noted("asked")), len(bench.noted("start"))) == (settled, 1)
    bench.head_down()
    time.sleep(1)
    bench.session("session_2026-02-02")
    bench.head_up()
    bench.started(2)
    assert "Ray has a head that began a new session, and is started again here" in bench.log()
    # One that is started again between two looks is never seen to be away.
    bench.session("session_2026-03-03")
    bench.head_down()
    bench.head_up()
    bench.started(3)
    assert bench.stop() == 143


def test_a_busy_ray_is_killed_after_its_time_and_nothing_is_left(bench: Bench) -> None:
    bench.behave("busy")
    bench.head_up()
    bench.start()
    bench.started(1)
    assert (bench.stop(), bench.left()) == (143, [])


def test_a_stop_while_no_head_is_there_ends_at_once(bench: Bench) -> None:
    bench.start()
    eventually(lambda: "waiting for the head" in bench.log(), 20)
    assert (bench.stop(), bench.left()) == (143, [])


def test_a_preempted_host_is_drained_once_and_not_started_again(bench: Bench) -> None:
    bench.head_up()
    bench.start()
    ray = bench.started(1)
    (bench.folder / "notice").write_text("maintenance: TERMINATE\n")
    (bench.folder / "notice").write_text("maintenance: TERMINATE\npreempted: save now\n")
    eventually(lambda: bench.noted("drain"), 20)
    # Of this node and this address; a host that is dead already, and those of others, are left alone.
    (drain,) = bench.noted("drain")
    assert [path.name[:8] for path in bench.folder.glob("drain-*")] == ["drain-31"]
    assert (drain["reason"], drain["address"]) == (2, f"127.9.0.2:{bench.port}")
    assert 0 < drain["deadline_ms"] / 1000 - drain["at"] <= 30
    assert TOKEN not in json.dumps(drain)
    os.kill(ray["pid"], signal.SIGKILL)
    eventually(lambda: "Ray is not started again on a machine that the cloud takes back" in bench.log(), 10)
    assert (bench.stop(), len(bench.noted("start")), len(bench.noted("drain"))) == (143, 1, 1)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "the variable TPUCARE_RAY_ADDRESS is not set"),
        ({"TPUCARE_RAY_ADDRESS": "10.0.0.2", "TPUCARE_RAY_TOKEN_FROM": "T", "T": "x", "TPUCARE_NODE": "n"}, "ADDRESS"),
    ],
)
def test_a_missing_or_wrong_variable_is_one_line(env: dict[str, str], says: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "run"], env=env, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    assert (done.returncode, says in line, done.stderr) == (1, True, "")
