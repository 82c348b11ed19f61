"""The client of the probe, against stand-ins that hang, die, lie and dawdle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.integrations.test_ray_demand import ANSWER
from tpucare.integrations.ray.cluster import HeadRecord
from tpucare.integrations.ray.demand import (
    ClusterState,
    DrainReason,
    HeadAway,
    PendingSlice,
    ProbeSilent,
)
from tpucare.integrations.ray.probe import Probe
from tpucare.model.errors import ConfigError, TpuCareError

T = TypeVar("T")

# Reads questions, writes each to the file that the head's "token" names, and answers with `answer(question, number)`.
STAND_IN = """
import json, os, sys, time
STATE = %(state)r
log = open(os.environ["RAY_AUTH_TOKEN_PATH"] + ".log", "a")
def say(text):
    sys.stdout.write(text + "\\n"); sys.stdout.flush()
%(before)s
for number, line in enumerate(sys.stdin, 1):
    question = json.loads(line)
    print(json.dumps([os.getpid(), sys.argv[1:], question]), file=log, flush=True)
%(answer)s
"""


def stand_in(answer: str, before: str = "") -> str:
    return STAND_IN % {"state": ANSWER | {"ok": True}, "before": before, "answer": textwrap.indent(answer, "    ")}


def head(folder: Path, python: str = sys.executable, address: str = "127.0.0.9:1") -> HeadRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return HeadRecord("lab", address, "127.0.0.1:8265", python, "2.60.0", "3.11", str(folder / "token"), now)


def asked(folder: Path) -> list[tuple[int, list[str], dict[str, Any]]]:
    log = folder / "token.log"
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(question: Callable[[], T | None], seconds: float = 15.0) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := question():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


def newest(probe: Probe, kind: type[T]) -> T:
    """The first answer of this kind."""

    def look() -> T | None:
        found = probe.newest()
        return found[0] if found is not None and isinstance(found[0], kind) else None

    return wait_for(look)


@pytest.fixture
def start() -> Iterator[Callable[..., Probe]]:
    probes: list[Probe] = []

    def build(source: str, **more: Any) -> Probe:
        probes.append(Probe(owner="me", host="vm", source=source, **more))
        return probes[-1]

    yield build
    for probe in probes:
        probe.close()


def test_states_come_at_the_interval_and_nothing_waits(start: Callable[..., Probe], tmp_path: Path) -> None:
    told: list[bool] = []
    probe: Probe = start(stand_in("say(json.dumps(STATE))"), on_answer=lambda: told.append(probe.newest() is not None))
    began = time.monotonic()
    probe.follow(head(tmp_path), 0.1)
    assert probe.newest() is None
    assert time.monotonic() - began < 0.1
    state, at = wait_for(probe.newest)
    assert isinstance(state, ClusterState)
    assert state.hosts[0].instance == "lab-0-a3"
    assert began <= at <= time.monotonic()
    wait_for(lambda: len(asked(tmp_path)) >= 4)
    pid, arguments, question = asked(tmp_path)[0]
    assert arguments == ["127.0.0.9:1", "me", "vm"]
    assert question == {"op": "state"}
    assert {one[0] for one in asked(tmp_path)} == {pid}
    assert len(told) >= 3
    assert all(told), "told before there was an answer"
    probe.close()
    assert not psutil.pid_exists(pid)


def test_a_longer_interval_is_a_quieter_one(start: Callable[..., Probe], tmp_path: Path) -> None:
    probe = start(stand_in("say(json.dumps(STATE))"))
    probe.follow(head(tmp_path), 0.05)
    wait_for(lambda: len(asked(tmp_path)) >= 3)
    probe.follow(head(tmp_path), 3600)
    time.sleep(0.2)
    count = len(asked(tmp_path))
    time.sleep(0.5)
    assert len(asked(tmp_path)) == count
    probe.follow(head(tmp_path), 0.05)
    wait_for(lambda: len(asked(tmp_path)) > count + 2)


def test_the_environment_has_the_token_and_nothing_of_ours(
    start: Callable[..., Probe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    probe = start(stand_in("say(json.dumps(STATE | {'warnings': [json.dumps(dict(os.environ)), os.getcwd()]}))"))
    probe.follow(head(tmp_path), 1)
    variables, folder = newest(probe, ClusterState).warnings
    found = json.loads(variables)
    assert found.keys() - {"LC_CTYPE"} <= {
        "PATH", "HOME", "LANG", "TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED",
    }  # fmt: skip
    assert found["RAY_AUTH_MODE"] == "token"
    assert folder == "/"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("time.sleep(3600)", "no answer within 2 s"),
        ("say('hello')", "nonsense"),
        ("say('[1]')", "nonsense"),
        ("say('[' * 100000)", "nonsense"),
        ("sys.stdout.write('{\"ok\": true'); sys.stdout.flush(); time.sleep(3600)", "no answer within 2 s"),
        ("sys.exit('out of memory')", "ended: out of memory"),
        ("os.kill(os.getpid(), 9)", "ended"),
        ("os.close(1); os.close(2); os.close(0); time.sleep(3600)", "ended"),
    ],
    ids=["silent", "no JSON", "no object", "deep", "half a line", "exit", "killed", "closed"],
)
def test_a_process_that_fails_is_ended_and_started_anew(
    start: Callable[..., Probe], tmp_path: Path, answer: str, text: str
) -> None:
    again = f"if os.path.exists(log.name + '.again'): say(json.dumps(STATE))\nelse:\n    {answer}"
    probe = start(stand_in(again), start_seconds=2.0, request_seconds=0.4)
    probe.follow(head(tmp_path), 0.05)
    assert text in str(newest(probe, ProbeSilent))
    pid = asked(tmp_path)[0][0]
    assert not psutil.pid_exists(pid)
    (tmp_path / "token.log.again").touch()
    newest(probe, ClusterState)
    assert asked(tmp_path)[-1][0] != pid


def test_after_its_first_answer_it_has_the_shorter_limit(start: Callable[..., Probe], tmp_path: Path) -> None:
    answer = "if number == 1: time.sleep(1)\nif number == 2: time.sleep(3600)\nsay(json.dumps(STATE))"
    probe = start(stand_in(answer), start_seconds=20.0, request_seconds=0.4)
    probe.follow(head(tmp_path), 0.05)
    newest(probe, ClusterState)
    began = time.monotonic()
    newest(probe, ProbeSilent)
    assert time.monotonic() - began < 5


def test_a_process_that_dies_at_once_is_started_less_and_less_often(
    start: Callable[..., Probe], tmp_path: Path
) -> None:
    probe = start(stand_in("", before="print('[]', file=log, flush=True); sys.exit(3)"))
    probe.follow(head(tmp_path), 0.01)
    time.sleep(2.5)
    assert 1 <= len((tmp_path / "token.log").read_text().splitlines()) <= 2


def test_a_python_that_is_not_there_is_one_line(start: Callable[..., Probe], tmp_path: Path) -> None:
    probe = start(stand_in(""))
    probe.follow(head(tmp_path, python="/nonexistent/python"), 1)
    assert str(newest(probe, ProbeSilent)) == (
        "Ray's probe cannot be started with /nonexistent/python (No such file or directory): "
        "start the head again with a Python that has Ray"
    )


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("away", HeadAway), ("token", ConfigError), ("version", ConfigError), ("failed", ProbeSilent), (7, ProbeSilent)],
)
def test_a_cause_becomes_its_type(
    start: Callable[..., Probe], tmp_path: Path, cause: object, kind: type[TpuCareError]
) -> None:
    error = {"ok": False, "cause": cause, "error": "why\x1b[2J\nnot"}
    probe = start(stand_in(f"say(json.dumps({error!r}))"))
    probe.follow(head(tmp_path), 0.05)
    found = newest(probe, TpuCareError)
    assert (type(found), str(found)) == (kind, "why not")
    wait_for(lambda: len(asked(tmp_path)) >= 3)
    assert len({one[0] for one in asked(tmp_path)}) == 1


def test_nonsense_in_a_state_does_not_end_the_process(start: Callable[..., Probe], tmp_path: Path) -> None:
    probe = start(stand_in("say(json.dumps({'ok': True} if number < 3 else STATE))"))
    probe.follow(head(tmp_path), 0.05)
    newest(probe, ProbeSilent)
    newest(probe, ClusterState)
    assert len({one[0] for one in asked(tmp_path)}) == 1


def test_drains_have_tickets(start: Callable[..., Probe], tmp_path: Path) -> None:
    answer = """
