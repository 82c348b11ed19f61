"""Complaints about the caretaker itself: what it costs, and what it takes with it when it goes."""

from __future__ import annotations

import gc
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from weakref import ReferenceType

from tests.kits.field import calls, named, preempt
from tests.kits.harness import Daemon
from tpucare.engine.engine import Settings
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.latency import around
from tpucare.testbed.simulation.machines import Script


def test_a_job_that_tells_no_progress_is_asked_all_the_time(tmp_path: Path) -> None:
    """Hundreds of jobs without a progress bar were asked every second how they were, for months."""
    daemon = Daemon(tmp_path, script=Script(tells_progress=False))
    daemon.care_for("pod")
    daemon.run(minutes=30)
    before = daemon.clock.seconds
    daemon.run(minutes=30)
    asked = [at for at in daemon.launcher.probes if at > before]
    assert 90 <= len(asked) <= 160, "every 15 s or so"
    daemon.check()


def test_heartbeats_of_hundreds_of_workers_take_a_core(tmp_path: Path) -> None:
    """The caretaker of a large fleet was busy asking workers that were well."""
    daemon = Daemon(tmp_path, settings=Settings(creates_per_minute=6000))
    daemon.listen = lambda _: None
    daemon.care_for("pod", 110)
    daemon.run(minutes=30)
    assert daemon.all_train()
    before = daemon.clock.seconds
    daemon.run(minutes=2)
    asked = [at for at in daemon.launcher.probes if at > before]
    assert 470 <= len(asked) <= 620, "440 workers at 18 a second are 110 nodes every 24 s; every 15 s it would be 880"


NOT_OURS = (type, ModuleType, FunctionType, MethodType, ReferenceType)


def reachable(*roots: object) -> int:
    """
    How many objects hang on *roots*, those of classes, modules and functions left out.

    Weak references keep nothing, and how many the interpreter has of its classes just now is no matter of ours.
    """
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, NOT_OURS):
            continue
        seen.add(id(one))
        todo.extend(gc.get_referents(one))
    return len(seen)


def test_the_caretaker_grows_with_hundreds_of_nodes(tmp_path: Path) -> None:
    """With hundreds of nodes that came and went, the caretaker grew until the machine killed it."""
    lengths = {"create_slice": around(30), "boot_late": around(5), "delete": around(20)}
    settings = Settings(probe=300)
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies=lengths), settings=settings)
    daemon.listen = lambda _: None
    daemon.care_for("pod", 15)

    def weigh() -> tuple[int, int]:
        engine = daemon.engine
        parts = (engine.slots, engine.projects, vars(engine.liveness), engine.prober._probes, engine.verdict_admission)
        assert daemon.store is not None
        return reachable(*parts), sum(len(repr(memory)) for memory in daemon.store.memories().values())

    def recover() -> None:
        preempt(daemon, "pod")
        daemon.run(minutes=8)
        assert daemon.all_train()

    daemon.run(minutes=8)
    # Wake-ups far ahead are kept until they come, so weights are compared after the same time of rest.
    for _ in range(2):
        recover()
    daemon.run(minutes=70)
    objects, remembered = weigh()
    lists = len(calls(daemon, "ListNodes"))
    began = daemon.clock.seconds
    for _ in range(6):
        recover()
    daemon.run(minutes=70)
    more_objects, more_remembered = weigh()
    assert more_objects < objects * 1.01
    assert more_remembered < remembered * 1.01
    assert len(calls(daemon, "ListNodes")) - lists <= daemon.clock.seconds - began, "one list, whatever their number"
    assert len(named(daemon)) == 15
    daemon.check()
