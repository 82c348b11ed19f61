"""
W&B sweeps: what their state means for a fleet, where W&B and its key are found, the fleet that works for one, and what
its agent's end means. The whole swarm is in `e2e/test_sweep.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Set
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.kits import wandb as wandb_kit
from tests.kits.local_server import serving
from tests.kits.service import MachinelessDeployment, Process, VirtualService, fleet_text, machineless_deployment
from tpucare.adapters.runner import scripts
from tpucare.adapters.state.store import open_store
from tpucare.fleetfile import parse as fleets
from tpucare.integrations.wandb import account
from tpucare.integrations.wandb import fleet as sweep_fleet
from tpucare.integrations.wandb.client import GraphqlSweeps, SweepRefused, SweepSilent
from tpucare.integrations.wandb.companion import PATIENCE_SECONDS, Answer, SweepCare, SweepKey, SweepPoller
from tpucare.integrations.wandb.rules import (
    SlotChanges,
    SlotState,
    SweepPath,
    SweepReport,
    Verdict,
    decide,
    judge,
    parse_path,
)
from tpucare.integrations.wandb.sweep import create, prepare
from tpucare.model.errors import ConfigError
from tpucare.service.options import Options
from tpucare.testbed.emulator.orders import parse_order
from tpucare.testbed.wandb import WandbServer
from tpucare.testbed.wandb.records import SweepState

# Seconds until a process of its own has come up, or has left.
PATIENCE = 120.0
PATH = SweepPath("me", "p", "abcd1234")
FLEET = """\
tpu: {type: v4-8, zones: [us-central2-b]}
job:
  workdir: .
  env: {A: "it's"}
  checkpoint: gs://bucket/it
