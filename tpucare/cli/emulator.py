"""`tpucare emulator`: run an emulated cloud, and send orders to a running one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tpucare.cli.common import CommandError, emulator_folder, print_json, say


class _RunByDefault(TyperGroup):
    """`tpucare emulator WORLD.yaml` is `tpucare emulator run WORLD.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="""\
Run an emulated Cloud TPU service with real machines as workers, or change a running one.

\b
Example: tpucare emulator world.yaml
Example: tpucare emulator preempt pod-0
""",
)

Selector = Annotated[str, typer.Argument(metavar="NODES", help="Node, slot, zone/node, or * for all.")]


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


def preempt(
    context: typer.Context,
    nodes: Selector,
    notice: Annotated[str, typer.Option(help="Time of the notice before, such as 30s.", metavar="TIME")] = "",
    silent: Annotated[bool, typer.Option("--silent", help="Workers stop answering instead of dying.")] = False,
    shown: Annotated[str, typer.Option(help="State in the API; or never, or gone.")] = "",
    visible_after: Annotated[str, typer.Option(help="Delay until the API shows it.", metavar="TIME")] = "",
) -> None:
    """
    Preempt nodes as the real cloud does.

    \b
    Example: tpucare emulator preempt pod-0 --notice 10s
    """
    _act(context, "preempt", selector=nodes, notice=notice, silent=silent, shown=shown, visible_after=visible_after)


def terminate(context: typer.Context, nodes: Selector) -> None:
    """
    Terminate nodes as the 24-hour limit of preemptible nodes does.

    \b
    Example: tpucare emulator terminate pod-0
    """
    _act(context, "terminate", selector=nodes)


def capacity(
    context: typer.Context,
    zone: Annotated[str, typer.Argument(help="Zone, such as us-central1-a.")],
    amount: Annotated[str, typer.Argument(help="Number of chips, hosts or slices; none = unlimited.")],
    accelerator: Annotated[str, typer.Option(help="Type or generation; default: all.")] = "",
    tier: Annotated[str, typer.Option(help="spot, on-demand or reserved.")] = "spot",
) -> None:
    """
    Set the capacity of a pool from now on.

    \b
    Example: tpucare emulator capacity us-central1-a 0
    """
    if amount != "none" and not amount.isdecimal():
        raise typer.BadParameter("AMOUNT must be a whole number, or none")
    number = None if amount == "none" else int(amount)
    _send(context, {"do": "capacity", "zone": zone, "accelerator": accelerator, "tier": tier, "amount": number})


def health(
    context: typer.Context,
    nodes: Selector,
    value: Annotated[
        str, typer.Argument(help="healthy, timeout, unhealthy-tensorflow, unhealthy-maintenance, or a number.")
    ],
) -> None:
    """
    Set the health that the API shows for nodes.

    \b
    Example: tpucare emulator health pod-0 unhealthy-maintenance
    """
    _act(context, "health", selector=nodes, health=value)


def state(
    context: typer.Context,
    nodes: Selector,
    value: Annotated[str, typer.Argument(help="A name such as repairing, or a number.")],
) -> None:
    """
    Set the state that the API shows for nodes, even an unknown one; their workers do not change.

    \b
    Example: tpucare emulator state pod-0 77
    """
    _act(context, "state", selector=nodes, state=value)


def unknown_fields(
    context: typer.Context,
    nodes: Selector,
    on: Annotated[bool, typer.Option("--on/--off", help="Add or remove them.")] = True,
    answers: Annotated[bool, typer.Option("--answers", help="Also in every answer of the API.")] = False,
) -> None:
    """
    Add fields to nodes that no client knows, as a newer service would.

    \b
    Example: tpucare emulator unknown-fields pod-0 --answers
    """
    _send(context, {"do": "unknown-fields", "selector": nodes, "on": on, "answers": answers})


def maintenance(
    context: typer.Context,
    nodes: Selector,
    duration: Annotated[str, typer.Option(help="Duration.", metavar="TIME")] = "5m",
    restart: Annotated[bool, typer.Option("--restart", help="Also reboot the workers.")] = False,
) -> None:
    """
    Announce a maintenance event to workers.

    \b
    Example: tpucare emulator maintenance pod-0 --restart
    """
    _act(context, "maintenance", selector=nodes, duration=duration, restart=restart)


def outage(
    context: typer.Context,
    duration: Annotated[str, typer.Argument(help="Duration, such as 90s.")],
    kind: Annotated[str, typer.Option(help="api, internal, zone or slow.")] = "api",
    zone: Annotated[str, typer.Option(help="Zone for --kind zone.")] = "",
) -> None:
    """
    Make the API fail, fail in one zone, or answer slowly.

    \b
    Example: tpucare emulator outage 2m --kind zone --zone us-central1-a
    """
    _act(context, "outage", duration=duration, kind=kind, zone=zone)


def end_outages(context: typer.Context) -> None:
    """
    End all outages.

    \b
    Example: tpucare emulator end-outages
    """
    _act(context, "end-outages")


def lose_worker(
    context: typer.Context,
    nodes: Selector,
    worker: Annotated[int, typer.Argument(help="Number of the worker.", min=0)],
    silent: Annotated[bool, typer.Option("--silent", help="It stops answering instead of dying.")] = False,
) -> None:
    """
    Kill one worker; the API does not show it.

    \b
    Example: tpucare emulator lose-worker pod-0 3
    """
    _act(context, "lose-worker", selector=nodes, worker=worker, silent=silent)


def restore_worker(
    context: typer.Context, nodes: Selector, worker: Annotated[int, typer.Argument(help="Number of the worker.", min=0)]
) -> None:
    """
    Boot a lost worker again, or make a silent one answer.

    \b
    Example: tpucare emulator restore-worker pod-0 3
    """
    _act(context, "restore-worker", selector=nodes, worker=worker)


def show_nodes(context: typer.Context) -> None:
    """
    Print every node of the running emulator as JSON.

    \b
    Example: tpucare emulator status
    """
    print_json(_request(context, {"do": "status"}))


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


_COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "preempt": preempt,
    "terminate": terminate,
    "capacity": capacity,
    "health": health,
    "state": state,
    "unknown-fields": unknown_fields,
    "maintenance": maintenance,
    "outage": outage,
    "end-outages": end_outages,
    "lose-worker": lose_worker,
    "restore-worker": restore_worker,
    "status": show_nodes,
    "order": order,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)


def _act(context: typer.Context, do: str, **values: Any) -> None:
    """Send an order without its empty values, for which the emulator has defaults."""
    _send(context, {"do": do, **{key: value for key, value in values.items() if value not in ("", None)}})


def _send(context: typer.Context, what: dict[str, Any]) -> None:
    answer = _request(context, what)
    touched = answer.get("touched")
    if touched == []:
        why = _why_nothing(str(what.get("selector")), _request(context, {"do": "status"}))
        raise CommandError(f"{what['do']}: {why}")
    if touched is None:
        values = {key: value for key, value in what.items() if key != "do" and value != ""}
        touched = [f"{key} {'none' if value is None else value}" for key, value in values.items()] or ["done"]
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
