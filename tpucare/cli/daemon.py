"""`tpucare daemon`: the process that cares for all fleets."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tpucare.cli.common import Exit, options


def daemon(
    context: typer.Context,
    fleets: Annotated[str, typer.Option(help="Folder of fleet files [env: TPUCARE_FLEETS].", metavar="DIR")] = "",
    log: Annotated[str, typer.Option(help="Format of the log: console or json.", metavar="FORM")] = "console",
    log_level: Annotated[
        str, typer.Option(help="Lowest level shown: debug, info, warning or error.", metavar="LEVEL")
    ] = "info",
) -> None:
    """
    Care for every fleet of a folder until SIGTERM or Ctrl-C; the nodes stay alive then.

    A changed file is read within seconds; SIGHUP reads every file again. A missing or unreadable file changes nothing:
    a fleet ends only by `tpucare down`.

    \b
    Example: tpucare daemon --fleets /etc/tpucare/fleets --log json
    """
    if log not in ("console", "json") or log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("--log is console or json; --log-level is debug, info, warning or error")
    chosen = options(context)
    from tpucare.integrations.ray.companion import RayCare
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
        companions=lambda runtime, registry, poll_soon: [
            SweepCare.beside(runtime, registry, env),
            RayCare.beside(runtime, registry, poll_soon),
        ],
    )
    # Everything is closed. A thread that still waits for a worker or the API would delay the exit until its deadline,
    # and stopping the threads of grpc takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.OK)
