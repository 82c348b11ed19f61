"""
W&B sweeps on TPU nodes: `sweep` makes one (or uses an existing one) and keeps N agents at work for it.

Mistakes of the user are found before the sweep and before any node is made. Making a sweep is left to the client of W&B
(extra `wandb`), in a process of its own; caring for the fleet to the daemon, or to this process if no daemon runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tpucare.fleetfile import parse as fleets
from tpucare.integrations.wandb import account
from tpucare.integrations.wandb import fleet as sweep_fleet
from tpucare.integrations.wandb.client import GraphqlSweeps, SweepRefused
from tpucare.integrations.wandb.companion import SweepCare
from tpucare.integrations.wandb.rules import SWEEP_VARIABLE, SweepPath, Verdict, is_path, judge, parse_path
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import Event
from tpucare.service import daemon
from tpucare.service.assembly import Runtime
from tpucare.service.control_socket import NoDaemon, request
from tpucare.service.fleet_folder import read_text
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import Options, resolve
from tpucare.service.stores import Stores

CREATE_SECONDS = 120.0
METHODS = ("grid", "random", "bayes")

_CREATE = """\
import json, sys
import wandb
order = json.load(sys.stdin)
name = wandb.sweep(order["config"], entity=order["entity"], project=order["project"])
print("\\n" + json.dumps({"sweep": name}))
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """
    A sweep and its fleet, checked; neither exists yet, except the sweep if `config` is None.

    config: of a new sweep; None: `path` exists already    folder: relative paths start here
    """

    base: sweep_fleet.Base
    folder: Path
    file: str
    count: int
    name: str
    base_url: str
    path: SweepPath
    config: Mapping[str, Any] | None = None

    def fleet_name(self, path: SweepPath) -> str:
        return sweep_fleet.name_of(self.base, path, self.name)

    def text(self, path: SweepPath, *, agent: str | None = None) -> str:
        """The fleet file of this swarm for the sweep at *path*; *agent* as in `sweep_fleet.fleet_text`."""
        base, url = self.base, self.base_url
        return sweep_fleet.fleet_text(
            base, path, count=self.count, base_url=url, name=self.name, file=self.file, agent=agent
        )

    def shown(self) -> str:
        """The fleet file for people: `{agent}` in place of the agent's source."""
        return self.text(self.path, agent=sweep_fleet.AGENT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    daemon: a running daemon accepted the fleet; the fields below are then unset
    over:   the sweep ended in this process, and no node or run of the fleet is left
    failed: slots that gave up -> the reason
    runs:   W&B's newest answer: `FINISHED, 3 of 4 runs finished, 1 requeued`; empty without one
    """

    sweep: str
    fleet: str
    slots: tuple[str, ...]
    daemon: bool
    over: bool = False
    failed: Mapping[str, str] | None = None
    runs: str = ""


def sweep(
    what: str | Path | Mapping[str, Any],
    count: int = 1,
    fleet: str | Path | Mapping[str, Any] | None = None,
    *,
    name: str = "",
    accelerator_type: str = "",
    zone: str = "",
    options: Options | None = None,
    env: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> Outcome:
    """
    Keep *count* nodes running `wandb agent` until the sweep is over.

    what:  a file or mapping of a new sweep, or `entity/project/id` of an existing one
    fleet: a fleet file or mapping; without one, *accelerator_type* and *zone* name the TPU

    With a running daemon this returns once the daemon has accepted the fleet. Without one it blocks and cares for the
    fleet itself; call it on the main thread then. SIGINT and SIGTERM end it and leave the nodes alive.
    Raises: ConfigError: a mistake, before anything was made; TpuCareError.
    """
    env = os.environ if env is None else env
    chosen = options or resolve(env)
    prepared = prepare(
        what, count, fleet, name=name, accelerator_type=accelerator_type, zone=zone, options=chosen, env=env
    )
    return hand_over(prepared, create(prepared, env), chosen, env, on_event)


# --- checks before the sweep is made ---------------------------------------------------------------------------------


def prepare(
    what: str | Path | Mapping[str, Any],
    count: int,
    fleet: str | Path | Mapping[str, Any] | None = None,
    *,
    name: str = "",
    accelerator_type: str = "",
    zone: str = "",
    options: Options,
    env: Mapping[str, str],
) -> Prepared:
    """The checked sweep and fleet of the arguments, as for `sweep`. Raises: ConfigError."""
    url = account.base_url(env)
    key = account.need_key(env, url)
    path, config, folder = sweep_fleet.UNKNOWN, None, Path.cwd()
    if isinstance(what, str) and is_path(what) and not Path(what).is_file():
        path = parse_path(what)
    else:
        config, folder = _read_sweep(what)
        path = _new_path(config, env, GraphqlSweeps(url, key))
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("making a sweep needs the client of W&B: run `pip install wandb`")
    base, file, folder = _read_fleet(fleet, accelerator_type, zone, folder, has_code=config is not None)
    prepared = Prepared(base, folder, file, count, name, url, path, config)
    parsed = fleets.parse(prepared.text(path), file=file, folder=folder)
    sweep_fleet.refuse_unfit(parsed)
    _refuse_other(options, prepared)
    if config is None:
        _refuse_over(GraphqlSweeps(url, key), path)
    return prepared


def _read_sweep(what: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The configuration of a sweep, and the folder where its paths start."""
    if isinstance(what, Mapping):
        config, file, folder = dict(what), "the sweep", Path.cwd()
    else:
        file, folder = str(what), Path(what).absolute().parent
        try:
            # As the client of W&B reads it: another dialect of YAML than that of fleet files.
            config = yaml.safe_load(read_text(Path(what)))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or not isinstance(config.get("parameters"), dict):
        raise ConfigError(f"{file}: must be a sweep: a mapping with `method` and `parameters`")
    if config.get("method") not in METHODS:
        raise ConfigError(f"{file}: method: must be one of {', '.join(METHODS)}")
    if not config.get("program") and not config.get("command"):
        raise ConfigError(f"{file}: program: is missing; name the program that agents run")
    return config, folder


def _new_path(config: Mapping[str, Any], env: Mapping[str, str], service: GraphqlSweeps) -> SweepPath:
    """Entity and project of the new sweep. W&B is asked for the key's entity, which also finds a refused key."""
    project = str(config.get("project") or account.setting(env, "project"))
    if not project:
        raise ConfigError("the sweep has no W&B project: add `project: NAME` to its file, or set WANDB_PROJECT")
    try:
        own = service.entity()
    except SweepRefused as error:
        raise ConfigError(str(error)) from None
    entity = str(config.get("entity") or account.setting(env, "entity") or own)
    return parse_path("/".join((entity, project, sweep_fleet.UNKNOWN.name)))


def _read_fleet(
    fleet: str | Path | Mapping[str, Any] | None, accelerator: str, zone: str, folder: Path, *, has_code: bool
) -> tuple[sweep_fleet.Base, str, Path]:
    """The base of the fleet, its name in errors, and the folder where its paths start."""
    if isinstance(fleet, Mapping):
        return fleet, "the fleet", Path.cwd()
    if fleet is not None:
        path = Path(fleet)
        return sweep_fleet.read_base(read_text(path), str(path)), str(path), path.absolute().parent
    if not (accelerator and zone and has_code):
        raise ConfigError(
            "the TPU and the code are missing: give --fleet FILE (`tpucare init --template sweep` prints one), "
            "or --type and --zone with a sweep file whose folder is sent to the workers"
        )
    return sweep_fleet.default_base(accelerator, zone, str(folder)), "--type and --zone", folder


def _refuse_other(options: Options, prepared: Prepared) -> None:
    """Raises: ConfigError: a fleet of that name still works for another sweep or job."""
    name = prepared.fleet_name(prepared.path)
    stores = Stores(options)
    if options.store not in stores.names():
        return
    store = stores.read(options.store)
    record = store.records.get(name)
    memories = [memory for memory in store.memories.values() if memory.fleet == name]
    if record is None or record.wish is DesiredState.DOWN or not any(_is_at_work(memory) for memory in memories):
        return
    job = sweep_fleet.read_base(record.text, f"{name}.yaml (as accepted)").get("job") or {}
    works_for = (job.get("env") or {}).get(SWEEP_VARIABLE, "a job of its own")
    if works_for != str(prepared.path):
        raise ConfigError(f"fleet {name} works for {works_for}: choose another --name, or `tpucare down {name}` first")


def _is_at_work(memory: Memory) -> bool:
    return memory.end is End.NONE and memory.wish is not DesiredState.DOWN


def _refuse_over(service: GraphqlSweeps, path: SweepPath) -> None:
    try:
        report = service.report(path)
    except SweepRefused as error:
        raise ConfigError(str(error)) from None
    if judge(report) in (Verdict.OVER, Verdict.END):
        raise ConfigError(f"sweep {path} is over ({report.text()}): no run is left")


# --- the sweep -------------------------------------------------------------------------------------------------------


def create(prepared: Prepared, env: Mapping[str, str]) -> SweepPath:
    """
    Make the sweep, unless it exists, with the client of W&B in a process of its own; the key is in its environment
    only. Raises: TpuCareError: with the client's last line.
    """
    if prepared.config is None:
        return prepared.path
    path, url = prepared.path, prepared.base_url
    order = {"config": prepared.config, "entity": path.entity, "project": path.project}
    ours = {account.URL_VARIABLE: url, account.KEY_VARIABLE: account.need_key(env, url), "WANDB_SILENT": "true"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CREATE],
            input=json.dumps(order, default=str),
            env={**env, **ours},
            capture_output=True,
            text=True,
            timeout=CREATE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TpuCareError(f"W&B at {url} made no sweep within {CREATE_SECONDS:.0f} s") from None
    if done.returncode:
        tail = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise TpuCareError(f"W&B made no sweep: {' '.join(tail) or f'exit status {done.returncode}'}")
    name = json.loads(done.stdout.strip().splitlines()[-1])["sweep"]
    return path._replace(name=str(name))


# --- the fleet -------------------------------------------------------------------------------------------------------


def hand_over(
    prepared: Prepared,
    path: SweepPath,
    options: Options,
    env: Mapping[str, str],
    on_event: Callable[[Event], None] = lambda _: None,
) -> Outcome:
    """Apply the fleet through the running daemon; without one, care for it in this process until it is over."""
    name = prepared.fleet_name(path)
    order = {"do": "apply", "text": prepared.text(path), "folder": str(prepared.folder), "file": f"{name}.yaml"}
    try:
        answer = request(options.socket, order)
    except NoDaemon:
        return _care(name, path, order, options, env, on_event)
    return Outcome(str(path), name, tuple(answer["slots"]), daemon=True)


def _care(
    name: str,
    path: SweepPath,
    order: Mapping[str, Any],
    options: Options,
    env: Mapping[str, str],
    on_event: Callable[[Event], None],
) -> Outcome:
    outcome, env = Outcome(str(path), name, (), daemon=False), account.with_key(env)
    made: list[SweepCare] = []

    def companions(runtime: Runtime, registry: FleetRegistry, _poll_soon: Callable[[], None]) -> list[SweepCare]:
        made.append(SweepCare.beside(runtime, registry, env))
        return made

    def update_outcome(here: daemon.Daemon) -> bool:
        nonlocal outcome
        rows = {row["slot"]: row for row in here.status(name)["slots"]}
        failed = {slot: str(row["end_why"]) for slot, row in rows.items() if row["end"] == End.FAILED.value}
        (sweeps,) = made
        over = is_over(here, sweeps, name)
        outcome = replace(outcome, slots=tuple(rows) or outcome.slots, failed=failed or outcome.failed, over=over)
        outcome = replace(outcome, runs=sweeps.summary_of(name) or outcome.runs)
        return over

    def prepare_daemon(here: daemon.Daemon) -> None:
        # This process cares for one fleet; other fleets of the store wait for a daemon.
        here.limit_to_fleet(name)
        here.first_commands = [order]
        here.until = lambda: update_outcome(here)

    daemon.run(options, options.fleets(env), env, listen=on_event, companions=companions, prepare=prepare_daemon)
    return outcome


def is_over(here: daemon.Daemon, sweeps: SweepCare, fleet: str) -> bool:
    """True if no slot of *fleet* is at work, and the sweep cannot need one again."""
    names = here.registry.slots_of(fleet)
    if not names:
        record = here.registry.records.get(fleet)
        return record is not None and record.wish is DesiredState.DOWN
    if not all(here.is_over(name) for name in names):
        return False
    # Slots come back when an interrupted run is queued later.
    return not sweeps.may_come_back(fleet)
