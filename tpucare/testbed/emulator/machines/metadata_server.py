"""
The metadata server of every emulated worker: one thread serves all of them, each on its own address.

Serves the requests of TPU tools: plain values, folders, `recursive=true`, and `wait_for_change` long polls with etags.
Source: Compute Engine documentation, "About VM metadata" and "Query VM metadata". The caller gives the values. Access
tokens of service accounts are served; identity tokens are not, because the emulator cannot sign them.

Some clients, Ray among them, know no other address than http://metadata.google.internal. On its port 80 an ordinary
user may not listen; then clients that read GCE_METADATA_HOST are served alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import structlog

from tpucare.testbed.emulator.machines.own_files import METADATA_NAMES
from tpucare.testbed.peers import Address, is_from_a_page, is_ours

_ROOT = "/computeMetadata/v1/"
_LONGEST_POLL_SECONDS = 3600.0
_IDLE_SECONDS = 120.0
_TOKEN_SECONDS = 3599
_LISTS = ("aliases", "scopes")
_NUMBERS = ("id", "numeric-project-id")
_SERVICE_PORT = 80

_log = structlog.get_logger("tpucare.emulator")

Leaf = str | int | list[str]

Tree = dict[str, "Tree | Leaf"]


@dataclass(eq=False)
class _Guest:
    """The values of one worker and the connections to its servers. Used by the loop's thread only."""

    values: dict[str, str]
    servers: list[asyncio.Server] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    conversations: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    body: str = ""
    etag: str = ""
    content_type: str = "application/text"


