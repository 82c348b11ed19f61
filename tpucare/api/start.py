"""
`start_single`, `start_multiple`, `run` and `status` of the Python API.

Each blocking call makes the parts for one fleet (options, store, launcher) and runs `foreground` until the fleet is
over. `arguments` checks the arguments, `callback_launcher` calls the user's functions, `threads` and `processes` run
them.
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
from tpucare.api.arguments import UNHEALTHY_SECONDS, Call, CallOptions, Start
from tpucare.api.callback_launcher import CallbackLauncher
from tpucare.api.contexts import StoredContexts
from tpucare.api.fleet import Fleet
from tpucare.api.foreground import LeftEarly, RunSpec, run_foreground
from tpucare.api.processes import ProcessStarter
from tpucare.api.progress import ProgressDisplay, progress_on
from tpucare.api.threads import CreationCallback, Starter, StartFn, ThreadStarter
from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile import python_fleet
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
    call_options = CallOptions(endpoint, project, arguments.store_of(store), on_event)
    options, parsed = place_of(call_options, fleet.parsed)
    _run(options, RunSpec(parsed, fleet.text, fleet.home), call_options)


def status(
    target: str = "", *, endpoint: str = "", project: str = "", store: str | os.PathLike[str] = ""
) -> list[dict[str, Any]]:
    """
    A record for every slot that the daemon and the scripts of this state folder care for, or for those of *target*.

    Keys are those of `tpucare status --json`: slot, fleet, phase, node, zone, attempt, step, why, and more. A running
    process is asked; slots without one are shown as they were when it ended.
    """
    options = options_of(CallOptions(endpoint, project, arguments.store_of(store)))
    if not Stores(options).names():
        return []
    rows: list[dict[str, Any]] = service_status.status(options, target)["slots"]
    return rows


# --- putting the parts together --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """Parts that the launcher and the loop make while they are put together."""

    contexts: StoredContexts | None = None
    launcher: CallbackLauncher | None = None
    runtime: Runtime | None = None


def _start(call: Call) -> None:
    start = arguments.read(call)
    with _starter(start) as starter:
        options, fleet = place_of(start.options, start.fleet)
        text = python_fleet.with_project(start.text, str(fleet.project))
        parts = _Parts()

        def begun(memories: dict[str, Memory]) -> None:
            assert parts.contexts is not None
            for name in _slots_without_context(memories, fleet, fresh=start.options.fresh):
                parts.contexts.drop(name)
            # A context that does not fit this script is an error now, and not a failed setup on every node.
            for index in range(fleet.count):
                name = fleet.slot_name(index)
                kept = parts.contexts.get(name)
                if kept is not None and parts.runtime is not None:
                    parts.runtime.engine.relay_event(_context_kept_event(name, kept, parts.runtime.clock.now()))

        def ended(slot: str) -> None:
            assert parts.contexts is not None
            parts.contexts.drop(slot)

        spec = RunSpec(fleet, text, Path.cwd(), start.options.delete_unowned, begun, ended)
        _run(options, spec, start.options, _launcher_of(start, starter, parts), start.creation_semaphore, parts)


@contextlib.contextmanager
def _starter(start: Start) -> Iterator[Starter]:
    """To be called before anything else: the helper of `processes` is forked before the first thread starts."""
    if start.options.start_method == "thread":
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
            report=lambda event: parts.runtime.engine.relay_event(event) if parts.runtime is not None else None,
            now=leaves.clock.now,
        )
        return parts.launcher

    return make


def _context_kept_event(slot: str, kept: object, now: datetime) -> Event:
    """A script that makes something at each start, such as a sweep, has to know that the last one is used further."""
    text = (
        f"{slot}: the context of the last start ({type(kept).__name__}) is kept, and creation_callback gets it for the "
        "next node; fresh=True begins without it"
    )
    return Event(now, "context", text, slot)


def _slots_without_context(memories: dict[str, Memory], fleet: fleets.FleetSpec, *, fresh: bool) -> list[str]:
    """Slots that start without a context: a person ended them, or their work was done; with *fresh* all."""
    names = {name for name, memory in memories.items() if memory.fleet == fleet.name}
    if fresh:
        return sorted(names | {fleet.slot_name(index) for index in range(fleet.count)})
    return sorted(name for name in names if memories[name].wish is DesiredState.DOWN or memories[name].end is End.DONE)


def _run(
    options: Options,
    spec: RunSpec,
    call_options: CallOptions,
    launcher: MakeLauncher = lambda leaves: leaves.scripts,
    creation: contextlib.AbstractContextManager[Any] | None = None,
    parts: _Parts | None = None,
) -> None:
    parts = parts or _Parts()
    progress = progress_on(level=_log_level())
    try:
        for line in spec.fleet.warnings:
            progress.say(line)
        runtime = _assembled(options, spec, call_options, progress, launcher, creation)
        parts.runtime = runtime
        try:
            run_foreground(runtime, spec, progress)
        finally:
            if parts.launcher is not None:
                parts.launcher.close()
            runtime.close()
    except LeftEarly as left:
        # A return would let the script go on as if its work were done.
        raise SystemExit(left.status) from None
    finally:
        progress.close()


def _assembled(
    options: Options,
    spec: RunSpec,
    call_options: CallOptions,
    progress: ProgressDisplay,
    launcher: MakeLauncher,
    creation: contextlib.AbstractContextManager[Any] | None,
) -> Runtime:
    listen = _listener(progress, call_options.on_event)
    try:
        return assemble(options, os.environ, listen=listen, launcher=launcher, creation=creation)
    except StoreLocked:
        pid = Stores(options).holder(options.store)
        whose = f"process {pid}" if pid else "another process"
        name = spec.fleet.name
        # The error of the lock itself would add nothing for the user.
        raise StoreLocked(
            f"{name} is cared for already, by {whose}: stop that one, or give this one another name"
        ) from None


def _listener(progress: ProgressDisplay, on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """Events go to the display and to the user's `on_event`, whose errors must not end the call."""
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
                progress.say(f"on_event raised {type(error).__name__}: {error} (reported once)")
            complained = True

    return listen


