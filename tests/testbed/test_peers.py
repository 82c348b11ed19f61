"""Whom the emulator serves: on each face its own user, and neither another one nor a page in a browser."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

import pytest

from tpucare.testbed import peers
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.peers import Address, UidOf, uid_by_netlink, uid_by_table
from tpucare.testbed.wandb.server import WandbServer

NOBODY = 65534
GUEST = "127.64.0.9"
NODES = "/v2/projects/emulated/locations/us-central1-a/nodes"
METADATA = "/computeMetadata/v1/instance/name"


@dataclass(frozen=True)
class Face:
    """Where a face of the emulator listens, and a request that it answers with 200."""

    host: str
    path: str
    name: str = "127.0.0.1"

    def ask(self, **headers: str) -> int:
        connection = http.client.HTTPConnection(self.name, int(self.host.rpartition(":")[2]), timeout=10)
        try:
            asked = {"Host": self.host, "Metadata-Flavor": "Google"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            connection.request("GET", self.path, headers=asked)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def faces() -> Iterator[dict[str, Face]]:
    """All that speak HTTP, and gRPC by its address."""
    with socket.create_server((GUEST, 0)) as free:
        port = free.getsockname()[1]
    metadata = MetadataServer(port)
    try:
        metadata.add(GUEST, {"instance/name": "w-0"})
        with EmulatorServer(WorldConfig.calm()) as cloud, WandbServer() as wandb:
            yield {
                "rest": Face(cloud.rest_endpoint.removeprefix("http://"), NODES),
                "storage": Face(cloud.storage_endpoint.removeprefix("http://"), "/storage/v1/b"),
                "wandb": Face(wandb.url.removeprefix("http://"), "/control/state"),
                "metadata": Face(f"{GUEST}:{port}", METADATA, GUEST),
                "grpc": Face(cloud.endpoint, ""),
            }
    finally:
        metadata.close()


HTTP_FACES = pytest.mark.parametrize("name", ["rest", "storage", "wandb", "metadata"])


@HTTP_FACES
def test_requests_of_a_page_are_refused(faces: dict[str, Face], name: str) -> None:
    face = faces[name]
    port = face.host.rpartition(":")[2]
    assert face.ask() == HTTPStatus.OK
    assert face.ask(Host=f"LocalHost:{port}") == HTTPStatus.OK
    refused = {
        "rebound": face.ask(Host=f"rebound.evil.example:{port}"),
        "rebound, nearly our name": face.ask(Host=f"127.0.0.1.evil.example:{port}"),
        "another port": face.ask(Host="127.0.0.1:1"),
        "no name": face.ask(Host=""),
        "another origin": face.ask(Origin="https://evil.example"),
        "a sandboxed page": face.ask(Origin="null"),
        "an image": face.ask(Sec_Fetch_Site="cross-site"),
    }
    assert refused == dict.fromkeys(refused, HTTPStatus.FORBIDDEN)


def test_metadata_has_the_names_of_the_real_server(faces: dict[str, Face]) -> None:
    assert faces["metadata"].ask(Host="metadata.google.internal") == HTTPStatus.OK


SOMEBODY_ELSE = """
import http.client, os, sys
import grpc
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.cloud.tpu_v2 import TpuClient
from google.api_core.exceptions import PermissionDenied
endpoint, *others = sys.argv[2:]
def ask():
    own = [("grpc.use_local_subchannel_pool", 1)]
    client = TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(endpoint, options=own)))
    try:
        client.list_nodes(parent="projects/emulated/locations/us-central1-a")
        yield "grpc 200"
    except PermissionDenied:
        yield "grpc 403"
    for other in others:
        host, _, path = other.partition("/")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", "/" + path, headers={"Metadata-Flavor": "Google"})
        yield str(connection.getresponse().status)
# What is imported at the first call may lie in a home that nobody else can read.
list(ask())
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
print(*ask())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("user", "status"), [(NOBODY, 403), (0, 200)])
def test_only_our_user_is_served(faces: dict[str, Face], user: int, status: int) -> None:
    others = [face.host + face.path for name, face in faces.items() if name != "grpc"]
    words = [sys.executable, "-c", SOMEBODY_ELSE, str(user), faces["grpc"].host, *others]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["grpc", *[str(status)] * 5]


# --- what the kernel says of a connection ----------------------------------------------------------------------------


def is_silent(way: UidOf) -> bool:
    """Kernels without the module, and sandboxes, tell nothing by one of the two."""
    try:
        way(("127.0.0.1", 1), ("127.0.0.1", 2))
    except OSError:
        return True
    return False


BOTH_WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.skipif(is_silent(way), reason="this system does not tell it so"))
        for way in (uid_by_netlink, uid_by_table)
    ],
)


@pytest.fixture
def served() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(end: socket.socket) -> Address:
    host, port = end.getsockname()[:2]
    return host, port


@BOTH_WAYS
def test_who_holds_the_other_end(served: socket.socket, way: UidOf) -> None:
    with socket.create_connection(address(served)) as client:
        assert way(address(client), address(served)) == os.geteuid()
        client.shutdown(socket.SHUT_WR)
        assert way(address(client), address(served)) == os.geteuid()


@BOTH_WAYS
def test_a_client_that_speaks_ipv6_of_an_ipv4_address(served: socket.socket, way: UidOf) -> None:
    with socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", address(served)[1]))
        assert way(("127.0.0.1", address(client)[1]), address(served)) == os.geteuid()


@BOTH_WAYS
def test_who_sent_and_left_at_once_is_not_taken_for_root(served: socket.socket, way: UidOf) -> None:
    """
    The kernel shows uid 0 for what is left of a closed connection, so a client that sent and left at once was root to
    the emulator. Only a socket that a process holds has an owner.
    """
    client = socket.create_connection(address(served))
    end = address(client)
    client.sendall(b"POST")
    client.close()
    assert way(end, address(served)) is None


@BOTH_WAYS
def test_who_listens_on_the_port_of_a_client_is_not_the_client(served: socket.socket, way: UidOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert way(address(other), address(served)) is None


def test_where_the_system_tells_nothing_everybody_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(peer: Address, served: Address) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(peers, "uid_by_netlink", silent)
    assert peers._find_method.__wrapped__() is uid_by_table
    monkeypatch.setattr(peers, "uid_by_table", silent)
    assert peers._find_method.__wrapped__() is None
