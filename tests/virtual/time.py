"""See `tpucare.simulation.time`."""

from __future__ import annotations

from tpucare.simulation.time import START, VirtualClock, VirtualExecutor

__all__ = ["START", "VirtualClock", "VirtualExecutor"]
