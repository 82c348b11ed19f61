"""
What goes wrong in a world by itself: calls, outages, deletes that hang, preemptions, health.

What an operator orders is in `orders`; what becomes of a call is drawn by `faults`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tpucare.testbed.emulator.world.latency import Latency, Seconds, Share, Strict, around


class FaultRates(Strict):
    """Chances per call. `lost_before`: 14, nothing happened. `lost_after`: 14, though it took effect."""

    unavailable: Share = 0.0
    internal: Share = 0.0
    lost_before: Share = 0.0
    lost_after: Share = 0.0
    slow: Share = 0.0
    slow_latency: Latency = around(20, 60)


class Outage(Strict):
    """Something that breaks at a time known beforehand; offsets count from the start of the world."""

    at: Seconds
    duration: Seconds
    kind: Literal["api", "internal", "zone", "slow"]
    zone: str = ""
    seconds: Seconds = 30.0


class Faults(Strict):
    """What goes wrong by itself."""

    calls: FaultRates = FaultRates()
    methods: dict[str, FaultRates] = Field(default={}, description="instead of `calls`, by method: ListNodes, ...")
    outages: tuple[Outage, ...] = ()
    repeated_delete: tuple[Literal[0, 9, 10], ...] = Field(
        default=(0, 9, 10), min_length=1, description="answers to a delete in DELETING: 0 = a second operation"
    )
    delete_stuck: Share = Field(default=0.0, description="share of deletes that need to be repeated")
    failed_create_left: Share = Field(default=0.0, description="share of failed creates whose node stays listed")
    missing_worker: Share = Field(default=0.0, description="share of large slices that lack one worker for ever")
    missing_worker_hosts: int = Field(default=64, ge=1, description="large begins at this many hosts")


class Preemption(Strict):
    """How nodes are taken away, whatever took them: capacity, their lifetime, or an operator who says no more."""

    lifetime: Latency | None = Field(default=None, description="of each spot node after READY; none: capacity decides")
    preemptible_limit: Seconds = Field(default=24 * 3600.0, description="preemptible nodes end this long after READY")
    notice: Latency | None = Field(default=around(10, 30), description="from preempted=TRUE to death; none: without")
    silent_share: Share = Field(default=0.1, description="share that falls silent first instead of dying at once")
    never_shown: Share = Field(default=0.0, description="share that the API shows READY for ever")
    shown_otherwise: Share = Field(default=0.0, description="share shown REPAIRING, TERMINATED or gone instead")


class HealthCourse(Strict):
    """Health of READY nodes: 0 at first, then HEALTHY; `flap_every` is the mean time between bad spells of a node."""

    flap_every: Seconds | None = None
    flap_length: Latency = around(300, 1800)
    values: tuple[int, ...] = (0, 3, 4, 5)
