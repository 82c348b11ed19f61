"""`tpucare ray`: the head of a Ray cluster, and ways to reach it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Annotated

import typer

from tpucare.cli.common import CommandError, options, print_json, say, warn
from tpucare.model.text import hint
from tpucare.service.options import expanded

# `ssh` would read a word that begins with a hyphen as an option.
_LOGIN = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""\
Run the head of a Ray cluster whose slices come and go with the demand, and reach it.

\b
Example: tpucare ray head lab
Example: eval "$(tpucare ray env lab)"
""",
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster.")]


@app.command("head", context_settings={"allow_extra_args": True})
def ray_head(
    context: typer.Context,
    name: Name,
    address: Annotated[
        str,
        typer.Option(help="Address that slices reach; default: of the default route, port 6379.", metavar="IP[:PORT]"),
    ] = "",
    python: Annotated[str, typer.Option(help="Python that has Ray; default: this one.", metavar="PATH")] = "",
    dashboard_port: Annotated[
        int, typer.Option(help="Port of dashboard and jobs on 127.0.0.1.", min=1, max=65535)
    ] = 8265,
    temp_dir: Annotated[
        str, typer.Option(help="Folder for Ray's sockets and logs, 43 bytes at most.", metavar="DIR")
    ] = "",
) -> None:
    """
    Run the head of a Ray cluster in the foreground, with a token that is made once; Ctrl-C ends it.

    The words after `--` go to `ray start`. A head that was killed may be started again: what it left is ended first.

    \b
    Example: tpucare ray head lab
    Example: tpucare ray head lab --address 10.128.0.5 --python ~/ray/bin/python -- --num-cpus 0
    """
    from datetime import UTC, datetime

    from tpucare.integrations.ray import head as heads

    state = options(context).state
    ready = heads.prepare_head(
        name,
        state=state,
        python=str(expanded(python)) if python else sys.executable,
        now=datetime.now(UTC),
        address=address,
        dashboard_port=dashboard_port,
        temp_dir=str(expanded(temp_dir)) if temp_dir else "",
        ray_words=context.args,
    )
    record = ready.record
    warn(f"cluster {name}: Ray {record.ray}, head at {record.address}; dashboard and jobs at http://{record.dashboard}")
    warn(f'to submit jobs from this machine: eval "$(tpucare ray env {name})"')
    heads.become_head(ready, state, os.environ)


@app.command("status")
def ray_status(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Default: every cluster.")] = "",
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """
    Show the pools of a cluster: slices, what is asked for, and why something is not there.

    \b
    Example: tpucare ray status lab
    """
    from tpucare.cli.render import ray_pool, ray_slice
    from tpucare.integrations.ray.cluster import checked_name
    from tpucare.service.control_socket import NoDaemon, request

    try:
        answer = request(options(context).socket, {"do": "status"})
    except NoDaemon:
        text = "no daemon runs, and only a daemon follows Ray clusters: start it with `tpucare daemon`"
        raise NoDaemon(text) from None
    known = answer["ray"]
    rows = [row for row in known if not name or row["cluster"] == checked_name(name)]
    if name and not rows:
        near = hint(name, [row["cluster"] for row in known])
        raise CommandError(f"no pool belongs to a cluster {name}: apply a fleet file with a `ray` section{near}")
    if json_out:
        print_json({"pools": rows})
        return
    slots = {row["slot"]: row for row in answer["slots"]}
    for row in rows:
        for line in ray_pool(row):
            say(line)
        for one in row["slices"]:
            if one["state"] != "resting":
                say(f"  {ray_slice(one, slots.get(one['slot'], {}))}")
    if not rows:
        say("no fleet is a pool of a Ray cluster; a fleet file with a `ray` section makes one (docs/ray.md)")


@app.command("env")
def ray_env(context: typer.Context, name: Name) -> None:
    """
    Print the variables with which `ray job submit` and the other commands of Ray's jobs reach a cluster.

    For the shell: eval "$(tpucare ray env lab)"

    \b
    Example: tpucare ray env lab
    """
    from tpucare.integrations.ray.cluster import ready_head, submit_variables

    for variable, value in submit_variables(ready_head(options(context).state, name)).items():
        typer.echo(f"export {variable}={shlex.quote(value)}")


@app.command("tunnel")
def ray_tunnel(
    context: typer.Context,
    name: Name,
    login: Annotated[str, typer.Argument(metavar="USER@HOST", help="How ssh reaches the head's machine.")] = "",
    run: Annotated[bool, typer.Option("--run", help="Run the command instead of printing it.")] = False,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of dashboard and jobs; default: the head's, else 8265.", min=1, max=65535)
    ] = None,
) -> None:
    """
    Print the `ssh -L` command that brings a cluster's dashboard and jobs to a laptop.

    On the laptop the cluster may be unknown. How to fetch its token is printed to standard error.

    \b
    Example: tpucare ray tunnel lab user@vm
    Example: tpucare ray tunnel lab user@vm --run
    """
    from tpucare.integrations.ray.cluster import read_head

    if login and not _LOGIN.fullmatch(login):
        raise CommandError(f"{login!r} is not USER@HOST")
    if run and not login:
        raise CommandError("--run needs USER@HOST, the way in which ssh reaches the head's machine")
    record = read_head(options(context).state, name)
    port = dashboard_port or (int(record.dashboard.rpartition(":")[2]) if record else 8265)
    where = login or "USER@HOST"
    words = ["ssh", "-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}", where]
    token = shlex.quote(record.token) if record else f"~/.local/state/tpucare/secrets/{_token_file(name)}"
    warn("Once, on the laptop, the token (a head of the service: `sudo cat` and its state folder, /var/lib/tpucare):")
    warn(f"  mkdir -p ~/.ray && (umask 077; ssh {where} cat {token} > ~/.ray/auth_token)")
    warn(f"Then, while the tunnel is open: export RAY_AUTH_MODE=token RAY_ADDRESS=http://127.0.0.1:{port}")
    if run:
        sys.stderr.flush()
        try:
            os.execvp(words[0], words)
        except OSError as error:
            raise CommandError(f"ssh cannot be run: {error.strerror}") from error
    say(shlex.join(words))


@app.command("demo")
def ray_demo(
    seed: Annotated[int, typer.Option(help="Seed of the emulated cloud.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object.")] = False,
    keep: Annotated[str, typer.Option(help="Keep all files in this new folder.", metavar="DIR")] = "",
) -> int:
    """
    Run a job of TPU tasks on slices that come for it, through a preemption, on an emulated cloud.

    The demo runs a real Ray head, `tpucare daemon` with a pool, and emulated hosts that run Ray. Exit 0 only if every
    task is done, exactly the slices that were asked for were created, the preempted one healed, and nothing is left.

    \b
    Example: tpucare ray demo
    """
    from rich.console import Console

    from tpucare.cli.demo import end_on_signals, require, tell
    from tpucare.testbed.demo import screen as demo_screen
    from tpucare.testbed.demo.ray_story import run_ray_demo
    from tpucare.testbed.demo.setup import DemoOptions

    require(("ray", "jax"), "make demo-ray", "demo,ray")
    end_on_signals()
    options = DemoOptions(seed=seed, keep=expanded(keep) if keep else None)
    console = Console(stderr=json, quiet=json)
    shown = demo_screen.Screen(console, options)
    with shown.shown():
        report = run_ray_demo(options, shown.follow)
    return tell(report, console, lambda: demo_screen.show_ray_report(console, report), json=json, keep=options.keep)


def _token_file(name: str) -> str:
    from tpucare.integrations.ray.cluster import token_variable

    return token_variable(name)