class MetadataServer:
    """Metadata for many workers. Thread-safe; nothing here blocks for long."""

    def __init__(self, port: int = 8080) -> None:
        self.port = port
        self._serves_by_name = True
        self._guests: dict[str, _Guest] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metadata", daemon=True)
        self._thread.start()

    def add(self, address: str, values: Mapping[str, str], *, by_name: bool = False) -> None:
        """
        Serve *values* (`instance/preempted` -> `FALSE`) on *address*, instead of those before.

        by_name: METADATA_NAMES resolve to this address, so serve on port 80 too, if that may be had
        Raises: OSError: the address and port cannot be listened on.
        """
        self._run_on_loop(self._remove(address))
        listeners = [socket.create_server((address, self.port), backlog=64)]
        if by_name and self.port != _SERVICE_PORT:
            listeners += self._listen_by_name(address)
        self._run_on_loop(self._add(address, _Guest(dict(values)), listeners))

    def _listen_by_name(self, address: str) -> list[socket.socket]:
        try:
            return [socket.create_server((address, _SERVICE_PORT), backlog=64)]
        except PermissionError:
            # The lot of every ordinary user, which `tpucare emulator` says once, at its start.
            return []
        except OSError as error:
            if self._serves_by_name:
                self._serves_by_name = False
                _log.warning(
                    f"http://{METADATA_NAMES[0]} does not answer on workers", address=address, error=str(error)
                )
            return []

    def update(self, address: str, values: Mapping[str, str]) -> None:
        """Change some values; ignored for an address that is not served. Long polls are answered at once."""
        self._loop.call_soon_threadsafe(self._update, address, dict(values))

    def remove(self, *addresses: str) -> None:
        """Stop listening there, and cut open connections."""
        self._run_on_loop(self._remove(*addresses))

    def close(self) -> None:
        """Stop serving altogether."""
        if self._loop.is_closed():
            return
        self._run_on_loop(self._remove_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run_on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _add(self, address: str, guest: _Guest, listeners: list[socket.socket]) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _converse(guest, reader, writer)

        guest.servers = [await asyncio.start_server(serve, sock=listener) for listener in listeners]
        self._guests[address] = guest

    def _update(self, address: str, values: dict[str, str]) -> None:
        if guest := self._guests.get(address):
            guest.values.update(values)
            # Waiting polls hold the old event; later ones wait for the new one.
            guest.changed.set()
            guest.changed = asyncio.Event()

    async def _remove(self, *addresses: str) -> None:
        for address in addresses:
            guest = self._guests.pop(address, None)
            if guest is None:
                continue
            for server in guest.servers:
                server.close()
            for task in list(guest.conversations):
                task.cancel()

    async def _remove_all(self) -> None:
        await self._remove(*self._guests)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def may_serve_by_name() -> bool:
    """Whether this user may listen on the port of http://metadata.google.internal."""
    try:
        socket.create_server(("127.0.0.1", _SERVICE_PORT)).close()
    except PermissionError:
        return False
    except OSError:
        pass  # taken on this address, which workers do not use
    return True


async def _converse(guest: _Guest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection, one after the other."""
    task = asyncio.current_task()
    assert task is not None, "the server runs each conversation as a task"
    guest.conversations.add(task)
    served: Address = writer.get_extra_info("sockname")
    try:
        if not is_ours(writer.get_extra_info("peername"), served):
            writer.write(_rendered(_Answer("403 Forbidden", "Not for other users of this machine.\n"), closing=True))
            await writer.drain()
            return
        while await _exchange(guest, served, reader, writer):
            pass
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
        return
    finally:
        guest.conversations.discard(task)
        writer.close()


async def _exchange(guest: _Guest, served: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request; True when the connection stays open for another."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE_SECONDS)
    request_line, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    closing = headers.get("connection", "").lower() == "close" or request_line.endswith("HTTP/1.0")
    writer.write(_rendered(await _answer(guest, served, request_line, headers), closing))
    await writer.drain()
    return not closing


async def _answer(guest: _Guest, served: Address, request_line: str, headers: Mapping[str, str]) -> _Answer:
    method, _, target = request_line.partition(" ")
    url = urlsplit(target.rpartition(" ")[0])
    path = unquote(url.path)
    path = _ROOT if f"{path}/" == _ROOT else path
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    if is_from_a_page(headers, served, *METADATA_NAMES):
        return _Answer("403 Forbidden", "Not for pages in a browser.\n")
    if method != "GET":
        return _Answer("405 Method Not Allowed")
    if path in ("/", "/computeMetadata", "/computeMetadata/"):
        return _Answer("200 OK", "computeMetadata/\n" if path == "/" else "v1/\n")
    # A forwarded request must not read a machine's metadata (server-side request forgery).
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _Answer("403 Forbidden", "Missing Metadata-Flavor:Google header.\n")
    if not path.startswith(_ROOT):
        return _Answer("404 Not Found")
    if query.get("wait_for_change", "").lower() == "true":
        await _wait_for_change(guest, path, query)
    return _look_up(guest.values, path, query)


async def _wait_for_change(guest: _Guest, path: str, query: Mapping[str, str]) -> None:
    """Return when the answer's etag differs from `last_etag`, or after `timeout_sec`."""
    try:
        timeout = min(float(query.get("timeout_sec", _LONGEST_POLL_SECONDS)), _LONGEST_POLL_SECONDS)
    except ValueError:
        timeout = _LONGEST_POLL_SECONDS
    known = query.get("last_etag") or _look_up(guest.values, path, query).etag
    try:
        async with asyncio.timeout(timeout):
            while _look_up(guest.values, path, query).etag == known:
                await guest.changed.wait()
    except TimeoutError:
        return


def _look_up(values: Mapping[str, str], path: str, query: Mapping[str, str]) -> _Answer:
    name = path.removeprefix(_ROOT)
    if name in values and _is_token(name):
        return _found(_token(values[name]), True)
    if name in values:
        as_json = query.get("alt") == "json"
        return _found(json.dumps(_leaf(name, values[name])) if as_json else values[name], as_json)
    folder = name if name.endswith("/") or not name else f"{name}/"
    inside = {key.removeprefix(folder): value for key, value in values.items() if key.startswith(folder)}
    if not inside:
        return _Answer("404 Not Found")
    if query.get("recursive", "").lower() == "true":
        return _found(json.dumps(_tree(inside, free_names=folder.endswith(("attributes/", "service-accounts/")))), True)
    children = sorted({head + slash for head, slash, _ in (key.partition("/") for key in inside)})
    return _found("".join(f"{child}\n" for child in children), False)


def _found(body: str, as_json: bool) -> _Answer:
    etag = hashlib.sha256(body.encode()).hexdigest()[:16]
    return _Answer("200 OK", body, etag, "application/json" if as_json else "application/text")


def _tree(values: Mapping[str, str], *, free_names: bool) -> Tree:
    """
    `{"a/b": "x"}` as `{"a": {"b": "x"}}`, names in camelCase as the service gives them.

    *free_names*: keep the names, as is done below `attributes`, where users choose them.
    """
    tree: Tree = {}
    for head in dict.fromkeys(key.partition("/")[0] for key in values):
        name = head if free_names else _camel_case(head)
        below = {key.removeprefix(f"{head}/"): value for key, value in values.items() if key.startswith(f"{head}/")}
        if below:
            tree[name] = _tree(below, free_names=head in ("attributes", "service-accounts"))
        elif not (head == "token" and "email" in values):
            tree[name] = values[head] if free_names else _leaf(head, values[head])
    return tree


def _leaf(name: str, value: str) -> Leaf:
    """A value in JSON."""
    last = name.rpartition("/")[2]
    if last in _LISTS:
        return value.splitlines()
    return int(value) if last in _NUMBERS and value.isdigit() else value


def _is_token(name: str) -> bool:
    return name.startswith("instance/service-accounts/") and name.endswith("/token")


def _token(secret: str) -> str:
    """An access token that says it is valid for an hour; the emulator checks none."""
    return json.dumps({"access_token": secret, "expires_in": _TOKEN_SECONDS, "token_type": "Bearer"})


def _camel_case(name: str) -> str:
    first, *others = name.split("-")
    return first + "".join(other.capitalize() for other in others)


def _rendered(answer: _Answer, closing: bool) -> bytes:
    body = answer.body.encode()
    head = [
        f"HTTP/1.1 {answer.status}",
        "Metadata-Flavor: Google",
        "Server: Metadata Server for VM",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(body)}",
        *([f"ETag: {answer.etag}"] if answer.etag else []),
        f"Connection: {'close' if closing else 'keep-alive'}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
