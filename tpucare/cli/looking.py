"""What `status`, `events` and `logs` show: from the daemon where it knows more, else from the state folder alone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tpucare.cli.common import Failure, say
from tpucare.model import Event
from tpucare.narration import event_line
from tpucare.options import Options
from tpucare.owner import OWNER_FILE
from tpucare.plain import plain
from tpucare.words import hint, length, shown

Answer = dict[str, Any]


# --- a table ---------------------------------------------------------------------------------------------------------

_STYLES = {
    "run": "green",
    "done": "green",
    "failed": "red",
    "preempted": "yellow",
    "terminated": "yellow",
    "connecting": "yellow",
    "paused": "magenta",
    "down": "dim",
    "deleting": "dim",
}


def show(answer: Answer) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(render(answer))


def watch(look: Callable[[], Answer], seconds: float) -> None:
    """Until Ctrl-C. A daemon that stops meanwhile is shown, not fatal."""
    with contextlib.suppress(KeyboardInterrupt), Live(render(look()), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(render(look()), refresh=True)


def render(answer: Answer) -> Group:
    parts: list[Any] = [_notice(text) for text in _notices(answer)]
    if answer["slots"]:
        parts.append(_table(answer["slots"]))
    elif not answer["fleets"]:
        parts.append(Text("no slots: `tpucare apply FILE` hands a fleet over"))
    return Group(*parts)


def _notices(answer: Answer) -> list[str]:
    lines = [] if answer["daemon"] else ["no daemon runs: this is what was remembered when the last one stopped"]
    if answer["store_lost"]:
        lines.append("the store was lost: nodes are adopted, none is swept until `tpucare confirm --store`")
    lines += [f"{row['project']}: {row['why']}" for row in answer["projects"] if not row["seen"]]
    lines += [
        f"{row['project']}: zones that do not answer: {', '.join(row['unreachable'])}"
        for row in answer["projects"]
        if row["unreachable"]
    ]
    begun = {row["fleet"] for row in answer["slots"]}
    if not answer["daemon"]:
        waiting = [row["fleet"] for row in answer["fleets"] if row["fleet"] not in begun and row["wish"] != "down"]
        lines += [f"{fleet}: accepted; it begins when a daemon runs" for fleet in waiting]
    lines += [f"{row['fleet']}: {row['problem']}" for row in answer["fleets"] if row["problem"]]
    lines += [row["problem"] for row in answer.get("files", ())]
    lines += [_sweep(row) for row in answer.get("sweeps", ())]
    if answer["strays"]:
        lines.append(f"{len(answer['strays'])} nodes bear our label and belong to no fleet: `tpucare gc`")
    return lines


def _sweep(row: Answer) -> str:
    known = f"{row['text']} ({length(row['age_seconds'])} ago)" if "text" in row else "not heard of yet"
    return f"{row['fleet']} works for sweep {row['sweep']}: " + "; ".join(filter(None, (known, row["problem"])))


def _notice(text: str) -> Text:
    return Text(plain(text), style="yellow")


def _table(rows: Sequence[Answer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("slot", "phase", "node", "place", "attempt", "step", "books", "why"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("slot", "phase"))
    for row in rows:
        cells = (row["slot"], row["phase"], _node(row), _place(row), str(row["attempt"]), _step(row), _books(row))
        styles = ("bold", _STYLES.get(row["phase"], ""), "", "", "", "", "")
        why = Text(plain(row["end_why"] or row["why"]), style="red" if row["needs_person"] else "")
        table.add_row(*(Text(plain(cell), style=style) for cell, style in zip(cells, styles, strict=True)), why)
    return table


def _node(row: Answer) -> str:
    if row["workers"] > 1:
        return f"{row['node']} {row['workers_answering']}/{row['workers']}"
    return str(row["node"])


def _place(row: Answer) -> str:
    return " ".join(part for part in (row["zone"], row["type"], row["tier"]) if part)


def _step(row: Answer) -> str:
    if row["step"] is None:
        return "no progress signal" if row["phase"] == "run" else ""
    age = row["step_age_seconds"]
    return str(row["step"]) + (f" ({length(age)} ago)" if age is not None else "")


def _books(row: Answer) -> str:
    """`crash 2/5`: two in a row, five in all."""
    return ", ".join(
        f"{name} {book['failures']}/{book['total']}" if book["failures"] else f"{name} {book['total']}"
        for name, book in row["books"].items()
        if book["total"]
    )


# --- events ----------------------------------------------------------------------------------------------------------


def events(options: Options, slot: str, *, follow: bool, number: int, as_json: bool, all_levels: bool) -> None:
    """Raises: StoreError: there is no store. Failure: nothing is known of *slot*, and nothing ever was."""
    from tpucare.desk import event_row
    from tpucare.store import open_reader

    def tell(found: Sequence[tuple[int, Event]]) -> None:
        _print_events([event_row(*pair) for pair in found if all_levels or pair[1].level != "debug"], as_json)

    with open_reader(options.state, name=options.store) as store:
        found = store.last_events(slot=slot, limit=number) if number else []
        if slot and not store.last_events(slot=slot, limit=1):
            refuse_unknown(slot, [*store.fleets(), *store.memories()])
        last = found[-1][0] if found else _newest_number(store)
        tell(found)
        while follow:
            time.sleep(0.5)
            store.refresh()
            while found := store.events(slot=slot, after=last):
                tell(found)
                last = found[-1][0]


def refuse_unknown(word: str, known: Sequence[str]) -> None:
    """Raises: Failure: *word* is no fleet or slot of *known*."""
    if word not in known:
        raise Failure(f"no fleet or slot {shown(word)}" + (hint(word, known) if known else "; no fleet is known yet"))


def is_untouched(options: Options) -> bool:
    """Whether nothing was ever cared for from this state folder."""
    return not any(options.state.glob("*.sqlite")) and not (options.state / OWNER_FILE).exists()


NOTHING_YET = (
    "nothing yet in {folder}: `tpucare init -o pod.yaml` writes a fleet file, `tpucare apply pod.yaml` hands it over"
)


def _newest_number(store: Any) -> int:
    newest = store.last_events(limit=1)
    return newest[-1][0] if newest else 0


def _print_events(rows: Sequence[Answer], as_json: bool) -> None:
    for row in rows:
        if as_json:
            typer.echo(json.dumps(row, ensure_ascii=False))
        else:
            say(event_line(datetime.fromisoformat(row["at"]).astimezone(), row["level"], row["slot"], row["text"]))
