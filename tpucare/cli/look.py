"""Commands that only look: status, events, logs; and `gc`, which looks for what nobody cares for."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tpucare.cli.common import Exit, Failure, ask, leave, options, print_json, say, warn

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
REFRESH_SECONDS = 1.0


def status(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: everything.")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it live until Ctrl-C.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Every slot: node, place, phase, attempt, step and its age, books, and why it waits.

    \b
    Example: tpucare status
    Example: tpucare status pod --watch
    """
    from tpucare import overview
    from tpucare.cli import looking

    chosen = options(context)
    if not watch:
        answer = overview.status(chosen, target)
        print_json(answer) if json_out else looking.show(answer)
    elif json_out:
        while True:
            print_json(overview.status(chosen, target))
            time.sleep(REFRESH_SECONDS)
    else:
        looking.watch(lambda: overview.status(chosen, target), REFRESH_SECONDS)


def events(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: everything.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", help="How many of the last ones.", min=0, max=100_000)] = 50,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """
    The story so far, oldest first: what was seen, decided and done. Needs no daemon.

    \b
    Example: tpucare events pod-0 --follow
    Example: tpucare events --number 1000 --json
    """
    from tpucare.cli import looking

    looking.events(options(context, slot), slot, follow=follow, number=number, as_json=json_out)


def logs(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="A slot; a fleet's name is its slot 0.")],
    attempt: Annotated[int, typer.Option("--attempt", "-a", help="Default: the last.", min=0)] = 0,
    worker: Annotated[int, typer.Option("--worker", "-w", help="Which host of the slice.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows, over attempts too.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List attempts and workers that are kept.")] = False,
) -> None:
    """
    What the job printed, also of nodes that are gone. Newest part comes with each probe (15 s).

    \b
    Example: tpucare logs pod-0 --attempt 3
    Example: tpucare logs pod --follow
    """
    from tpucare.cli import looking

    chosen = options(context)
    keeper, name = looking.log_keeper(chosen, slot)
    kept = keeper.attempts(name)
    if list_them:
        for number, workers in kept.items():
            say(f"attempt {number}: workers {', '.join(map(str, workers))}")
    elif follow:
        looking.follow_log(keeper, name, attempt or None, worker, REFRESH_SECONDS)
    elif not kept or (attempt and attempt not in kept):
        had = f"; kept are {', '.join(map(str, kept))}" if kept else "; it has not printed anything yet"
        raise Failure(f"no log of {name}" + (f", attempt {attempt}" if attempt else "") + had)
    else:
        typer.echo(looking.log_text(keeper.read(name, attempt or max(kept), worker)), nl=False)


def gc(
    context: typer.Context,
    apply: Annotated[bool, typer.Option("--apply", help="Delete them; asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    List nodes that bear our owner label and belong to no fleet we know; `--apply` deletes them.

    \b
    Example: tpucare gc
    Example: tpucare gc --apply
    """
    from tpucare.cli import claiming

    chosen = options(context)
    answer = claiming.find(chosen)
    if apply and answer["strays"]:
        names = ", ".join(row["node"] for row in answer["strays"])
        # While the store is lost it is refused; nobody need say yes to that.
        ask(f"Delete {len(answer['strays'])} nodes ({names})?", yes=yes or answer["store_lost"])
        answer = claiming.sweep(chosen)
    if json_out:
        print_json(answer)
    else:
        _tell_strays(answer)
    if answer["unseen_projects"] or answer["unreachable"]:
        leave(Exit.CLOUD)


def _tell_strays(answer: dict[str, Any]) -> None:
    """What is there, and of what it is not known; "none" is said only where everything was looked at."""
    for row in answer["strays"]:
        doing = "delete asked for" if row["node"] in answer["deleting"] else row["state"]
        say(f"{row['node']} in {row['zone']}: {row['type']}, fleet {row['fleet'] or '?'}: {doing}")
    for row in answer["adopted"]:
        warn(f"{row['node']} in {row['zone']}: adopted once, of no fleet now; gc leaves it to `adopt-node` or gcloud")
    for project in answer["unseen_projects"]:
        warn(f"{project}: not looked, it could not be listed")
    for zone in answer["unreachable"]:
        warn(f"{zone}: not looked, the zone does not answer")
    if answer["store_lost"]:
        warn("the store was lost: `gc --apply` is refused until `tpucare confirm --store`")
    if answer["strays"]:
        if not answer["deleting"] and not answer["store_lost"]:
            say("`tpucare gc --apply` deletes them")
    elif not (answer["unseen_projects"] or answer["unreachable"]):
        say(f"no stray nodes in {', '.join(answer['projects'])}")
