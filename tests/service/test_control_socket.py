"""The control socket: one line in, one line out, whatever comes; and only the loop's thread carries orders out."""

from __future__ import annotations

import json
import random
import socket
import socketserver
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpucare.model import errors
from tpucare.model.errors import ConfigError, StoreFull
from tpucare.service import control_socket as control
from tpucare.service.control_socket import LINE_LIMIT, Control, NoDaemon, Refused, Stopping, is_running, request


class Loop:
    """A thread that serves when it is nudged, as the daemon's loop does."""

    def __init__(self, path: Path, answer_seconds: float = 60.0, *, busy: bool = False) -> None:
        self.woken, self.nudged = threading.Event(), threading.Event()
        self.stumbles: list[Exception] = []
        self.carried: list[object] = []
        self.threads: set[str] = set()
        self.busy = threading.Event()
        if busy:
            self.busy.set()
        self.control = Control(path, self._nudge, answer_seconds, self.stumbles.append)
        self.control.start()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="the-loop")
        self._thread.start()

    def _nudge(self) -> None:
        self.nudged.set()
        self.woken.set()

    def _run(self) -> None:
        while not self._ending:
            self.woken.wait(0.5)
            self.woken.clear()
            if self.busy.is_set():
                continue
            try:
                self.control.serve(self._carry)
            except StoreFull:
                self.stumbles.append(StoreFull("ended the loop"))

    def _carry(self, order: object) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        self.carried.append(order)
        match order:
            case {"do": "echo", "text": text}:
                return {"text": text}
            case {"do": "stumble"}:
                raise ZeroDivisionError("oops")
            case {"do": "full"}:
                raise StoreFull("no room")
        raise ConfigError("no verb of that name")

    def close(self) -> None:
        self._ending = True
        self.woken.set()
        self._thread.join()
        self.control.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def loop(path: Path) -> Iterator[Loop]:
    made = Loop(path)
    yield made
    made.close()


def raw(path: Path, content: bytes, *, shut: bool = True) -> list[dict[str, Any]]:
    """Answers to bytes as they are."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(10)
        channel.connect(str(path))
        try:
            channel.sendall(content)
            if shut:
                channel.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        with channel.makefile("rb") as lines:
            try:
                return [json.loads(line) for line in lines]
            except OSError:
                return []


def test_an_order_is_carried_out_on_the_thread_of_the_loop(loop: Loop, path: Path) -> None:
    assert request(path, {"do": "echo", "text": "ä\n"}) == {"text": "ä\n"}
    assert loop.threads == {"the-loop"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_making_a_socket_leaves_the_mask_of_other_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is one for the whole process: a folder that the user's code makes meanwhile would be closed to it."""
    bind = socketserver.UnixStreamServer.server_bind
    modes: list[int] = []

    def meanwhile(server: socketserver.UnixStreamServer) -> None:
        (tmp_path / "made").mkdir()
        modes.append(stat.S_IMODE((tmp_path / "made").stat().st_mode))
        bind(server)

    (tmp_path / "before").mkdir()
    monkeypatch.setattr(socketserver.UnixStreamServer, "server_bind", meanwhile)
    made = Control(tmp_path / "control.sock", lambda: None)
    made.start()
    made.close()
    assert modes == [stat.S_IMODE((tmp_path / "before").stat().st_mode)]


def test_an_error_arrives_as_the_class_that_it_was(loop: Loop, path: Path) -> None:
    with pytest.raises(ConfigError, match="no verb of that name"):
        request(path, {"do": "fly"})
    with pytest.raises(StoreFull, match="no room"):
        request(path, {"do": "full"})
    # Whoever asked has the answer before the loop has the error: one turn of it later it has both.
    assert request(path, {"do": "echo", "text": "on"}) == {"text": "on"}
    assert [type(error) for error in loop.stumbles] == [StoreFull], "an error of the store ends the loop, too"


def test_every_class_but_that_with_an_exit_status_crosses_the_socket() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.TpuCareError):
            error = control._error_of({"kind": kind.__name__, "error": "no -> yes"})
            assert type(error) is (Refused if kind is errors.CommandFailed else kind)
            assert str(error) == "no -> yes"
    assert type(control._error_of({"kind": "Problem", "error": "no"})) is Refused


def test_an_order_that_stumbles_ends_nothing_else(loop: Loop, path: Path) -> None:
    with pytest.raises(Refused, match="ZeroDivisionError: oops"):
        request(path, {"do": "stumble"})
    assert request(path, {"do": "echo", "text": "on"}) == {"text": "on"}
    assert [type(error) for error in loop.stumbles] == [ZeroDivisionError]


def test_nobody_listens(path: Path) -> None:
    assert not is_running(path)
    with pytest.raises(NoDaemon, match="tpucare daemon"):
        request(path, {"do": "status"})


