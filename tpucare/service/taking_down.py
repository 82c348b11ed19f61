"""`tpucare down` to its end: asked of the daemon and watched, or done here when no daemon runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tpucare.model.errors import StoreLocked, TpuCareError
from tpucare.model.memory import Wish
from tpucare.model.resources import Event, Slot
from tpucare.model.text import shown
from tpucare.service import overview, view
from tpucare.service.control_socket import NoDaemon, Refused, is_running, request
from tpucare.service.ending import Ending
from tpucare.service.offline import alone
from tpucare.service.options import Options

LOOK_EVERY_SECONDS = 0.5
# A process that stops lets go of its store within this.
END_SECONDS = 20.0


def fleets_that_are_up(options: Options) -> list[str]:
    """Of the daemon's own store. Raises: StoreError: there is none."""
    rows = overview.of_store(options, "")["fleets"]
    return [row["fleet"] for row in rows if row["wish"] != Wish.DOWN.value]


def refuse_unknown(options: Options, target: str) -> None:
    """Before a person is asked. Raises: TpuCareError: no fleet or slot is called so."""
    if overview.is_untouched(options):
        raise TpuCareError(f"no fleet or slot {shown(target)}; no fleet is known yet")
    overview.status(options, target)


def take_down(
    options: Options, targets: Sequence[str], tell: Callable[[str], None], *, wait: bool
) -> dict[str, dict[str, Any]]:
    """
    By target: `changed`; `left`: slots of which something was there when this returned; `out_of_reach`: what of that
    could not be looked at. *tell* is given a line of text at a time of what goes on here.
    """
    try:
        # All are told before one is waited for.
        told = {target: request(options.socket, {"do": "down", "target": target}) for target in targets}
    except NoDaemon:
        return {target: _here(options, {"do": "down", "target": target}, tell, wait=wait) for target in targets}
    return {target: _watched(options, target, answer, tell, wait=wait) for target, answer in told.items()}


def _watched(
    options: Options, target: str, answer: dict[str, Any], tell: Callable[[str], None], *, wait: bool
) -> dict[str, Any]:
    order = {"do": "down", "target": target}
    slots = list(answer["changed"])
    left, rows = slots, dict[str, view.Row]()
    try:
        while wait:
            rows = _rows(options, slots)
            left = [slot for slot, row in rows.items() if not row["over"]]
            if all(rows[slot]["out_of_reach"] for slot in left):
                break
            time.sleep(LOOK_EVERY_SECONDS)
    except (NoDaemon, Refused):
        if is_running(options.socket):
            raise
        return _after_it(options, order, tell)
    return {**answer, "left": left, "out_of_reach": [key for row in rows.values() for key in row["out_of_reach"]]}


def _after_it(options: Options, order: dict[str, str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Who was told ended, as a script does when nothing is left; what it did not get done is done here."""
    until = time.monotonic() + END_SECONDS
    while True:
        try:
            return _here(options, order, tell, wait=True)
        except StoreLocked:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_EVERY_SECONDS)


def _rows(options: Options, slots: list[str]) -> dict[str, view.Row]:
    """What the daemon says of those of *slots* that it still knows."""
    status = request(options.socket, {"do": "status"})
    return {row["slot"]: row for row in status["slots"] if row["slot"] in slots}


def _here(options: Options, order: dict[str, str], tell: Callable[[str], None], *, wait: bool) -> dict[str, Any]:
    def listen(event: Event) -> None:
        if event.level != "debug":
            tell(event.text)

    with alone(options, listen=listen) as here:
        answer = here.desk.carry(order)
        engine, fleet, slots = here.care.engine, answer["fleet"], list(answer["changed"])

        def is_meant(slot: Slot) -> bool:
            return slot.fleet == fleet if fleet else slot.name in slots

        ending = Ending(engine, here.care.clock, is_meant, tell)
        if wait:
            # This process ends soon: it begins nothing for slots that it was not asked about.
            engine.release(is_meant)
            here.run(ending.is_over)
        left = [name for name, track in engine.slots.items() if is_meant(track.slot) and not engine.is_over(name)]
        return {**answer, "left": left, "out_of_reach": view.key_rows(ending.left)}
