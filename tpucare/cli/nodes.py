"""Commands that reach workers with the pinned host keys and our own key, and `adopt-node`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tpucare.cli.common import ask, leave, options, print_json, say

SlotWord = Annotated[str, typer.Argument(metavar="SLOT", help="A slot; a fleet's name is its slot 0.")]
WorkerFlag = Annotated[int, typer.Option("--worker", "-w", help="Number of the host.", min=0, metavar="N")]


def ssh(context: typer.Context, slot: SlotWord, worker: WorkerFlag = 0) -> None:
    """
    Log in to a worker, or run one command there, in the home of the login user. The job runs in ~/.tpucare/work, in
    `screen -r tpucare-SLOT`. Words after the slot, except --worker, go to ssh.

    \b
    Example: tpucare ssh pod-0
    Example: tpucare ssh pod-0 --worker 3 -- htop
    Example: tpucare ssh pod-0 -L 8888:localhost:8888
    """
    from tpucare.cli.ssh import run_ssh

    number, arguments = split_worker(context.args)
    run_ssh(options(context, slot), slot, worker if number is None else number, arguments)


def split_worker(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """
    (N of `--worker N`, *words* without it and without a `--` at their beginning); words after `--` are a command.

    Raises: BadParameter: N is not a number.
    """
    end = words.index("--") if "--" in words else len(words)
    mine, rest = list(words[:end]), list(words[end:])
    found: int | None = None
    for flag in ("--worker", "-w"):
        for place, word in enumerate(mine):
            name, equals, value = word.partition("=")
            if name != flag:
                continue
            given = value if equals else "".join(mine[place + 1 : place + 2])
            if not given.isdecimal():
                raise typer.BadParameter(f"{flag} needs the number of a worker")
            found = int(given)
            del mine[place : place + (1 if equals else 2)]
            break
    return found, [*mine, *rest] if mine else rest[1:]


def ssh_config(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="[SLOT]", help="Default: every slot with a node.")] = "",
) -> None:
    """
    Print ssh_config entries (`Host SLOT`, `Host SLOT.WORKER`), for editors and rsync. They hold for the present node:
    write them again after a preemption, into a file that ~/.ssh/config includes with `Include`.

    \b
    Example: tpucare ssh-config > ~/.ssh/tpucare.config
    """
    from tpucare.cli.ssh import config_text

    say(config_text(options(context, slot), slot))


def scp(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="PATH or SLOT:PATH.")],
    target: Annotated[str, typer.Argument(help="PATH or SLOT:PATH.")],
    worker: WorkerFlag = 0,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Copy folders.")] = False,
) -> None:
    """
    Copy files to or from a worker; one of the two is SLOT:PATH. PATH is relative to the home of the login user; the job
    runs in .tpucare/work.

    \b
    Example: tpucare scp pod-0:.tpucare/work/results.json .
    Example: tpucare scp -r data pod-0:data
    """
    from tpucare.cli.ssh import run_scp

    slot = next((text.partition(":")[0] for text in (source, target) if ":" in text), "")
    run_scp(options(context, slot), source, target, worker, recursive=recursive)


def execute(
    context: typer.Context,
    slot: SlotWord,
    worker: Annotated[str, typer.Option("--worker", "-w", help="Number of a host, or all.", metavar="N|all")] = "all",
    timeout: Annotated[
        int,
        typer.Option(
            help="Seconds to wait for an answer; the command itself may go on.", min=1, max=86400, metavar="N"
        ),
    ] = 600,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Run one command, after `--`, on all workers of a slot at once; the exit status is the highest of theirs. It runs in
    the home of the login user, without the environment of the job.

    \b
    Example: tpucare exec pod-0 -- df -h /
    Example: tpucare exec pod-0 --worker 0 -- ls .tpucare/work
    """
    from tpucare.cli.ssh import run_everywhere

    words = [word for number, word in enumerate(context.args) if number or word != "--"]
    if not words:
        raise typer.BadParameter("give a command after --: tpucare exec pod-0 -- uptime")
    if worker != "all" and not worker.isdecimal():
        raise typer.BadParameter("--worker needs a number, or all")
    results = run_everywhere(options(context, slot), slot, words, worker, timeout)
    if json_out:
        print_json({"slot": slot, "workers": [result.row() for result in results]})
    else:
        for result in results:
            result.print(len(results) > 1)
    leave(max(result.status for result in results))


def adopt_node(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of an existing node.")],
    slot: SlotWord,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """
    Adopt an existing node, made by hand or by another tool, for a slot without a node: it gets our labels and our care.

    A slot requests a node of its own as soon as it is declared, except after `apply --paused`.

    \b
    Example: tpucare apply pod.yaml --paused
    Example: tpucare adopt-node my-old-tpu pod-0 && tpucare resume pod
    """
    from tpucare.service import client

    ask(f"tpucare may delete and replace {node} from now on, as any node of {slot}. Go on?", yes=yes)
    answer = client.adopt_node(options(context, slot), node, slot)
    say(f"{answer['node']} is the node of {answer['slot']}")
