"""`tpucare emulator`: run the cloud in a box, and act on one that runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tpucare.cli.common import Failure, emulator_folder, print_json, say


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
Run an emulated Cloud TPU service with real machines for workers, or act on a running one.

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
        typer.Argument(metavar="[WORLD.yaml]", help="A file, or `realistic`. Default: two zones with room, fast."),
    ] = None,
    port: Annotated[int, typer.Option(help="Of the API; 0 = any.", min=0, max=65535)] = 0,
    rest_port: Annotated[int, typer.Option(help="Of the API as JSON; 0 = any.", min=0, max=65535)] = 0,
    storage_port: Annotated[int, typer.Option(help="Of Cloud Storage; 0 = any.", min=0, max=65535)] = 0,
    bucket: Annotated[
        list[str] | None, typer.Option(help="A bucket that exists; may be repeated.", metavar="NAME")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same history.")] = 0,
    machines: Annotated[bool, typer.Option(help="Real sshd, home and screen per worker.")] = True,
    ssh_port: Annotated[int, typer.Option(help="Of every worker.", min=1, max=65535)] = 2222,
    metadata_port: Annotated[int, typer.Option(help="Of the metadata server.", min=1, max=65535)] = 8080,
    audit: Annotated[Path | None, typer.Option(help="Audit log: a line of JSON per call.", metavar="FILE")] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="A stand-in for W&B beside it, for offline sweeps.")] = False,
    wandb_port: Annotated[int, typer.Option(help="Of that stand-in; 0 = any.", min=0, max=65535)] = 0,
    wandb_lost_after: Annotated[
        float, typer.Option(help="Seconds of silence after which its agents and runs are lost.", min=0.1)
    ] = 60.0,
) -> None:
    """
    Serve an emulated cloud until Ctrl-C; prints the line that points tpucare at it.

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
    notice: Annotated[str, typer.Option(help="Warn this long before, such as 30s.", metavar="TIME")] = "",
    silent: Annotated[bool, typer.Option("--silent", help="Workers fall silent instead of dying.")] = False,
    shown: Annotated[str, typer.Option(help="State shown, or never, or gone.")] = "",
    visible_after: Annotated[str, typer.Option(help="The API shows it this late.", metavar="TIME")] = "",
) -> None:
    """
    Take nodes away, as the real cloud does.

    \b
    Example: tpucare emulator preempt pod-0 --notice 10s
    """
    _act(context, "preempt", selector=nodes, notice=notice, silent=silent, shown=shown, visible_after=visible_after)


def terminate(context: typer.Context, nodes: Selector) -> None:
    """
    End nodes as the 24-hour limit of preemptible ones does.

    \b
    Example: tpucare emulator terminate pod-0
    """
    _act(context, "terminate", selector=nodes)


def capacity(
    context: typer.Context,
    zone: Annotated[str, typer.Argument(help="Zone, such as us-central1-a.")],
    amount: Annotated[str, typer.Argument(help="How many chips, hosts or slices; none = unlimited.")],
    accelerator: Annotated[str, typer.Option(help="Type or generation; default: all.")] = "",
    tier: Annotated[str, typer.Option(help="spot, on-demand or reserved.")] = "spot",
) -> None:
    """
    Set the capacity of a pool from now on.

    \b
    Example: tpucare emulator capacity us-central1-a 0
    """
    if amount != "none" and not amount.isdecimal():
        raise typer.BadParameter("AMOUNT is a whole number, or none")
    many = None if amount == "none" else int(amount)
    _send(context, {"do": "capacity", "zone": zone, "accelerator": accelerator, "tier": tier, "amount": many})


def health(
    context: typer.Context,
    nodes: Selector,
    value: Annotated[
        str, typer.Argument(help="healthy, timeout, unhealthy-tensorflow, unhealthy-maintenance, or any number.")
    ],
) -> None:
    """
    Show a health value of nodes.

    \b
    Example: tpucare emulator health pod-0 unhealthy-maintenance
    """
    _act(context, "health", selector=nodes, health=value)


def state(
    context: typer.Context,
    nodes: Selector,
    value: Annotated[str, typer.Argument(help="A name such as repairing, or any number.")],
) -> None:
    """
    Show a state of nodes, known or not; their workers are not touched.

    \b
    Example: tpucare emulator state pod-0 77
    """
    _act(context, "state", selector=nodes, state=value)


