"""See `tpucare.simulation.workers`."""

from __future__ import annotations

from tpucare.simulation.machines import Script, SimulatedRun, SimulatedWorker
from tpucare.simulation.workers import VirtualLauncher

__all__ = ["Script", "SimulatedRun", "SimulatedWorker", "VirtualLauncher"]
