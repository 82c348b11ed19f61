"""`tpucare ray`: what is refused before Ray starts, what an earlier head left, and how a cluster is reached."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_ray_cluster import HEAD
from tests.kits.bench_worker import eventually
from tpucare.cli.common import Exit
from tpucare.integrations.ray.cluster import cluster_folder, make_token, read_head, write_head
from tpucare.model.memory import Memory
from tpucare.service.control_socket import Control
from tpucare.service.status import remembered_row

IP = "127.7.3.2"


class Bench:
    """A state folder, and a stand-in for the Python that has Ray: it notes its words and its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.started: list[subprocess.Popen[str]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("TPUCARE_", "RAY_"))}
        # A short path, as the sockets of Ray need it.
        self.temp = tempfile.mkdtemp(prefix="c", dir="/tmp")
        self.env |= {"HOME": str(folder), "TPUCARE_STATE": str(self.state), "TMPDIR": self.temp}

    def python(self, ray: str = "2.60.0", lacks: str = "") -> str:
        path = self.folder / "python"
        about = json.dumps({"ray": ray, "python": "3.11", "lacks": lacks.split()})
        path.write_text(
            f"#!/bin/bash\nif [ $1 = -c ]; then echo {shlex.quote(about)}; exit; fi\n"
            f"pwd > {self.folder}/cwd; env -0 > {self.folder}/env; printf '%s\\0' \"$@\" > {self.folder}/words\n"
            "trap 'exit 1' TERM; while :; do sleep 0.1; done\n"
        )
        path.chmod(0o755)
        return str(path)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tpucare.cli", *words]
        process = subprocess.Popen(command, env=self.env, stdout=-1, stderr=-1, text=True)
        self.started.append(process)
        return process

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def head(self, *words: str) -> tuple[str, ...]:
        port = free_port()
        return ("ray", "head", "lab", "--address", f"{IP}:{port}", "--python", self.python(), *words)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    shutil.rmtree(made.temp)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((IP, 0))
        return int(probe.getsockname()[1])


# --- the head --------------------------------------------------------------------------------------------------------


def test_a_head_is_ray_itself_with_a_token_in_a_file(bench: Bench) -> None:
    bench.env |= {"RAY_AUTH_TOKEN": "old", "RAY_ADDRESS": "elsewhere"}
    port, dashboard = free_port(), free_port()
    words = bench.head("--address", f"{IP}:{port}", "--dashboard-port", str(dashboard), "--", "--num-cpus", "0")
    process = bench.start(*words)
    eventually(lambda: (bench.folder / "words").exists(), 20)
    eventually(lambda: (bench.folder / "words").read_bytes().endswith(b"\0"), 5)
    record = read_head(bench.state, "lab")
    assert record is not None
    assert (record.address, record.dashboard) == (f"{IP}:{port}", f"127.0.0.1:{dashboard}")
    assert (record.ray, record.python_version, record.python) == ("2.60.0", "3.11", str(bench.folder / "python"))
    token = make_token(bench.state, "lab")
    assert record.token == str(token)
    said = (bench.folder / "words").read_text().split("\0")[:-1]
    temp = next(word for word in said if word.startswith("--temp-dir=")).partition("=")[2]
    assert said == [
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"),
        *(f"--node-ip-address={IP}", f"--port={port}", f"--temp-dir={temp}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        # Of two heads that start on one machine at the same moment, each gets a port for the agent that takes its jobs.
        *("--dashboard-agent-listen-port=0", "--num-cpus", "0"),
    ]
    assert len(temp) <= 45
    assert Path(temp).parent.stat().st_mode & 0o777 == 0o700
    env = dict(line.split("=", 1) for line in (bench.folder / "env").read_text().split("\0") if line)
    assert {name: value for name, value in env.items() if name.startswith("RAY_")} == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_NODE_TYPE_NAME": "head",
        "RAY_CLOUD_INSTANCE_ID": "head",
    }
    assert token.read_text() not in (bench.folder / "env").read_text() + "".join(said)
    # No process stays above Ray, and its folder has nothing that `python -m` could import.
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"/bin/bash\0")
    work = Path((bench.folder / "cwd").read_text().strip())
    assert (work, list(work.iterdir())) == (cluster_folder(bench.state, "lab") / "work", [])


