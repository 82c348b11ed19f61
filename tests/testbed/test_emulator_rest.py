"""The REST face: clients written for the real service, the JSON that they see, and what they are refused."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import pytest
from google.auth.credentials import AnonymousCredentials
from googleapiclient.discovery import build as discover  # type: ignore[import-untyped]
from googleapiclient.errors import HttpError  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.emulated_calls import next_call
from tests.kits.hand_clock import HandClock
from tpucare.testbed.emulator.api.calls import ServedWorld
from tpucare.testbed.emulator.api.rest import RestServer, routes
from tpucare.testbed.emulator.http_server import HttpRequest
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.world import World

PROJECT, ZONE = "emulated", "us-central1-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
INSTANT: dict[str, object] = {"read": 0, "write": 0, "visible": 0, "list_lag_share": 0}
_FIELDS = [
    "name",
    "acceleratorType",
    "acceleratorConfig",
    "runtimeVersion",
    "schedulingConfig",
    "spot",
    "labels",
    "metadata",
    "state",
    "id",
    "createTime",
    "tpu",
    "nodeSpec",
    "node",
    "nodeId",
    "multiNodeParams",
    "nodeCount",
    "queueingPolicy",
    "validUntilDuration",
    "validInterval",
    "startTime",
    "bootDiskConfig",
]
_PARAMETERS = [
    "nodeId",
    "queuedResourceId",
    "pageSize",
    "pageToken",
    "updateMask",
    "force",
    "requestId",
    "node.id",
    "$alt",
]
NODE: dict[str, Any] = {
    "acceleratorType": "v2-8",
    "runtimeVersion": "tpu-ubuntu2204-base",
    "schedulingConfig": {"spot": True},
    "labels": {"team": "vision"},
}


class Place:
    """A server whose clock is moved by hand, and both discovery clients."""

    def __init__(self, server: EmulatorServer, clock: HandClock) -> None:
        self.server, self._clock = server, clock

    def nodes(self, version: str = "v2") -> Any:
        return self.client(version).projects().locations().nodes()

    def client(self, version: str = "v2") -> Any:
        """google-api-python-client with the discovery document that it bundles."""
        return discover(
            "tpu",
            version,
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
            client_options={"api_endpoint": self.server.rest_endpoint},
            static_discovery=True,
        )

    def play(self, seconds: float) -> None:
        self._clock.seconds += seconds
        with self.server.lock:
            self.server.world.advance(self.server.now())

    def ask(self, path: str, body: bytes | None = None, method: str | None = None, **headers: str) -> Any:
        told = {"Content-Type": "application/json", **headers}
        request = Request(self.server.rest_endpoint + path, body, told, method=method)
        return json.loads(urlopen(request, timeout=10).read())


@pytest.fixture
def place() -> Iterator[Place]:
    clock = HandClock()
    with EmulatorServer(WorldConfig.calm(latencies=INSTANT), now=clock.now) as server:
        yield Place(server, clock)


# --- google-api-python-client, unmodified ----------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_the_discovery_client_sees_a_node_through_its_life(place: Place, version: str) -> None:
    nodes = place.nodes(version)
    begun = nodes.create(parent=PARENT, nodeId="pod-0-a1", body=NODE).execute()
    assert begun["metadata"]["@type"] == f"type.googleapis.com/google.cloud.tpu.{version}.OperationMetadata"
    assert (begun["metadata"]["verb"], begun.get("done", False)) == ("create", False)
    name = f"{PARENT}/nodes/pod-0-a1"
    young = nodes.get(name=name).execute()
    assert (young["state"], "health" in young) == ("CREATING", False)
    place.play(300)
    ended = place.client(version).projects().locations().operations().get(name=begun["name"]).execute()
    assert ended["response"]["state"] == "READY"
    (listed,) = nodes.list(parent=PARENT).execute()["nodes"]
    assert isinstance(listed["id"], str)
    assert (listed["health"], listed["networkEndpoints"][0]["port"]) == ("HEALTHY", 8470)
    change = {"labels": {"team": "speech"}, "description": "not in the mask"}
    nodes.patch(name=name, updateMask="labels", body=change).execute()
    place.play(10)
    changed = nodes.get(name=name).execute()
    assert (changed["labels"], changed.get("description")) == ({"team": "speech"}, None)
    nodes.delete(name=name).execute()
    assert nodes.get(name=name).execute()["state"] == "DELETING"
    place.play(120)
    with pytest.raises(HttpError) as gone:
        nodes.get(name=name).execute()
    assert (gone.value.status_code, gone.value.error_details[0]["resourceName"]) == (404, name)


@pytest.mark.contract
def test_the_discovery_client_walks_pages_and_hears_of_dark_zones(place: Place) -> None:
    nodes = place.nodes()
    for number in range(5):
        nodes.create(parent=PARENT, nodeId=f"pod-{number}-a1", body=NODE).execute()
    place.play(1)
    seen, pages = [], 0
    request = nodes.list(parent=f"projects/{PROJECT}/locations/-", pageSize=2)
    while request is not None:
        answer = request.execute()
        seen += [node["name"].rpartition("/")[2] for node in answer["nodes"]]
        pages += 1
        request = nodes.list_next(request, answer)
    assert (seen, pages) == ([f"pod-{number}-a1" for number in range(5)], 3)
    place.server.apply_order({"do": "outage", "kind": "zone", "zone": ZONE, "duration": 60})
    assert nodes.list(parent=f"projects/{PROJECT}/locations/-").execute() == {"unreachable": [ZONE]}
    with pytest.raises(HttpError) as dark:
        nodes.list(parent=PARENT).execute()
    assert dark.value.status_code == 503


@pytest.mark.contract
def test_the_rest_of_the_discovery_document_answers(place: Place) -> None:
    locations = place.client().projects().locations()
    assert {one["locationId"] for one in locations.list(name=f"projects/{PROJECT}").execute()["locations"]} > {ZONE}
    assert locations.get(name=PARENT).execute()["locationId"] == ZONE
    types = locations.acceleratorTypes()
    assert len(types.list(parent=PARENT, pageSize=3).execute()["acceleratorTypes"]) == 3
    kind = types.get(name=f"{PARENT}/acceleratorTypes/v4-32").execute()
    assert kind["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x4"}]
    assert locations.runtimeVersions().list(parent=PARENT).execute()["runtimeVersions"]
    assert locations.generateServiceIdentity(parent=PARENT, body={}).execute()["identity"]["email"]
    name = f"{PARENT}/nodes/pod-0-a1"
    begun = place.nodes().create(parent=PARENT, nodeId="pod-0-a1", body=NODE).execute()
    place.play(300)
    with place.server.lock:
        place.server.world.operator.set_guest_attribute(name, 0, "hostkeys", "ssh-ed25519", "AAAA")
    asked = place.nodes().getGuestAttributes(name=name, body={"queryPath": "hostkeys/"}).execute()
    assert asked["guestAttributes"][0]["queryValue"]["items"][0]["value"] == "AAAA"
    operations = locations.operations()
    assert [one["name"] for one in operations.list(name=PARENT).execute()["operations"]] == [begun["name"]]
    assert operations.cancel(name=begun["name"]).execute() == {}
    assert operations.delete(name=begun["name"]).execute() == {}
    with pytest.raises(HttpError, match="404"):
        operations.get(name=begun["name"]).execute()


def test_every_method_of_both_discovery_documents_has_a_path(place: Place) -> None:
    known = {(route.verb, route.pattern) for route in routes()}
    left_out = {"tpu.projects.locations.queuedResources.getMaintenanceInfo"}  # in no package

    def missing(resource: Any) -> Iterator[str]:
        for method in resource.get("methods", {}).values():
            path = "/" + re.sub(r"\{[^}]*\}", "x", method["flatPath"])
            if not any(verb == method["httpMethod"] and pattern.fullmatch(path) for verb, pattern in known):
                yield method["id"]
        for below in resource.get("resources", {}).values():
            yield from missing(below)

    for version in ("v2", "v2alpha1"):
        assert set(missing(place.client(version)._rootDesc)) <= left_out


# --- the JSON itself --------------------------------------------------------------------------------------------------


def test_enums_are_names_or_numbers_as_asked_and_unknown_ones_pass(place: Place) -> None:
    place.nodes().create(parent=PARENT, nodeId="pod-0-a1", body=NODE).execute()
    path = f"/v2/{PARENT}/nodes/pod-0-a1"
    assert place.ask(path)["state"] == "CREATING"
    assert place.ask(f"{path}?$alt=json;enum-encoding=int")["state"] == 1
    place.server.apply_order({"do": "state", "selector": "*", "state": 77})
    place.server.apply_order({"do": "health", "selector": "*", "health": 99})
    strange = place.ask(path)
    assert (strange["state"], strange["health"]) == ("STATE_77", "HEALTH_99")
    assert place.ask(f"{path}?%24alt=json%3Benum-encoding%3Dint")["health"] == 99
    # The discovery client knows no schema for answers: whatever comes is handed on.
    assert place.nodes().get(name=f"{PARENT}/nodes/pod-0-a1").execute()["state"] == "STATE_77"


def test_fields_that_no_client_knows(place: Place) -> None:
    place.nodes().create(parent=PARENT, nodeId="pod-0-a1", body=NODE).execute()
    place.play(1)
    place.server.apply_order({"do": "unknown-fields", "selector": "*"})
    answer = place.ask(f"/v2/{PARENT}/nodes")
    assert answer["nodes"][0]["laterSettings"] == {"level": 3}
    assert "laterText" not in answer
    place.server.apply_order({"do": "unknown-fields", "selector": "*", "answers": True})
    assert place.ask(f"/v2alpha1/{PARENT}/nodes")["laterText"] == "later"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("nodes?nodeId=a", b'{"acceleratorTyp": "v2-8"}', "acceleratorTyp"),
        ("nodes?nodeId=a", b'{"labels": [1]}', "labels"),
        ("nodes?nodeId=a", b"{", "Invalid JSON payload"),
        ("nodes?nodeId=a", b"[]", "Root element"),
        ("nodes?nodeid=a", b"{}", 'Unknown name "nodeid"'),
        ("nodes?nodeId=a", b"[" * 60_000, "Invalid JSON payload"),
        ("nodes?nodeId=UPPER", b"{}", "Invalid node id"),
    ],
)
def test_what_is_malformed_is_told(place: Place, path: str, body: bytes, said: str) -> None:
    with pytest.raises(HTTPError) as refused:
        place.ask(f"/v2/{PARENT}/{path}", body)
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("query", "body", "field", "said"),
    [
        (
            "nodeId=a",
            {"colour": 1},
            "node",
            "Invalid JSON payload received. Unknown name \"colour\" at 'node': Cannot find field.",
        ),
        (
            "nodeId=a",
            {"schedulingConfig": {"hot": True}},
            "node.scheduling_config",
            "Invalid JSON payload received. Unknown name \"hot\" at 'node.scheduling_config': Cannot find field.",
        ),
        ("nodeId=a&pageSize=abc", {}, "", 'Unknown name "pageSize": Cannot bind query parameter.'),
    ],
)
def test_a_wrong_field_is_named_in_the_services_words(
    place: Place, query: str, body: dict[str, object], field: str, said: str
) -> None:
    with pytest.raises(HTTPError) as refused:
        place.ask(f"/v2/{PARENT}/nodes?{query}", json.dumps(body).encode())
    error = json.loads(refused.value.read())["error"]
    assert said in error["message"]
    [detail] = error["details"]
    assert detail["@type"] == "type.googleapis.com/google.rpc.BadRequest"
    assert detail["fieldViolations"][0].get("field", "") == field


def test_a_page_size_is_a_number(place: Place) -> None:
    with pytest.raises(HTTPError) as refused:
        place.ask(f"/v2/{PARENT}/nodes?pageSize=abc")
    said = json.loads(refused.value.read())["error"]["message"]
    assert said == "Invalid value at 'page_size' (TYPE_INT32), \"abc\""


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "1"])
def test_force_is_read_as_clients_write_it(place: Place, word: str) -> None:
    body = json.dumps({"tpu": {"nodeSpec": [{"parent": PARENT, "nodeId": "pod-0-a1", "node": NODE}]}}).encode()
    place.ask(f"/v2/{PARENT}/queuedResources?queuedResourceId=q1", body)
    place.play(600)
    place.ask(f"/v2/{PARENT}/queuedResources/q1?force={word}", method="DELETE")


def test_a_node_shows_what_its_caller_left_out(place: Place) -> None:
    place.nodes().create(parent=PARENT, nodeId="pod-0-a1", body=NODE).execute()
    place.play(1)
    node = place.ask(f"/v2/{PARENT}/nodes/pod-0-a1")
    region = ZONE.rpartition("-")[0]
    assert node["networkConfig"] == {
        "network": f"projects/{PROJECT}/global/networks/default",
        "subnetwork": f"projects/{PROJECT}/regions/{region}/subnetworks/default",
    }
    assert node["acceleratorConfig"].keys() == {"type", "topology"}
    assert node["cidrBlock"].endswith(".0.0/20")
    assert node["serviceAccount"]["email"].endswith("-compute@developer.gserviceaccount.com")
    assert node["serviceAccount"]["scope"] == ["https://www.googleapis.com/auth/cloud-platform"]


def test_v1_lists_locations_and_types(place: Place) -> None:
    zones = [one["locationId"] for one in place.ask(f"/v1/projects/{PROJECT}/locations")["locations"]]
    assert ZONE in zones
    assert place.ask(f"/v1/{PARENT}/acceleratorTypes?pageSize=2")["acceleratorTypes"]
    with pytest.raises(HTTPError) as refused:
        place.ask(f"/v1/{PARENT}/nodes")
    assert refused.value.code == 404


@pytest.mark.parametrize("runtime", ["v2-alpha", "tpu-vm-base"])
def test_runtimes_of_former_years_are_taken(place: Place, runtime: str) -> None:
    body = {**NODE, "acceleratorType": "v2-8", "runtimeVersion": runtime}
    place.nodes().create(parent=PARENT, nodeId="pod-0-a1", body=body).execute()


def test_what_only_rest_has_is_taken(place: Place) -> None:
    body = json.dumps({**NODE, "bootDiskConfig": {"enableConfidentialCompute": False}}).encode()
    assert place.ask(f"/v2/{PARENT}/nodes?nodeId=pod-0-a1", body)["metadata"]["target"].endswith("pod-0-a1")


@pytest.mark.parametrize(
    ("fails", "code", "status"),
    [
        ({"do": "fail-next", "method": "GetNode", "code": 8, "text": "Quota"}, 429, "RESOURCE_EXHAUSTED"),
        ({"do": "fail-next", "method": "GetNode", "code": 9, "text": "no"}, 400, "FAILED_PRECONDITION"),
        ({"do": "fail-next", "method": "GetNode", "code": 10, "text": "no"}, 409, "ABORTED"),
        ({"do": "fail-next", "method": "GetNode", "code": 16, "text": "who"}, 401, "UNAUTHENTICATED"),
        ({"do": "outage", "kind": "api", "duration": 60}, 503, "UNAVAILABLE"),
        ({"do": "outage", "kind": "internal", "duration": 60}, 500, "INTERNAL"),
    ],
)
def test_refusals_bear_their_http_code(place: Place, fails: dict[str, object], code: int, status: str) -> None:
    place.server.apply_order(fails)
    with pytest.raises(HTTPError) as refused:
        place.ask(f"/v2/{PARENT}/nodes/pod-0-a1")
    assert (refused.value.code, json.loads(refused.value.read())["error"]["status"]) == (code, status)


_WORDS = st.one_of(
    st.sampled_from(
        ["v2", "v2alpha1", "projects", "locations", "nodes", "queuedResources", "operations", ZONE, "-", "p"]
    ),
    st.text(alphabet="aZ0-_%:/~.ü\x00", max_size=6).map(lambda text: quote(text, safe=":%")),
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(_FIELDS), below, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(
    verb=st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT"]),
    ending=st.sampled_from(["", "/nodes", "/nodes/a", "/queuedResources", "/queuedResources/q", "/nodes/a:stop"]),
    words=st.none() | st.lists(_WORDS, max_size=8),
    query=st.lists(st.tuples(st.sampled_from(_PARAMETERS), st.text(max_size=12)), max_size=4),
    body=st.binary(max_size=40) | _VALUES.map(lambda value: json.dumps(value).encode()),
)
def test_no_request_whatever_breaks_the_face(
    verb: str, ending: str, words: list[str] | None, query: list[tuple[str, str]], body: bytes
) -> None:
    path = f"/v2alpha1/{PARENT}{ending}" if words is None else "/" + "/".join(words)
    said = fuzzed().answer(HttpRequest(verb, path, tuple(query), {}, body, "ipv4:127.0.0.1:1"))
    assert said.status < 500
    if said.content_type.startswith("application/json"):
        assert json.loads(said.body) is not None


def fuzzed() -> RestServer:
    """A face over a world of its own, without a socket."""
    clock = HandClock()
    world = World(WorldConfig.calm(latencies=INSTANT), seed=1, start=clock.now())
    return RestServer(ServedWorld(world, threading.RLock(), clock.now, lambda _: None, lambda: None))


def test_a_path_that_nobody_serves_is_a_page(place: Place) -> None:
    for path in ("/", "/v2", "/v1/projects/p/locations/z/nodes", f"/v2/{PARENT}/nodes/a/b", f"/v2/{PARENT}:explode"):
        with pytest.raises(HTTPError) as lost:
            urlopen(place.server.rest_endpoint + path, timeout=10)
        assert (lost.value.code, lost.value.headers["Content-Type"]) == (404, "text/html; charset=UTF-8")


def test_a_verb_may_be_said_in_a_header(place: Place) -> None:
    answer = place.ask(f"/v2/{PARENT}/acceleratorTypes", b"pageSize=2", **{"X-HTTP-Method-Override": "GET"})
    assert len(answer["acceleratorTypes"]) == 2


def test_one_connection_carries_many_calls_and_bodies_in_chunks(place: Place) -> None:
    connection = http.client.HTTPConnection(urlsplit(place.server.rest_endpoint).netloc, timeout=10)
    body = json.dumps(NODE).encode()
    connection.request("POST", f"/v2/{PARENT}/nodes?nodeId=pod-0-a1", iter([body[:7], body[7:]]), encode_chunked=True)
    assert json.loads(connection.getresponse().read())["metadata"]["verb"] == "create"
    connection.request("GET", f"/v2/{PARENT}/nodes/pod-0-a1")
    assert json.loads(connection.getresponse().read())["labels"] == {"team": "vision"}
    connection.close()


def test_a_stopped_server_lets_go_of_open_connections() -> None:
    before = set(threading.enumerate())
    server = EmulatorServer(WorldConfig.calm(latencies=INSTANT))
    server.start()
    idle = http.client.HTTPConnection(urlsplit(server.rest_endpoint).netloc, timeout=10)
    idle.request("GET", f"/v2/{PARENT}/nodes")
    idle.getresponse().read()
    server.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    idle.close()


def test_latency_is_spent_outside_the_lock(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorldConfig.calm(latencies={**INSTANT, "write": 60})
    with EmulatorServer(config) as server:
        slow = threading.Thread(
            target=_swallow,
            args=(
                lambda: (
                    Place(server, HandClock())
                    .nodes()
                    .create(parent=PARENT, nodeId="pod-0-a1", body=NODE)
                    .execute(num_retries=0)
                ),
            ),
        )
        arrived = next_call(server.world, monkeypatch)
        slow.start()
        assert arrived.wait(60)
        assert Place(server, HandClock()).ask(f"/v2/{PARENT}/nodes") == {}
    slow.join(30)
    assert not slow.is_alive()


def _swallow(act: Callable[[], object]) -> None:
    try:
        act()
    except (OSError, HttpError, http.client.HTTPException):
        return
