"""The emulated buckets: rules of the store, clients of the real one, and what a run finds of real checkpoints there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.bench_worker import eventually, node
from tpucare.model.resources import Job
from tpucare.testbed.emulator.http_server import HttpAnswer, HttpRequest, HttpService
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.storage.api import ObjectServer
from tpucare.testbed.emulator.storage.objects import Conditions, Glob, ObjectError, ObjectQuery, ObjectStore
from tpucare.testbed.emulator.world.config import WorldConfig

BUCKET = "team-bucket"
START = datetime(2026, 3, 1, tzinfo=UTC)
TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "worker"


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(lambda: START, [BUCKET])


def refusal(act: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(ObjectError) as refused:
        act()
    return refused.value.code, refused.value.reason


# --- the store -------------------------------------------------------------------------------------------------------


def test_every_write_is_a_new_generation(store: ObjectStore) -> None:
    first = store.insert(BUCKET, "a", b"1")
    second = store.insert(BUCKET, "a", b"2")
    assert second.generation > first.generation
    assert store.get(BUCKET, "a").content == b"2"
    assert refusal(lambda: store.get(BUCKET, "a", generation=first.generation)) == (404, "notFound")
    changed = store.patch(BUCKET, "a", {"metadata": {"k": "v"}, "contentType": "text/plain"})
    assert (changed.metageneration, changed.metadata, changed.generation) == (2, {"k": "v"}, second.generation)
    assert store.patch(BUCKET, "a", {"metadata": {"k": None}}).metadata == {}


def test_preconditions(store: ObjectStore) -> None:
    made = store.insert(BUCKET, "a", b"1", conditions=Conditions(generation=0))
    again = Conditions(generation=0)
    assert refusal(lambda: store.insert(BUCKET, "a", b"2", conditions=again)) == (412, "conditionNotMet")
    other = Conditions(generation=made.generation + 1)
    assert refusal(lambda: store.delete(BUCKET, "a", conditions=other)) == (412, "conditionNotMet")
    known = Conditions(not_generation=made.generation)
    assert refusal(lambda: store.get(BUCKET, "a", conditions=known)) == (304, "notModified")
    assert refusal(lambda: store.insert(BUCKET, "a", b"2", conditions=known)) == (412, "conditionNotMet")
    store.insert(BUCKET, "a", b"2", conditions=Conditions(generation=made.generation))


def test_listings_are_cut_at_a_delimiter_and_paged(store: ObjectStore) -> None:
    for name in ("ckpt/1/x", "ckpt/1/y", "ckpt/2/x", "ckpt/10/x", "ckpt/note", "other"):
        store.insert(BUCKET, name, b"")
    page = store.list(BUCKET, ObjectQuery(prefix="ckpt/", delimiter="/"))
    assert page.prefixes == ("ckpt/1/", "ckpt/10/", "ckpt/2/")
    assert [one.name for one in page.items] == ["ckpt/note"]
    entries, after = [], ""
    while True:
        page = store.list(BUCKET, ObjectQuery(prefix="ckpt/", delimiter="/", size=1, after=after))
        entries += [*page.prefixes, *(one.name for one in page.items)]
        if not (after := page.next_token):
            break
    assert entries == ["ckpt/1/", "ckpt/10/", "ckpt/2/", "ckpt/note"]
    spanned = store.list(BUCKET, ObjectQuery(start="ckpt/10", end="ckpt/note"))
    assert [one.name for one in spanned.items] == ["ckpt/10/x", "ckpt/2/x"]
    globbed = store.list(BUCKET, ObjectQuery(glob="ckpt/*/x"))
    assert [one.name for one in globbed.items] == ["ckpt/1/x", "ckpt/10/x", "ckpt/2/x"]
    assert [one.name for one in store.list(BUCKET, ObjectQuery(glob="**/{y,note}")).items] == ["ckpt/1/y", "ckpt/note"]


@pytest.mark.parametrize(
    ("glob", "matched"),
    [
        ("a*c", {"abc", "ac"}),
        ("a**c", {"abc", "ac", "a/b/c", "a/c"}),
        ("a/**/c", {"a/b/c", "a/c"}),
        ("**/c", {"a/b/c", "a/c", "c"}),
        ("a?c", {"abc"}),
        ("a[!x]c", {"abc", "a/c"}),
        ("{a{b,},}c", {"abc", "ac", "c"}),
        ("a}c,", set()),
        ("", set()),
    ],
)
def test_a_glob_matches_whole_names(glob: str, matched: set[str]) -> None:
    names = {"abc", "ac", "a/b/c", "a/c", "c", "axc/d"}
    assert {name for name in names if Glob(glob).matches(name)} == matched


def test_no_glob_takes_long() -> None:
    """As a regular expression, five `**/` took seconds on one name, and each further one 25 times as long."""
    began = time.process_time()
    assert not Glob("**/" * 40 + "*a*" * 40 + "b").matches("a/" * 300)
    assert time.process_time() - began < 1
    for wrong in ("{a", "{" * 5000, "[z-a]"):
        with pytest.raises(ObjectError):
            Glob(wrong)


def test_buckets_come_first(store: ObjectStore) -> None:
    assert refusal(lambda: store.insert("nowhere", "a", b"")) == (404, "notFound")
    assert refusal(lambda: store.make_bucket(BUCKET)) == (409, "conflict")
    assert refusal(lambda: store.make_bucket("Bad_Name!")) == (400, "invalid")
    store.insert(BUCKET, "a", b"")
    assert refusal(lambda: store.delete_bucket(BUCKET)) == (409, "conflict")
    store.delete(BUCKET, "a")
    store.delete_bucket(BUCKET)
    assert store.buckets() == {}


# --- clients of the real service -------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(store: ObjectStore) -> Iterator[str]:
    service = ObjectServer(store).serve()
    yield f"http://127.0.0.1:{service.port}"
    service.stop()


@pytest.mark.contract
def test_googles_own_library(store: ObjectStore, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = pytest.importorskip("google.cloud.storage")
    exceptions = pytest.importorskip("google.api_core.exceptions")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    client = storage.Client.create_anonymous_client()
    client.project = "emulated"
    bucket = client.create_bucket("fresh-bucket")
    blob = bucket.blob("a folder/ü.bin")
    blob.upload_from_string(b"0123456789", content_type="text/plain", if_generation_match=0)
    assert blob.download_as_bytes(start=2, end=4) == b"234"
    assert (blob.size, blob.content_type, blob.generation > 0) == (10, "text/plain", True)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_string(b"other", if_generation_match=0)
    large = bucket.blob("large", chunk_size=256 * 1024)
    content = os.urandom(600 * 1024)
    large.upload_from_string(content)
    assert large.download_as_bytes() == content
    bucket.copy_blob(blob, bucket, "copy")
    whole = bucket.blob("whole")
    whole.compose([blob, bucket.blob("copy")])
    assert whole.download_as_bytes() == b"0123456789" * 2
    blob.metadata = {"k": "v"}
    blob.patch()
    assert store.get("fresh-bucket", "a folder/ü.bin").metadata == {"k": "v"}
    listed = client.list_blobs("fresh-bucket", delimiter="/", page_size=2)
    assert [one.name for one in listed] == ["copy", "large", "whole"]
    assert listed.prefixes == {"a folder/"}
    with client.batch():
        for name in ("copy", "large"):
            bucket.delete_blob(name)
    assert not bucket.blob("copy").exists()
    bucket.delete(force=True)
    with pytest.raises(exceptions.NotFound):
        client.get_bucket("fresh-bucket")


_TENSORSTORE = """
import sys, tensorstore as ts
kv = ts.KvStore.open({"driver": "gcs", "bucket": sys.argv[1], "path": "kv/"}).result()
first = kv.write("a", b"one").result()
assert kv.write("a", b"two", if_equal=first.generation).result().generation != first.generation
lost = kv.write("a", b"three", if_equal=first.generation).result()
assert kv.read("a").result().value == b"two"
kv.write("b/c", b"x").result()
assert kv.list().result() == [b"a", b"b/c"], kv.list().result()
kv.delete_range(ts.KvStore.KeyRange("b", "c")).result()
assert kv.list().result() == [b"a"]
print("agreed")
"""


def outside(script: str, *arguments: str, endpoint: str) -> subprocess.Popen[str]:
    """A Python of its own, as a training is: these libraries read their environment once."""
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env |= {
        "STORAGE_EMULATOR_HOST": endpoint,
        "TENSORSTORE_GCS_HTTP_URL": endpoint,
        "GOOGLE_CLOUD_PROJECT": "emulated",
        "NO_GCE_CHECK": "true",
        # Otherwise gcsfs looks for credentials at every call, to ask over gRPC of which kind the bucket is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # tensorstore writes behind gcsfs's back, whose listings orbax would take for what is there.
        "FSSPEC_GCS": '{"use_listings_cache": false}',
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.mark.contract
def test_tensorstore_writes_on_conditions(endpoint: str) -> None:
    pytest.importorskip("tensorstore")
    assert ended(outside(_TENSORSTORE, BUCKET, endpoint=endpoint)) == "agreed\n"


# --- checkpoints -----------------------------------------------------------------------------------------------------

_TRAINING = """
import sys, numpy as np, orbax.checkpoint as ocp
from etils import epath
options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
manager = ocp.CheckpointManager(epath.Path(sys.argv[1]), options=options)
print("resumed at", manager.latest_step(), flush=True)
for step in map(int, sys.argv[2:]):
    manager.save(step, args=ocp.args.StandardSave({"a": np.arange(1000.0)}), force=True)
    manager.wait_until_finished()
    print("saved", step, flush=True)