def test_one_cluster_has_one_head(bench: Bench) -> None:
    first = bench.start(*bench.head("--dashboard-port", str(free_port())))
    eventually(lambda: (bench.folder / "words").exists(), 20)
    code, _, err = bench.run(*bench.head("--dashboard-port", str(free_port())))
    assert code == Exit.CONFIG
    assert f"its head runs already, as process {first.pid}" in err
    assert first.poll() is None


def test_what_a_killed_head_left_is_ended_before_the_next_start(bench: Bench) -> None:
    folder = cluster_folder(bench.state, "lab")
    ignoring = ["bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    left = [
        subprocess.Popen(words, env={**bench.env, "TPUCARE_RAY_HEAD": str(folder)})
        for words in (["sleep", "600"], ignoring)
    ]
    other = subprocess.Popen(["sleep", "600"], env={**bench.env, "TPUCARE_RAY_HEAD": f"{folder}-2"})
    try:
        bench.start(*bench.head("--dashboard-port", str(free_port())))
        eventually(lambda: (bench.folder / "words").exists(), 30)
        assert [process.wait(1) for process in left] == [-15, -9]
        assert other.poll() is None
    finally:
        for process in (*left, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--address", "127.0.0.1"), "Ray replaces this one by another"),
        (("--address", "[::1]:6379"), "Ray replaces this one by another"),
        (("--address", "0.0.0.0"), "Ray replaces this one by another"),
        (("--address", "localhost"), "internal address as IP or IP:PORT"),
        (("--address", f"{IP}:0"), "a number from 1 to 65535"),
        (("--address", f"{IP}:http"), "a number from 1 to 65535"),
        (("--address", "192.0.2.7"), "is no address of this machine"),
        (("--temp-dir", "/tmp/" + "x" * 39), "longer than 43 bytes"),
        (("--python", "/nowhere/python"), "cannot be run (No such file or directory): name the one that has Ray"),
        (("--python", "/bin/true"), "is no Python that works"),
        (("--python", "/bin/false"), "is no Python that works"),
        (("--", "--port", "1"), "--port after --: tpucare sets it; write --address IP:PORT"),
        (("--", "--autoscaling-config=x"), "two caretakers"),
    ],
)
def test_each_mistake_is_one_line_and_nothing_is_started(words: tuple[str, ...], says: str, bench: Bench) -> None:
    code, out, err = bench.run(*bench.head(*words))
    assert (code, out) == (Exit.CONFIG, "")
    (line,) = err.splitlines()
    assert says in line
    assert not (bench.folder / "words").exists()
    assert read_head(bench.state, "lab") is None


@pytest.mark.parametrize(
    ("ray", "lacks", "says"),
    [
        ("", "", "it has no Ray: "),
        ("2.55.9", "", "it has Ray 2.55.9, and slices need 2.56 or later: "),
        ("1.13.0", "", "slices need 2.56 or later: "),
        ("nonsense", "", "slices need 2.56 or later: "),
        ("2.60.0", "aiohttp_cors", "no dashboard, which jobs need (aiohttp_cors): "),
    ],
)
def test_a_python_without_the_ray_that_slices_need_is_told(ray: str, lacks: str, says: str, bench: Bench) -> None:
    code, _, err = bench.run(*bench.head(), "--python", bench.python(ray, lacks))
    assert code == Exit.CONFIG
    (line,) = err.splitlines()
    assert says in line
    assert "-m pip install 'ray[default]>=2.56'" in line


