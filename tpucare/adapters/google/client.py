"""
Cloud over the official google-cloud-tpu client: gRPC calls in, model records and `CloudError`s out.

Every call has a deadline (the client has none of its own), only reads are repeated, and the loop polls operations
through `get_operation` (the client's futures notice a failed create up to 20 s late, or give up at an outage).
Classes of errors are left to `classify`, fields of messages to `wire`, changes since the last listing to `snapshot`.

Importing this module costs 200 ms and 50 MB (grpc, google-cloud-tpu): import it only where a cloud is needed.
"""

from __future__ import annotations

import configparser
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import google.auth
import grpc
from google.api_core.exceptions import GoogleAPICallError
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud.tpu_v2 import TpuClient, types
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random

from tpucare.adapters.google import wire
from tpucare.adapters.google.classify import INVALID_ARGUMENT, READ_TRIES, UNKNOWN, Where, classify, is_worth_repeating
from tpucare.adapters.google.snapshot import SnapshotDiffer, key_of
from tpucare.model.errors import ConfigError, NeedsPerson, OwnCredentials, Transient
from tpucare.model.resources import (
    Listing,
    Node,
    NodeKey,
    NodeRequest,
    Operation,
    QueuedRequest,
    QueuedResource,
    QueueListing,
)

T = TypeVar("T")

PAGE_SIZE = 1000

# Without these a channel waits up to two minutes after an outage before it connects again, only a deadline notices a
# connection that a firewall dropped, and an answer is limited to 4 MiB (4,500 nodes).
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)

_ENDPOINT = re.compile(r"^(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}$")
_NO_CREDENTIALS = (
    "no Google credentials found: run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS "
    "to the key file of a service account, or run on a VM that has one"
)
_LOG_IN = "run `gcloud auth application-default login`"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest wait for one answer. `listing` is per page; `write` covers create, delete and update."""

    listing: timedelta = timedelta(seconds=30)
    read: timedelta = timedelta(seconds=10)
    write: timedelta = timedelta(seconds=30)


class CloudClock:
    """
    The service's clock: the `date` of its last answer (or the create time of an operation), plus the time since then
    on a monotonic clock. Exact to a second; `now` is None before the first answer.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last: tuple[datetime, float] | None = None

    def set(self, instant: datetime) -> None:
        self._last = (instant, self._monotonic())

    def now(self) -> datetime | None:
        if self._last is None:
            return None
        instant, at = self._last
        return instant + timedelta(seconds=self._monotonic() - at)