"""


def report(state: str = "RUNNING", expected: int | None = 9, **runs: int) -> SweepReport:
    return SweepReport(state, expected, runs)


# --- what a report means ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (report(), Verdict.CARE),
        (report("PENDING"), Verdict.CARE),
        (report("PAUSED", finished=3), Verdict.CARE),
        (report("NEVER_HEARD_OF", finished=9), Verdict.CARE),
        (report(finished=5, running=4), Verdict.CARE),
        (report(finished=8, preempted=1), Verdict.CARE),
        (report(finished=9), Verdict.OVER),
        (report(expected=None, finished=9), Verdict.CARE),
        (report("FINISHED", finished=9), Verdict.OVER),
        (report("FINISHED", finished=5, running=1), Verdict.DRAIN),
        (report("FINISHED", finished=5, pending=1), Verdict.DRAIN),
        (report("FINISHED", finished=8, preempted=1), Verdict.DRAIN),
        (report("FINISHED", finished=2, crashed=3, failed=1, killed=3), Verdict.OVER),
        (report("CANCELED", running=4), Verdict.END),
        (report("CANCELED"), Verdict.END),
    ],
)
def test_what_the_state_of_a_sweep_means(seen: SweepReport, verdict: Verdict) -> None:
    assert judge(seen) is verdict


BUSY, IDLE = SlotState("busy", busy=True), SlotState("idle")
OURS, FAILED = SlotState("ours", ended=True, by_us=True), SlotState("failed", ended=True)
EXITED = SlotState("exited", ended=True, done=True)
ALL = (BUSY, IDLE, OURS, FAILED, EXITED)


@pytest.mark.parametrize(
    ("seen", "patient", "changes"),
    [
        (report(), True, SlotChanges(revive=("ours",))),
        (report("FINISHED", finished=8, running=1), True, SlotChanges(end=("idle",))),
        (report("FINISHED", finished=8, preempted=1), True, SlotChanges()),
        (report("FINISHED", finished=7, preempted=2), True, SlotChanges(revive=("ours",))),
        (report("FINISHED", finished=5, preempted=4), True, SlotChanges(revive=("ours", "exited"))),
        (report("RUNNING", finished=5, preempted=3), True, SlotChanges(revive=("ours",))),
        (report("RUNNING", finished=5, preempted=4), True, SlotChanges(revive=("ours", "exited"))),
        (report("FINISHED", finished=9), True, SlotChanges(end=("idle",))),
        (report("FINISHED", finished=9), False, SlotChanges(end=("busy", "idle"))),
        (report("CANCELED", running=1), True, SlotChanges(end=("busy", "idle"))),
    ],
)
def test_what_changes_for_the_slots(seen: SweepReport, patient: bool, changes: SlotChanges) -> None:
    assert decide(seen, ALL, patient=patient) == changes


def test_who_came_for_a_queue_and_got_nothing_does_not_come_again_at_once() -> None:
    seen = report("FINISHED", finished=3, preempted=1)
    assert decide(seen, (EXITED, FAILED)) == SlotChanges(revive=("exited",))
    assert decide(seen, (EXITED, FAILED), again=False) == SlotChanges()
    assert decide(report("FINISHED", finished=9), (EXITED,)) == SlotChanges()


def test_progress_for_people() -> None:
    assert report(finished=4, running=3, preempted=1, failed=1).text() == (
        "RUNNING, 4 of 9 runs finished, 3 running, 1 requeued, 1 failed"
    )
    assert report(expected=None).text() == "RUNNING, 0 runs finished"


@pytest.mark.parametrize("word", ["abcd1234", "a/b", "a/b/c/d", "a//c", "a/b/$(rm)", "a/b/'; x"])
def test_what_is_no_sweep_is_said_in_one_line(word: str) -> None:
    with pytest.raises(ConfigError, match="entity/project/id"):
        parse_path(word)


# --- where W&B is, and its key ---------------------------------------------------------------------------------------


def test_the_base_url_comes_from_the_users_settings(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert account.base_url(env) == account.DEFAULT_BASE_URL
    (tmp_path / ".netrc").write_text("machine api.forge.coreweave.com login user password " + "n" * 40)
    assert account.base_url(env) == "https://api.forge.coreweave.com"
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.lab.example/\nentity = lab\n")
    assert account.base_url(env) == "https://wandb.lab.example"
    assert account.setting(env, "entity") == "lab"
    assert account.setting({**env, "WANDB_ENTITY": "me"}, "entity") == "me"
    assert account.base_url({**env, "WANDB_BASE_URL": "http://127.0.0.1:8"}) == "http://127.0.0.1:8"
    for wrong in ("wandb.lab.example", "http://[::1", "http://a.example/a b", "http://a.example:x", "http://a:99999"):
        with pytest.raises(ConfigError, match="is not an address"):
            account.base_url({"WANDB_BASE_URL": wrong})
    assert account.base_url({"WANDB_BASE_URL": "http://[::1]:8/x"}) == "http://[::1]:8/x"


def test_the_key_comes_from_the_environment_or_the_netrc_entry_with_its_port(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(
        f"machine 127.0.0.1:8099 login user password {'n' * 40}\ndefault login a password b"
    )
    env = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:8099"}
    assert account.api_key(env, "http://127.0.0.1:8099") == "n" * 40
    assert account.api_key(env, "http://127.0.0.1:9000") == ""
    assert account.with_key(env)["WANDB_API_KEY"] == "n" * 40
    assert account.api_key({**env, "WANDB_API_KEY": "e" * 40}, "http://127.0.0.1:8099") == "e" * 40
    with pytest.raises(ConfigError, match="5 characters") as short:
        account.need_key({**env, "WANDB_API_KEY": "short"}, "http://127.0.0.1:8099")
    assert "'short'" not in str(short.value)
    with pytest.raises(ConfigError, match="no W&B key"):
        account.need_key({"HOME": str(tmp_path)}, "http://127.0.0.1:9000")


# --- asking W&B ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer(entity="me") as running:
        yield running


def make_sweep(server: WandbServer, **more: Any) -> SweepPath:
    config = wandb_kit.grid(Path("train.py"), {"lr": [1, 2, 3]}) | more
    with server.lock:
        return SweepPath("me", "p", server.world.create_sweep("me", "p", yaml.safe_dump(config), 0.0).name)


def test_the_client_reads_a_sweep_and_its_runs(server: WandbServer) -> None:
    path, client = make_sweep(server), GraphqlSweeps(server.url, wandb_kit.KEY)
    assert client.entity() == "me"
    assert client.report(path) == SweepReport("RUNNING", 3, {})
    with server.lock:
        sweep = server.world.sweep(*path)
        for _ in range(2):
            agent = server.world.create_agent(sweep, "host", server.now())
            server.world.heartbeat(agent.id, {}, server.now())
        run = server.world.begin_run("me", "p", sweep.runs[0], "", server.now())[0]
        server.world.report_run(run, server.now(), preempting=False, complete=True, exit_code=0)
    assert client.report(path) == SweepReport("RUNNING", 3, {"finished": 1, "pending": 1})


def test_what_w_and_b_refuses_and_what_it_does_not_say(server: WandbServer) -> None:
    client = GraphqlSweeps(server.url, wandb_kit.KEY)
    with pytest.raises(SweepRefused, match="has no sweep"):
        client.report(PATH)
    with pytest.raises(SweepRefused, match="refuses the key"):
        GraphqlSweeps(server.url, "short").report(PATH)
    server.stop()
    with pytest.raises(SweepSilent, match="does not answer"):
        client.report(PATH)


def test_something_else_at_the_port_of_w_and_b_is_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            channel, _ = other.accept()
            with channel:
                channel.recv(1 << 16)  # one that is closed with a request unread would be reset
                channel.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        client = GraphqlSweeps(f"http://127.0.0.1:{other.getsockname()[1]}", wandb_kit.KEY)
        with pytest.raises(SweepSilent, match="does not answer"):
            client.report(PATH)
        greeter.join()


def test_the_watch_looks_at_once_and_again_and_survives_a_bad_answer() -> None:
    let = threading.Semaphore(0)
    answers: list[SweepReport | Exception] = [report(), SweepSilent("gone"), KeyError("edges"), report("FINISHED")]
    urls: list[str] = []

    class Service:
        """Answers when it is let, one answer after the other."""

        def report(self, path: SweepPath) -> SweepReport:
            assert let.acquire(timeout=10)
            answer = answers.pop(0) if answers else report("LAST")
            if isinstance(answer, Exception):
                raise answer
            return answer

    def service(url: str) -> Service:
        urls.append(url)
        return Service()

    def next_news() -> Answer:
        let.release()
        while not (news := watch.news()):
            time.sleep(0.005)
        return news[PATH, "http://here"]

    watch = SweepPoller(service, every=0.001, monotonic=time.monotonic)
    try:
        watch.follow({(PATH, "http://here")})
        assert next_news() == report()
        assert str(next_news()) == "gone"
        assert isinstance(next_news(), SweepSilent), "whatever it stumbles over is no knowledge"
        assert next_news() == report("FINISHED")
        assert set(urls) == {"http://here"}
    finally:
        let.release()
        watch.close()
    assert not any(thread.name == "tpucare-sweeps" for thread in threading.enumerate())


def test_a_redirect_is_not_followed_and_plain_http_stays_on_this_machine() -> None:
    heard: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host']}/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            heard.append(self.path)

        def log_message(self, *_: object) -> None: ...

    with serving(HTTPServer(("127.0.0.1", 0), Redirecting)) as server, pytest.raises(SweepSilent, match="302"):
        GraphqlSweeps(f"http://127.0.0.1:{server.server_port}", "k" * 40).report(PATH)
    assert heard == ["/graphql"]
    for url in ("http://10.0.0.7", "http://wandb.example"):
        with pytest.raises(SweepRefused, match="https"):
            GraphqlSweeps(url, "k" * 40)
    for url in ("https://wandb.example", "http://localhost:8", "http://[::1]:8"):
        GraphqlSweeps(url, "k" * 40)


def test_the_key_goes_to_the_w_and_b_of_our_own_environment_and_to_those_listed(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "WANDB_BASE_URL": "https://own", "TPUCARE_WANDB_URLS": "https://a, https://b/"}
    for url in ("https://own", "https://own/", "https://a", "https://b"):
        assert account.key_refusal(env, url) == ""
    for url in ("https://api.wandb.ai", "https://own.evil", "http://own", ""):
        assert "TPUCARE_WANDB_URLS" in account.key_refusal(env, url)


# --- what becomes of the fleet ---------------------------------------------------------------------------------------


class HandWatch:
    """A watch whose answers are laid before it."""

    def __init__(self) -> None:
        self.wanted: Set[SweepKey] = set()
        self.laid: dict[SweepKey, Answer] = {}

    def follow(self, wanted: Set[SweepKey]) -> None:
        self.wanted = wanted

    def news(self) -> Mapping[SweepKey, Answer]:
        laid, self.laid = self.laid, {}
        return laid

    def close(self) -> None:
        self.laid = {}


class Swarm:
    """Two slots that work for a sweep, in virtual time."""

    def __init__(self, tmp_path: Path) -> None:
        self.service = VirtualService(tmp_path)
        text = fleet_text("swarm", count=2) + f"  env: {{TPUCARE_SWEEP: {PATH}}}\n"
        self.service.write(text, "swarm.yaml")
        self.service.look()
        self.service.run()
        self.watch = HandWatch()
        self._open()

    def _open(self) -> None:
        clock = self.service.daemon.clock
        self.care = SweepCare(
            self.service.daemon.engine,
            self.service.registry,
            self.watch,
            base_url=lambda: "http://wandb",
            now=clock.now,
            monotonic=clock.monotonic,
            refusal=lambda url: "not ours" if "evil" in url else "",
        )

    def hear(self, answer: Answer, minutes: float = 10) -> None:
        self.care.poll()
        self.watch.laid = {(PATH, "http://wandb"): answer}
        self.care.poll()
        self.service.run(minutes)

    def end(self, slot: str) -> str:
        rows = {row["slot"]: row for row in self.service.ask("status")["slots"]}
        return str(rows[slot]["end"])

    def capacity(self, slices: int | None) -> None:
        daemon = self.service.daemon
        pool = {"do": "capacity", "zone": "us-central1-a", "amount": slices}
        parse_order(pool).apply(daemon.zone.world, daemon.clock.true_now())

    def strike(self) -> None:
        """Take the node of slot 1, and let there be none for it."""
        daemon = self.service.daemon
        daemon.zone.world.operator.preempt("swarm-1", daemon.clock.true_now())
        self.capacity(1)


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    made = Swarm(tmp_path)
    assert made.service.nodes == ["swarm-0-a0", "swarm-1-a0"]
    return made


def test_a_running_sweep_changes_nothing(swarm: Swarm) -> None:
    swarm.hear(report(finished=3, running=2))
    assert swarm.watch.wanted == {(PATH, "http://wandb")}
    assert swarm.service.nodes == ["swarm-0-a0", "swarm-1-a0"]
    (row,) = swarm.care.rows()
    assert (row["fleet"], row["finished"], row["running"], row["expected"]) == ("swarm", 3, 2, 9)


@pytest.mark.parametrize("silence", [SweepSilent("down"), SweepRefused("unknown")])
def test_silence_of_w_and_b_changes_nothing_and_is_said_once(swarm: Swarm, silence: Answer) -> None:
    swarm.hear(silence)
    swarm.hear(silence)
    assert swarm.service.nodes == ["swarm-0-a0", "swarm-1-a0"]
    assert len(swarm.service.daemon.told("sweep-silent")) == 1
    assert swarm.care.rows()[0]["problem"]
    swarm.hear(report())
    assert len(swarm.service.daemon.told("sweep-heard")) == 1
    assert swarm.care.rows()[0]["problem"] == ""


def test_a_cancelled_sweep_ends_runs_and_nodes(swarm: Swarm) -> None:
    swarm.hear(report("CANCELED", running=2))
    assert swarm.service.nodes == []
    assert swarm.end("swarm-0") == swarm.end("swarm-1") == "done"
    swarm.service.daemon.check("swarm-0-a0", "swarm-1-a0")


def test_no_node_is_made_again_for_a_sweep_that_is_finished(swarm: Swarm) -> None:
    swarm.strike()
    swarm.service.run(5)
    assert swarm.end("swarm-1") == ""
    swarm.hear(report("FINISHED", finished=8, running=1))
    swarm.capacity(None)
    swarm.service.run(30)
    assert swarm.service.nodes == ["swarm-0-a0"]
    assert swarm.end("swarm-1") == "done"
    # The run that was lost with it is queued after all: one slot comes back for it.
    swarm.hear(report("FINISHED", finished=7, running=1, preempted=1))
    assert swarm.service.nodes[0] == "swarm-0-a0"
    assert swarm.end("swarm-1") == ""
    assert len(swarm.service.nodes) == 2


def exit_agent(swarm: Swarm, slot: str) -> None:
    """W&B told the agent of *slot* that there is nothing to hand out."""
    daemon = swarm.service.daemon
    for worker in daemon.launcher.of_node(*daemon.node_of(slot).key):
        daemon.launcher.end(worker, status=0)
    swarm.service.run(5)
    assert swarm.end(slot) == "done"


def test_a_run_that_is_queued_when_every_agent_has_left_gets_a_node(swarm: Swarm) -> None:
    for slot in ("swarm-0", "swarm-1"):
        exit_agent(swarm, slot)
    assert swarm.service.nodes == []
    assert swarm.care.may_come_back("swarm"), "W&B has not said since that nothing is left"
    swarm.hear(report("FINISHED", expected=4, finished=3, running=1), minutes=1)
    assert swarm.care.may_come_back("swarm"), "it may be the run of a node that was lost"
    swarm.hear(report("FINISHED", expected=4, finished=3, preempted=1))
    assert swarm.service.nodes == ["swarm-0-a1"]
    assert swarm.care.summary_of("swarm") == "FINISHED, 3 of 4 runs finished, 1 requeued"
    # It gets nothing: its node is not made again each time that this is said.
    exit_agent(swarm, "swarm-0")
    swarm.hear(report("FINISHED", expected=4, finished=3, preempted=1))
    assert swarm.service.nodes == []
    swarm.service.run(30)
    swarm.hear(report("FINISHED", expected=4, finished=3, preempted=1))
    assert swarm.service.nodes == ["swarm-0-a2"]
    exit_agent(swarm, "swarm-0")
    swarm.hear(report("FINISHED", expected=4, finished=4))
    assert not swarm.care.may_come_back("swarm")
    assert swarm.service.nodes == []


def test_who_left_a_sweep_that_goes_on_elsewhere_is_done(swarm: Swarm) -> None:
    for slot in ("swarm-0", "swarm-1"):
        exit_agent(swarm, slot)
    swarm.hear(report(finished=3, running=4))
    assert swarm.service.nodes == []
    assert not swarm.care.may_come_back("swarm")


def test_a_fleet_that_names_another_w_and_b_is_not_followed_with_our_key(swarm: Swarm) -> None:
    for name in ("evil", "twin"):
        url = f"http://{'evil' if name == 'evil' else 'wandb/'}"
        text = fleet_text(name) + f"  env: {{TPUCARE_SWEEP: {PATH}, WANDB_BASE_URL: '{url}'}}\n"
        swarm.service.apply(text, swarm.service.folder)
    swarm.care.poll()
    swarm.care.poll()
    assert swarm.watch.wanted == {(PATH, "http://wandb")}
    assert swarm.service.daemon.told("sweep-unknown") == ["evil: its sweep is not followed: not ours"]
    assert {row["fleet"] for row in swarm.care.rows()} == {"swarm", "twin"}


def test_agents_get_time_to_leave_and_then_their_nodes_go(swarm: Swarm) -> None:
    swarm.hear(report("FINISHED", finished=9), minutes=1)
    assert swarm.service.nodes == ["swarm-0-a0", "swarm-1-a0"]
    swarm.service.run(PATIENCE_SECONDS / 60)
    swarm.hear(report("FINISHED", finished=9))
    assert swarm.service.nodes == []
    swarm.service.daemon.check("swarm-0-a0", "swarm-1-a0")


def test_a_sweep_that_runs_again_gets_its_nodes_back(swarm: Swarm) -> None:
    swarm.hear(report("CANCELED"))
    assert swarm.service.nodes == []
    swarm.hear(report("RUNNING", finished=3))
    assert swarm.service.nodes == ["swarm-0-a1", "swarm-1-a1"]


def test_the_end_of_a_sweep_outlives_the_daemon(swarm: Swarm) -> None:
    swarm.hear(report("CANCELED"), minutes=0.2)
    swarm.service.again()
    swarm.service.run(10)
    assert swarm.service.nodes == []
    assert swarm.end("swarm-0") == "done"


def test_a_fleet_that_is_down_is_followed_no_more(swarm: Swarm) -> None:
    swarm.service.ask("down", target="swarm")
    swarm.care.poll()
    assert swarm.watch.wanted == set()
    assert swarm.care.rows() == []


def test_a_sweep_that_cannot_be_read_is_said_once(swarm: Swarm) -> None:
    text = fleet_text("odd") + "  env: {TPUCARE_SWEEP: nonsense}\n"
    swarm.service.apply(text, swarm.service.folder)
    swarm.care.poll()
    swarm.care.poll()
    assert len(swarm.service.daemon.told("sweep-unknown")) == 1


# --- the fleet that works for it -------------------------------------------------------------------------------------


def made_fleet(text: str = FLEET, **more: Any) -> tuple[fleets.FleetSpec, str]:
    given: dict[str, Any] = {"count": 4, "base_url": "http://127.0.0.1:8", "file": "f.yaml"} | more
    whole = sweep_fleet.fleet_text(sweep_fleet.read_base(text, "f.yaml"), PATH, **given)
    return fleets.parse(whole, file="f.yaml", folder=Path("/code"), default_project="grant"), whole


def test_the_fleet_keeps_what_its_file_says_and_runs_one_agent_a_slot() -> None:
    fleet, _ = made_fleet()
    job = fleet.slots()[3].job
    assert job is not None
    assert (fleet.name, fleet.count, job.workdir) == ("sweepabcd1234", 4, "/code")
    assert job.run == f"exec {sweep_fleet.agent_command()}"
    assert job.secrets == ("WANDB_API_KEY",)
    assert job.env["TPUCARE_SWEEP"] == "me/p/abcd1234"
    assert job.env["WANDB_BASE_URL"] == "http://127.0.0.1:8"
    assert job.env["WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"] == "5"
    assert job.env["A"] == "it's"
    # One folder for all slots: a run that was interrupted goes on in another.
    assert (job.checkpoint, job.env["TPUCARE_SWEEP_CHECKPOINT"]) == ("", "gs://bucket/it")
    scripts.check_job(job)


def test_a_file_may_say_where_the_agent_stands_and_what_it_is_called() -> None:
    text = FLEET.replace("job:\n", "name: mine\njob:\n  run: |\n    . venv/bin/activate\n    {agent}\n")
    fleet, whole = made_fleet(text, name="")
    assert fleet.name == "mine"
    assert fleet.job.run.startswith(". venv/bin/activate\npython3 -c ")
    assert "run: |" in whole, "people read it"
    assert made_fleet(text, name="other")[0].name == "other"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (FLEET + "  run: python train.py\n", "{agent}"),
        (FLEET.replace("gs://bucket/it", "gs://bucket/{slot}"), "job.checkpoint"),
        (FLEET.replace("v4-8", "v4-32"), "several hosts"),
        (FLEET + "care: {on_success: restart}\n", "on_success"),
        ("just text", "mapping"),
        ("job: [", "not YAML"),
        ("[" * 5000, "f.yaml:1: "),
        (FLEET + "name: one\nname: two\n", "f.yaml:7: name: is a duplicate"),
        ("tpu: {type: v4-8}\njob: text\n", "f.yaml: job: must be a mapping"),
        (FLEET.replace('{A: "it\'s"}', "[A=1]"), "f.yaml: job.env: must be a mapping"),
        (FLEET + "  secrets: 5\n", "f.yaml: job.secrets: must be a list"),
        (FLEET + "  secrets: GIT_TOKEN\n", "f.yaml: job.secrets: must be a list"),
    ],
)
def test_a_fleet_that_no_sweep_can_use_is_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        sweep_fleet.refuse_unfit(made_fleet(text)[0])


def test_a_fleet_file_means_the_same_as_it_does_to_apply() -> None:
    env = {"SEED": "010", "WHEN": "12:30", "BIG": "1_000", "V": "1.10", "LR": "1e-4", "ON": "on", "DAY": "2024-01-01"}
    written = ", ".join(f"{name}: {text}" for name, text in env.items())
    text = FLEET.replace("{A:", f"{{{written}, A:") + "  repository: https://example.com/r\n  branch: '1e10'\n"
    fleet, _ = made_fleet(text.replace("  workdir: .\n", "") + "care: {unhealthy_after: 10m}\n")
    job = fleet.slots()[0].job
    assert job is not None
    assert {name: job.env[name] for name in env} == env
    assert job.branch == "1e10", "a text that looks like a number stays a text"


def test_a_fleet_of_python_may_hold_what_python_has() -> None:
    base = {"tpu": {"type": "v4-8", "zones": ("us-central2-b",)}, "job": {"workdir": Path("/code"), "env": {"A": 1}}}
    whole = sweep_fleet.fleet_text(
        {**base, "care": {"unhealthy_after": timedelta(minutes=5)}}, PATH, count=1, base_url="http://127.0.0.1:8"
    )
    fleet = fleets.parse(whole, file="f.yaml", folder=Path("/code"), default_project="grant")
    assert fleet.care.unhealthy_after == timedelta(minutes=5)


# --- before anything is made -----------------------------------------------------------------------------------------


class Desk:
    """Where a person calls `tpucare sweep`."""

    def __init__(self, server: WandbServer, folder: Path) -> None:
        self.folder = folder
        self.env = wandb_kit.environment(server.url, folder)
        self.options = Options(state=folder / "state")
        config = wandb_kit.grid(Path("train.py"), {"lr": [1, 2]}) | {"project": "p"}
        self.sweep = folder / "sweep.yaml"
        self.sweep.write_text(yaml.safe_dump(config))
        self.fleet = folder / "fleet.yaml"
        self.fleet.write_text(FLEET)

    def prepare(self, what: object = None, **more: Any) -> Any:
        given: dict[str, Any] = {"fleet": self.fleet, "options": self.options, "env": self.env, **more}
        return prepare(self.sweep if what is None else what, 2, **given)  # type: ignore[arg-type]


@pytest.fixture
def desk(server: WandbServer, tmp_path: Path) -> Desk:
    return Desk(server, tmp_path)


def test_a_sweep_is_made_by_the_real_client_where_the_file_says(desk: Desk, server: WandbServer) -> None:
    prepared = desk.prepare()
    assert server.summary()["sweeps"] == [], "nothing is made before everything is checked"
    path = create(prepared, desk.env)
    (row,) = server.summary()["sweeps"]
    assert path == SweepPath("me", "p", row["sweep"])
    assert row["expected"] == 2
    assert prepared.fleet_name(path) == f"sweep{path.name}"


def test_a_sweep_is_prepared_beside_the_stores_of_scripts_alone(desk: Desk) -> None:
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    open_store(desk.options.state, machine_id="m", now=now, name="pod.p").close()
    assert desk.prepare().count == 2


def test_a_sweep_that_is_there_is_taken_unless_it_is_over(desk: Desk, server: WandbServer) -> None:
    path = make_sweep(server)
    prepared = desk.prepare(str(path))
    assert create(prepared, desk.env) == path
    with server.lock:
        server.world.set_sweep_state(server.world.sweep(*path), SweepState.CANCELED, server.now())
    with pytest.raises(ConfigError, match="is over"):
        desk.prepare(str(path))
    with pytest.raises(ConfigError, match="has no sweep"):
        desk.prepare("me/p/nothere1")


def test_what_can_be_known_is_said_before_anything_is_made(desk: Desk, server: WandbServer) -> None:
    config = yaml.safe_load(desk.sweep.read_text())
    (desk.folder / "deep.yaml").write_text("[" * 5000)
    (desk.folder / "odd.yaml").write_text("method: 2024-13-13")
    wrong: list[tuple[object, dict[str, Any], str]] = [
        (None, {"env": {**desk.env, "WANDB_API_KEY": "short"}}, "fewer than 40"),
        (None, {"fleet": None}, "--type and --zone"),
        (None, {"fleet": desk.folder / "absent.yaml"}, "cannot be read"),
        (desk.folder / "absent.yaml", {}, "cannot be read"),
        (desk.folder / "deep.yaml", {}, "is not YAML"),
        (desk.folder / "odd.yaml", {}, "is not YAML"),
        ({**config, "method": "guess"}, {}, "method"),
        ({**config, "parameters": None}, {}, "parameters"),
        ({**config, "program": ""} | {"command": None}, {}, "program"),
        ({key: value for key, value in config.items() if key != "project"}, {}, "WANDB_PROJECT"),
        (None, {"fleet": {"tpu": {"type": "v9-1", "zones": ["us-central2-b"]}, "job": {}}}, "v9-1"),
        (None, {"fleet": None, "accelerator_type": "v4-32", "zone": "us-central2-b"}, "several hosts"),
    ]
    for what, more, word in wrong:
        with pytest.raises(ConfigError, match=word) as refused:
            desk.prepare(what, **more)
        assert wandb_kit.KEY not in str(refused.value)
    assert server.summary()["sweeps"] == []


def test_check_shows_the_fleet_without_the_source_of_the_agent(desk: Desk, server: WandbServer) -> None:
    prepared = desk.prepare(str(make_sweep(server)))
    assert "{agent}" in prepared.shown()
    assert "python3 -c" in prepared.text(prepared.path)
    assert "python3 -c" not in prepared.shown()


def test_a_fleet_that_works_for_something_else_is_not_taken_over(desk: Desk, server: WandbServer) -> None:
    service = VirtualService(desk.folder)
    text = fleet_text("mine") + "  env: {TPUCARE_SWEEP: me/p/another1}\n"
    service.apply(text, service.folder)
    service.run(1)
    path = make_sweep(server)
    with pytest.raises(ConfigError, match="works for me/p/another1"):
        desk.prepare(str(path), name="mine")
    service.ask("down", target="mine")
    assert desk.prepare(str(path), name="mine").path == path


def test_without_a_fleet_file_the_folder_of_the_sweep_is_sent(desk: Desk) -> None:
    prepared = desk.prepare(fleet=None, accelerator_type="v4-8", zone="us-central2-b")
    fleet = yaml.safe_load(prepared.text(PATH))
    assert fleet["job"]["workdir"] == str(desk.folder)
    assert "pip install" in fleet["job"]["setup"]


# --- the agent on a worker -------------------------------------------------------------------------------------------


class Worker:
    """A folder whose `wandb` is a script of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("bash", "sleep", "env", "cat"):
            (self.bin / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
        (self.bin / "python3").symlink_to(os.path.realpath(sys.executable))

    def wandb(self, text: str) -> None:
        path = self.bin / "wandb"
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, **env: str) -> subprocess.Popen[str]:
        command = ["bash", "-c", f"exec {sweep_fleet.agent_command()}"]
        own = {"PATH": str(self.bin), "TPUCARE_SWEEP": str(PATH), "HOME": str(self.folder), **env}
        return subprocess.Popen(
            command, env=own, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def end(self, **env: str) -> tuple[int, str, str]:
        process = self.start(**env)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


GAVE_UP = "Detected 3 failed runs in the first 60 seconds, shutting down."


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("echo 'wandb.wandb_agent - INFO - Received exit command.' >&2", 0),
        (f"echo '{GAVE_UP}' >&2", 70),
        ("echo 'Detected 5 failed runs in a row, shutting down.' >&2", 70),
        (f"echo '{GAVE_UP}' >&2; exit 3", 3),
        ("exit 1", 1),
        ("kill -KILL $$", 137),
    ],
)
def test_the_end_of_an_agent_is_told_truly(worker: Worker, text: str, status: int) -> None:
    worker.wandb(text)
    assert worker.end()[0] == status