def test_ports_in_use_are_told_before_ray_moves_on(bench: Bench) -> None:
    with socket.create_server((IP, 0)) as taken, socket.create_server(("127.0.0.1", 0)) as dashboard:
        code, _, err = bench.run(*bench.head(), "--address", f"{IP}:{taken.getsockname()[1]}")
        assert (code, "it is in use; choose another port" in err) == (Exit.CONFIG, True)
        code, _, err = bench.run(*bench.head(), "--dashboard-port", str(dashboard.getsockname()[1]))
        assert (code, "choose another one: --dashboard-port" in err) == (Exit.CONFIG, True)


def test_a_temp_folder_that_is_a_link_is_refused(bench: Bench) -> None:
    link = Path(f"/tmp/t-{os.getpid()}-{time.monotonic_ns() % 10**6}")
    link.symlink_to(bench.folder)
    try:
        code, _, err = bench.run(*bench.head("--temp-dir", str(link)))
        assert (code, "is another user's, or a link" in err) == (Exit.CONFIG, True)
    finally:
        link.unlink()


@pytest.mark.parametrize("name", ["Lab", "lab-1", "../lab"])
def test_a_cluster_of_no_name_is_refused(name: str, bench: Bench) -> None:
    for words in (("head", name), ("env", name), ("tunnel", name, "user@vm")):
        code, _, err = bench.run("ray", *words)
        assert (code, "cluster" in err, "must" in err) == (Exit.CONFIG, True, True)


# --- its status, and what `down` ends ---------------------------------------------------------------------------------


def slice_row(slot: str, state: str, busy: int = 0) -> dict[str, Any]:
    return {"slot": slot, "state": state, "why": "", "busy_hosts": busy, "stuck": False}


def pool_row(fleet: str, *slices: dict[str, Any], cluster: str = "lab", **values: Any) -> dict[str, Any]:
    return {
        "fleet": fleet,
        "cluster": cluster,
        "type": "v4-16",
        "head": "10.0.0.2:6379",
        "dashboard": "127.0.0.1:8265",
        "problem": "",
        "age_seconds": 1.0,
        "min": 0,
        "max": 4,
        "hosts": 0,
        "asked": "",
        "unmet": [],
        "pending": [],
        "awake": sum(one["state"] != "resting" for one in slices),
        "joined": sum(one["state"] == "joined" for one in slices),
        "busy_hosts": sum(one["busy_hosts"] for one in slices),
        "slices": list(slices),
        **values,
    }


LAB = pool_row("lab", slice_row("lab-0", "joined", 2), slice_row("lab-1", "joined", 1), slice_row("lab-2", "resting"))


@contextlib.contextmanager
def daemon_that_says(state: Path, *pools: dict[str, Any]) -> Iterator[None]:
    """A daemon's socket that answers `status` with these rows of pools."""
    names = [(row["fleet"], one["slot"]) for row in pools for one in row["slices"]]
    now = datetime(2026, 11, 22, 7, 0, tzinfo=UTC)
    slots = [
        {
            **remembered_row(slot, Memory(fleet=fleet), now),
            "node": f"{slot}-a3",
            "zone": "us-central2-b",
            "why": "boots",
        }
        for fleet, slot in names
    ]
    answer = {"at": now.isoformat(), "store_lost": False, "projects": [], "strays": [], "files": [], "slots": slots}
    fleets = [{"fleet": row["fleet"], "wish": "up", "problem": "", "cluster": row["cluster"]} for row in pools]
    state.mkdir(exist_ok=True)
    said = {**answer, "fleets": fleets, "ray": pools}

    def serve() -> None:
        served.serve(lambda _: said)

    served = Control(state / "control.sock", serve)
    served.start()
    (state / "owner").write_text("tpucare-1")
    try:
        yield
    finally:
        served.close()


def test_the_status_of_a_cluster_needs_a_daemon(bench: Bench) -> None:
    code, out, err = bench.run("ray", "status", "lab")
    assert (code, out) == (Exit.DAEMON, "")
    assert "start it with `tpucare daemon`" in err