class _DateReader(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Reads the `date` header of an answer; the client itself shows only the message."""

    def __init__(self, clock: CloudClock) -> None:
        self._clock = clock

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        for key, value in call.initial_metadata() or ():
            if key == "date" and (instant := _parse_date(value)) is not None:
                self._clock.set(instant)
        return call


class GoogleCloud:
    """
    `ports.Cloud`. Thread-safe, except that one listing of a project may be under way at a time.

    A passed deadline and a broken connection are AnswerLost: the service may have done what the call asked for.

    log_in_again: called after a refusal of our credentials; returns a client with other credentials, if there are any
    """

    def __init__(
        self,
        client: TpuClient,
        clock: CloudClock,
        deadlines: Deadlines = Deadlines(),
        log_in_again: Callable[[], TpuClient | None] = lambda: None,
    ) -> None:
        self._client, self._log_in_again = client, log_in_again
        self._renewing = threading.Lock()
        self._clock = clock
        self._listing = deadlines.listing.total_seconds()
        self._read = deadlines.read.total_seconds()
        self._write = deadlines.write.total_seconds()
        self._differs: dict[str, SnapshotDiffer[Any]] = {}
        self._closed = threading.Event()
        self._page_size = PAGE_SIZE

    def list_nodes(self, project: str) -> Listing:
        """All nodes of all zones: one call per page. A page that fails makes the listing fail."""
        pages = self._pages(project)
        records = ((raw.name, raw) for page in pages for raw in page.nodes)
        unreachable = {zone for page in pages for zone in page.unreachable}
        differ = self._differs.setdefault(project, SnapshotDiffer(project, wire.node_of))
        return differ.full(records, unreachable, self._clock.now())

    def list_zone(self, project: str, zone: str) -> list[tuple[Node, dict[str, Any]]]:
        """
        All nodes of one zone, of every owner: as records, and as the REST API v2 would write them. Thread-safe.

        Raises: NeedsPerson: no such zone, or not open to the project. Transient: the zone does not answer for now.
        """
        pages = self._pages(project, zone)
        if any(page.unreachable for page in pages):
            raise Transient(f"zone {zone} does not answer, so its nodes are unknown")
        named = ((key_of(raw.name, project), raw) for page in pages for raw in page.nodes)
        return [(wire.node_of(key, raw), wire.rest_of(raw)) for key, raw in named if key is not None]

    def get_node(self, key: NodeKey) -> Node:
        return wire.node_of(key, self._get_raw(key))

    def create_node(self, request: NodeRequest) -> Operation:
        message = wire.create_request(request)
        with self._translated(Where.CREATE):
            raw = self._client.create_node(request=message, timeout=self._write).operation
        self._set_clock(raw)
        return wire.operation_of(raw)

    def get_operation(self, name: str) -> Operation:
        def read() -> Any:
            with self._translated(Where.GET_OPERATION):
                return self._client.get_operation({"name": name}, timeout=self._read)

        return wire.operation_of(_repeat(read))

    def delete_node(self, key: NodeKey) -> None:
        with self._translated(Where.DELETE):
            raw = self._client.delete_node(name=wire.node_path(key), timeout=self._write).operation
        self._set_clock(raw)

    def add_ssh_key(self, key: NodeKey, line: str) -> None:
        """
        Raises: LostRace: another update is under way.

        The API has no conditional write, so a key that another client adds between read and write is lost.
        """
        metadata = wire.with_ssh_key(dict(self._get_raw(key).metadata), line)
        if metadata is None:
            return
        self._update(types.Node(name=wire.node_path(key), metadata=metadata), "metadata")

    def add_labels(self, key: NodeKey, labels: Mapping[str, str]) -> None:
        """Raises: LostRace: another update is under way."""
        merged = {**dict(self._get_raw(key).labels), **labels}
        self._update(types.Node(name=wire.node_path(key), labels=merged), "labels")

    def _update(self, node: Any, path: str) -> None:
        request = types.UpdateNodeRequest(node=node, update_mask={"paths": [path]})
        with self._translated(Where.UPDATE):
            raw = self._client.update_node(request=request, timeout=self._write).operation
        if (error := wire.operation_of(raw).error) is not None:
            raise error

    def host_keys(self, key: NodeKey) -> Mapping[int, tuple[str, ...]]:
        request = types.GetGuestAttributesRequest(name=wire.node_path(key), query_path=f"{wire.HOST_KEYS}/")

        def read() -> Any:
            with self._translated(Where.GUEST):
                return self._client.get_guest_attributes(request=request, timeout=self._read)

        return wire.host_keys_of(types.GetGuestAttributesResponse.pb(_repeat(read)).guest_attributes)

    def list_queued(self, project: str) -> QueueListing:
        """All queued resources of all zones: one call per page. A page that fails makes the listing fail."""
        # The service chooses the size of a page: there are some dozens of queued resources in a zone at most.
        request = types.ListQueuedResourcesRequest(parent=wire.parent_name(project, "-"))
        pages = list(
            self._walk(
                lambda: self._client.list_queued_resources(request=request, timeout=self._listing),
                types.ListQueuedResourcesResponse.pb,
                "ListQueuedResources",
            )
        )
        named = ((key_of(raw.name, project), raw) for page in pages for raw in page.queued_resources)
        resources = {key: wire.queued_of(key, raw) for key, raw in named if key is not None}
        unreachable = frozenset(zone.rsplit("/", 1)[-1] for page in pages for zone in page.unreachable)
        return QueueListing(project, resources, unreachable)

    def get_queued(self, key: NodeKey) -> QueuedResource:
        def read() -> Any:
            with self._translated(Where.GET):
                return self._client.get_queued_resource(name=wire.queued_path(key), timeout=self._read)

        return wire.queued_of(key, types.QueuedResource.pb(_repeat(read)))

    def create_queued(self, request: QueuedRequest) -> None:
        message = wire.queued_request(request)
        with self._translated(Where.CREATE):
            self._client.create_queued_resource(request=message, timeout=self._write)

    def delete_queued(self, key: NodeKey) -> None:
        message = types.DeleteQueuedResourceRequest(name=wire.queued_path(key), force=True)
        with self._translated(Where.DELETE):
            self._client.delete_queued_resource(request=message, timeout=self._write)

    def close(self) -> None:
        """Close the connection; calls under way and later ones fail as Transient."""
        self._closed.set()
        self._client.transport.close()  # type: ignore[no-untyped-call]

    def _get_raw(self, key: NodeKey) -> Any:
        def read() -> Any:
            with self._translated(Where.GET):
                return self._client.get_node(name=wire.node_path(key), timeout=self._read)

        return types.Node.pb(_repeat(read))

    def _pages(self, project: str, zone: str = "-") -> list[Any]:
        """
        Raw ListNodesResponse messages until no token is left.

        The largest page size is not documented: after a refusal of ours the service chooses it from then on. Otherwise
        every later listing would fail, too.
        """
        try:
            return list(self._read_pages(project, zone))
        except NeedsPerson as error:
            if error.code != INVALID_ARGUMENT or not self._page_size:
                raise
        pages = list(self._read_pages(project, zone, plain=True))
        self._page_size = 0
        return pages

    def _read_pages(self, project: str, zone: str, *, plain: bool = False) -> Iterator[Any]:
        size = 0 if plain else self._page_size
        request = types.ListNodesRequest(parent=wire.parent_name(project, zone), page_size=size)
        return self._walk(
            lambda: self._client.list_nodes(request=request, timeout=self._listing),
            types.ListNodesResponse.pb,
            "ListNodes",
        )

    def _walk(self, begin: Callable[[], Any], raw_of: Callable[[Any], Any], method: str) -> Iterator[Any]:
        """Raw answers of *method* until no page token is left. *begin*: sends the first call, and walks its pages."""
        tokens: set[str] = set()
        with self._translated(Where.LIST):
            for page in begin().pages:
                raw = raw_of(page)
                if raw.next_page_token in tokens:
                    raise Transient(f"{method} gave the same page token twice, so the listing has no end")
                tokens.add(raw.next_page_token)
                yield raw

    def _set_clock(self, raw: Any) -> None:
        """Set the service's clock from a new operation, if no answer has had a date yet."""
        instant = wire.operation_time(raw)
        if instant is not None and self._clock.now() is None:
            self._clock.set(instant)

    @contextmanager
    def _translated(self, where: Where) -> Iterator[None]:
        """Translate the client's exceptions into CloudErrors."""
        try:
            yield
        except GoogleAPICallError as error:
            meant = classify(_status_number(error), error.message or str(error), where)
            if isinstance(meant, OwnCredentials):
                self._renew()
            raise meant from error
        except GoogleAuthError as error:
            self._renew()
            raise OwnCredentials(_one_line(error), advice=_LOG_IN) from error
        except grpc.RpcError as error:
            raise classify(UNKNOWN, _one_line(error), where) from error
        except ValueError as error:
            if not self._closed.is_set():
                raise
            raise Transient("the connection to the API was closed by us") from error

    def _renew(self) -> None:
        """Log in again for later calls; the refused call fails, and calls under way end on their old client."""
        with self._renewing:
            client = self._log_in_again()
            if client is not None and not self._closed.is_set():
                self._client = client


def connect(endpoint: str | None, *, monotonic: Callable[[], float], deadlines: Deadlines = Deadlines()) -> GoogleCloud:
    """
    A client of the real service, or of an emulator at *endpoint* (`127.0.0.1:PORT`): plain text, no credentials.

    monotonic: seconds that never jump, for the service's clock between two answers.
    Raises: ConfigError: *endpoint* is not `host:port`, or no credentials are found.
    """
    clock = CloudClock(monotonic)
    reader = _DateReader(clock)
    if endpoint:
        return GoogleCloud(TpuClient(transport=_emulator_transport(endpoint, reader)), clock, deadlines)
    log_in_again = _after_a_change_of_the_file(reader)
    return GoogleCloud(TpuClient(transport=_google_transport(reader)), clock, deadlines, log_in_again)


def _after_a_change_of_the_file(reader: _DateReader) -> Callable[[], TpuClient | None]:
    """A function that reads the credentials again if their file has changed (a rotated key, a new login)."""
    path = credentials_file(os.environ)
    seen = _stamp(path)

    def log_in_again() -> TpuClient | None:
        nonlocal seen
        found = _stamp(path)
        if found is None or found == seen:
            return None
        try:
            client = TpuClient(transport=_google_transport(reader))
        except (ConfigError, ValueError):
            # The file is half written: the next refusal reads it again.
            return None
        seen = found
        return client

    return log_in_again


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _emulator_transport(endpoint: str, reader: _DateReader) -> TpuGrpcTransport:
    if not _ENDPOINT.match(endpoint):
        raise ConfigError(f"endpoint {endpoint!r} is not of the form 127.0.0.1:PORT")
    # A proxy from the environment cannot reach this machine's loopback.
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]
    channel = grpc.insecure_channel(endpoint, options=options)
    return TpuGrpcTransport(channel=grpc.intercept_channel(channel, reader))


