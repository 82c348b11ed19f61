"""
The program `tpucare`: its commands, in the order in which a person needs them, and the flags for all of them.

Only the called command is built. The list of commands takes their first lines from the docstrings: building forty
commands would take longer than typer itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from tpucare._version import __version__
from tpucare.cli.common import Globals

# Command -> module and function.
HOMES: Mapping[str, tuple[str, str]] = {
    "init": ("fleets", "init"),
    "check": ("fleets", "check"),
    "plan": ("fleets", "plan"),
    "daemon": ("daemon", "daemon"),
    "apply": ("fleets", "apply"),
    "down": ("fleets", "down"),
    "pause": ("fleets", "pause"),
    "resume": ("fleets", "resume"),
    "retry": ("fleets", "retry"),
    "confirm": ("fleets", "confirm"),
    "adopt-node": ("nodes", "adopt_node"),
    "status": ("status", "status"),
    "places": ("places", "places"),
    "logs": ("status", "logs"),
    "ssh": ("nodes", "ssh"),
    "ssh-config": ("nodes", "ssh_config"),
    "scp": ("nodes", "scp"),
    "exec": ("nodes", "execute"),
    "events": ("status", "events"),
    "gc": ("status", "gc"),
    "sweep": ("sweep", "sweep"),
    "ray": ("ray", "app"),
    "emulator": ("emulator", "app"),
    "demo": ("demo", "demo"),
    "simulate": ("simulate", "simulate"),
}
# The words after the slot go to ssh unchanged; a command for all workers comes after `--`, so flags may come anywhere.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_SETTINGS: Mapping[str, dict[str, Any]] = {"ssh": _PASS_ON, "exec": {"allow_extra_args": True}}
PROGRAM_FLAGS = ("--state", "--endpoint", "--project", "--emulator")
# A command of other tools -> its counterpart here.
OTHER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("delete", "destroy", "kill", "remove", "rm", "stop", "terminate"), "down FLEET"),
    **dict.fromkeys(("list", "ls", "ps", "queue", "describe", "get", "show"), "status"),
    **dict.fromkeys(("top", "monitor", "watch"), "status --watch"),
    **dict.fromkeys(("create", "launch", "run", "start", "submit", "up"), "apply FILE"),
    **dict.fromkeys(("attach", "log", "tail"), "logs --follow SLOT"),
    **dict.fromkeys(("adopt",), "adopt-node NODE SLOT"),
    **dict.fromkeys(("restart",), "apply FILE --restart"),
    **dict.fromkeys(("validate", "lint"), "check FILE"),
    **dict.fromkeys(("version",), "--version"),
    **dict.fromkeys(("cp", "rsync"), "scp"),
    **dict.fromkeys(("history", "timeline"), "events"),
}
LINE_LIMIT = 100
_HELP_FLAGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_HELP = """\
The caretaker of preemptible Google Cloud TPUs: keeps the declared number of slices alive and training.

\b
  tpucare init > pod.yaml          write a fleet file
  tpucare check pod.yaml           find its mistakes
  tpucare daemon                   care for all fleets (leave it running)
  tpucare apply pod.yaml           give the fleet to the daemon
  tpucare status --watch           watch all slots
  tpucare down pod                 the only way a fleet ends

The flags below hold for all commands; each is also an environment variable.
"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpucare {__version__}")
        raise typer.Exit


def with_flags_first(args: list[str]) -> list[str]:
    """
    *args* with the flags of the program first; a person may write them after the command, too.

    Words after `--`, and words after the slot of `ssh`, belong to another program and stay.
    """
    flags: list[str] = []
    rest: list[str] = []
    left = list(args)
    while left and left[0] != "--" and not (rest[:1] == ["ssh"] and len(rest) > 1 and not rest[-1].startswith("-")):
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        if name not in PROGRAM_FLAGS:
            rest.append(word)
            continue
        flags.append(word)
        if not equals and left:
            flags.append(left.pop(0))
    return [*flags, *rest, *left]


class _Commands(Mapping[str, Any]):
    """Click commands by name; each is built at its lookup."""

    def __getitem__(self, name: str) -> Any:
        found = function_of(name)
        if isinstance(found, typer.Typer):
            group = get_command(found)
            group.name = name
            return group
        single = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        single.command(name, context_settings={**_HELP_FLAGS, **_SETTINGS.get(name, {})})(found)
        return get_command(single)

    def __iter__(self) -> Iterator[str]:
        return iter(HOMES)

    def __len__(self) -> int:
        return len(HOMES)


class _Program(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_flags_first(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in OTHER_WORDS:
            ctx.fail(f"No such command {args[0]!r}; you may mean `tpucare {OTHER_WORDS[args[0]]}`.")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(HOMES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_line(name)) for name in HOMES])


def function_of(name: str) -> Callable[..., Any] | typer.Typer:
    """The function of a command, or the app of a group of them. Raises: KeyError."""
    module, attribute = HOMES[name]
    found: Callable[..., Any] | typer.Typer = getattr(importlib.import_module(f"tpucare.cli.{module}"), attribute)
    return found


def first_line(name: str) -> str:
    """The first sentence of the command's help."""
    found = function_of(name)
    text = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    first, _, _ = " ".join(str(text).split("\n\n")[0].split()).partition(". ")
    first, _, _ = first.partition(": ") if len(first) > LINE_LIMIT else (first, "", "")
    return first.removesuffix(".")


app = typer.Typer(
    name="tpucare",
    cls=_Program,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    # Rendering help with rich takes longer than the rest of --help.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP_FLAGS,
)


@app.callback()
def begin(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="State folder [env: TPUCARE_STATE].", metavar="DIR")] = "",
    endpoint: Annotated[str, typer.Option(help="Emulated cloud [env: TPUCARE_ENDPOINT].", metavar="HOST:PORT")] = "",
    project: Annotated[str, typer.Option(help="Project of fleets without one [env: TPUCARE_PROJECT].")] = "",
    emulator: Annotated[str, typer.Option(help="Running emulator [env: TPUCARE_EMULATOR].", metavar="DIR")] = "",
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj = Globals(state, endpoint, project, emulator)