def unknown_fields(
    context: typer.Context,
    nodes: Selector,
    on: Annotated[bool, typer.Option("--on/--off", help="Show them, or no more.")] = True,
    answers: Annotated[bool, typer.Option("--answers", help="In every answer of the API, too.")] = False,
) -> None:
    """
    Let nodes bear fields that no client knows, as from a service newer than it.

    \b
    Example: tpucare emulator unknown-fields pod-0 --answers
    """
    _send(context, {"do": "unknown-fields", "selector": nodes, "on": on, "answers": answers})


def maintenance(
    context: typer.Context,
    nodes: Selector,
    duration: Annotated[str, typer.Option(help="How long.", metavar="TIME")] = "5m",
    restart: Annotated[bool, typer.Option("--restart", help="Reboot the workers, too.")] = False,
) -> None:
    """
    Announce a maintenance event to workers.

    \b
    Example: tpucare emulator maintenance pod-0 --restart
    """
    _act(context, "maintenance", selector=nodes, duration=duration, restart=restart)


def outage(
    context: typer.Context,
    duration: Annotated[str, typer.Argument(help="How long, such as 90s.")],
    kind: Annotated[str, typer.Option(help="api, internal, zone or slow.")] = "api",
    zone: Annotated[str, typer.Option(help="For kind zone.")] = "",
) -> None:
    """
    Break the API, one zone of it, or its speed.

    \b
    Example: tpucare emulator outage 2m --kind zone --zone us-central1-a
    """
    _act(context, "outage", duration=duration, kind=kind, zone=zone)


def end_outages(context: typer.Context) -> None:
    """
    Let everything answer again.

    \b
    Example: tpucare emulator end-outages
    """
    _act(context, "end-outages")


def lose_worker(
    context: typer.Context,
    nodes: Selector,
    worker: Annotated[int, typer.Argument(help="Its number.", min=0)],
    silent: Annotated[bool, typer.Option("--silent", help="It falls silent instead of dying.")] = False,
) -> None:
    """
    Let one worker die; the API shows nothing.

    \b
    Example: tpucare emulator lose-worker pod-0 3
    """
    _act(context, "lose-worker", selector=nodes, worker=worker, silent=silent)


def restore_worker(
    context: typer.Context, nodes: Selector, worker: Annotated[int, typer.Argument(help="Its number.", min=0)]
) -> None:
    """
    Boot a lost worker again, or let a silent one answer.

    \b
    Example: tpucare emulator restore-worker pod-0 3
    """
    _act(context, "restore-worker", selector=nodes, worker=worker)


def status(context: typer.Context) -> None:
    """
    Every node of the running emulator, as JSON.

    \b
    Example: tpucare emulator status
    """
    print_json(_request(context, {"do": "status"}))


def order(
    context: typer.Context, text: Annotated[str, typer.Argument(metavar="JSON", help="One order; see the docs.")]
) -> None:
    """
    Send any order of the emulator as JSON, for those that have no command of their own.

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
    "status": status,
    "order": order,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)


def _act(context: typer.Context, do: str, **values: Any) -> None:
    """Values that were not given are left to the emulator's own defaults."""
    _send(context, {"do": do, **{key: value for key, value in values.items() if value not in ("", None)}})


def _send(context: typer.Context, what: dict[str, Any]) -> None:
    answer = _request(context, what)
    touched = answer.get("touched")
    if touched == []:
        raise Failure(f"{what['do']}: {_why_nothing(str(what.get('selector')), _request(context, {'do': 'status'}))}")
    if touched is None:
        told = {key: value for key, value in what.items() if key != "do" and value != ""}
        touched = [f"{key} {'none' if value is None else value}" for key, value in told.items()] or ["done"]
    say(f"{what['do']}: {', '.join(touched)}")


def _why_nothing(selector: str, status: Mapping[str, Any]) -> str:
    """Why an order touched no node: none is meant, or those that are meant are past it."""
    nodes = {row["name"]: row["state"] for row in status["nodes"]}
    patterns = (selector, f"{selector}-a*", f"{selector}-*-a*")
    meant = [name for name in nodes if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if meant:
        return ", ".join(f"{name} is {nodes[name]}" for name in meant) + ": nothing to do"
    return f"no node is called {selector}; there " + (f"are {', '.join(nodes)}" if nodes else "is none")


def _request(context: typer.Context, what: Any) -> dict[str, Any]:
    from tpucare.service import emulator_address as running
    from tpucare.testbed.emulator import control_socket as control

    return control.request(running.find(emulator_folder(context)).control, what)