def test_what_a_program_left_behind_does_not_keep_the_agent(worker: Worker) -> None:
    worker.wandb(f"sleep 300 >/dev/null & echo $! >left; echo '{GAVE_UP}' >&2")
    process = worker.start()
    try:
        assert process.wait(timeout=60) == 70
    finally:
        psutil.Process(int((worker.folder / "left").read_text())).kill()
    _, err = process.communicate(timeout=30)
    assert GAVE_UP in err


def test_the_agent_gets_its_sweep_the_shared_checkpoints_and_a_python(worker: Worker) -> None:
    worker.wandb('echo "$@"; echo "$TPUCARE_CHECKPOINT $JAX_COMPILATION_CACHE_DIR"; python -c "print(1 + 1)"')
    status, out, err = worker.end(TPUCARE_CHECKPOINT="", TPUCARE_SWEEP_CHECKPOINT="/bucket/it/")
    assert (status, err) == (0, "")
    assert out.splitlines() == ["agent --forward-signals me/p/abcd1234", "/bucket/it /bucket/it/.jax-cache", "2"]


def test_a_worker_without_wandb_says_what_to_add(worker: Worker) -> None:
    status, _, err = worker.end()
    assert status == 69
    assert "pip install wandb" in err


def test_a_signal_waits_for_what_the_agent_still_does(worker: Worker) -> None:
    worker.wandb("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    process = worker.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (agent,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    assert process.poll() is None, "it waits for the agent"
    agent.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "saved\n")


