"""Text of `status` and `events` for a terminal, made from the answers of `service/status.py` and from the store."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tpucare.cli.common import CommandError, bounds_line, say, work_line
from tpucare.model.actions import event_line
from tpucare.model.errors import TpuCareError
from tpucare.model.resources import Event
from tpucare.model.text import counted, hint, length, plain, shown
from tpucare.service.options import Options

Answer = dict[str, Any]


# --- the screen of status --------------------------------------------------------------------------------------------

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
_COLUMNS = ("slot", "phase", "node", "place", "attempt", "step", "checkpoint", "failures", "why")
# Columns in the order in which a narrow screen loses them, so that the reason keeps _REASON_LEAST characters.
_DROPPED_FIRST = ("place", "attempt", "checkpoint", "node", "failures")
_REASON_LEAST = 48
_GAP = "  "
# Slots without a node in these phases share a line if they have the same reason.
_FOLDED = ("waiting", "done", "down", "paused")
_SUMMED = {
    "run": "train",
    "waiting": "wait",
    **dict.fromkeys(("creating", "booting", "connecting", "ready", "fetch", "setup"), "on the way"),
}
_ATTENTION_AT_MOST = 6
_TEXT_LIMIT = 200
NEEDS_YOU = "needs you"


def show(answer: Answer, *, wide: bool = False) -> None:
    """Print a status. wide: all columns and reasons in full, for any width; always so for a pipe."""
    console = Console(highlight=False)
    for line in picture(answer, 0 if wide or not console.is_terminal else console.width):
        console.print(line, soft_wrap=True)


def watch(read: Callable[[], Answer], seconds: float, *, wide: bool = False) -> None:
    """Refresh until `q` or Ctrl-C. An error of *read* appears below the last status."""
    console = Console(highlight=False)
    answer, problem = read(), ""

    def drawn() -> Group:
        lines = [*picture(answer, 0 if wide else console.width), *([_notice(problem)] if problem else [])]
        return Group(*lines, Text("q: quit", style="dim"))

    with contextlib.suppress(KeyboardInterrupt), keys() as pressed, Live(drawn(), auto_refresh=False) as live:
        while pressed(seconds) != "q":
            try:
                answer, problem = read(), ""
            except TpuCareError as error:
                problem = str(error)
            live.update(drawn(), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for a key and returns it; without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield _asleep
        return
    import select
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)

        def wait(seconds: float) -> str:
            readable, _, _ = select.select([handle], [], [], seconds)
            return os.read(handle, 1).decode("ascii", "replace") if readable else ""

        yield wait
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _asleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def picture(answer: Answer, width: int) -> list[Text]:
    """Lines of the screen: number of slots by phase, notices, then a line per slot. width: 0 = no limit"""
    rows: list[Answer] = answer["slots"]
    at = datetime.fromisoformat(answer["at"]).astimezone()
    lines = [_notice(text) for text in _notices(answer)]
    if rows:
        lines = [Text(f"{_summary(rows)}   {at:%H:%M:%S %Z}", style="bold"), *lines, *_attention(rows)]
        lines += _table(sorted(rows, key=lambda row: not row["needs_person"]), width)
    else:
        lines.append(Text(_nothing(answer)))
    return lines


def _nothing(answer: Answer) -> str:
    down = sorted(row["fleet"] for row in answer["fleets"] if row["wish"] == "down")
    if down and len(down) == len(answer["fleets"]):
        return f"no fleet is up; down: {', '.join(down)}; `tpucare apply FILE` starts a fleet again"
    return "" if answer["fleets"] else "no slots: `tpucare apply FILE` starts a fleet"


def _summary(rows: Sequence[Answer]) -> str:
    counts = Counter(_SUMMED.get(row["phase"], row["phase"]) for row in rows)
    fleets = len({row["fleet"] for row in rows})
    parts = [f"{counts.pop('train', 0)} train", *(f"{count} {word}" for word, count in counts.most_common())]
    if people := sum(row["needs_person"] for row in rows):
        parts.append(f"{people} need{'s' if people == 1 else ''} you")
    return f"{counted(fleets, 'fleet')}, {counted(len(rows), 'slot')}: {', '.join(parts)}"


def _notices(answer: Answer) -> list[str]:
    lines = [_absence(answer)] if answer.get("suspended") or not answer["daemon"] else []
    if answer["store_lost"]:
        lines.append("the store was lost: nodes are adopted, orphans are kept until `tpucare confirm --store`")
    lines += [f"{row['project']}: {row['why']}" for row in answer["projects"] if not row["seen"]]
    lines += [
        f"{row['project']}: zones that do not answer: {', '.join(row['unreachable'])}"
        for row in answer["projects"]
        if row["unreachable"]
    ]
    begun = {row["fleet"] for row in answer["slots"]}
    if not answer["daemon"]:
        waiting = [row["fleet"] for row in answer["fleets"] if row["fleet"] not in begun and row["wish"] != "down"]
        lines += [f"{fleet}: accepted; it starts once a daemon runs" for fleet in waiting]
    lines += [f"{row['fleet']}: {row['problem']}" for row in answer["fleets"] if row["problem"]]
    lines += [work_line(row["slot"], row["work"]) for row in _furthest_behind(answer["slots"])]
    costs = ((row["fleet"], row.get("cost")) for row in answer["fleets"] if row["wish"] != "down")
    lines += [line for fleet, cost in costs if cost and (line := bounds_line(fleet, cost))]
    lines += [row["problem"] for row in answer.get("files", ())]
    lines += [_sweep(row) for row in answer.get("sweeps", ())]
    lines += [line for row in answer.get("ray", ()) for line in ray_pool(row)]
    if answer["strays"]:
        lines.append(f"{counted(len(answer['strays']), 'node')} with our label, but without a fleet: `tpucare gc`")
    return lines


def _furthest_behind(rows: Sequence[Answer]) -> list[Answer]:
    """Of each fleet with a deadline the slot that is furthest behind its line."""
    worst: dict[str, Answer] = {}
    for row in (row for row in rows if row.get("work") and not row["end"]):
        known, behind = worst.get(row["fleet"]), row["work"]["hours_due"] - row["work"]["hours"]
        if known is None or behind > known["work"]["hours_due"] - known["work"]["hours"]:
            worst[row["fleet"]] = row
    return list(worst.values())


def _absence(answer: Answer) -> str:
    if suspended := answer.get("suspended"):
        return f"{suspended}; the last known state of its slots is below"
    since = ""
    if answer.get("last_event"):
        last = datetime.fromisoformat(answer["last_event"]).astimezone()
        since = f" since {last:%Y-%m-%d %H:%M %Z}" + ("" if answer.get("stopped") else " (killed?)")
    return f"no daemon runs{since}; the last known state is below. Start it with `tpucare daemon`"


def _sweep(row: Answer) -> str:
    known = f"{row['text']} ({length(row['age_seconds'])} ago)" if "text" in row else "W&B has not answered yet"
    return f"{row['fleet']} works for sweep {row['sweep']}: " + "; ".join(filter(None, (known, row["problem"])))


def ray_pool(row: Answer) -> list[str]:
    """One line for a pool of a Ray cluster, and one for each demand that it cannot satisfy."""
    bounds = f"{row['min']} to {row['max']}" if row["min"] != row["max"] else str(row["max"])
    counts = f"{row['awake']} awake of {bounds}, {row['joined']} joined"
    if row["busy_hosts"]:
        counts = f"{counts}, {counted(row['busy_hosts'], 'host')} at work"
    known = ""
    if row["age_seconds"] is not None:
        known = f"asked for: {row['asked'] or 'nothing'} ({length(row['age_seconds'])} ago)"
    elif row["head"] and not row["problem"]:
        known = f"the head at {row['head']} has not answered yet"
    parts = "; ".join(filter(None, (counts, known, row["problem"])))
    return [f"{row['fleet']}, pool of {row['cluster']}: {parts}", *row["unmet"]]


def ray_slice(one: Answer, slot: Answer) -> str:
    """A slice of a pool, with what its slot waits for while hosts are missing."""
    where = " ".join(filter(None, (slot.get("node", ""), slot.get("zone", ""))))
    waits = slot.get("why", "") if one["state"] != "joined" else ""
    if one.get("stuck"):
        waits = "; ".join(filter(None, (waits, "other pools that fit serve meanwhile")))
    return ": ".join(filter(None, (f"{one['slot']} {one['state']}" + (f" ({where})" if where else ""), waits)))


def _notice(text: str) -> Text:
    return Text(plain(text), style="yellow")


def _attention(rows: Sequence[Answer]) -> list[Text]:
    """Slots that need a person, with the reason and the command that helps; slots with one reason share a line."""
    groups: dict[str, list[Answer]] = {}
    for row in rows:
        if row["needs_person"]:
            groups.setdefault(_need(row), []).append(row)
    lines = [f"! {_names(group)} {need}" for need, group in groups.items()]
    more = len(lines) - _ATTENTION_AT_MOST
    if more > 0:
        lines = [*lines[:_ATTENTION_AT_MOST], f"! and {more} more: `tpucare status --failed`"]
    return [Text(plain(line), style="red") for line in lines]


def _need(row: Answer) -> str:
    if row["end"] != "failed":
        waits = _waits(row)
        return _short(waits) if waits and _is_blocked(row) else f"{NEEDS_YOU}: {_short(waits or row['why'])}"
    why, last = row["end_why"], row.get("last_line", "")
    parts = [f"failed: {why}" + (f": {_short(last)}" if last and last not in why else "")]
    if row.get("kept_until"):
        parts.append(f"node kept until {datetime.fromisoformat(row['kept_until']).astimezone():%H:%M %Z}")
    return "; ".join([*parts, f"`tpucare logs {row['slot']}`, then `tpucare retry {row['slot']}`"])


def _table(rows: Sequence[Answer], width: int) -> list[Text]:
    groups = _folded(rows) if width else [[row] for row in rows]
    cells = [dict(zip(_COLUMNS, _cells(group), strict=True)) for group in groups]
    columns = [name for name in _COLUMNS if name in ("slot", "why") or any(cell[name] for cell in cells)]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in columns}
    for name in _DROPPED_FIRST if width else ():
        if width - sum(widths[one] + len(_GAP) for one in columns if one != "why") < _REASON_LEAST and name in columns:
            columns.remove(name)
    lines = [Text(_line({name: name for name in columns}, columns, widths, width), style="dim")]
    for group, cell in zip(groups, cells, strict=True):
        line = Text(_line(cell, columns, widths, width), no_wrap=True, overflow="crop")
        end = widths["slot"] + len(_GAP)
        line.stylize("bold", 0, widths["slot"])
        if "phase" in columns:
            line.stylize(_STYLES.get(group[0]["phase"], ""), end, end + widths["phase"])
        if group[0]["needs_person"]:
            line.stylize("red", len(line.plain) - len(line.plain.rpartition(_GAP)[2]))
        lines.append(line)
    return lines


def _line(cell: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], width: int) -> str:
    line = _GAP.join(cell[name].ljust(widths[name]) for name in columns).rstrip()
    return line if not width or len(line) <= width else line[: width - 1] + "…"


def _folded(rows: Sequence[Answer]) -> list[list[Answer]]:
    """Rows in groups: those of one fleet without a node and with the same reason together."""
    groups: dict[tuple[object, ...], list[Answer]] = {}
    for row in rows:
        alone = row["node"] or row["phase"] not in _FOLDED
        key = (row["slot"],) if alone else (row["fleet"], row["phase"], row["needs_person"], _cause(row))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cause(row: Answer) -> str:
    """Why a slot waits, without the time of its next try."""
    return _waits(row, with_next=False) or str(row["end_why"] or row["why"])


def _cells(group: Sequence[Answer]) -> tuple[str, ...]:
    row = group[0]
    if len(group) == 1:
        checkpoint = "" if row["checkpoint"] is None else str(row["checkpoint"])
        attempt = str(row["attempt"] or "")
        texts = (row["phase"], _node(row), _place(row), attempt, _step(row), checkpoint, _failures(row), _why(row))
    else:
        soonest = min(group, key=lambda one: _next_try(one) or 0.0)
        texts = (f"{row['phase']} {len(group)}", "", "", "", "", "", "", _why(soonest))
    return (_names(group), *(plain(text) for text in texts))


def _names(group: Sequence[Answer]) -> str:
    """`pod-3`, or `pod-1..4`, or `pod-1, 3, 7`."""
    if len(group) == 1:
        return str(group[0]["slot"])
    indices = sorted(int(row["slot"].rpartition("-")[2]) for row in group if row["slot"].rpartition("-")[2].isdecimal())
    fleet = str(group[0]["fleet"])
    if len(indices) != len(group) or len({row["fleet"] for row in group}) > 1:
        return ", ".join(str(row["slot"]) for row in group)
    if indices == list(range(indices[0], indices[-1] + 1)):
        return f"{fleet}-{indices[0]}..{indices[-1]}"
    named = ", ".join(map(str, indices[:4])) + (", …" if len(indices) > 4 else "")
    return f"{fleet}-{named}"


def _node(row: Answer) -> str:
    if row["workers"] > 1:
        return f"{row['node']} {row['workers_answering']}/{row['workers']}"
    return str(row["node"])


def _place(row: Answer) -> str:
    return " ".join(part for part in (row["zone"], row["type"], row["tier"]) if part)


def _step(row: Answer) -> str:
    if row["step"] is None:
        return ""
    age = row["step_age_seconds"]
    return str(row["step"]) + (f" ({length(age)} ago)" if age is not None else "")


def _failures(row: Answer) -> str:
    """`crash 2 (5 in all)`: two in a row; `preemption 3`: none in a row, or a kind without a failure budget."""
    parts = []
    for name, counter in row["books"].items():
        streak, total = counter["failures"], counter["total"]
        if total:
            parts.append(f"{name} {streak} ({total} in all)" if streak and streak != total else f"{name} {total}")
    return ", ".join(parts)


def _why(row: Answer) -> str:
    marks = []
    if row.get("surplus"):
        marks.append(f"no longer declared: `tpucare down {row['slot']}` ends it")
    if "job" in row.get("behind", ()):
        marks.append("runs the job before the edit: `apply --restart` changes it now")
    if "tpu" in row.get("behind", ()):
        marks.append("not the declared TPU: `apply --replace` changes it now")
    last = row.get("last_line", "") if row["end"] == "failed" else ""
    text = _waits(row) or str(row["end_why"] or row["why"])
    return "; ".join([*marks, text + (f": {last}" if last and last not in text else ""), *_saves(row), *_way(row)])


def _saves(row: Answer) -> list[str]:
    """How often a run saves that follows the advice, and what the usual interval would cost."""
    told = row.get("cadence")
    if not told or not told["followed"] or row["phase"] != "run":
        return []
    every, lost, usual = told["interval_seconds"], told["lost_minutes_a_day"], told["usual_minutes_a_day"]
    return [f"saves each {length(every)} (costs {lost:.0f} min a day, each 30 min {usual:.0f})"]


def _way(row: Answer) -> list[str]:
    """How the run came to its environment, before its first step is told."""
    made = row.get("preparation")
    return [made["text"]] if made and made["text"] and row["phase"] == "run" and row["step_age_seconds"] is None else []


def _waits(row: Answer, *, with_next: bool = True) -> str:
    """The refusals of places in a few words, blocked places first; empty if the slot does not wait for a place."""
    if not row.get("waits_for_place"):
        return ""
    kinds: dict[str, list[str]] = {}
    for key, place in sorted(row["places"].items(), key=lambda entry: not entry[1]["blocked"]):
        if place["retry_in_seconds"] or place["blocked"]:
            word = f"{NEEDS_YOU}: {_short(place['reason'])}" if place["blocked"] else place["kind"] or "refused"
            kinds.setdefault(word, []).append(key.partition("/")[0])
    text = "; ".join(f"{word} in {', '.join(dict.fromkeys(zones))}" for word, zones in kinds.items())
    soon = _next_try(row)
    return text + (f", next try in {length(soon)}" if text and with_next and soon is not None else "")


def _is_blocked(row: Answer) -> bool:
    return any(place["blocked"] for place in row["places"].values())


def _next_try(row: Answer) -> float | None:
    return min(
        (place["retry_in_seconds"] for place in row["places"].values() if place["retry_in_seconds"]), default=None
    )


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 1] + "…"


# --- events ----------------------------------------------------------------------------------------------------------


def show_events(options: Options, slot: str, *, follow: bool, number: int, as_json: bool, all_levels: bool) -> None:
    """Print events. Raises: StoreError: there is no store. CommandError: *slot* is unknown and has no events."""
    from tpucare.adapters.state.store import open_reader
    from tpucare.service.commands import event_row

    def show_found(found: Sequence[tuple[int, Event]]) -> None:
        _print_events([event_row(*pair) for pair in found if all_levels or pair[1].level != "debug"], as_json)

    with open_reader(options.state, name=options.store) as store:
        found = store.last_events(slot=slot, limit=number) if number else []
        if slot and not store.last_events(slot=slot, limit=1):
            refuse_unknown(slot, [*store.fleets(), *store.memories()])
        last = found[-1][0] if found else _newest_number(store)
        show_found(found)
        while follow:
            time.sleep(0.5)
            store.refresh()
            while found := store.events(slot=slot, after=last):
                show_found(found)
                last = found[-1][0]


def refuse_unknown(word: str, known: Sequence[str]) -> None:
    """Raises: CommandError: *word* is not a fleet or slot of *known*."""
    if word not in known:
        near = hint(word, known) if known else "; no fleet is known yet"
        raise CommandError(f"no fleet or slot {shown(word)}{near}")


NOTHING_YET = "no fleet yet in {folder}: `tpucare init -o pod.yaml` writes a file, `tpucare apply pod.yaml` starts it"


def _newest_number(store: Any) -> int:
    newest = store.last_events(limit=1)
    return newest[-1][0] if newest else 0


def _print_events(rows: Sequence[Answer], as_json: bool) -> None:
    for row in rows:
        if as_json:
            typer.echo(json.dumps(row, ensure_ascii=False))
        else:
            say(event_line(datetime.fromisoformat(row["at"]).astimezone(), row["level"], row["slot"], row["text"]))
