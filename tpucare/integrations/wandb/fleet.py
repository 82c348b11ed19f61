"""
A fleet file and a sweep -> the fleet that works for it: N slots whose job is one W&B agent each. Pure.

The file's keys for TPUs, code, setup and care stay; `{agent}` in `job.run` is replaced by the agent's command, and
without `job.run` the job is that command alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from tpucare.adapters.runner.scripts import read_template
from tpucare.api.fleet import plain_value
from tpucare.fleetfile import yaml_document
from tpucare.fleetfile.parse import FleetSpec
from tpucare.integrations.wandb.account import KEY_VARIABLE, URL_VARIABLE
from tpucare.integrations.wandb.rules import SWEEP_VARIABLE, SweepPath
from tpucare.model.errors import ConfigError
from tpucare.model.resources import OnSuccess

AGENT = "{agent}"
INTERVAL_VARIABLE = "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"
# The client's default is 15 s, and a preemption loses the lines since. Whole seconds: less than 1 counts as not set.
INTERVAL_SECONDS = "5"
# TPUCARE_CHECKPOINT differs by slot, and an interrupted run goes on in the slot that asks for a run next.
CHECKPOINT_VARIABLE = "TPUCARE_SWEEP_CHECKPOINT"
INSTALL = "command -v wandb >/dev/null || python3 -m pip install --quiet --user 'wandb<1'"
# The path of a sweep that does not exist yet: its fleet is checked with it before the sweep is created.
UNKNOWN = SweepPath("entity", "project", "unknown")

Base = Mapping[str, Any]
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])


def default_base(accelerator: str, zone: str, workdir: str) -> Base:
    """The base without a fleet file: sends the folder of the sweep's file, and installs wandb if it is missing."""
    tpu = {"type": accelerator, "zones": [zone]}
    return {"tpu": tpu, "job": {"workdir": workdir, "setup": INSTALL}}


def read_base(text: str, file: str) -> Base:
    """
    The fleet file as a mapping, read as `apply` reads it. All but the YAML is checked later, as part of the fleet.

    Raises: ConfigError: not YAML, or not a mapping.
    """
    try:
        document = yaml_document.read(text)
    except yaml_document.Unreadable as error:
        raise ConfigError.of([error.problem], file) from None
    if document.problems:
        raise ConfigError.of(document.problems, file)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{file}: must be a fleet file: a mapping whose `job` is a mapping too")
    return document.value


def name_of(base: Base, path: SweepPath, given: str = "") -> str:
    """Name of the fleet: *given*, else the file's `name`, else `sweep` and the sweep's id."""
    named = base.get("name")
    if given or isinstance(named, str):
        return given or str(named)
    # Without a hyphen: a name must not end like a slot's.
    return f"sweep{''.join(char for char in path.name.lower() if char.isalnum())}"[:24]


def fleet_text(
    base: Base,
    path: SweepPath,
    *,
    count: int,
    base_url: str,
    name: str = "",
    file: str = "",
    agent: str | None = None,
) -> str:
    """
    The complete fleet file; *agent* replaces the agent's command in a text that is only shown.

    Raises: ConfigError: `job.run` lacks `{agent}`, or a section has the wrong type.
    """
    whole = {str(key): plain_value(value, str(key)) for key, value in base.items()}
    place = file or "the fleet"
    job = _part(whole, "job", {}, f"{place}: job")
    run = job.get("run", f"exec {AGENT}")
    if not isinstance(run, str) or AGENT not in run:
        raise ConfigError(f"{file or 'job'}: job.run: write {AGENT} where the W&B agent runs, or leave job.run out")
    env = {INTERVAL_VARIABLE: INTERVAL_SECONDS, **_part(job, "env", {}, f"{place}: job.env")}
    env |= {SWEEP_VARIABLE: str(path), URL_VARIABLE: base_url}
    if checkpoint := job.pop("checkpoint", ""):
        env[CHECKPOINT_VARIABLE] = _shared(checkpoint, file)
    secrets = _part(job, "secrets", [], f"{place}: job.secrets")
    job |= {"run": run.replace(AGENT, agent if agent is not None else agent_command()), "env": env}
    job["secrets"] = secrets if KEY_VARIABLE in secrets else [*secrets, KEY_VARIABLE]
    whole |= {"name": name_of(base, path, name), "count": count, "job": job}
    return yaml.dump(whole, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=120)


def _part(section: Mapping[str, Any], key: str, otherwise: _Kind, name: str) -> _Kind:
    """Value of *key* in *section*, or *otherwise*. Raises: ConfigError: the value has another type than *otherwise*."""
    value = section.get(key)
    if value is None:
        return otherwise
    if not isinstance(value, type(otherwise)):
        raise ConfigError(f"{name}: must be a {'mapping' if isinstance(otherwise, dict) else 'list'}")
    return value


def _shared(checkpoint: object, file: str) -> str:
    text = str(checkpoint)
    if "{slot}" in text or not text.startswith(("gs://", "/")):
        raise ConfigError(
            f"{file or 'job'}: job.checkpoint: runs of a sweep move between slots, so it must be one folder for all "
            "slots: gs://BUCKET/PATH or an absolute path, without {slot}"
        )
    return text


def agent_command() -> str:
    """One command for bash that contains the agent's source, so that a worker needs only python3."""
    return f"python3 -c {shlex.quote(read_template('sweep_agent.py'))}"


def refuse_unfit(fleet: FleetSpec) -> None:
    """Raises: ConfigError: a fleet that a sweep cannot use."""
    if fleet.workers > 1:
        kinds = sorted({place.accelerator_type for place in fleet.places if place.workers > 1})
        raise ConfigError(
            f"{fleet.file}: tpu.type: {', '.join(kinds)} has several hosts, and a W&B agent starts its program on one; "
            "choose a type with one host"
        )
    if fleet.care.on_success is OnSuccess.RESTART:
        raise ConfigError(f"{fleet.file}: care.on_success: restart would start agents again for a sweep that is over")


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as people write scripts."""


def _text(dumper: _Blocks, value: str) -> yaml.ScalarNode:
    # Quote a text that only `yaml_document` reads as a number: `1e-4` and `08` are texts in the YAML of the dumper.
    plain = None if isinstance(yaml_document.scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else plain)


_Blocks.add_representer(str, _text)
_Blocks.add_representer(yaml_document.WrittenInt, _Blocks.represent_int)
_Blocks.add_representer(yaml_document.WrittenFloat, _Blocks.represent_float)