# --- without a daemon ------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Iterator[MachinelessDeployment]:
    with machineless_deployment(tmp_path) as made:
        yield made


def foreground(home: MachinelessDeployment, server: WandbServer, path: SweepPath) -> Process:
    """`tpucare sweep` as a process, once its two nodes were made."""
    fleet = {"name": "swarm", "tpu": {"type": "v2-8", "zones": ["us-central1-a"]}, "job": {}}
    (home.folder / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    words = [sys.executable, "-m", "tpucare.cli", "sweep", str(path), "-n", "2", "--fleet", "fleet.yaml"]
    log = home.folder / "sweep.log"
    env = {**wandb_kit.environment(server.url, home.folder), **home.env, "TPUCARE_SWEEP_POLL": "0.2"}
    with log.open("wb") as out:
        popen = subprocess.Popen(words, env=env, cwd=home.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    home.processes.append(Process(popen, log))
    home.until(lambda: home.nodes() == ["swarm-0-a0", "swarm-1-a0"], PATIENCE)
    return home.processes[-1]


def test_without_a_daemon_the_command_cares_until_the_sweep_is_over(
    home: MachinelessDeployment, server: WandbServer
) -> None:
    path = make_sweep(server)
    process = foreground(home, server, path)
    # The daemon's commands work meanwhile, as far as it is the daemon now.
    (row,) = home.ask("status")["sweeps"]
    assert row["sweep"] == str(path)
    with server.lock:
        server.world.set_sweep_state(server.world.sweep(*path), SweepState.CANCELED, server.now())
    assert process.popen.wait(PATIENCE) == 0
    assert f"sweep {path} is over" in process.text
    assert home.nodes() == []
    assert wandb_kit.KEY not in process.text


def test_a_command_that_is_interrupted_leaves_nodes_alive_and_says_how_to_go_on(
    home: MachinelessDeployment, server: WandbServer
) -> None:
    process = foreground(home, server, make_sweep(server))
    assert process.end(signal.SIGINT, PATIENCE) == 1
    assert "tpucare down swarm" in process.text
    assert home.nodes() == ["swarm-0-a0", "swarm-1-a0"]
