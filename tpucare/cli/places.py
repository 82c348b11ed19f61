"""The command `places`, and the lines of `plan` and `apply` that say in which order a fleet asks its places."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tpucare.cli.common import options, print_json, say
from tpucare.model.text import counted, length

_GAP = "  "
Row = Mapping[str, Any]


def places(
    context: typer.Context,
    fleet: Annotated[str, typer.Argument(metavar="[FLEET]", help="Default: every fleet that is up.")] = "",
    record: Annotated[
        Path | None,
        typer.Option(help="Write what was seen, one file per zone, for `simulate --traces`.", metavar="DIR"),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Show what the project learned of each place, what it is worth, and why it is next. Needs no daemon.

    Creates, stockouts, nodes and lives of all fleets and scripts of the state folder count; they halve in weight every
    few days. A life counts those of nodes that still live.

    \b
    Example: tpucare places
    Example: tpucare places pod --json
    Example: tpucare places --record recordings
    """
    if record is not None:
        from tpucare.service.recordings import record_places, told_row

        rows = record_places(options(context), record)
        if json_out:
            print_json({"files": rows})
        for row in () if json_out else rows:
            say(told_row(row))
        return
    from tpucare.service import places as service_places

    answer = service_places.places(options(context), fleet)
    if json_out:
        print_json(answer)
        return
    lines = [*_learned_lines(answer["places"]), *_other_lines(answer["others"])]
    if answer["left_out"]:
        lines.append(f"and {counted(answer['left_out'], 'more market')}: --json shows none of them either")
    for line in lines or ["no fleet is up, and nothing was learned yet: `tpucare apply FILE`"]:
        say(line)


# --- the order, in `plan` and `apply` ---------------------------------------------------------------------------------


def order_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line per place in the order of asking, under a line per fleet that has several."""
    for fleet, group in itertools.groupby(rows, lambda row: row["fleet"]):
        found = [*group]
        if len(found) > 1:
            yield _title(fleet, found)
            yield from aligned([[*_place(row), _worth(row), _life(row), _chance(row), _reason(row)] for row in found])


def _title(fleet: str, rows: Sequence[Row]) -> str:
    by = "in declared order" if rows[0]["worth"] is None else "by worth"
    return f"{fleet} asks its places {by}:"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + _GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _place(row: Row) -> list[str]:
    price = "price unknown" if row["price"] is None else f"${row['price']:.4g}/h"
    return [str(row["rank"]), row["zone"], row["type"], row["terms"], price]


def _worth(row: Row) -> str:
    return "" if row["worth"] is None else f"worth {'-' if row['worth'] < 0 else ''}${abs(row['worth']):.2f}/h"


def _life(row: Row) -> str:
    return "life unknown" if row["life_hours"] is None else f"life {length(row['life_hours'] * 3600)}"


def _chance(row: Row) -> str:
    return f"chance {row['chance']:.0%}"


def _reason(row: Row) -> str:
    return f"{row['turn']}: {row['why']}" if row["why"] else str(row["turn"])


# --- what was learned, in `places` ------------------------------------------------------------------------------------

_HEADINGS = ("asked", "given", "refused", "lives", "dry for", "told in")


def _learned_lines(rows: Iterable[Row]) -> Iterator[str]:
    for fleet, group in itertools.groupby(rows, lambda row: row["fleet"]):
        found = [*group]
        yield _title(fleet, found)
        head = ["", "zone", "type", "terms", "price", "worth", *_HEADINGS, "turn"]
        body = [[*_place(row), _worth(row).removeprefix("worth "), *_seen(row), _reason(row)] for row in found]
        yield from aligned([head, *body])


def _other_lines(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "other markets that were asked:"
        yield from aligned(
            [
                ["zone", "type", "terms", *_HEADINGS],
                *([row["zone"], row["type"], row["terms"], *_seen(row)] for row in rows),
            ]
        )


def _seen(row: Row) -> list[str]:
    counts = [f"{row[name]:.4g}" if row[name] >= 0.1 else "-" for name in ("asked", "given", "refused")]
    lives = f"{_life(row)}, {row['deaths']:.2g} died, {row['living']} live".removeprefix("life ")
    dry = "-" if row["dry_seconds"] is None else length(row["dry_seconds"])
    told = "-" if row["told_seconds"] is None else length(row["told_seconds"])
    return [*counts, lives if row["life_hours"] is not None else "-", dry, told]
