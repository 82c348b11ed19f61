"""
The program `tpucare`: its commands, in the order in which a person meets them, and the flags that stand before them.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

import tpucare
from tpucare.cli import emulate, fleets, look, nodes, service
from tpucare.cli.common import Globals

_HELP = """\
The caretaker of preemptible Google Cloud TPUs: keeps the declared number of slices alive and training.

\b
  tpucare init > pod.yaml          a fleet file to begin with
  tpucare check pod.yaml           is it right?
  tpucare daemon                   care for all fleets (leave it running)
  tpucare apply pod.yaml           hand the fleet to it
  tpucare status --watch           see it live
  tpucare down pod                 the only way a fleet ends

Flags before the command hold for all of them; each is also an environment variable.
"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpucare {tpucare.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="tpucare",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    # Rendering help with rich costs more than everything else that --help does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def begin(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="State folder [env: TPUCARE_STATE].", metavar="DIR")] = "",
    endpoint: Annotated[str, typer.Option(help="Emulated cloud [env: TPUCARE_ENDPOINT].", metavar="HOST:PORT")] = "",
    project: Annotated[str, typer.Option(help="Project of fleets that name none [env: TPUCARE_PROJECT].")] = "",
    emulator: Annotated[str, typer.Option(help="Running emulator [env: TPUCARE_EMULATOR].", metavar="DIR")] = "",
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,  # noqa: ARG001
) -> None:
    context.obj = Globals(state, endpoint, project, emulator)


fleets.register(app)
look.register(app)
nodes.register(app)
service.register(app)
app.add_typer(emulate.app, name="emulator")
if importlib.util.find_spec("tpucare.cli.demo") is not None:
    importlib.import_module("tpucare.cli.demo").register(app)
