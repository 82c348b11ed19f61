"""
Admission of actions: the creation semaphore of a user, the create budget of the project, and the brake.

On the engine's thread only. A slot holds the semaphore from before its create is intended until the operation ended or
the node is READY, gone, abandoned or being deleted, and also while it waits for the create budget alone. Acquiring it
is left to `ports.Gate`, beginning an admitted action to the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from tpucare.engine.probes import Liveness
from tpucare.engine.state import EngineState
from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import ANY_CREATE, Create, Delete, Effect, Record, Stop, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import CreateState
from tpucare.model.markets import Market, market_of
from tpucare.model.memory import Memory
from tpucare.model.ports import Gate
from tpucare.model.resources import NodeState
from tpucare.planner.markets import is_drought, is_dry, known, market_at
from tpucare.planner.placement import Budget, CreateBudget

WAITS = Wait(Cause.CREATE_SEMAPHORE, "waiting for the creation semaphore")
WAITS_FOR_BUDGET = Wait(Cause.CREATE_BUDGET, "the create budget of the project is used up for this minute")


class CreateSemaphore:
    """The user's semaphore; without a gate every create is allowed."""

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate
        self._holds: dict[str, str] = {}
        self._waits: set[str] = set()

    def may_create(self, track: SlotTrack, name: str) -> bool:
        """Whether *name* may be created now; else the slot waits. Raises: the error of acquiring the semaphore."""
        if self._gate is None:
            return True
        slot = track.slot.name
        self._waits.discard(slot)
        if not self._gate.acquire(slot):
            self._waits.add(slot)
            track.set_action(WAITS)
            return False
        self._holds[slot] = name
        return True

    def changed_slots(self) -> frozenset[str]:
        """Slots that acquired the semaphore, or failed to, and are decided again."""
        return self._gate.changed_slots() if self._gate is not None else frozenset()

    def release_unneeded(self, slots: Mapping[str, SlotTrack]) -> None:
        """Release the semaphore for slots that no longer need it or wait for it."""
        if self._gate is None:
            return
        for slot in [slot for slot in self._waits if slot not in slots or not _waits(slots[slot])]:
            self._waits.discard(slot)
            self._gate.release(slot)
        for slot, name in [*self._holds.items()]:
            if slot not in slots or not _needs(slots[slot], name):
                del self._holds[slot]
                self._gate.release(slot)


def _waits(track: SlotTrack) -> bool:
    return track.action.cause is Cause.CREATE_SEMAPHORE


def _needs(track: SlotTrack, name: str) -> bool:
    if ANY_CREATE in track.in_flight or track.action.cause is Cause.CREATE_BUDGET:
        return True
    intent, seen = track.memory.create(name), track.nodes.get(name)
    if intent is None or intent.abandoned or intent.state is CreateState.FAILED or track.memory.has_given_up(name):
        return False
    return seen is None or seen.node.state is NodeState.CREATING


# --- the create budget: which creates begin now -----------------------------------------------------------------------


class CreateAdmission:
    """Admits creates of all slots by semaphore and create budget."""

    def __init__(self, state: EngineState, semaphore: CreateSemaphore) -> None:
        self._state = state
        self.semaphore = semaphore
        self._budgets: dict[str, Budget] = {}

    def admitted(self, creates: Mapping[str, Create], now: float) -> Iterator[tuple[SlotTrack, Create]]:
        """
        The creates to begin, one after the other; all other slots wait, or are decided again.

        The budget of a project goes to the slots with the fewest creates in the window, the longest waiting first. Of
        several creates in one market the first begins: with it, the market may be worth less to the others.
        """
        shares = {project: budget.shares() for project, budget in self._budgets.items()}
        order: list[tuple[int, float, str]] = []
        for name in creates:
            track = self._state.slots[name]
            track.wants_create_since = now if track.wants_create_since is None else track.wants_create_since
            share = shares[track.slot.project][name] if track.slot.project in shares else 0
            order.append((share, track.wants_create_since, name))
        begun: set[tuple[str, str]] = set()
        for _, _, name in sorted(order):
            track, create = self._state.slots[name], creates[name]
            market = track.slot.project, market_of(create.place.key)
            if market in begun and self._has_choice(track, create):
                self._state.dirty[name] = None
            elif self._may_begin(track, create, now):
                begun.add(market)
                yield track, create

    def _has_choice(self, track: SlotTrack, create: Create) -> bool:
        """Whether another create in its market may change where the slot asks."""
        now = self._state.clock.now()
        lasts = is_drought(known(self._market(track, create), now), now)
        return not create.resend and (lasts or len(track.slot.places) > 1)

    def _market(self, track: SlotTrack, create: Create) -> Market:
        return market_at(self._state.markets.of(track.slot.project), create.place.key)

    def _may_begin(self, track: SlotTrack, create: Create, now: float) -> bool:
        try:
            if not self.semaphore.may_create(track, create.name):
                return False
        except Exception as error:
            self._state.set_aside(track, error)
            return False
        # Creates that are refused, most likely, leave half of the budget to those that are not.
        dry = is_dry(known(self._market(track, create), self._state.clock.now()))
        spare = self._state.settings.creates_per_minute // 2 if dry else 0
        # Checked last: what is reserved is lost to all processes if no create follows.
        if not self._takes_budget(track, now, spare):
            return False
        track.wants_create_since = None
        return True

    def admits_request(self, track: SlotTrack, now: float) -> bool:
        """
        Whether the slot may ask for a queued resource now, by the create budget.

        A request may stand for days, so it takes no semaphore: that would keep all other slots from creating.
        """
        return self._takes_budget(track, now)

    def _takes_budget(self, track: SlotTrack, now: float, spare: int = 0) -> bool:
        """Reserve a create of the budget that leaves *spare* others; else the slot waits until one is free."""
        budget = self._budget_of(track.slot.project)
        free_at = budget.free_at(now, spare)
        if free_at is not None:
            track.set_action(WAITS_FOR_BUDGET)
            self._state.wake_at(track, free_at)
            return False
        budget.reserve(track.slot.name, now)
        return True

    def create_ended(self, track: SlotTrack, now: float) -> None:
        """Tell the budget that the slot's create ended."""
        self._budget_of(track.slot.project).create_ended(track.slot.name, now)

    def restore_budget(self, project: str, memory: Memory) -> None:
        """Add the creates of the last minute that *memory* remembers to the budget of *project*."""
        clock = self._state.clock
        wall, now = clock.now(), clock.monotonic()
        ages = [(wall - asked).total_seconds() for asked in memory.recent_creates]
        self._budget_of(project).restore((now - age, "") for age in ages if 0 <= age < 60)

    def _budget_of(self, project: str) -> Budget:
        budget = self._budgets.get(project)
        if budget is None:
            settings = self._state.settings
            shared = settings.budget
            budget = shared(project) if shared is not None else CreateBudget(settings.creates_per_minute)
            self._budgets[project] = budget
        return budget


