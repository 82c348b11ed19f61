"""`tpucare emulator`: run an emulated cloud, and send orders to a running one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from tpucare.cli.common import CommandError, emulator_folder, print_json, say

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from tpucare.testbed.emulator.orders import BaseOrder


class _Group(TyperGroup):
    """Has the commands of orders as well; `tpucare emulator WORLD.yaml` is `tpucare emulator run WORLD.yaml`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from tpucare.testbed.emulator.orders import ORDERS

        orders = typer.Typer(rich_markup_mode=None, add_completion=False)
        for order in ORDERS.values():
            if order.example is not None:
                orders.command(order.do)(_command(order))
        run = self.commands.pop("run")
        self.commands = {"run": run, **get_group(orders).commands, **self.commands}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    add_completion=False,
    help="""\
Run an emulated Cloud TPU service with real machines as workers, or change a running one.

\b
Example: tpucare emulator world.yaml
Example: tpucare emulator preempt pod-0
""",
)


@app.command()
def run(
    context: typer.Context,
    world: Annotated[
        Path | None,
        typer.Argument(metavar="[WORLD.yaml]", help="A file, or `realistic`. Default: two fast zones with capacity."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the API; 0 = any.", min=0, max=65535)] = 0,
    rest_port: Annotated[int, typer.Option(help="Port of the REST API; 0 = any.", min=0, max=65535)] = 0,
    storage_port: Annotated[int, typer.Option(help="Port of Cloud Storage; 0 = any.", min=0, max=65535)] = 0,
    bucket: Annotated[
        list[str] | None, typer.Option(help="An existing bucket; may be repeated.", metavar="NAME")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same history.")] = 0,
    machines: Annotated[bool, typer.Option(help="Give each worker a real sshd, home and screen.")] = True,
    ssh_port: Annotated[int, typer.Option(help="SSH port of every worker.", min=1, max=65535)] = 2222,
    metadata_port: Annotated[int, typer.Option(help="Port of the metadata server.", min=1, max=65535)] = 8080,
    audit: Annotated[Path | None, typer.Option(help="Audit log: a line of JSON per call.", metavar="FILE")] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Also emulate W&B, for offline sweeps.")] = False,
    wandb_port: Annotated[int, typer.Option(help="Port of the emulated W&B; 0 = any.", min=0, max=65535)] = 0,
    wandb_lost_after: Annotated[
        float, typer.Option(help="Seconds until a silent agent or run counts as lost in W&B.", min=0.1)
    ] = 60.0,
) -> None:
    """
    Serve an emulated cloud until Ctrl-C; prints the setting that makes tpucare use it.

    \b
    Example: tpucare emulator world.yaml --seed 7
    Example: tpucare emulator realistic
    Example: tpucare emulator --no-machines --audit audit.jsonl
    Example: tpucare emulator --bucket my-bucket
    Example: tpucare emulator --wandb
    """
    from tpucare.testbed.emulator.serve import serve

    folder = emulator_folder(context)
    serve(
        folder,
        world,
        say,
        ports=(port, rest_port, storage_port),
        buckets=bucket or (),
        seed=seed,
        ssh_port=ssh_port if machines else 0,
        metadata_port=metadata_port,
        audit=audit,
        wandb_port=wandb_port if wandb or wandb_port else None,
        wandb_lost_after=wandb_lost_after,
    )


@app.command("status")
def show_nodes(context: typer.Context) -> None:
    """
    Print every node of the running emulator as JSON.

    \b
    Example: tpucare emulator status
    """
    print_json(_request(context, {"do": "status"}))


@app.command()
def order(
    context: typer.Context, text: Annotated[str, typer.Argument(metavar="JSON", help="An order (docs/emulator.md).")]
) -> None:
    """
    Send an order to the emulator as JSON, for orders without a command of their own.

    \b
    Example: tpucare emulator order '{"do": "stick-deleting", "selector": "pod-0"}'
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}") from error
    print_json(_request(context, value))


def _command(order: type[BaseOrder]) -> Callable[..., None]:
    """The command of an order: typer reads the parameters from its signature, and its help from the docstring."""

    def command(context: typer.Context, **values: Any) -> None:
        # The emulator has defaults for empty values.
        given = {key: value for key, value in values.items() if value not in ("", None)}
        if "amount" in given:
            given["amount"] = _amount(given["amount"])
        _send(context, {"do": order.do, **given})

    example = f"tpucare emulator {order.do} {order.example}".rstrip()
    command.__doc__ = f"{order.__doc__}\n\n\b\nExample: {example}"
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    others = [_parameter(name, field) for name, field in order.model_fields.items() if field.description]
    command.__signature__ = Signature([context, *others])  # type: ignore[attr-defined]
    return command


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """An argument, a flag or an option. Texts such as lengths of time and names of states are left to the emulator."""
    about, metavar, default = field.description, field.title, field.default
    kind: type = str
    declared: Any = typer.Option(help=about, metavar=metavar)
    if field.is_required():
        least = next((rule.ge for rule in field.metadata if hasattr(rule, "ge")), None)
        kind, declared = str if least is None else int, typer.Argument(help=about, metavar=metavar, min=least)
        default = Parameter.empty
    elif isinstance(default, bool):
        kind, declared = bool, typer.Option(f"--{name}/--off" if default else f"--{name}", help=about)
    elif not isinstance(default, str):
        default = ""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])


def _amount(text: str) -> int | None:
    if text != "none" and not text.isdecimal():
        raise typer.BadParameter("AMOUNT must be a whole number, or none")
    return None if text == "none" else int(text)


def _send(context: typer.Context, what: dict[str, Any]) -> None:
    answer = _request(context, what)
    touched = answer.get("touched")
    if touched == []:
        why = _why_nothing(str(what.get("selector")), _request(context, {"do": "status"}))
        raise CommandError(f"{what['do']}: {why}")
    if touched is None:
        values = [f"{key} {'none' if value is None else value}" for key, value in what.items() if key != "do"]
        touched = values or ["done"]
    say(f"{what['do']}: {', '.join(touched)}")


def _why_nothing(selector: str, status: Mapping[str, Any]) -> str:
    """Why an order changed no node: none has that name, or the state of those that have it forbids it."""
    nodes = {row["name"]: row["state"] for row in status["nodes"]}
    patterns = (selector, f"{selector}-a*", f"{selector}-*-a*")
    matching = [name for name in nodes if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if matching:
        return ", ".join(f"{name} is {nodes[name]}" for name in matching) + ": nothing to do"
    return f"there is no node {selector}; nodes: {', '.join(nodes) or 'none'}"


def _request(context: typer.Context, what: Any) -> dict[str, Any]:
    from tpucare.service import emulator_address
    from tpucare.testbed.emulator import control_socket as control

    return control.request(emulator_address.find(emulator_folder(context)).control, what)