"""


class Gate:
    """A store's face that holds one upload back, and tells that it came."""

    def __init__(self, store: ObjectStore, held: str) -> None:
        self._face, self._held = ObjectServer(store), held
        self.reached, self.open = threading.Event(), threading.Event()
        self.service = HttpService(self.answer)
        self.endpoint = f"http://127.0.0.1:{self.service.port}"

    def answer(self, request: HttpRequest) -> HttpAnswer:
        begins = request.path.startswith("/upload/") and not request.value("upload_id")
        if begins and self._held in (request.value("name") or request.body.decode("latin-1")):
            self.reached.set()
            self.open.wait(120)
        return self._face.answer(request)

    def close(self) -> None:
        self.open.set()
        self.service.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def newest(endpoint: str, url: str) -> str:
    """What the code that runs on a TPU VM says, in a Python of its own."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import checkpoints; print(checkpoints.newest(sys.argv[2]))"
    return ended(outside(script, str(TEMPLATES), url, endpoint=endpoint)).strip()


CHECKPOINTS = f"gs://{BUCKET}/run-7/checkpoints"


@contextmanager
def killed_training(store: ObjectStore) -> Iterator[Gate]:
    """Real orbax, killed when every byte of step 3 is in the bucket and only the mark that says so is not."""
    pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("gcsfs")
    gate = Gate(store, "run-7/checkpoints/3/commit_success.txt")
    training = outside(_TRAINING, CHECKPOINTS, "1", "2", "3", endpoint=gate.endpoint)
    try:
        assert gate.reached.wait(120)
        training.send_signal(signal.SIGKILL)
        said, _ = training.communicate(timeout=30)
        assert said.splitlines() == ["resumed at None", "saved 1", "saved 2"]
        names = [one.name for one in store.list(BUCKET, ObjectQuery(prefix="run-7/checkpoints/3/")).items]
        assert [name for name in names if name.endswith("manifest.ocdbt")]
        gate.open.set()
        yield gate
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()
        gate.close()


@pytest.mark.machines
def test_a_save_that_was_killed_is_no_checkpoint(store: ObjectStore) -> None:
    with killed_training(store) as gate:
        assert newest(gate.endpoint, CHECKPOINTS) == "2"
        with node(STORAGE_EMULATOR_HOST=gate.endpoint) as one:
            assert one.launch(Job(run="sleep 60", checkpoint=CHECKPOINTS)).complete
            eventually(lambda: one.probe(checkpoint=CHECKPOINTS).checkpoint == 2)
            one.stop()


@pytest.mark.slow
def test_orbax_itself_sees_the_same_and_goes_on(store: ObjectStore) -> None:
    with killed_training(store) as gate:
        resumed = ended(outside(_TRAINING, CHECKPOINTS, "4", endpoint=gate.endpoint))
        assert resumed.splitlines() == ["resumed at 2", "saved 4"]
        assert newest(gate.endpoint, CHECKPOINTS + "/") == "4"


def test_a_bucket_without_checkpoints_and_one_of_many_pages(store: ObjectStore, endpoint: str) -> None:
    assert newest(endpoint, CHECKPOINTS) == "None"
    for step in range(1, 1203):
        store.insert(BUCKET, f"run-7/checkpoints/{step}/default", b"")
    for step in (3, 700, 1199):
        store.insert(BUCKET, f"run-7/checkpoints/{step}/commit_success.txt", b"")
    assert newest(endpoint, CHECKPOINTS) == "1199"


@pytest.mark.machines
def test_the_bucket_is_read_with_the_machines_own_token(store: ObjectStore) -> None:
    """
    `gcloud` was asked for the newest checkpoint every two minutes, first after two: short runs showed none, and images
    without it never did. The runner asks the JSON API with the machine's token at once; `gcloud` and `gsutil` come
    second.
    """
    for name in (
        "7/commit_success.txt",
        "9/half",
        "007/commit_success.txt",
        "12/commit_success.txt.tmp",
        "x/1/commit_success.txt",
    ):
        store.insert(BUCKET, name, b"")
    face, asked = ObjectServer(store), []

    def closed(request: HttpRequest) -> HttpAnswer:
        asked.append(request.headers.get("authorization"))
        return face.answer(request) if asked[-1] == "Bearer secret-token" else HttpAnswer(401, b"{}")

    service, metadata = HttpService(closed), MetadataServer(free_port())
    try:
        metadata.add(
            "127.0.0.1",
            {
                "instance/service-accounts/default/email": "me",
                "instance/service-accounts/default/token": "secret-token",
            },
        )
        endpoint = f"http://127.0.0.1:{service.port}"
        with node(STORAGE_EMULATOR_HOST=endpoint, GCE_METADATA_HOST=f"127.0.0.1:{metadata.port}") as one:
            assert one.launch(Job(run="sleep 60", checkpoint=f"gs://{BUCKET}")).complete
            eventually(lambda: one.probe(checkpoint=f"gs://{BUCKET}").checkpoint == 7)
            one.stop()
        assert set(asked) == {"Bearer secret-token"}
    finally:
        metadata.close()
        service.stop()


@pytest.mark.machines
def test_where_the_api_lets_nobody_in_a_tool_is_asked(tmp_path: Path) -> None:
    service = HttpService(lambda _: HttpAnswer(403, b"{}"))
    tool = tmp_path / "gcloud"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "storage ls" ] && echo "gs://{BUCKET}/run/41/commit_success.txt"\n')
    tool.chmod(0o755)
    url = f"gs://{BUCKET}/run"
    try:
        path = f"{tmp_path}:{os.environ['PATH']}"
        with node(STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{service.port}", PATH=path) as one:
            assert one.launch(Job(run="sleep 60", checkpoint=url)).complete
            eventually(lambda: one.probe(checkpoint=url).checkpoint == 41)
            one.stop()
    finally:
        service.stop()


@settings(max_examples=200)
@given(
    verb=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]),
    path=st.sampled_from(
        [
            f"/storage/v1/b/{BUCKET}/o",
            f"/storage/v1/b/{BUCKET}/o/a%2Fb",
            f"/storage/v1/b/{BUCKET}/o/a/compose",
            f"/storage/v1/b/{BUCKET}/o/a/rewriteTo/b/{BUCKET}/o/c",
            f"/upload/storage/v1/b/{BUCKET}/o",
            "/batch/storage/v1",
            "/storage/v1/b",
        ]
    ),
    query=st.lists(
        st.tuples(
            st.sampled_from(
                ["uploadType", "name", "maxResults", "matchGlob", "ifGenerationMatch", "generation", "alt"]
            ),
            st.sampled_from(["media", "multipart", "resumable", "-1", "0", "x", "[", "**/{a,", "{"]),
        ),
        max_size=4,
    ),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "content-type": st.sampled_from(["multipart/related; boundary=b", "text/plain", ""]),
            "range": st.sampled_from(["bytes=-3", "bytes=9-", "bytes=5-2", "nonsense"]),
            "content-range": st.sampled_from(["bytes */0", "bytes 0-1/2", "x"]),
        },
    ),
    body=st.binary(max_size=60) | st.sampled_from([b"--b\r\n\r\n{}\r\n--b\r\n\r\nx\r\n--b--", b'{"name": 3}', b"[1]"]),
)
def test_no_request_whatever_breaks_the_buckets(
    verb: str, path: str, query: list[tuple[str, str]], headers: dict[str, str], body: bytes
) -> None:
    store = ObjectStore(lambda: START, [BUCKET])
    store.insert(BUCKET, "a/b", b"0123456789")
    answer = ObjectServer(store).answer(HttpRequest(verb, path, tuple(query), headers, body, "peer"))
    assert answer.status < 500


# --- the emulator's own ----------------------------------------------------------------------------------------------


def test_a_world_names_the_buckets_that_exist() -> None:
    with EmulatorServer(WorldConfig.fast(buckets=["first-bucket"])) as server:
        listed = json.loads(urllib.request.urlopen(f"{server.storage_endpoint}/storage/v1/b", timeout=10).read())
        assert [one["name"] for one in listed["items"]] == ["first-bucket"]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/storage/v1/b/none/o", b"", 404),
        ("GET", f"/storage/v1/b/{BUCKET}/o?maxResults=many", b"", 400),
        ("POST", "/storage/v1/b", b"[]", 400),
        ("POST", "/storage/v1/b", b"{", 400),
        ("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart", b"x", 400),
        ("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media", b"x", 400),
        ("PUT", f"/upload/storage/v1/b/{BUCKET}/o?upload_id=none", b"x", 404),
        ("GET", f"/storage/v1/b/{BUCKET}/o?matchGlob=[z-a]", b"", 400),
        ("GET", "/nonsense", b"", 404),
    ],
)
def test_what_is_refused_is_told_as_json(endpoint: str, method: str, path: str, body: bytes, code: int) -> None:
    request = urllib.request.Request(endpoint + path, body or None, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert (refused.value.code, json.loads(refused.value.read())["error"]["code"]) == (code, code)
