"""
The demo: train through preemptions, then compare the result with an undisturbed run.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.model.errors import TpuCareError
from tpucare.model.memory import End
from tpucare.model.text import length
from tpucare.testbed.demo.examples import example_folder
from tpucare.testbed.demo.preemptions import Director, scenes
from tpucare.testbed.demo.reader import DaemonReader
from tpucare.testbed.demo.reference import beginning
from tpucare.testbed.demo.setup import FLEET, SLOT, DemoOptions, Stage
from tpucare.testbed.demo.timeline import Life, Recovery, Told, recoveries
from tpucare.testbed.emulator.witness import Witness

LOOK_SECONDS = 0.2
PATIENCE = timedelta(minutes=15)
EMPTY_WITHIN = timedelta(minutes=1)


def leftovers(nodes: Sequence[str], processes: Sequence[int]) -> list[str]:
    """A line for each node and process that a demo left."""
    return [*(f"node {name} is left" for name in nodes), *(f"process {pid} is left" for pid in processes)]


@dataclass(slots=True)
class Report:
    """The report at the end; `as_json` is the output of `--json`."""

    options: DemoOptions
    attempts: int = 0
    zones: list[str] = field(default_factory=list)
    final_step: int = 0
    losses: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    params: str = ""
    reference: str = ""
    leaked_nodes: list[str] = field(default_factory=list)
    leaked_processes: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def params_match(self) -> bool:
        return bool(self.params) and self.params == self.reference

    @property
    def faults(self) -> list[str]:
        """Every broken promise, one line each."""
        wanted, found = self.options.preemptions, list(self.findings)
        if self.final_step != self.options.steps:
            found.append(f"training ended at step {self.final_step} of {self.options.steps}")
        if self.losses != wanted or len(self.recoveries) != wanted:
            found.append(f"{self.losses} preemptions, {len(self.recoveries)} recoveries, {wanted} wanted")
        if not self.params_match:
            found.append(f"parameters differ from the undisturbed run: {self.params[:12]} {self.reference[:12]}")
        for recovery in self.recoveries:
            if not 0 <= recovery.steps_redone <= recovery.allowed:
                what = f"{recovery.new_node} redid {recovery.steps_redone} steps"
                found.append(f"{what}, {recovery.allowed} are a checkpoint interval and one save in flight")
        return [*found, *leftovers(self.leaked_nodes, self.leaked_processes)]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.faults,
            "faults": self.faults,
            "preemptions": self.losses,
            "attempts": self.attempts,
            "zones": self.zones,
            "final_step": self.final_step,
            "resumed_from": [recovery.resumed_from for recovery in self.recoveries],
            "steps_redone": [recovery.steps_redone for recovery in self.recoveries],
            "steps_redone_allowed": [recovery.allowed for recovery in self.recoveries],
            "params_match": self.params_match,
            "params_sha256": self.params,
            "undisturbed_sha256": self.reference,
            "leaked_nodes": self.leaked_nodes,
            "leaked_processes": self.leaked_processes,
            "recovery_seconds": [round(recovery.total, 3) for recovery in self.recoveries],
            "phase_seconds": [
                {name: round(length, 3) for name, length in recovery.seconds.items()} for recovery in self.recoveries
            ],
            "seconds": round(self.seconds, 1),
            "seed": self.options.seed,
            "hosts": self.options.hosts,
        }


@dataclass(frozen=True, slots=True)
class Glance:
    """The content of the live view at one instant."""

    events: list[Told]
    life: Life | None
    node: str
    zone: str
    attempts: int
    act: str


def run_demo(options: DemoOptions, show: Callable[[Glance], None]) -> Report:
    """
    Run the demo, and leave nothing but the kept folder.

    Raises: ConfigError: impossible options. TpuCareError: the daemon ended by itself, or the demo took too long.
    """
    options.check()
    report, began = Report(options), time.monotonic()
    with demo_folder(options.keep) as folder, _undisturbed(folder, options) as reference:
        with Stage(folder, options) as stage:
            _perform(stage, report, show)
            report.leaked_nodes = await_empty(stage)
            report.leaked_processes = stage.survivors()
        report.leaked_processes += stage.survivors()
        report.findings += _audit(stage)
        show(Glance([], None, "", "", report.attempts, "waiting for the undisturbed run"))
        report.reference = str(reference(PATIENCE)["params_sha256"])
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tpucare-demo-") as folder:
        yield Path(folder).resolve()


def _perform(stage: Stage, report: Report, show: Callable[[Glance], None]) -> None:
    assert stage.server is not None
    server = stage.server
    director = Director(stage, scenes(stage.options.preemptions, stage.options.steps, stage.rng))
    watch = DaemonReader(stage)
    # Not all processes of this machine: another demo's nodes have the same names.
    witness = Witness(director.nodes, server.log_note, stage.survivors)
    witness.start()
    zones: dict[str, str] = {}
    try:
        _watch_to_the_end(stage, watch, director, zones, show)
    finally:
        witness.stop()
        watch.close()
    memory = watch.memory
    report.attempts = memory.attempts if memory is not None else 0
    report.zones = [zones[node] for node in dict.fromkeys(token.rpartition(".")[0] for token in watch.tokens)]
    report.losses = len(director.losses)
    report.recoveries = recoveries(director.losses, watch.events, watch.lives(), zones, stage.options.save_every)
    result = _read_result(stage.checkpoints)
    report.final_step, report.params = int(result.get("final_step", 0)), str(result.get("params_sha256", ""))


def _watch_to_the_end(
    stage: Stage, watch: DaemonReader, director: Director, zones: dict[str, str], show: Callable[[Glance], None]
) -> None:
    until = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < until:
        stage.check_daemon()
        new = watch.refresh()
        zones.update({record.path.node_id: record.path.zone for record in director.nodes()})
        memory, life = watch.memory, watch.current()
        node = memory.run.node if memory is not None and memory.run is not None else ""
        if life is not None and life.last > life.resumed:
            director.update(node, life.last, life.resumed)
        show(Glance(new, life, node, zones.get(node, ""), memory.attempts if memory else 0, "training"))
        if memory is not None and memory.end is End.DONE and not director.plan:
            return
        if memory is not None and memory.end is not End.NONE:
            raise TpuCareError(f"the slot {SLOT} is {memory.end.value} too early: {memory.end_why}")
        time.sleep(LOOK_SECONDS)
    raise TpuCareError(f"the training did not end within {length(PATIENCE)}")


def await_empty(stage: Stage, look: Callable[[], None] = lambda: None) -> list[str]:
    """Names of nodes that still exist after the daemon had time to delete them; *look* is called meanwhile."""
    assert stage.server is not None
    until = time.monotonic() + EMPTY_WITHIN.total_seconds()
    while True:
        with stage.server.lock:
            left = [record.path.node_id for record in stage.server.world.nodes()]
        look()
        if not left or time.monotonic() > until:
            return left
        time.sleep(LOOK_SECONDS)


def _audit(stage: Stage) -> list[str]:
    assert stage.server is not None
    finished = [record for record in stage.server.world.audit if record.get("method") == "DeleteNode"]
    last = str(finished[-1]["name"]).rpartition("/")[2] if finished else ""
    return stage.judge(FLEET, frozenset({last}))


def _undisturbed(
    folder: Path, options: DemoOptions
) -> AbstractContextManager[Callable[[timedelta], Mapping[str, Any]]]:
    """The same training on the same number of hosts, without tpucare, at the lowest priority."""
    return beginning(
        example_folder("train"),
        hosts=options.hosts,
        steps=options.steps,
        seed=options.seed,
        save_every=options.save_every,
        folder=folder / "undisturbed",
        nice=19,
    )


def _read_result(folder: Path) -> Mapping[str, Any]:
    try:
        result: Mapping[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return result