def test_the_status_of_an_unknown_cluster_names_the_nearest(bench: Bench) -> None:
    with daemon_that_says(bench.state, LAB, pool_row("big", cluster="other")):
        code, out, err = bench.run("ray", "status", "labs")
        assert (code, out) == (Exit.FAILED, "")
        assert "no pool belongs to a cluster labs: apply a fleet file with a `ray` section; nearest: lab" in err
    with daemon_that_says(bench.state):
        code, out, _ = bench.run("ray", "status")
        assert (code, "no fleet is a pool of a Ray cluster" in out) == (0, True)


def test_the_status_of_a_cluster_shows_its_pools_and_the_slices_that_are_awake(bench: Bench) -> None:
    big = pool_row("big", slice_row("big-0", "coming"), asked="2 placement groups", unmet=["{TPU: 64}: no pool has it"])
    with daemon_that_says(bench.state, LAB, big, pool_row("far", cluster="other")):
        code, out, err = bench.run("ray", "status", "lab")
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "lab, pool of lab: 2 awake of 0 to 4, 2 joined, 3 hosts at work; asked for: nothing (1 s ago)",
            "  lab-0 joined (lab-0-a3 us-central2-b)",
            "  lab-1 joined (lab-1-a3 us-central2-b)",
            "big, pool of lab: 1 awake of 0 to 4, 0 joined; asked for: 2 placement groups (1 s ago)",
            "{TPU: 64}: no pool has it",
            "  big-0 coming (big-0-a3 us-central2-b): boots",
        ]
        code, out, _ = bench.run("ray", "status", "lab", "--json")
        assert json.loads(out) == {"pools": [LAB, big]}
        assert bench.run("ray", "status")[1].count(", pool of ") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lab",), "3 hosts of lab work for jobs, which end. Stop the runs of lab and delete its nodes?"),
        (("lab-1",), "1 host of lab-1 works for jobs, which end. Stop the runs of lab-1 and delete its nodes?"),
        (("lab-2",), "Stop the runs of lab-2 and delete its nodes?"),
    ],
)
def test_down_tells_of_the_jobs_that_end_with_the_hosts(words: tuple[str, ...], said: str, bench: Bench) -> None:
    with daemon_that_says(bench.state, LAB):
        code, out, err = bench.run("down", *words)
    assert (code, out) == (Exit.FAILED, "")
    assert err.startswith(f"tpucare: {said} There is no terminal"), err


def test_down_says_so_where_work_of_hosts_is_not_known(bench: Bench) -> None:
    silent = pool_row("lab", slice_row("lab-0", "coming"), age_seconds=None, problem="the head does not answer")
    late = pool_row("big", slice_row("big-0", "joined", 2), age_seconds=180.0, problem="the head does not answer")
    resting = pool_row("far", slice_row("far-0", "resting"), age_seconds=None)
    with daemon_that_says(bench.state, silent, late, resting):
        _, _, err = bench.run("down", "--all")
    assert "Whether hosts of lab work for jobs is not known: the head does not answer. " in err
    assert "2 hosts of big worked for jobs 3 min ago, when the head answered last; these jobs end. Stop" in err
    assert "far work" not in err


def test_down_of_a_cluster_is_one_question_about_all_its_pools(bench: Bench) -> None:
    big = pool_row("big", slice_row("big-0", "joined", 1))
    far = pool_row("far", slice_row("far-0", "joined", 8), cluster="other")
    with daemon_that_says(bench.state, LAB, big, far):
        code, out, err = bench.run("down", "--cluster", "lab")
        assert (code, out) == (Exit.FAILED, "")
        assert err.startswith(
            "tpucare: 3 hosts of lab work for jobs, which end. 1 host of big works for jobs, which end. "
            "The head of lab goes on. Stop the runs of lab, big and delete their nodes? There is no terminal"
        ), err
        code, out, err = bench.run("down", "--cluster", "labs")
        assert (code, out) == (Exit.CONFIG, "")
        assert err == "tpucare: no pool belongs to a cluster labs; there are lab, other\n"


