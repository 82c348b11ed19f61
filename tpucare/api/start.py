"""
`start_single`, `start_multiple`, `run` and `status` of the Python API.

Each call that cares puts the parts together for one fleet (options, store, launcher), and blocks in `foreground` until
the fleet is over. What arguments mean is told by `arguments`, what users' functions are given by `callback_launcher`,
where they run by `threads` and `processes`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from tpucare.adapters.state.folder import check_store_name
from tpucare.api import arguments
from tpucare.api.arguments import UNHEALTHY_SECONDS, Call, CreationCallback, Door, Start, StartFn
from tpucare.api.callback_launcher import CallbackLauncher
from tpucare.api.contexts import StoredContexts
from tpucare.api.fleet import Fleet
from tpucare.api.foreground import Left, RunSpec, care
from tpucare.api.processes import ProcessStarter
from tpucare.api.progress import Progress, progress_on
from tpucare.api.threads import Starter, ThreadStarter
from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile import python_fleet as fleet_python
from tpucare.model.errors import ConfigError, StoreLocked
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import Event
from tpucare.service import status as service_status
from tpucare.service.assembly import Leaves, MakeLauncher, Runtime, assemble, project_finder
from tpucare.service.options import DAEMON_STORE, Options, resolve
from tpucare.service.stores import Stores, store_name

__all__ = ["All", "Context", "SliceIndex", "run", "start_multiple", "start_single", "status"]

# Names by which scripts of 2022 annotate their callbacks.
Context = TypeVar("Context")
All = Literal["all"]
SliceIndex = int | All


def start_single(
    host: str,
    tpu_version: int,
    zone: str,
    preemptible: bool | int,
    service_account: str | None,
    slices: int,
    start_fn: StartFn,
    creation_callback: CreationCallback | None = None,
    creation_semaphore: contextlib.AbstractContextManager[Any] | None = None,
    all_workers: bool = False,
    unhealthy_timeout_seconds: float = UNHEALTHY_SECONDS,
    **more: Any,
) -> None:
    """
    Keep one TPU alive under the name *host* and start *start_fn* on every new node of it, until it is over.

    slices: of 8 cores; `tpu_version=3, slices=32` is a v3-256
    preemptible: may be 0 or 1    service_account: may be None
    creation_callback(host, ctx_or_None) -> ctx: once for each new node; the context outlives this process
    start_fn(ctx, worker): for every worker of the node, on a thread of its own; once with worker="all" if `all_workers`
    creation_semaphore: held while a node is being created, and may block
    more: everything a fleet file can say (`accelerator_type`, `zones`, `runtime`, `network`, `ssh_keys`, `tpu`, `care`
    and its keys, `on_exit`), and `endpoint`, `project`, `store`, `on_event`, `start_method`, `delete_unowned`, `fresh`

    Ctrl-C deletes the node and returns. SIGTERM and SIGHUP leave it alive and end the process; the same call goes on
    with the same context, attempt and node.
    Raises: ConfigError: before anything is created. SlotFailed: it gave up. StoreLocked: somebody cares for it already.
    CloudError: its first listing was refused for credentials or permissions.
    """
    _start(
        Call(
            name=host,
            tpu_version=tpu_version,
            zone=zone,
            preemptible=preemptible,
            service_account=service_account,
            slices=slices,
            start_fn=start_fn,
            creation_callback=creation_callback,
            creation_semaphore=creation_semaphore,
            all_workers=all_workers,
            unhealthy_timeout_seconds=unhealthy_timeout_seconds,
            more=more,
        )
    )


def start_multiple(
    prefix: str,
    tpu_version: int,
    zone: str,
    preemptible: bool | int,
    service_account: str | None,
    slices: int,
    start_fn: StartFn,
    creation_callback: CreationCallback | None = None,
    tpus: int = 1,
    **more: Any,
) -> None:
    """
    Keep *tpus* TPUs alive under the names `prefix-0` to `prefix-(tpus-1)`; everything else is as in `start_single`.

    `creation_semaphore`, `all_workers` and `unhealthy_timeout_seconds` are keywords. Every slot has its own context.
    """
    named = {
        key: more.pop(key) for key in ("creation_semaphore", "all_workers", "unhealthy_timeout_seconds") if key in more
    }
    _start(
        Call(
            name=prefix,
            tpu_version=tpu_version,
            zone=zone,
            preemptible=preemptible,
            service_account=service_account,
            slices=slices,
            start_fn=start_fn,
            creation_callback=creation_callback,
            tpus=tpus,
            single=False,
            more=more,
            **named,
        )
    )


def run(
    fleet: Fleet,
    *,
    endpoint: str = "",
    project: str = "",
    store: str | os.PathLike[str] = "",
    on_event: Callable[[Event], None] | None = None,
) -> None:
    """
    Care for *fleet* on this thread, as the daemon would, until every slot is over.

    Signals, the store and what is raised are as of `start_single`; the job is started by tpucare's own runner.
    """
    if not isinstance(fleet, Fleet):
        raise ConfigError(
            f"run takes a tpucare.Fleet, not a {type(fleet).__name__}: Fleet.from_file reads a fleet file"
        )
    door = Door(endpoint, project, arguments.store_of(store), on_event)
    options, parsed = place_of(door, fleet.parsed)
    _care(options, RunSpec(parsed, fleet.text, fleet.home), door)


def status(
    target: str = "", *, endpoint: str = "", project: str = "", store: str | os.PathLike[str] = ""
) -> list[dict[str, Any]]:
    """
    A record for every slot that the daemon and the scripts of this state folder care for, or for those of *target*.

    Keys are those of `tpucare status --json`: slot, fleet, phase, node, zone, attempt, step, why, and more. Whoever
    cares now is asked; of others it says what was true when they were last cared for.
    """
    options = options_of(Door(endpoint, project, arguments.store_of(store)))
    if not Stores(options).names():
        return []
    rows: list[dict[str, Any]] = service_status.status(options, target)["slots"]
    return rows


# --- putting the parts together --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """What is known only while the leaves are put together, and has to be closed."""

    contexts: StoredContexts | None = None
    launcher: CallbackLauncher | None = None
    runtime: Runtime | None = None


def _start(call: Call) -> None:
    start = arguments.read(call)
    with _starter(start) as starter:
        options, fleet = place_of(start.door, start.fleet)
        text = fleet_python.with_project(start.text, str(fleet.project))
        parts = _Parts()

        def begun(memories: dict[str, Memory]) -> None:
            assert parts.contexts is not None
            for name in _forgotten(memories, fleet, fresh=start.door.fresh):
                parts.contexts.drop(name)
            # One that does not fit this script is told now, and not by a setup that fails on every node.
            for index in range(fleet.count):
                name = fleet.slot_name(index)
                kept = parts.contexts.get(name)
                if kept is not None and parts.runtime is not None:
                    parts.runtime.engine.tell(_kept_context(name, kept, parts.runtime.clock.now()))

        def ended(slot: str) -> None:
            assert parts.contexts is not None
            parts.contexts.drop(slot)

        declared = RunSpec(fleet, text, Path.cwd(), start.door.delete_unowned, begun, ended)
        _care(options, declared, start.door, _launcher_of(start, starter, parts), start.creation_semaphore, parts)


@contextlib.contextmanager
def _starter(start: Start) -> Iterator[Starter]:
    """Before anything else: a helper that is to be forked must be so before the first thread begins."""
    if start.door.start_method == "thread":
        yield ThreadStarter(start.start_fn)
        return
    with ProcessStarter(start.start_fn) as starter:
        yield starter


def _launcher_of(start: Start, starter: Starter, parts: _Parts) -> MakeLauncher:
    functions = (start.creation_callback, start.start_fn)
    homes = [str(getattr(function, "__module__", None) or "__main__") for function in functions]

    def make(leaves: Leaves) -> CallbackLauncher:
        parts.contexts = StoredContexts(leaves.store, homes)
        parts.launcher = CallbackLauncher(
            leaves.remote,
            starter,
            parts.contexts,
            inner=leaves.scripts,
            created=start.creation_callback,
            all_workers=start.all_workers,
            nudge=leaves.nudge,
            report=lambda event: parts.runtime.engine.tell(event) if parts.runtime is not None else None,
            now=leaves.clock.now,
        )
        return parts.launcher

    return make


def _kept_context(slot: str, kept: object, now: datetime) -> Event:
    """A script that makes something anew at each start, such as a sweep, must hear that the last start's goes on."""
    text = (
        f"{slot}: the context of the last start ({type(kept).__name__}) is kept, and creation_callback gets it for the "
        "next node; fresh=True begins without it"
    )
    return Event(now, "context", text, slot)


