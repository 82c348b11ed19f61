"""Head and host with the real Ray: a host joins, heals in place, follows its head to a new session, and leaves."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.bench_worker import eventually
from tests.kits.ray_cluster import RAY_PYTHON
from tests.templates.test_ray_host import SCRIPT
from tpucare.integrations.ray.cluster import make_token, token_variable

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HEAD_IP, HOST_IP = "127.11.0.2", "127.11.0.3"
SMALL = ("--num-cpus", "1", "--object-store-memory", "80000000")
# Runs in a process of its own, as the probe does: a client of Ray keeps state per process.
NODES = """
import json, sys
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
state = get_cluster_resource_state(GcsClient(address=sys.argv[1]))
print(json.dumps([[n.node_id.hex(), n.instance_id, n.ray_node_type_name, n.node_ip_address, n.status]
    for n in state.node_states]))
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        # Ray's temporary folders need short paths.
        self.temp = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
        with socket.create_server((HEAD_IP, 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, self.dashboard = one.getsockname()[1], other.getsockname()[1]
        self.address = f"{HEAD_IP}:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TPUCARE_", "RAY_", "TPU_"))}
        self.env = {**clean, "HOME": str(folder), "TMPDIR": str(self.temp), "BENCH": str(folder)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start(self, words: list[str], env: dict[str, str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as stream:
            made = subprocess.Popen(words, env={**self.env, **env}, stdout=stream, stderr=stream)
        self.processes.append(made)
        return made

    def start_head(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tpucare.cli", "ray", "head", "lab", "--address", self.address]
        words += [
            "--dashboard-port",
            str(self.dashboard),
            "--python",
            RAY_PYTHON,
            "--",
            *SMALL,
            "--ray-client-server-port",
            "20001",
        ]
        return self._start(words, {"TPUCARE_STATE": str(self.state)}, "head.log")

    def start_host(self) -> subprocess.Popen[bytes]:
        env = {
            "TPUCARE_SLOT": "lab-0",
            "TPUCARE_NODE": "lab-0-a1",
            "TPUCARE_RAY_ADDRESS": self.address,
            "TPUCARE_RAY_POOL": "lab",
            "TPUCARE_RAY_TOKEN_FROM": token_variable("lab"),
            token_variable("lab"): make_token(self.state, "lab").read_text(),
            "TPUCARE_RAY_ARGS": " ".join(SMALL),
            # No metadata server; a later word goes before an earlier one.
            "GCE_METADATA_HOST": "127.0.0.1:9",
        }
        env["TPUCARE_RAY_ARGS"] += f" --node-ip-address {HOST_IP}"
        return self._start([RAY_PYTHON, str(SCRIPT), "run"], env, "host.log")

    def living(self) -> list[list[Any]]:
        """Id, instance, node type and address of every host that Ray calls alive; none while the head is away."""
        env = {**self.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(make_token(self.state, "lab"))}
        words = [RAY_PYTHON, "-c", NODES, self.address]
        try:
            done = subprocess.run(words, env=env, capture_output=True, timeout=10, check=True)
        except subprocess.SubprocessError:
            return []
        return [node[:4] for node in json.loads(done.stdout) if node[4] != 2 and node[1] != "head"]

    def joined(self, *, besides: tuple[str, ...] = ()) -> str:
        """Id of a host that joined, other than *besides*."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [node[0] for node in self.living() if node[0] not in besides]
            return bool(found)

        eventually(look, 100)
        return found[0]

    def left(self) -> dict[int, str]:
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"BENCH={self.folder}".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue
        return found

    def is_ours(self, process: psutil.Process) -> bool:
        """Started by this cluster: some of Ray's processes write their title over their environment."""
        try:
            above = {process.pid, *(parent.pid for parent in process.parents())}
        except psutil.Error:
            return False
        return not above.isdisjoint({one.pid for one in self.processes} | self.left().keys())

    def raylet_of(self, process: subprocess.Popen[bytes]) -> int:
        parents = {int(path.name): parent_of(path) for path in Path("/proc").glob("[0-9]*")}
        for pid, command in self.left().items():
            above = pid
            while above in parents and above != process.pid:
                above = parents[above]
            if above == process.pid and "/raylet " in command:
                return pid
        raise AssertionError("no raylet")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


def parent_of(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        for log in ("head.log", "host.log"):
            print(f"--- {log}", (tmp_path / log).read_text()[-3000:] if (tmp_path / log).exists() else "none")
        made.close()


def test_a_host_heals_in_place_and_follows_its_head(cluster: Cluster) -> None:
    began = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} {text}")

    head, host = cluster.start_head(), cluster.start_host()
    first = cluster.joined()
    assert cluster.living() == [[first, "lab-0-a1", "lab", HOST_IP]]
    told("joined")
    # Ray opens its own folders to all users; those above, with token and sockets, stay private.
    assert [path.stat().st_mode & 0o777 for path in cluster.temp.glob("ray-*")] == [0o700, 0o700]
    os.kill(cluster.raylet_of(host), signal.SIGKILL)
    second = cluster.joined(besides=(first,))
    told("joined again in place")
    # Killed, it leaves agents and its dashboard's processes, which the next head ends.
    head.kill()
    head.wait()
    head = cluster.start_head()
    cluster.joined(besides=(first, second))
    # By itself Ray waits a minute for the head that is gone.
    assert "has a head that began a new session" in (cluster.folder / "host.log").read_text()
    told("joined the new session")
    assert host.poll() is None
    host.terminate()
    assert host.wait(25) == 143
    told("host left")
    eventually(lambda: cluster.living() == [], 20)
    head.terminate()
    head.wait(30)
    told("head left")
    eventually(lambda: cluster.left() == {}, 15)
    told("nothing left")


# A service of each kind of gRPC server of Ray, and a method of it that only reads.
GRPC = {
    "gcs": "ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "raylet": "ray.rpc.NodeManagerService/GetNodeStats",
    "objects": "ray.rpc.ObjectManagerService/Pull",
    "worker": "ray.rpc.CoreWorkerService/NumPendingTasks",
    "agent": "ray.rpc.ReporterService/HealthCheck",
    "client": "ray.rpc.RayletDriver/ClusterInfo",
}
WORK = """
import ray, time
ray.init(logging_level="ERROR", log_to_driver=False)
@ray.remote(num_cpus=1)
class Actor:
    def ready(self):
        return True
actors = [Actor.remote() for _ in range(2)]  # one on the head, one on the host
print(ray.get([actor.ready.remote() for actor in actors]), flush=True)
time.sleep(600)
"""


def http_without_token(address: str, port: int, method: str, path: str) -> int:
    """The status; 0: this port speaks no HTTP."""
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request(method, path, body="{}" if method == "POST" else None)
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return 0
    finally:
        connection.close()


def grpc_without_token(address: str, port: int, method: str) -> str:
    import grpc

    with grpc.insecure_channel(f"{address}:{port}") as channel:
        try:
            channel.unary_unary(f"/{method}", None, None)(b"", timeout=5)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_without_the_token_a_port_serves_nothing_but_metrics_and_health(cluster: Cluster) -> None:
    """The table of ports in docs/ray.md. Another version of Ray may have other ports."""
    cluster.start_head()
    cluster.start_host()
    cluster.joined()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(make_token(cluster.state, "lab"))}
    cluster._start([sys.executable, "-c", WORK], {**token, "RAY_ADDRESS": cluster.address}, "work.log")
    eventually(lambda: "True" in (cluster.folder / "work.log").read_text(), 60)
    ours = {process.pid for process in psutil.process_iter() if cluster.is_ours(process)}
    ports = {
        (str(one.laddr[0]), int(one.laddr[1]))
        for one in psutil.net_connections("inet")
        if one.laddr and one.pid in ours and (one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM)
    }
    refused, healthy = Counter[str](), set[tuple[str, str]]()
    for bound, port in sorted(ports):
        address = HEAD_IP if bound in ("0.0.0.0", "::") else bound.removeprefix("::ffff:")
        status = {path: http_without_token(address, port, "GET", path) for path in ("/", "/api/jobs/", "/metrics")}
        if any(status.values()):
            changing = {http_without_token(address, port, "POST", path) for path in ("/api/jobs/", "/api/x")}
            is_metrics = set(status.values()) == {200}
            assert changing <= ({405} if is_metrics else {401}), (port, changing)
            assert is_metrics or status["/api/jobs/"] == 401, (port, status)
            refused["metrics" if is_metrics else "http"] += 1
            continue
        for kind, method in GRPC.items():
            answer = grpc_without_token(address, port, method)
            assert answer in ("UNAUTHENTICATED", "UNIMPLEMENTED"), (port, kind, answer)
            if answer == "UNAUTHENTICATED":
                refused[kind] += 1
                healthy.add((kind, grpc_without_token(address, port, "grpc.health.v1.Health/Check")))
    assert set(refused) >= {*GRPC, "metrics", "http"}
    assert all(refused.values()), refused
    known = {kind for kind, answer in healthy if answer == "OK"}
    assert (known, healthy - {(kind, "OK") for kind in known}) == (
        {"gcs", "raylet", "objects", "worker"},
        {("agent", "UNIMPLEMENTED"), ("client", "UNIMPLEMENTED")},
    )