def test_a_dead_socket_is_replaced_and_taken_away_at_the_end(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not is_running(path)
    loop = Loop(path)
    assert is_running(path)
    loop.close()
    assert not path.exists()


def test_a_socket_that_cannot_be_taken_away_is_left(path: Path) -> None:
    """What ended the daemon, as a file system that turned read-only, is told and not this."""
    loop = Loop(path)
    path.unlink()
    path.mkdir()
    loop.close()
    assert path.is_dir()


def test_several_lines_on_one_connection_are_answered_in_order(loop: Loop, path: Path) -> None:
    lines = b"".join(json.dumps({"do": "echo", "text": str(number)}).encode() + b"\n" for number in range(20))
    assert [answer["text"] for answer in raw(path, lines)] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    "content",
    [
        b"\n\n \n",
        b"not json\n",
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b'{"do": ' + b"1" * 5000 + b"}\n",
        b"null\n",
        b'"status"\n',
        b'{"do": "ec',
        b"\x00" * 4096,
        b'{"do": "echo", "text": "' + b"x" * (LINE_LIMIT + 10) + b'"}\n',
    ],
)
def test_garbage_is_answered_by_one_line_or_none_and_harms_nobody(loop: Loop, path: Path, content: bytes) -> None:
    for answer in raw(path, content):
        assert answer["ok"] is False
        assert "\n" not in answer["error"]
    assert request(path, {"do": "echo", "text": "still here"}) == {"text": "still here"}


@pytest.mark.parametrize("seed", [4711, 4712])
def test_random_bytes_and_halves_of_lines_harm_nobody(loop: Loop, path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(control.CONNECTIONS_LIMIT - 1):  # Some may still be served when all have hung up.
        content = rng.randbytes(rng.randrange(1, 300)) if rng.random() < 0.5 else b'{"do": "echo", "text": "a"}\n'
        cut = rng.randrange(len(content) + 1)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(str(path))
            channel.sendall(content[:cut])
    assert request(path, {"do": "echo", "text": "still here"}) == {"text": "still here"}


def test_an_order_that_nobody_waits_for_any_more_is_not_carried_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(path, answer_seconds=0.3, busy=True)
    try:
        with pytest.raises(Refused, match="did nothing for this command"):
            request(path, {"do": "echo", "text": "too late"})
        monkeypatch.setattr(loop.control, "_answer_seconds", 60.0)
        loop.busy.clear()
        assert request(path, {"do": "echo", "text": "in time"}) == {"text": "in time"}
        assert loop.carried == [{"do": "echo", "text": "in time"}]
    finally:
        loop.close()


def test_too_many_connections_are_told_so(loop: Loop, path: Path) -> None:
    idle = [socket.socket(socket.AF_UNIX) for _ in range(control.CONNECTIONS_LIMIT)]
    try:
        for channel in idle:
            channel.connect(str(path))
            channel.sendall(b'{"do": "echo", "text": ""}\n')
            channel.recv(100)
        with pytest.raises(Refused, match="too many connections"):
            request(path, {"do": "echo", "text": ""})
    finally:
        for channel in idle:
            channel.close()


def test_a_path_that_is_too_long_for_a_socket_is_reached_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    loop = Loop(folder / "control.sock")
    try:
        assert len(str(folder)) > 108
        assert request(folder / "control.sock", {"do": "echo", "text": "far"}) == {"text": "far"}
        assert is_running(folder / "control.sock")
    finally:
        loop.close()


def test_orders_that_wait_when_the_daemon_stops_are_refused(path: Path) -> None:
    loop = Loop(path, busy=True)
    refused: list[Exception] = []

    def ask() -> None:
        try:
            request(path, {"do": "echo", "text": ""})
        except Exception as error:
            refused.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert loop.nudged.wait(30)
    loop.close()
    asking.join(30)
    assert [type(error) for error in refused] == [Stopping]
    assert "stopping" in str(refused[0])


def test_only_apply_may_be_long(loop: Loop) -> None:
    long = "x" * (1 << 20)
    orders: list[Any] = [{"do": "echo", "text": long}, [[]] * 100_000, {"text": long, "do": "apply"}]
    for order in orders:
        with pytest.raises((Refused, ConfigError), match="at most 65536 bytes"):
            request(loop.control.path, order)
    assert loop.carried == []
    with pytest.raises(ConfigError, match="verb"):
        request(loop.control.path, {"do": "apply", "text": long})
    assert len(loop.carried) == 1


def test_a_line_that_does_not_end_gives_its_place_back(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LINE_SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(loop.control.path))
        channel.settimeout(20)
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                try:
                    channel.sendall(b" ")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert channel.recv(100) == b""
        ended.set()
        dripping.join()


def test_lines_that_come_together_are_answered_one_by_one(loop: Loop) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(loop.control.path))
        channel.sendall(b'{"do": "echo", "text": "a"}\n\n{"do": "echo", "text": "b"}\n')
        with channel.makefile("rb") as lines:
            assert [json.loads(lines.readline())["text"] for _ in range(2)] == ["a", "b"]