# --- the brake (rule 12): many verdicts at once say more about us than about the nodes --------------------------------


WINDOW_SECONDS = 600.0
# A held verdict is dropped after so much observed time without it: longer than a second read of the node takes, shorter
# than any timeout that leads to a new verdict.
HOLD_LAPSES = timedelta(minutes=1)


@dataclass(slots=True)
class Brake:
    """
    Holds the verdicts of a pass when, with those of the last ten minutes, they exceed
    max(`minimum`, `share` of the live nodes). Instants are monotonic seconds.
    """

    minimum: int = 3
    share: float = 0.2
    _judged: deque[tuple[float, str]] = field(default_factory=deque)

    def counted(self, slots: Collection[str], now: float) -> int:
        """Number of slots judged in the window, *slots* included."""
        while self._judged and now - self._judged[0][0] > WINDOW_SECONDS:
            self._judged.popleft()
        return len({name for _, name in self._judged} | set(slots))

    def limit(self, live_nodes: int) -> int:
        return max(self.minimum, int(self.share * live_nodes))

    def passed(self, slot: str, now: float) -> None:
        self._judged.append((now, slot))


def is_judged(action: Record | Effect, memory: Memory) -> bool:
    """Whether *action* is a verdict that has not passed the brake yet."""
    if isinstance(action, Stop):
        return action.then is Reason.JUDGED
    if not isinstance(action, Delete) or action.reason is not Reason.JUDGED:
        return False
    past, run = memory.node(action.key.name), memory.run_on(action.key.name)
    stopped = run is not None and run.then_delete is Reason.JUDGED
    # A delete on record has passed the brake; a node listed dead needs no verdict.
    return not stopped and (past is None or past.delete is None)


# --- the brake in the loop: the verdicts of one pass are admitted or held together ------------------------------------


class VerdictAdmission:
    """Admits judged deletes and stops of all slots by the brake."""

    def __init__(self, state: EngineState, liveness: Liveness) -> None:
        self._state = state
        self._liveness = liveness
        self.brake = Brake(state.settings.brake_minimum, state.settings.brake_share)

    def admitted(self, judged: Mapping[str, Delete | Stop], now: float) -> Iterator[tuple[SlotTrack, Delete | Stop]]:
        """The verdicts to begin, one after the other; the brake holds the rest, except those a person confirmed."""
        slots = self._state.slots
        lifted = {name for name, action in judged.items() if slots[name].is_brake_lifted_for(action.key.name)}
        live = sum(len(track.nodes) for track in slots.values())
        count = self.brake.counted(judged.keys() - lifted, now)
        for name, action in judged.items():
            if count > self.brake.limit(live) and name not in lifted:
                self._hold(slots[name], action, count, live)
            else:
                self._pass(slots[name], action, now)
                yield slots[name], action

    def _pass(self, track: SlotTrack, action: Delete | Stop, now: float) -> None:
        name = track.slot.name
        self.brake.passed(name, now)
        track.release_verdict()
        silent = isinstance(action, Delete) and name in self._liveness.silent
        if silent and not self._liveness.elsewhere_answers(track):
            self._liveness.canary = name

    def _hold(self, track: SlotTrack, action: Delete | Stop, count: int, live: int) -> None:
        why = f"held by the brake: {count} of {live} nodes judged within 10 minutes ({action.why}); `tpucare confirm`"
        if track.hold_verdict(action.key.name, self._state.project(track.slot.project).observed):
            self._state.add_event(track, "brake", why, node=action.key.name, level="error")
        self._state.update_slot_sets(track)
        track.set_action(Wait(Cause.BRAKE, why, needs_person=True))
