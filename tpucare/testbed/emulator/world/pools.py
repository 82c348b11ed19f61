"""The capacity pools of a world: each follows its configured supply, and spot nodes that no longer fit are reported."""

from __future__ import annotations

from collections.abc import Callable

from tpucare.model.accelerators import Accelerator
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS, Pool, Supply, supply
from tpucare.testbed.emulator.world.state import State


class CapacityPools:
    """
    Every pool of every zone.

    preempt_victims: called with a spot pool whose amount changed; it ends the nodes that no longer fit (`Pool.victims`)
    """

    def __init__(self, state: State, preempt_victims: Callable[[Pool], None]) -> None:
        """Raises: ConfigError: a trace in the configuration cannot be read."""
        self._state = state
        self._preempt_victims = preempt_victims
        self.all: list[Pool] = []
        self._supplies: dict[int, Supply] = {}
        for zone, settings in state.config.zones.items():
            for number, one in enumerate(settings.capacity):
                unit = one.unit or ("hosts" if one.trace else "nodes")
                stream = supply(one, state.now, state.stream(f"capacity/{zone}/{number}"))
                pool = Pool(zone, one.type, one.tier, unit, None, one.burst)
                self.all.append(pool)
                self._supplies[id(pool)] = stream
                self._schedule_next(pool)

    def pool_of(self, zone: str, accelerator: Accelerator, tier: str) -> Pool | None:
        """The narrowest pool that covers such a node: its type before its generation before the whole zone."""
        fitting = [pool for pool in self.all if pool.zone == zone and pool.covers(accelerator, tier)]
        narrow = (accelerator.type, accelerator.generation, "")
        return min(fitting, key=lambda pool: narrow.index(pool.accelerator), default=None)

    def set_capacity(self, zone: str, accelerator: str, tier: str, amount: int | None) -> None:
        """Fix the amount of one pool, which is made if there is none; its configured supply ends."""
        named = (one for one in self.all if (one.zone, one.accelerator, one.tier) == (zone, accelerator, tier))
        pool = next(named, None)
        if pool is None:
            pool = Pool(zone, accelerator, tier, "nodes", None)
            self.all.append(pool)
            self._move_claims(pool)
        self._supplies.pop(id(pool), None)
        self._set_amount(pool, amount)

    def _move_claims(self, pool: Pool) -> None:
        """Nodes that the new pool covers, and that no narrower one holds, count in it from now on."""
        for life in self._state.nodes.values():
            tier = CAPACITY_TIERS[life.record.spec.tier]
            if life.doomed or life.killed or self.pool_of(life.path.zone, life.accelerator, tier) is not pool:
                continue
            life.release_capacity()
            life.pool = pool
            pool.claim(life.record.id, life.accelerator)

    def _schedule_next(self, pool: Pool) -> None:
        """Schedule the next change of a pool's supply."""
        stream = self._supplies.get(id(pool))
        change = next(stream, None) if stream is not None else None
        if change is None:
            return
        at, amount = change

        def apply() -> None:
            if self._supplies.get(id(pool)) is stream:
                self._set_amount(pool, amount)
                self._schedule_next(pool)

        if pool.capacity is None and at <= self._state.now:
            apply()
        else:
            self._state.timeline.at(at, apply)

    def _set_amount(self, pool: Pool, amount: int | None) -> None:
        if pool.capacity == amount:
            return
        pool.capacity = amount
        self._state.log(
            "capacity", zone=pool.zone, accelerator=pool.accelerator, tier=pool.tier, amount=amount, used=pool.used
        )
        # Only spot capacity is taken back from its holders.
        if pool.tier == "spot":
            self._preempt_victims(pool)
