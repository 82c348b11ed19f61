"""
What comes from outside, drawn by chance: fleet files, answers of workers, messages of the API, orders at the socket.

Whatever arrives, it is understood or refused in the way that the loop knows; nothing else is raised. Few examples here,
many behind the slow marker.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.tpu_v2 import types
from google.longrunning import operations_pb2  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kits.service import VirtualService, fleet_text
from tpucare.adapters.google import wire as cloud_wire
from tpucare.adapters.runner import answers
from tpucare.fleetfile import yaml_document
from tpucare.fleetfile.parse import FleetSpec, parse
from tpucare.model.errors import CloudError, ConfigError
from tpucare.model.resources import Health, NodeKey, NodeState, Ran
from tpucare.model.runs import Contact
from tpucare.service.commands import CannotDo

FEW, MANY = 25, 3000
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

Test = Callable[..., None]


def examples(number: int) -> Callable[[Test], Test]:
    return settings(max_examples=number, derandomize=number == FEW, suppress_health_check=QUIET)


def harmless(told: str) -> None:
    """What a person is told is bounded, and no terminal obeys it."""
    assert len(told) < 5000
    assert told.isprintable() or not told


HOSTILE_TEXTS = ("", "\0", "\x1b]0;x\x07", "$(id)", "../..", "{slot}", "'\"", "é\u202e", "x" * 10_000, "\ud800", "\n")
texts = st.text(max_size=30) | st.sampled_from(HOSTILE_TEXTS)
numbers = st.integers() | st.floats(allow_nan=True) | st.sampled_from([2**63, -(2**63), 10**30, -1, 0])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


# --- fleet files -----------------------------------------------------------------------------------------------------

FLEET: dict[str, Any] = {
    "name": "pod",
    "count": 2,
    "project": "my-project",
    "tpu": {
        "type": "v3-32",
        "zones": ["europe-west4-a", {"zone": "us-central1-a", "service_account": "a@b.iam.gserviceaccount.com"}],
        "provisioning": "spot",
        "runtime": "tpu-ubuntu2204-base",
        "network": {"external_ips": True, "tags": ["t"]},
        "ssh_keys": ["me:ssh-ed25519 AAAA"],
        "metadata": {"startup-script": "true"},
        "os_login": False,
    },
    "job": {
        "repository": "https://example.org/r",
        "branch": "main",
        "setup": "bash setup.sh",
        "run": "bash run.sh",
        "files": {"a.yaml": "./a.yaml"},
        "env": {"A": "1"},
        "secrets": ["KEY"],
        "checkpoint": "gs://b/{slot}",
        "progress": r"step (\d+)",
    },
    "care": {"unhealthy_after": "1h", "stalled_after": "30m", "on_success": "delete"},
}
PATHS = [(key,) for key in FLEET] + [(top, key) for top in ("tpu", "job", "care") for key in FLEET[top]]


@st.composite
def bent_fleets(draw: st.DrawFn) -> str:
    """A good fleet of which a few values, or names of keys, are others."""
    fleet = json.loads(json.dumps(FLEET))
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        holder = fleet
        for step in path[:-1]:
            holder = holder.get(step) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            key = draw(texts) if draw(st.booleans()) else path[-1]
            holder[key] = draw(values)
    return str(yaml.safe_dump(fleet, allow_unicode=draw(st.booleans()), sort_keys=False))


def read_fleet(text: str) -> None:
    def read_file(_: Path, path: str) -> bytes:
        if "missing" in Path(path).name:
            raise FileNotFoundError(2, "No such file or directory")
        return b"content"

    try:
        fleet = parse(text, file="fleet.yaml", folder=Path("/srv/fleets"), read_file=read_file)
    except ConfigError as error:
        lines = str(error).split("\n")
        assert all(line.startswith("fleet.yaml") and line.isprintable() for line in lines), lines
        assert sum(map(len, lines)) < 20_000 + 4 * len(text)
        return
    assert isinstance(fleet, FleetSpec)
    assert [slot.name for slot in fleet.slots()] == [f"{fleet.name}-{index}" for index in range(fleet.count)]


@given(bent_fleets() | st.text(max_size=300) | values.map(lambda value: yaml.dump(value)))
@examples(FEW)
def test_a_fleet_file_is_read_or_refused(text: str) -> None:
    read_fleet(text)


@pytest.mark.slow
@given(bent_fleets() | st.text(max_size=300) | values.map(lambda value: yaml.dump(value)))
@examples(MANY)
def test_a_fleet_file_is_read_or_refused_many_times(text: str) -> None:
    read_fleet(text)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch pwned']",
        "name: !!python/name:os.system",
        "name: !!python/object/new:subprocess.Popen [[touch, pwned]]",
        "name: !<tag:yaml.org,2002:python/module:os> x",
        "name: !custom {a: 1}",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
        "&a [*a]",
        "? {a: b}\n: c",
        "<<: {name: pod}",
        "[" * 5000,
        "{" * 5000,
        "name: pod\n" * 3000,
        "- " * 2000,
        "name: " + "9" * 5000,
    ],
)
def test_yaml_that_does_more_than_say_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        parse(text, file="fleet.yaml")
    with contextlib.suppress(yaml_document.Unreadable):
        yaml_document.read(text)
    assert list(tmp_path.iterdir()) == []


# --- answers of workers ----------------------------------------------------------------------------------------------

PROBE_KEYS = (
    "token", "alive", "chips_free", "last_number", "boot_id", "detail", "state", "exit", "log", "told", "step",
    "checkpoint", "log_bytes", "fresh", "tools", "seen", "rebooted", "quiet", "claim", "rest", "phase", "created",
    "status", "failure", "signalled", "preempted", "maintenance", "start", "data",
)  # fmt: skip
GOOD = {
    "token": "pod-0-a0.1",
    "alive": True,
    "chips_free": False,
    "last_number": 1,
    "boot_id": "ab-12",
    "detail": "",
    "state": {"phase": "run", "signalled": False},
    "exit": None,
    "log": {"token": "pod-0-a0.1", "start": 0, "data": "aGVsbG8="},
    "step": 3,
    "checkpoint": 2,
    "log_bytes": 5,
}
odd = values | st.dictionaries(st.sampled_from(PROBE_KEYS), values, max_size=5)
said = st.dictionaries(st.sampled_from(PROBE_KEYS), odd, max_size=4).map(lambda bent: {**GOOD, **bent})
outputs = (
    said.map(lambda one: json.dumps(one).encode())
    | st.binary(max_size=200)
    | odd.map(lambda one: json.dumps(one).encode())
    | st.sampled_from([b"[" * 100_000, b'{"step": ' + b"1" * 10_000 + b"}", b'{"a": 1e999}', b'{"step": NaN}'])
)


def understand(output: bytes, status: int, truncated: bool) -> None:
    ran = Ran(status, output, output[:100], truncated)
    try:
        answer = answers.read_probe(ran)
    except (answers.MalformedAnswer, answers.ToolsMissing) as error:
        harmless(str(error))
    else:
        report = answer.report
        assert report.contact is Contact.ANSWERED
        assert not report.token or answers.TOKEN.fullmatch(report.token)
        for text in (report.detail, report.boot_id, report.maintenance):
            assert len(text) <= 500
            assert text.isprintable() or not text
        for number in (report.step, report.checkpoint, report.log_bytes, report.last_number):
            assert number is None or 0 <= number <= answers.NUMBER_LIMIT
    for read in (answers.read_stop, lambda ran: answers.read_claim(ran, "w"), lambda ran: answers.read_start(ran, "w")):
        try:
            read(ran)
        except (answers.MalformedAnswer, answers.ToolsMissing):
            continue
    answers.read_commit(ran)


@given(outputs, st.sampled_from([0, 0, 0, 1, 75, -9]), st.booleans())
@examples(FEW)
def test_an_answer_of_a_worker_is_understood_or_nonsense(output: bytes, status: int, truncated: bool) -> None:
    understand(output, status, truncated)


@pytest.mark.slow
@given(outputs, st.sampled_from([0, 0, 0, 1, 75, -9]), st.booleans())
@examples(MANY)
def test_an_answer_of_a_worker_is_understood_or_nonsense_many_times(
    output: bytes, status: int, truncated: bool
) -> None:
    understand(output, status, truncated)


# --- messages of the API ---------------------------------------------------------------------------------------------

KEY = NodeKey("my-project", "us-central1-a", "pod-0-a0")
int32, int64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
words = st.text(st.characters(codec="utf-8"), max_size=20)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def unknown_field(number: int, content: bytes) -> bytes:
    """A length-delimited field that no version of the message has."""
    return varint(number << 3 | 2) + varint(len(content)) + content


@st.composite
def api_nodes(draw: st.DrawFn) -> Any:
    node = types.Node.pb()()
    node.id = draw(int64)
    node.create_time.seconds, node.create_time.nanos = draw(int64), draw(int32)
    node.labels.update(draw(st.dictionaries(words, words, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        node.network_endpoints.add(ip_address=draw(words)).access_config.external_ip = draw(words)
    node.accelerator_type, node.queued_resource = draw(words), draw(words)
    node.scheduling_config.spot = draw(st.booleans())
    # State 9 and health 22 are enums; numbers that nobody has named yet go by the wire.
    wire = node.SerializeToString()
    wire += varint(9 << 3) + varint(draw(st.integers(0, 2**31 - 1)))
    wire += varint(22 << 3) + varint(draw(st.integers(0, 2**31 - 1)))
    wire += unknown_field(draw(st.integers(100, 2000)), draw(st.binary(max_size=20)))
    return types.Node.pb().FromString(wire)


def translate(raw: Any) -> None:
    node = cloud_wire.node_of(KEY, raw)
    assert isinstance(node.create_time, datetime)
    assert isinstance(node.state, NodeState)
    assert isinstance(node.health, Health)
    assert (node.id, len(node.endpoints)) == (raw.id, len(raw.network_endpoints))
    assert node.state.name


@given(api_nodes())
@examples(FEW)
def test_a_node_with_anything_in_it_is_translated(raw: Any) -> None:
    translate(raw)


@pytest.mark.slow
@given(api_nodes())
@examples(MANY)
def test_a_node_with_anything_in_it_is_translated_many_times(raw: Any) -> None:
    translate(raw)


@given(st.integers(0, 2**31 - 1), words, st.binary(max_size=40), int64)
@examples(FEW)
def test_an_operation_with_anything_in_it_is_translated(code: int, text: str, content: bytes, seconds: int) -> None:
    raw = operations_pb2.Operation(name="op", done=True)
    raw.error.code, raw.error.message = code, text
    raw.metadata.type_url = "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata"
    raw.metadata.value = content
    assert isinstance(cloud_wire.operation_of(raw).error, CloudError)
    metadata = types.OperationMetadata.pb()()
    metadata.create_time.seconds = seconds
    raw.metadata.Pack(metadata)
    assert isinstance(cloud_wire.operation_of(raw).error, CloudError)


# --- orders at the control socket ------------------------------------------------------------------------------------

VERBS = (
    "status",
    "plan",
    "workers",
    "apply",
    "down",
    "pause",
    "resume",
    "retry",
    "confirm",
    "adopt-node",
    "gc",
    "events",
)
ARGUMENTS = (
    "target",
    "slot",
    "text",
    "folder",
    "file",
    "restart",
    "replace",
    "paused",
    "node",
    "apply",
    "after",
    "limit",
    "do",
)
named = st.sampled_from(["pod", "pod-0", "pod-1", "pod-7", "other", fleet_text(), "/", ""])
orders = st.builds(
    lambda do, rest: {**rest, "do": do},
    st.sampled_from(VERBS) | values,
    st.dictionaries(st.sampled_from(ARGUMENTS), named | values, max_size=5),
)


def ask(service: VirtualService, order: Any) -> None:
    try:
        answer = service.handler.handle(order)
    except (ConfigError, CannotDo) as error:
        harmless(str(error).replace("\n", " "))
    else:
        json.dumps(answer, default=str).encode()
    service.daemon.run(seconds=1)


def carry_out(folder: Path, asked: list[Any]) -> None:
    """Each order in turn, none of which may be an error of a slot."""
    service = VirtualService(folder)
    service.write(fleet_text(count=2))
    service.look()
    for order in asked:
        ask(service, order)
    service.again()
    service.run(1)
    assert not service.daemon.told("error")


@given(st.lists(orders | values, min_size=3, max_size=10))
@examples(FEW // 2)
def test_an_order_is_carried_out_or_refused(tmp_path_factory: pytest.TempPathFactory, asked: list[Any]) -> None:
    carry_out(tmp_path_factory.mktemp("o"), asked)


@pytest.mark.slow
@given(st.lists(orders | values, min_size=3, max_size=10))
@examples(MANY // 5)
def test_an_order_is_carried_out_or_refused_many_times(
    tmp_path_factory: pytest.TempPathFactory, asked: list[Any]
) -> None:
    carry_out(tmp_path_factory.mktemp("o"), asked)