def _google_transport(reader: _DateReader) -> TpuGrpcTransport:
    try:
        credentials, _ = google.auth.default(scopes=[wire.CLOUD_PLATFORM])
    except DefaultCredentialsError as error:
        raise ConfigError(f"{_NO_CREDENTIALS} ({_one_line(error)})") from error

    def channel(host: str, **settings: Any) -> Any:
        settings["options"] = [*settings.get("options", ()), *CHANNEL_OPTIONS]
        return grpc.intercept_channel(TpuGrpcTransport.create_channel(host, **settings), reader)

    return TpuGrpcTransport(credentials=credentials, channel=channel)


def _repeat(read: Callable[[], T]) -> T:
    """Up to READ_TRIES quick tries of a read."""
    tries = Retrying(
        retry=retry_if_exception(is_worth_repeating),
        stop=stop_after_attempt(READ_TRIES),
        wait=wait_random(0.05, 0.3),
        reraise=True,
    )
    return tries(read)


def _status_number(error: GoogleAPICallError) -> int:
    status = error.grpc_status_code
    return int(status.value[0]) if status is not None else UNKNOWN


def _parse_date(value: str | bytes) -> datetime | None:
    """An HTTP date (`Sun, 06 Nov 1994 08:49:37 GMT`) as an instant."""
    try:
        return parsedate_to_datetime(value.decode() if isinstance(value, bytes) else value).astimezone(UTC)
    except ValueError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- the project and the credentials: flag, environment, gcloud's configuration ---------------------------------------
