"""The client's own matters: where it connects, whose project, which clock. What every Cloud promises: the contract."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.kits.hand_clock import HandClock
from tpucare.adapters.google import client as cloud_module
from tpucare.adapters.google.client import CloudClock, Deadlines, GoogleCloud, connect, credentials_file, find_project
from tpucare.adapters.google.wire import with_ssh_key
from tpucare.model.errors import AnswerLost, ConfigError, NeedsPerson, OwnCredentials, Transient
from tpucare.model.resources import Health, NodeKey, NodeRequest, Place, Provisioning
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

PROJECT, ZONE = "emulated", "us-central1-a"
INSTANT: dict[str, object] = {"read": 0, "write": 0, "list_lag_share": 0}


def still() -> float:
    return 0.0


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def server(clock: HandClock) -> Iterator[EmulatorServer]:
    with EmulatorServer(WorldConfig.fast(latencies=INSTANT), now=clock.now, dated=False) as running:
        yield running


@pytest.fixture
def cloud(server: EmulatorServer) -> Iterator[GoogleCloud]:
    client = connect(server.endpoint, monotonic=still)
    yield client
    client.close()


def request(name: str, **metadata: str) -> NodeRequest:
    place = Place(ZONE, "v2-8", Provisioning.SPOT, "tpu-ubuntu2204-base")
    return NodeRequest(NodeKey(PROJECT, ZONE, name), place, {}, metadata)


# --- connecting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["127.0.0.1", "http://127.0.0.1:1", "127.0.0.1:port", ":80", "a b:1"])
def test_an_endpoint_has_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:PORT"):
        connect(endpoint, monotonic=still)


@pytest.fixture
def no_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder without any credentials, on a machine that is no VM of Google's."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    return tmp_path


def test_missing_credentials_say_which_command_to_run(no_google: Path) -> None:
    with pytest.raises(ConfigError, match="gcloud auth application-default login"):
        connect(None, monotonic=still)


def account_file(folder: Path) -> Path:
    """A service account's key, a new one each time."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "project_id": "by-credentials",
        "client_email": "me@by-credentials.iam.gserviceaccount.com",
        "private_key": key.decode(),
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    file = folder / "key.json"
    file.write_text(json.dumps(account))
    return file


def test_credentials_open_a_channel_of_the_real_service(no_google: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account_file(no_google)))
    connect(None, monotonic=still).close()  # no call is made
    assert find_project(None, {"HOME": str(no_google)}) == "by-credentials"


class Refusing(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A service that knows the key of nobody."""

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        def refuse(_: bytes, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Request had invalid authentication credentials.")

        return grpc.unary_unary_rpc_method_handler(refuse)


def test_a_key_that_was_rotated_is_read_again(
    server: EmulatorServer, no_google: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon was blind until somebody restarted it: it does not end, so systemd does not either."""
    file = account_file(no_google)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    refusing = grpc.server(ThreadPoolExecutor(2), handlers=[Refusing()])
    port = refusing.add_insecure_port("127.0.0.1:0")
    refusing.start()
    logins: list[str] = []

    def transport(reader: Any) -> Any:
        logins.append(file.read_text())
        return cloud_module._emulator_transport(f"127.0.0.1:{port}" if len(logins) == 1 else server.endpoint, reader)

    original = cloud_module._google_transport
    monkeypatch.setattr(cloud_module, "_google_transport", lambda reader: once_real(original, transport, reader))
    client = connect(None, monotonic=still)
    try:
        for _ in range(2):
            with pytest.raises(OwnCredentials):
                client.list_nodes(PROJECT)
        assert len(logins) == 1, "the same file says the same"
        file.write_text('{"type": "service_acc')
        with pytest.raises(OwnCredentials):
            client.list_nodes(PROJECT)
        assert len(logins) == 1, "half a file is none"
        account_file(no_google)
        with pytest.raises(OwnCredentials):
            client.list_nodes(PROJECT)
        assert not client.list_nodes(PROJECT).nodes
        assert len(logins) == 2
    finally:
        client.close()
        refusing.stop(None)


def once_real(original: Any, transport: Any, reader: Any) -> Any:
    """The credentials are read as they are, and the emulator is spoken to."""
    original(reader).close()
    return transport(reader)


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/k.json", "CLOUDSDK_CONFIG": "/c"}, "/k.json"),
        ({"CLOUDSDK_CONFIG": "/c"}, "/c/application_default_credentials.json"),
        ({"HOME": "/h"}, "/h/.config/gcloud/application_default_credentials.json"),
    ],
)
def test_credentials_lie_where_google_looks_for_them(env: dict[str, str], path: str) -> None:
    assert str(credentials_file(env)) == path