def test_down_takes_a_fleet_or_all_or_a_cluster(bench: Bench) -> None:
    for words in ((), ("lab", "--all"), ("lab", "--cluster", "lab"), ("--all", "--cluster", "lab")):
        code, _, err = bench.run("down", *words)
        assert (code, "give a FLEET, a SLOT, --all or --cluster NAME" in err) == (Exit.USAGE, True), err


# --- to reach it -----------------------------------------------------------------------------------------------------


def test_a_shell_gets_the_variables_of_rays_jobs(bench: Bench) -> None:
    token = bench.folder / "a folder" / "$(touch evil)"
    token.parent.mkdir()
    token.touch()
    write_head(bench.state, dataclasses.replace(HEAD, token=str(token)))
    code, out, err = bench.run("ray", "env", "lab")
    assert (code, err) == (0, "")
    told = 'printf "%s|" "$RAY_ADDRESS" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN_PATH"'
    shell = subprocess.run(["bash", "-ec", f"{out}\n{told}"], capture_output=True, text=True, check=True)
    assert shell.stdout == f"http://127.0.0.1:8265|token|{token}|"


def test_a_cluster_whose_token_is_gone_is_told_apart(bench: Bench) -> None:
    token = bench.folder / "token"
    write_head(bench.state, dataclasses.replace(HEAD, token=str(token)))
    code, out, err = bench.run("ray", "env", "lab")
    assert (code, out) == (Exit.CONFIG, "")
    assert f"its token, {token}, is gone; start the head again: tpucare ray head lab" in err


def test_an_unknown_cluster_names_the_command_that_makes_it_and_the_nearest(bench: Bench) -> None:
    write_head(bench.state, dataclasses.replace(HEAD, cluster="labs"))
    code, out, err = bench.run("ray", "env", "lab")
    assert (code, out) == (Exit.CONFIG, "")
    assert "start one: tpucare ray head lab; nearest: labs" in err


def test_a_tunnel_is_one_command_for_a_laptop(bench: Bench) -> None:
    code, out, err = bench.run("ray", "tunnel", "lab", "user@vm")
    assert code == 0
    assert out == "ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:8265:127.0.0.1:8265 user@vm\n"
    assert "ssh user@vm cat '~/" not in err
    assert "ssh user@vm cat ~/.local/state/tpucare/secrets/TPUCARE_RAY_TOKEN_LAB > ~/.ray/auth_token" in err
    write_head(bench.state, dataclasses.replace(HEAD, dashboard="127.0.0.1:9001"))
    code, out, err = bench.run("ray", "tunnel", "lab")
    assert out == "ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:9001:127.0.0.1:9001 USER@HOST\n"
    assert "cat /state/secrets/TPUCARE_RAY_TOKEN_LAB" in err


def test_a_tunnel_that_runs_is_ssh_itself(bench: Bench) -> None:
    ssh = bench.folder / "ssh"
    ssh.write_text('#!/bin/sh\nprintf "%s " ran "$@"\n')
    ssh.chmod(0o755)
    bench.env["PATH"] = f"{bench.folder}:{bench.env['PATH']}"
    code, out, _ = bench.run("ray", "tunnel", "lab", "user@vm", "--run", "--dashboard-port", "7000")
    assert (code, out) == (0, "ran -N -o ExitOnForwardFailure=yes -L 127.0.0.1:7000:127.0.0.1:7000 user@vm ")


@pytest.mark.parametrize("words", [("lab", "--run"), ("lab", "user@vm;x"), ("lab", "--", "-oProxyCommand=x")])
def test_a_tunnel_to_nowhere_or_to_an_option_is_refused(words: tuple[str, ...], bench: Bench) -> None:
    code, out, err = bench.run("ray", "tunnel", *words)
    assert (code, out) == (Exit.FAILED, "")
    assert "USER@HOST" in err
