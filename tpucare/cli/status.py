"""Commands that only look: status, events, logs; and `gc`, which looks for what nobody cares for."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tpucare.cli.common import Exit, ask, leave, options, print_json, say, warn
from tpucare.model.text import counted

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
REFRESH_SECONDS = 1.0


def status(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: everything.")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it live until q or Ctrl-C.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only slots that failed or need a person.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Every column, and every reason in full.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Every slot on a line: phase, node, place, attempt, step and its age, newest checkpoint, failures, and why it waits.
    What needs a person stands first; waiting slots of a fleet that say the same are one line.

    \b
    Example: tpucare status
    Example: tpucare status pod --watch
    """
    from tpucare.cli import render as looking
    from tpucare.service import status as service_status
    from tpucare.service.stores import Stores

    chosen = options(context)
    if not json_out and Stores(chosen).is_unused():
        say(looking.NOTHING_YET.format(folder=chosen.state))
        return

    def look() -> dict[str, Any]:
        answer = service_status.status(chosen, target)
        return {**answer, "slots": [row for row in answer["slots"] if row["needs_person"] or not failed]}

    if not watch:
        print_json(look()) if json_out else looking.show(look(), wide=wide)
    elif json_out:
        while True:
            print_json(look())
            time.sleep(REFRESH_SECONDS)
    else:
        looking.watch(look, REFRESH_SECONDS, wide=wide)


def events(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: everything.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    number: Annotated[
        int, typer.Option("--number", "-n", help="How many of the last ones.", min=0, max=100_000, metavar="N")
    ] = 50,
    everything: Annotated[bool, typer.Option("--all", help="Those of level debug, too.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """
    Show past events, oldest first: what was seen, decided and done. Needs no daemon.

    \b
    Example: tpucare events pod-0 --follow
    Example: tpucare events --number 1000 --json
    """
    from tpucare.cli import render as looking

    looking.events(options(context, slot), slot, follow=follow, number=number, as_json=json_out, all_levels=everything)


def logs(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="A slot; a fleet's name is its slot 0.")],
    attempt: Annotated[
        int | None, typer.Option("--attempt", "-a", help="Default: the last.", min=1, metavar="N")
    ] = None,
    worker: Annotated[int, typer.Option("--worker", "-w", help="Which host of the slice.", min=0, metavar="N")] = 0,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only the last lines.", min=0, metavar="N")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as it grows, over attempts too, until the slot ends.")
    ] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List what is kept: attempt, node, workers, time.")] = False,
) -> None:
    """
    What the job printed, also of nodes that are gone. Newest part comes with each probe (15 s).

    \b
    Example: tpucare logs pod-0 --attempt 3
    Example: tpucare logs pod --follow --tail 20
    """
    from tpucare.cli import logs as printed

    chosen = options(context, slot)
    keeper, name = printed.log_keeper(chosen, slot)
    if list_them:
        for line in printed.kept(keeper, name):
            say(line)
        return
    if not follow or attempt is not None:
        printed.refuse_unkept(keeper, name, attempt, worker)
    shown = printed.Tail(keeper, name, attempt, worker, tail)
    if follow:
        printed.follow(shown, chosen, REFRESH_SECONDS)
    else:
        shown.show()


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
    from tpucare.service import client

    chosen = options(context)
    answer = client.find_orphans(chosen)
    if apply and answer["strays"]:
        names = ", ".join(row["node"] for row in answer["strays"])
        # While the store is lost it is refused; nobody need say yes to that.
        ask(f"Delete {counted(len(answer['strays']), 'node')} ({names})?", yes=yes or answer["store_lost"])
        answer = client.delete_orphans(chosen)
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