def _forgotten(memories: dict[str, Memory], fleet: fleets.Fleet, *, fresh: bool) -> list[str]:
    """Slots whose context goes no further: a person ended them, or their work was done; all, when begun anew."""
    names = {name for name, memory in memories.items() if memory.fleet == fleet.name}
    if fresh:
        return sorted(names | {fleet.slot_name(index) for index in range(fleet.count)})
    return sorted(name for name in names if memories[name].wish is DesiredState.DOWN or memories[name].end is End.DONE)


def _care(
    options: Options,
    declared: RunSpec,
    door: Door,
    launcher: MakeLauncher = lambda leaves: leaves.scripts,
    creation: contextlib.AbstractContextManager[Any] | None = None,
    parts: _Parts | None = None,
) -> None:
    parts = parts or _Parts()
    progress = progress_on(level=_log_level())
    try:
        for line in declared.fleet.warnings:
            progress.say(line)
        runtime = _assembled(options, declared, door, progress, launcher, creation)
        parts.runtime = runtime
        try:
            care(runtime, declared, progress)
        finally:
            if parts.launcher is not None:
                parts.launcher.close()
            runtime.close()
    except Left as left:
        # To return would let the script go on as if its work were done.
        raise SystemExit(left.status) from None
    finally:
        progress.close()


