"""
A W&B run that goes on over attempts, and never stops the training.

W&B is imported when a run begins; its id is a pure function of the environment.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from .processes import this_process

# With the client's default, 15 s, a host that dies loses its last values: a run killed after 13 s had sent none.
TRANSMIT_SECONDS = 5

# The client's default is to wait 90 s for a server that is down, while the TPU idles.
INIT_TIMEOUT_SECONDS = 60

# W&B refuses `/ \ # ? % :` in ids; a slot's name from the Python API may have any character.
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]+")

_log = logging.getLogger(__name__)


def wandb_run_id(environ: Mapping[str, str] | None = None) -> str:
    """
    The W&B id of this slot's training: the same over all attempts, nodes and hosts. Empty outside of tpucare.

    It derives from the slot (whose name includes the fleet's) and from TPUCARE_CHECKPOINT: training from the same
    checkpoints is the same run, and a fleet of an old name with a new folder is a new run.
    """
    environ = os.environ if environ is None else environ
    slot = environ.get("TPUCARE_SLOT", "")
    if not slot:
        return ""
    digest = hashlib.sha256(f"{slot}\0{environ.get('TPUCARE_CHECKPOINT', '')}".encode()).hexdigest()
    return f"{_NOT_IN_IDS.sub('-', slot)[:60]}-{digest[:8]}"


def wandb_options(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Arguments of `wandb.init` for a run that goes on over attempts; W&B's own variables override them.

    `resume="allow"` always: without it an existing id would count its steps from 0 again. No id in a sweep: its agent
    sets the id.
    """
    environ = os.environ if environ is None else environ
    options: dict[str, Any] = {"settings": {}}
    if not environ.get("WANDB_RESUME"):
        options["resume"] = "allow"
    own_id = wandb_run_id(environ)
    if own_id and not environ.get("WANDB_RUN_ID") and not environ.get("WANDB_SWEEP_ID"):
        options["id"] = own_id
    if not environ.get("WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"):
        options["settings"]["x_file_stream_transmit_interval"] = TRANSMIT_SECONDS
    if not environ.get("WANDB_INIT_TIMEOUT"):
        options["settings"]["init_timeout"] = INIT_TIMEOUT_SECONDS
    return options


def init_wandb(*, preemptible: bool = True, **options: Any) -> Any:
    """
    `wandb.init(**options)` for a training that is preempted; returns its run.

    Only process 0 writes: on all others the run is disabled. A server that is down does not stop the training: the run
    is then kept offline, on this host's disk (`wandb sync`). Log with `run.log(..., step=step)`: W&B already has the
    steps before `run.starting_step`, and drops them. (`run.step` is 0 until the first `log`.)

    preemptible:  mark the run as preempting at once, so that a sweep requeues it even if the host dies without a
                  signal. Then a program that fails by itself is requeued, too; False: only after SIGTERM (`Requests`)

    Raises:
        wandb.errors.UsageError, AuthenticationError: No key, or a wrong one: a person has to log in.
    """
    import wandb

    if this_process().index != 0:
        return wandb.init(**{**options, "mode": "disabled"})
    merged = {**wandb_options(), **options}
    if isinstance(options.get("settings"), dict):
        merged["settings"] = {**wandb_options()["settings"], **options["settings"]}
    try:
        run = wandb.init(**merged)
    except wandb.errors.AuthenticationError:
        raise
    except wandb.errors.CommError as error:
        _log.warning("W&B does not answer; this attempt is kept offline in ./wandb: %s", str(error).splitlines()[0])
        # Without it the client's service still has the id in use.
        wandb.teardown()
        run = wandb.init(**{**merged, "mode": "offline"})
    if preemptible:
        run.mark_preempting()
    return run