def test_an_unreachable_endpoint_is_a_lost_answer_and_quick() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        client = connect(f"127.0.0.1:{port}", monotonic=still, deadlines=Deadlines(*[timedelta(seconds=5)] * 3))
        try:
            with pytest.raises(AnswerLost):
                client.list_nodes(PROJECT)
        finally:
            client.close()


def test_a_proxy_of_the_environment_is_not_asked_for_an_emulator(
    server: EmulatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = connect(server.endpoint, monotonic=still)
    try:
        assert not client.list_nodes(PROJECT).nodes
    finally:
        client.close()


def test_a_server_that_speaks_something_else_is_for_a_person_or_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = connect(f"127.0.0.1:{port}", monotonic=still, deadlines=Deadlines(*[timedelta(seconds=0.3)] * 3))
        try:
            with pytest.raises(AnswerLost):
                client.get_node(NodeKey(PROJECT, ZONE, "pod-0-a1"))
        finally:
            client.close()


def test_a_closed_client_fails_as_transient(server: EmulatorServer) -> None:
    client = connect(server.endpoint, monotonic=still)
    client.list_nodes(PROJECT)
    client.close()
    with pytest.raises(Transient):
        client.list_nodes(PROJECT)


def test_a_connection_comes_back_with_the_emulator() -> None:
    config = WorldConfig.fast(latencies=INSTANT)
    with EmulatorServer(config) as first:
        port = int(first.endpoint.rpartition(":")[2])
        client = connect(first.endpoint, monotonic=still)
        client.list_nodes(PROJECT)
    with pytest.raises(AnswerLost):
        client.list_nodes(PROJECT)
    with EmulatorServer(config, port=port):
        deadline = time.monotonic() + 60
        while not answers(client) and time.monotonic() < deadline:
            time.sleep(0.05)  # the channel itself decides when it looks again
        assert answers(client)
        client.close()


def answers(client: GoogleCloud) -> bool:
    try:
        return not client.list_nodes(PROJECT).nodes
    except AnswerLost:
        return False


def test_importing_the_core_does_not_load_the_client() -> None:
    modules = "tpucare, tpucare.model.ports, tpucare.adapters.google.classify, tpucare.adapters.google.snapshot"
    program = f"import sys, {modules}; print('grpc' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


# --- projects ------------------------------------------------------------------------------------------------------


def configure(folder: Path, name: str, project: str) -> None:
    (folder / "configurations").mkdir(parents=True, exist_ok=True)
    (folder / "active_config").write_text(f"{name}\n")
    (folder / "configurations" / f"config_{name}").write_text(f"[core]\naccount = me%x\nproject = {project}\n")


def test_where_the_project_comes_from(no_google: Path) -> None:
    folder = no_google / ".config" / "gcloud"
    configure(folder, "default", "by-file")
    configure(folder, "work", "by-work-file")
    env = {"HOME": str(no_google)}
    assert find_project("by-flag", {**env, "GOOGLE_CLOUD_PROJECT": "by-env"}) == "by-flag"
    assert find_project(None, {**env, "GOOGLE_CLOUD_PROJECT": "by-env"}) == "by-env"
    both = {**env, "GOOGLE_CLOUD_PROJECT": "by-env", "CLOUDSDK_CORE_PROJECT": "by-gcloud"}
    assert find_project(None, both) == "by-env"
    assert find_project(None, {**env, "CLOUDSDK_CORE_PROJECT": "by-gcloud"}) == "by-gcloud", "as gcloud itself has it"
    assert find_project("", env) == "by-work-file"
    assert find_project(None, {**env, "CLOUDSDK_ACTIVE_CONFIG_NAME": "default"}) == "by-file"
    moved = no_google / "moved"
    configure(moved, "default", "by-moved-file")
    assert find_project(None, {**env, "CLOUDSDK_CONFIG": str(moved)}) == "by-moved-file"


@pytest.mark.parametrize("content", ["", "[core]\n", "no ini at all", "[core]\nproject =\n"])
def test_no_project_says_which_command_to_run(no_google: Path, content: str) -> None:
    folder = no_google / ".config" / "gcloud"
    configure(folder, "default", "")
    (folder / "configurations" / "config_default").write_text(content)
    with pytest.raises(ConfigError, match="gcloud config set project"):
        find_project(None, {"HOME": str(no_google)})


# --- the cloud's clock ---------------------------------------------------------------------------------------------


def test_the_clock_of_the_cloud_runs_on_between_answers() -> None:
    seconds = [100.0]
    clock = CloudClock(lambda: seconds[0])
    assert clock.now() is None
    clock.set(datetime(2026, 3, 1, tzinfo=UTC))
    seconds[0] += 90
    assert clock.now() == datetime(2026, 3, 1, 0, 1, 30, tzinfo=UTC)


def test_without_dates_the_clock_is_learned_from_an_operation(cloud: GoogleCloud) -> None:
    assert cloud.list_nodes(PROJECT).cloud_time is None
    operation = cloud.create_node(request("pod-0-a1"))
    assert operation.create_time is not None
    assert cloud.list_nodes(PROJECT).cloud_time == operation.create_time


# --- size ----------------------------------------------------------------------------------------------------------


def test_an_answer_may_be_larger_than_grpc_allows_by_itself(
    cloud: GoogleCloud, server: EmulatorServer, clock: HandClock
) -> None:
    for number in range(30):
        cloud.create_node(request(f"pod-{number}-a1", note="x" * 200_000))
    clock.seconds += 60
    assert len(cloud.list_nodes(PROJECT).nodes) == 30
    with server.lock:
        reads = [record for record in server.world.audit if record.get("method") == "ListNodes"]
    assert [read["count"] for read in reads] == [30]


def test_one_call_per_page(cloud: GoogleCloud, server: EmulatorServer) -> None:
    cloud.list_nodes(PROJECT)
    cloud.list_nodes(PROJECT)
    with server.lock:
        assert [record.get("method") for record in server.world.audit] == ["ListNodes", "ListNodes"]


def test_a_page_size_that_is_refused_is_left_to_the_service(cloud: GoogleCloud, server: EmulatorServer) -> None:
    """It would have blinded the daemon for good."""
    with server.lock:
        server.world.operator.fail_next("ListNodes", 3, "page_size must be at most 500")
    assert not cloud.list_nodes(PROJECT).nodes
    assert not cloud.list_nodes(PROJECT).nodes
    with server.lock:
        assert [record.get("method") for record in server.world.audit] == ["ListNodes"] * 3
        server.world.operator.fail_next("ListNodes", 3, "no such parent")
    with pytest.raises(NeedsPerson, match="no such parent"):
        cloud.list_nodes(PROJECT)


def test_a_node_whose_hidden_fields_change_is_not_a_change(
    cloud: GoogleCloud, server: EmulatorServer, clock: HandClock
) -> None:
    cloud.create_node(request("pod-0-a1"))
    clock.seconds += 60
    cloud.list_nodes(PROJECT)
    with server.lock:
        server.world.operator.set_health("pod-0-a1", Health.HEALTHY, server.now(), "said in passing")
    assert cloud.list_nodes(PROJECT).changed == frozenset()
    with server.lock:
        server.world.operator.set_health("pod-0-a1", Health.TIMEOUT, server.now(), "said in passing")
    assert len(cloud.list_nodes(PROJECT).changed) == 1


def test_a_request_that_is_too_odd_is_for_a_person(cloud: GoogleCloud) -> None:
    with pytest.raises(NeedsPerson):
        cloud.create_node(request("Not_A_Name!"))


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"ssh-keys": "me:k"}),
        ({"ssh-keys": ""}, {"ssh-keys": "me:k"}),
        ({"ssh-keys": "you:k\n\n", "own": "x"}, {"ssh-keys": "you:k\nme:k", "own": "x"}),
        ({"ssh-keys": "you:k\nme:k "}, None),
    ],
)
def test_appending_a_key(before: dict[str, str], after: dict[str, str] | None) -> None:
    assert with_ssh_key(before, "me:k\n") == after