def _assembled(
    options: Options,
    declared: RunSpec,
    door: Door,
    progress: Progress,
    launcher: MakeLauncher,
    creation: contextlib.AbstractContextManager[Any] | None,
) -> Runtime:
    listen = _listener(progress, door.on_event)
    try:
        return assemble(options, os.environ, listen=listen, launcher=launcher, creation=creation)
    except StoreLocked:
        pid = Stores(options).holder(options.store)
        whose = f"process {pid}" if pid else "another process"
        name = declared.fleet.name
        # What the operating system said of the lock is under this line in no way that helps.
        raise StoreLocked(
            f"{name} is cared for already, by {whose}: stop that one, or give this one another name"
        ) from None


def _listener(progress: Progress, on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """Events go to the progress, and to the user, whose mistake must not end the care."""
    complained = False

    def listen(event: Event) -> None:
        nonlocal complained
        progress.event(event)
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception as error:
            if not complained:
                progress.say(f"on_event raised {type(error).__name__}: {error} (told once)")
            complained = True

    return listen


def _log_level() -> int:
    """`tpucare.LOG_LEVEL`, as scripts of 2022 set it: a level of `logging`, 0 for everything."""
    level = getattr(sys.modules.get("tpucare"), "LOG_LEVEL", 20)
    return level if isinstance(level, int) else 20


# --- where a call keeps what it remembers: the state folder, the store in it, and the project -------------------------
# Explicit arguments go before the environment. Nothing is made or asked for yet, but a project that nobody named.


AnyFleet = TypeVar("AnyFleet", bound=fleets.Fleet)


def place_of(door: Door, fleet: AnyFleet) -> tuple[Options, AnyFleet]:
    """
    Options with the store of *fleet*, and *fleet* with its project.

    Raises: ConfigError: no project is named anywhere, or no emulator runs where one was named.
    """
    options = options_of(door)
    project = fleet.project or project_finder(options, os.environ)()
    if options.store == DAEMON_STORE:
        options = replace(options, store=store_name(fleet.name, project))
    return options, replace(fleet, project=project)


def options_of(door: Door) -> Options:
    """`store`: a folder, a file `<folder>/<name>.sqlite`, or a name beside the others; else as the environment says."""
    store, state, name = door.store, "", ""
    if isinstance(store, Path) and store.suffix == ".sqlite":
        state, name = str(store.parent), store.stem
    elif isinstance(store, Path) or "/" in store or store in (".", ".."):
        path = Path(store)
        state, name = (str(path.parent), path.stem) if path.suffix == ".sqlite" else (str(path), "")
    else:
        name = store.removesuffix(".sqlite")
    options = resolve(os.environ, state=state, endpoint=door.endpoint, project=door.project)
    if not name:
        return options
    if name == DAEMON_STORE:
        raise ConfigError(f"store={name!r} is the daemon's; choose another name")
    check_store_name(name)
    return replace(options, store=name)