# gcloud itself is not called: it takes a second, and a machine with a copied configuration need not have it.


_NO_PROJECT = (
    "no Google Cloud project is set: set `project` in the fleet file or GOOGLE_CLOUD_PROJECT, "
    "or run `gcloud config set project PROJECT`"
)


def find_project(explicit: str | None, env: Mapping[str, str]) -> str:
    """
    *explicit*, else GOOGLE_CLOUD_PROJECT, else CLOUDSDK_CORE_PROJECT, else the project of gcloud's active
    configuration, else of the credentials.

    env: the process's environment. Raises: ConfigError: none of them names a project.
    """
    named = explicit or env.get("GOOGLE_CLOUD_PROJECT") or env.get("CLOUDSDK_CORE_PROJECT")
    project = named or _configured_project(env) or _credentials_project()
    if not project:
        raise ConfigError(_NO_PROJECT)
    return project


def credentials_file(env: Mapping[str, str]) -> Path:
    """The file that `google.auth.default` tries first; it need not exist on a VM with a service account."""
    return Path(env.get("GOOGLE_APPLICATION_CREDENTIALS") or _folder(env) / "application_default_credentials.json")


def _folder(env: Mapping[str, str]) -> Path:
    home = env.get("HOME") or str(Path.home())
    return Path(env.get("CLOUDSDK_CONFIG") or Path(home, ".config", "gcloud"))


def _configured_project(env: Mapping[str, str]) -> str:
    """`core/project` of gcloud's active configuration; empty if there is none."""
    folder = _folder(env)
    try:
        name = env.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text("utf-8").strip()
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string((folder / "configurations" / f"config_{name}").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""
    return parser.get("core", "project", fallback="").strip()


def _credentials_project() -> str:
    try:
        _, project = google.auth.default()
    except GoogleAuthError:
        return ""
    return str(project or "")
