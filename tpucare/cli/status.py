"""Commands that only show: status, events, logs; and `gc`, which finds orphan nodes."""

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
    target: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: every slot.")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until q or Ctrl-C.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only slots that failed or need a person.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="All columns, and reasons in full.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Show every slot on a line: phase, node, place, attempt, step and its age, newest checkpoint, failures, and why it
    waits. Slots that need a person come first; waiting slots of a fleet with the same reason share a line.

    \b
    Example: tpucare status
    Example: tpucare status pod --watch
    """
    from tpucare.cli import render
    from tpucare.service import status as service_status
    from tpucare.service.stores import Stores

    chosen = options(context)
    if not json_out and Stores(chosen).is_unused():
        say(render.NOTHING_YET.format(folder=chosen.state))
        return

    def read() -> dict[str, Any]:
        answer = service_status.status(chosen, target)
        return {**answer, "slots": [row for row in answer["slots"] if row["needs_person"] or not failed]}

    if not watch:
        print_json(read()) if json_out else render.show(read(), wide=wide)
    elif json_out:
        while True:
            print_json(read())
            time.sleep(REFRESH_SECONDS)
    else:
        render.watch(read, REFRESH_SECONDS, wide=wide)


def events(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="Default: every event.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones.")] = False,
    number: Annotated[
        int, typer.Option("--number", "-n", help="Number of past events.", min=0, max=100_000, metavar="N")
    ] = 50,
    everything: Annotated[bool, typer.Option("--all", help="Also those of level debug.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """
    Show past events, oldest first: observations, decisions and actions. Needs no daemon.

    \b
    Example: tpucare events pod-0 --follow
    Example: tpucare events --number 1000 --json
    """
    from tpucare.cli import render

    render.show_events(
        options(context, slot), slot, follow=follow, number=number, as_json=json_out, all_levels=everything
    )


def logs(
    context: typer.Context,
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="A slot; a fleet's name is its slot 0.")],
    attempt: Annotated[
        int | None, typer.Option("--attempt", "-a", help="Attempt; default: the last.", min=1, metavar="N")
    ] = None,
    worker: Annotated[int, typer.Option("--worker", "-w", help="Number of the host.", min=0, metavar="N")] = 0,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only the last N lines.", min=0, metavar="N")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, over attempts, until the slot ends.")
    ] = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="List the kept logs: attempt, node, workers, time.")
    ] = False,
) -> None:
    """
    Print the job's output, also from nodes that are gone. New lines come with each probe (every 15 s).

    \b
    Example: tpucare logs pod-0 --attempt 3
    Example: tpucare logs pod --follow --tail 20
    """
    from tpucare.cli import logs as kept_logs

    chosen = options(context, slot)
    keeper, name = kept_logs.log_keeper(chosen, slot)
    if list_them:
        for line in kept_logs.kept(keeper, name):
            say(line)
        return
    if not follow or attempt is not None:
        kept_logs.refuse_unkept(keeper, name, attempt, worker)
    shown = kept_logs.Tail(keeper, name, attempt, worker, tail)
    if follow:
        kept_logs.follow(shown, chosen, REFRESH_SECONDS)
    else:
        shown.show()


def gc(
    context: typer.Context,
    apply: Annotated[bool, typer.Option("--apply", help="Delete them; asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    List nodes and queued resources with our owner label that belong to no known fleet; `--apply` deletes them.

    \b
    Example: tpucare gc
    Example: tpucare gc --apply
    """
    from tpucare.service import client

    chosen = options(context)
    answer = client.find_orphans(chosen)
    if apply and answer["strays"]:
        names = ", ".join(row["node"] for row in answer["strays"])
        # With a lost store the delete is refused anyway: no question.
        ask(f"Delete {counted(len(answer['strays']), 'node')} ({names})?", yes=yes or answer["store_lost"])
        answer = client.delete_orphans(chosen)
    if json_out:
        print_json(answer)
    else:
        _print_orphans(answer)
    if answer["unseen_projects"] or answer.get("unseen_queues", []) or answer["unreachable"]:
        leave(Exit.CLOUD)


def _print_orphans(answer: dict[str, Any]) -> None:
    """The orphans, and the projects and zones that were not listed; "no orphans" only if all were."""
    for row in answer["strays"]:
        doing = "delete requested" if row["node"] in answer["deleting"] else row["state"]
        say(f"{row['node']} in {row['zone']}: {row['type']}, fleet {row['fleet'] or '?'}: {doing}")
    for row in answer["adopted"]:
        warn(
            f"{row['node']} in {row['zone']}: was adopted, and has no fleet now; gc never deletes it: use "
            "`tpucare adopt-node` or gcloud"
        )
    for project in answer["unseen_projects"]:
        warn(f"{project}: not checked, its nodes could not be listed")
    for project in answer.get("unseen_queues", []):
        warn(f"{project}: not checked for queued resources, they could not be listed")
    for zone in answer["unreachable"]:
        warn(f"{zone}: not checked, the zone does not answer")
    if answer["store_lost"]:
        warn("the store was lost: `gc --apply` is refused until `tpucare confirm --store`")
    if answer["strays"]:
        if not answer["deleting"] and not answer["store_lost"]:
            say("`tpucare gc --apply` deletes them")
    elif not (answer["unseen_projects"] or answer.get("unseen_queues", []) or answer["unreachable"]):
        say(f"no orphan nodes in {', '.join(answer['projects'])}")