if question["op"] == "drain":
    say(json.dumps({"ok": True, "drained": {"aa": True, "bb": "busy", "cc": 7}}))
else:
    say(json.dumps(STATE))
"""
    probe = start(stand_in(answer))
    early = probe.drain(["aa"], DrainReason.IDLE_TERMINATION, 0, "too early")
    assert probe.drained() == [(early, {"aa": "no head is known"})]
    probe.follow(head(tmp_path), 3600)
    ticket = probe.drain(["aa", "bb", "cc", "dd"], DrainReason.PREEMPTION, 30, "preempted")
    found = wait_for(probe.drained)
    assert found == [(ticket, {"aa": True, "bb": "busy", "cc": "7", "dd": "no answer"})]
    question = {"op": "drain", "ids": ["aa", "bb", "cc", "dd"], "reason": "PREEMPTION", "seconds": 30}
    assert question | {"text": "preempted"} in [one[2] for one in asked(tmp_path)]


@pytest.mark.parametrize("answer", ["sys.exit(1)", "say(json.dumps({'ok': False, 'cause': 'away', 'error': 'gone'}))"])
def test_a_drain_is_over_even_if_nothing_answers(start: Callable[..., Probe], tmp_path: Path, answer: str) -> None:
    probe = start(stand_in(answer))
    probe.follow(head(tmp_path), 3600)
    tickets = [probe.drain(["aa"], DrainReason.IDLE_TERMINATION, 0, "idle") for _ in range(3)]
    over: dict[int, Any] = {}

    def all_over() -> bool:
        over.update(probe.drained())
        return len(over) == 3

    wait_for(all_over)
    assert sorted(over) == tickets
    assert all(isinstance(outcome["aa"], str) for outcome in over.values())


def test_a_report_is_sent_when_it_changes_and_only_by_the_sole_caretaker(
    start: Callable[..., Probe], tmp_path: Path
) -> None:
    reporter = "open(log.name + '.other').read() if os.path.exists(log.name + '.other') else ''"
    probe = start(stand_in(f"say(json.dumps(STATE | {{'reporter': {reporter}}}))"))

    def reports() -> list[dict[str, Any]]:
        return [question for _, _, question in asked(tmp_path) if question["op"] == "report"]

    one = PendingSlice("lab-1", "lab", "v4-16", "queued")
    probe.report([one], [])
    probe.follow(head(tmp_path), 0.05)
    wait_for(reports)
    probe.report([one], [])
    time.sleep(0.3)
    shown = {"slot": "lab-1", "pool": "lab", "type": "v4-16", "why": "queued"}
    assert reports() == [{"op": "report", "pending": [shown], "unmet": []}]
    probe.report([], [])
    wait_for(lambda: len(reports()) == 2)
    (tmp_path / "token.log.other").write_text("tpucare you on vm2")
    wait_for(lambda: newest(probe, ClusterState).reporter)
    probe.report([one], [])
    time.sleep(0.3)
    assert len(reports()) == 2


def test_another_head_gets_another_process(start: Callable[..., Probe], tmp_path: Path) -> None:
    probe = start(stand_in("say(json.dumps(STATE | {'session': sys.argv[1]}))"))
    probe.follow(head(tmp_path), 0.05)
    assert newest(probe, ClusterState).session == "127.0.0.9:1"
    first = asked(tmp_path)[0][0]
    probe.follow(head(tmp_path, address="127.0.0.9:2"), 0.05)
    assert probe.newest() is None
    assert newest(probe, ClusterState).session == "127.0.0.9:2"
    assert not psutil.pid_exists(first)
    probe.follow(None, 0.05)
    assert probe.newest() is None
    second = asked(tmp_path)[-1][0]
    wait_for(lambda: not psutil.pid_exists(second))


def test_the_probe_ends_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """Its source's own way: it hangs in a request, and reads no end of input."""
    source = stand_in("time.sleep(3600)")
    real = "from tpucare.adapters.runner.scripts import read_template; REAL = read_template('ray/gcs_probe.py')"
    code = f"""
{real}
import time
from tests.integrations.test_ray_probe import head
from pathlib import Path
from tpucare.integrations.ray.probe import Probe
guard = REAL[:REAL.index('# --- lines in, lines out')] + "\\nend_with_parent()\\n"
probe = Probe(owner="me", host="vm", source=guard + {source!r})
probe.follow(head(Path({str(tmp_path)!r})), 1)
time.sleep(60)
"""
    daemon = subprocess.Popen([sys.executable, "-c", code])
    try:
        pid = wait_for(lambda: asked(tmp_path))[0][0]
    finally:
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_request_that_hangs_does_not_hold_up_the_end(start: Callable[..., Probe], tmp_path: Path) -> None:
    probe = start(stand_in("time.sleep(3600)"))
    probe.follow(head(tmp_path), 1)
    pid = wait_for(lambda: asked(tmp_path))[0][0]
    began = time.monotonic()
    probe.close()
    assert time.monotonic() - began < 1
    wait_for(lambda: not psutil.pid_exists(pid))


def test_the_probe_itself_ends_with_its_input(tmp_path: Path) -> None:
    from tpucare.adapters.runner.scripts import read_template

    child = subprocess.Popen(
        [sys.executable, "-c", read_template("ray/gcs_probe.py"), "127.0.0.9:1", "me", "vm"],
        stdin=subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")},
    )
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(10) == 0
