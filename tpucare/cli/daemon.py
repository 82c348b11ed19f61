"""`tpucare daemon`: the process that cares."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tpucare.cli.common import Exit, options


def daemon(
    context: typer.Context,
    fleets: Annotated[str, typer.Option(help="Folder of fleet files [env: TPUCARE_FLEETS].", metavar="DIR")] = "",
    log: Annotated[str, typer.Option(help="Form of the log: console or json.", metavar="FORM")] = "console",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", metavar="LEVEL")] = "info",
) -> None:
    """
    Care for every fleet of a folder until SIGTERM or Ctrl-C; nodes stay alive then.

    A changed file is taken in within seconds, SIGHUP reads all anew. A file that vanished or cannot be read changes
    nothing: a fleet ends only by `tpucare down`.

    \b
    Example: tpucare daemon --fleets /etc/tpucare/fleets --log json
    """
    if log not in ("console", "json") or log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("--log is console or json; --log-level is debug, info, warning or error")
    chosen = options(context)
    from tpucare.integrations.wandb.account import with_key
    from tpucare.integrations.wandb.companion import SweepCare
    from tpucare.service import event_log as events
    from tpucare.service.daemon import run
    from tpucare.service.options import expanded

    events.configure(events.LogForm(log), log_level)
    folder = expanded(fleets) if fleets else chosen.fleets(os.environ)
    env = with_key(os.environ)
    run(
        chosen,
        folder,
        env,
        listen=events.teller(),
        companions=lambda care, registry: [SweepCare.beside(care, registry, env)],
    )
    # Everything is closed. A thread that still waits for a worker or the API would keep the process until its
    # deadline, and taking the threads of grpc apart takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.OK)
