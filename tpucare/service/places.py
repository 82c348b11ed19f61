"""
Places and markets as plain data: in which order a fleet asks its places and why, and what the project learned of each.

From a running engine, or from what lies in the state folder. Scripts rely on the keys, as on those of `status`. Nothing
is decided here: the order is that of `planner.placement`, as a slot without a node sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tpucare.fleetfile.python_fleet import parse_accepted
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.evidence import Case, Evidence, Moment, ProjectEvidence, Timers
from tpucare.model.markets import Experience, Market, market_of
from tpucare.model.memory import DesiredState, FleetRecord, Memory
from tpucare.model.resources import PlacementOrder, Slot
from tpucare.model.text import hint, plain, shown
from tpucare.planner.markets import count_slot, is_dry, known, market_at, moved_at, outlook
from tpucare.planner.placement import Ranked, open_in_turn
from tpucare.service.options import Options
from tpucare.service.stores import Stores, StoreSnapshot

Row = dict[str, Any]
Answer = dict[str, Any]

# Names in `asking`, of one market.
NAMES_AT_MOST = 20
# Markets that no fleet declares (any more), of all that were learned.
OTHERS_AT_MOST = 100


def order_rows(slot: Slot, memories: Iterable[Memory], project: ProjectEvidence, now: datetime) -> list[Row]:
    """
    The places of *slot* in the order in which one of *memories* asks them: the first that has no node and no open
    create; where all have one, as a slot asks that begins anew.

    turn: next | later | asked (in this round) | dear | closed    tier: of its `tpu` entry and terms, the lowest first
    worth: dollars an hour; None: the fleet keeps its declared order
    """
    waits = (memory for memory in memories if not (memory.nodes or memory.creates))
    memory = next(waits, Memory(slot.fleet))
    case = Case(slot, Evidence(project), memory, Timers(Moment(now, timedelta(), 0)))
    turns = [*open_in_turn(case)]
    first = next((one for one, refusal in turns if refusal is None), None)
    rows = []
    for number, (one, refusal) in enumerate(turns):
        place, turn = one.place, _turn(one, refusal, first)
        rows.append(
            {
                "fleet": slot.fleet,
                "project": slot.project,
                "zone": place.zone,
                "type": place.accelerator_type,
                "terms": place.provisioning.value,
                "rank": number + 1,
                "tier": one.preference,
                "turn": turn,
                "why": plain(refusal or _why(turn, one, first, slot.order)),
                "price": place.price,
                "worth": None if one.worth is None else round(one.worth, 4),
                **market_row(market_at(project.markets, place.key), now),
            }
        )
    return rows


def _turn(one: Ranked, refusal: str | None, first: Ranked | None) -> str:
    if one is first:
        return "next"
    if one.asked:
        return "asked"
    if one.dear:
        return "dear"
    return "later" if refusal is None else "closed"


def _why(turn: str, one: Ranked, first: Ranked | None, order: PlacementOrder) -> str:
    if turn == "asked":
        return "in this round"
    if first is not None and one.preference > first.preference:
        return "declared as an alternative"
    if order is PlacementOrder.ORDERED:
        return "declared first" if turn == "next" else "declared later"
    return "most worth" if turn == "next" else "less worth"


def market_row(market: Market, now: datetime) -> Row:
    """
    What was learned of one market. Counts are weights, which halve with age.

    life_hours, told_seconds, start_hours: None: nothing seen yet    dry_seconds: None: its last answer was no stockout
    """
    learned, view = known(market, now), outlook(market, now)
    has_lived = market.living > 0 or learned.lived_hours > 0 or learned.deaths > 0
    moved = moved_at(learned)
    return {
        "asked": round(learned.asked, 2),
        "given": round(learned.given, 2),
        "refused": round(learned.refused, 2),
        "deaths": round(learned.deaths, 2),
        "living": market.living,
        "asking": sorted(plain(name) for name in market.asking)[:NAMES_AT_MOST],
        "life_hours": round(view.life, 3) if has_lived else None,
        "start_hours": round(view.start, 3) if learned.readied or learned.stepped else None,
        "told_seconds": round(view.told * 3600, 1) if learned.refused else None,
        "chance": round(view.chance, 3),
        "dry_seconds": _age(moved, now) if is_dry(learned) else None,
        "given_seconds_ago": _age(learned.given_at, now),
        "lost_seconds_ago": _age(learned.lost_at, now),
        "refused_seconds_ago": _age(learned.refused_at, now),
    }


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else round(max(0.0, (now - instant).total_seconds()), 1)


# --- from the state folder: what all processes learned, and the slots that all stores remember ------------------------


@dataclass(slots=True)
class _Fleet:
    """A fleet that is declared, and the memories of its slots."""

    slot: Slot
    memories: list[Memory] = field(default_factory=list)


def places(options: Options, fleet: str = "") -> Answer:
    """
    The places of every fleet that is up, or those of *fleet*, then markets that no fleet declares.

    Raises: TpuCareError: no such fleet.
    """
    from tpucare.adapters.state.market_files import read_markets
    from tpucare.adapters.system import SystemClock

    now, stores = SystemClock().now(), Stores(options).readable()
    markets = _joined(read_markets(options.state).values())
    declared: dict[str, _Fleet] = {}
    for store in stores:
        for record in store.records.values():
            meant = record.wish is not DesiredState.DOWN if not fleet else record.name == fleet
            if meant and (found := _declared(record, store, options)) is not None:
                declared[record.name] = found
                _add_slots(markets.setdefault(found.slot.project, {}), record.name, store)
    if fleet and fleet not in declared:
        known_fleets = {name for store in stores for name in store.records}
        raise TpuCareError(f"no fleet {shown(fleet)}{hint(fleet, known_fleets)}")
    rows = [
        row
        for name in sorted(declared)
        for row in order_rows(
            declared[name].slot,
            declared[name].memories,
            ProjectEvidence(fresh=True, markets=markets.get(declared[name].slot.project, {})),
            now,
        )
    ]
    others, left = ([], 0) if fleet else _other_rows(markets, declared.values(), now)
    return {"at": now.isoformat(), "places": rows, "others": others, "left_out": left}


def _joined(stores: Iterable[Mapping[str, Mapping[str, Experience]]]) -> dict[str, dict[str, Market]]:
    found: dict[str, dict[str, Market]] = {}
    for store in stores:
        for project, learned in store.items():
            for name, experience in learned.items():
                found.setdefault(project, {}).setdefault(name, Market()).others += (experience,)
    return found


def _declared(record: FleetRecord, store: StoreSnapshot, options: Options) -> _Fleet | None:
    """None: its text cannot be read; `status` says why."""
    memories = [memory for memory in store.memories.values() if memory.fleet == record.name]
    try:
        spec = parse_accepted(record)
        project = spec.project or record.project or options.project or ""
        return _Fleet(replace(spec, project=project).slot(0), memories)
    except ConfigError:
        return None


def _add_slots(markets: dict[str, Market], fleet: str, store: StoreSnapshot) -> None:
    """Add who lives and asks in the markets of a project."""
    for slot, memory in store.memories.items():
        if memory.fleet == fleet:
            count_slot(markets, slot, memory)


def _other_rows(
    markets: Mapping[str, Mapping[str, Market]], declared: Iterable[_Fleet], now: datetime
) -> tuple[list[Row], int]:
    taken = {(one.slot.project, market_of(place.key)) for one in declared for place in one.slot.places}
    found = [
        (project, name, market)
        for project, learned in sorted(markets.items())
        for name, market in sorted(learned.items())
        if (project, name) not in taken
    ]
    rows = [_other_row(*one, now) for one in found[:OTHERS_AT_MOST]]
    return rows, len(found) - len(rows)


def _other_row(project: str, name: str, market: Market, now: datetime) -> Row:
    zone, kind, terms = (*plain(name).split("/"), "", "", "")[:3]
    return {"project": plain(project), "zone": zone, "type": kind, "terms": terms, **market_row(market, now)}