def _log_level() -> int:
    """`tpucare.LOG_LEVEL`, as scripts of 2022 set it: a level of `logging`, 0 for everything."""
    level = getattr(sys.modules.get("tpucare"), "LOG_LEVEL", 20)
    return level if isinstance(level, int) else 20


# --- the state folder, the store in it, and the project of a call ----------------------------------------------------
# Explicit arguments go before the environment. Nothing is made yet; only a project that is named nowhere is asked for.


AnyFleet = TypeVar("AnyFleet", bound=fleets.FleetSpec)


def place_of(call_options: CallOptions, fleet: AnyFleet) -> tuple[Options, AnyFleet]:
    """
    Options with the store of *fleet*, and *fleet* with its project.

    Raises: ConfigError: no project is named, or no emulator runs in the folder that was named.
    """
    options = options_of(call_options)
    project = fleet.project or project_finder(options, os.environ)()
    if options.store == DAEMON_STORE:
        options = replace(options, store=store_name(fleet.name, project))
    return options, replace(fleet, project=project)


def options_of(call_options: CallOptions) -> Options:
    """`store`: a folder, a file `<folder>/<name>.sqlite`, or a name beside the others; else as the environment says."""
    store, state, name = call_options.store, "", ""
    if isinstance(store, Path) and store.suffix == ".sqlite":
        state, name = str(store.parent), store.stem
    elif isinstance(store, Path) or "/" in store or store in (".", ".."):
        path = Path(store)
        state, name = (str(path.parent), path.stem) if path.suffix == ".sqlite" else (str(path), "")
    else:
        name = store.removesuffix(".sqlite")
    options = resolve(os.environ, state=state, endpoint=call_options.endpoint, project=call_options.project)
    if not name:
        return options
    if name == DAEMON_STORE:
        raise ConfigError(f"store={name!r} is the daemon's; choose another name")
    check_store_name(name)
    return replace(options, store=name)
