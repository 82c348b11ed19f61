"""
Lengths of time in a world: their notation, their distribution, and the defaults for each step of the service.

Defaults are the public numbers on the real service (medians and 95th percentiles), where there are any; the others are
guesses, to be varied.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LENGTH = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*$")
_Z95 = 1.6449
"""The 95th percentile of the standard normal distribution."""


def seconds(value: object) -> object:
    """A number of seconds from `90`, `1.5`, `90s`, `5m`, `1h`, `2d` or `200ms`; anything else is left to pydantic."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        match = _LENGTH.match(value)
        if match is None:
            raise ValueError(f"'{value}' is not a length of time; write 90s, 5m, 1h or 2d")
        return float(match[1]) * _UNITS[match[2]]
    return value


Seconds = Annotated[float, BeforeValidator(seconds), Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Unknown keys are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Latency(Strict):
    """A log-normal length by its median and 95th percentile; `p95` 0 means constant. A bare length is a constant."""

    median: Seconds
    p95: Seconds = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_length(cls, value: object) -> object:
        return value if isinstance(value, Mapping | Latency) else {"median": value}

    def draw(self, rng: random.Random) -> float:
        """Seconds. Always takes one number from *rng*, so that a changed latency does not shift everything after it."""
        score = rng.gauss(0.0, 1.0)
        if self.median <= 0:
            return 0.0
        if self.p95 <= self.median:
            return self.median
        return self.median * math.exp(score * math.log(self.p95 / self.median) / _Z95)


def around(median: float, p95: float = 0.0) -> Latency:
    """A log-normal length in seconds; a constant when *p95* is left out."""
    return Latency(median=median, p95=p95)


class Latencies(Strict):
    """The length of each step; log-normal, each can be set on its own."""

    read: Latency = Field(default=around(0.15, 1), description="GetNode, ListNodes, GetOperation and other reads")
    write: Latency = Field(default=around(0.4, 2), description="CreateNode, DeleteNode, UpdateNode: the call itself")
    visible: Latency = Field(default=around(0.3, 1), description="from the create call until GetNode shows the node")
    list_lag: Latency = Field(default=around(2, 8), description="how much longer lists may miss or keep a node")
    list_lag_share: Share = Field(default=0.1, description="share of nodes for which lists lag")
    stockout: Latency = Field(default=around(20, 90), description="from the create call to the error in its operation")
    create_single: Latency = Field(default=around(100, 300), description="from the create call to READY, one host")
    create_slice: Latency = Field(default=around(240, 900), description="the same, 2 to 64 hosts")
    create_large: Latency = Field(default=around(600, 2400), description="the same, more than 64 hosts")
    boot_skew: Seconds = Field(default=60.0, description="hosts of a slice come up within this length")
    boot_early_share: Share = Field(default=0.3, description="share of nodes whose workers are up before READY")
    boot_late: Latency = Field(default=around(15, 90), description="from READY until SSH answers, for the others")
    reboot: Latency = Field(default=around(40, 120), description="a worker that restarts")
    operation_done: Latency = Field(default=around(2, 10), description="from READY until the create operation is done")
    operation_lingers_share: Share = Field(default=0.02, description="share of create operations that stay open")
    operation_lingers: Latency = Field(default=around(600, 3600), description="how long those stay open")
    operation_kept: Seconds = Field(default=3 * 86400.0, description="how long a finished operation can be read")
    update: Latency = Field(default=around(2, 8), description="an UpdateNode operation")
    keys_usable: Latency = Field(default=around(10, 40), description="from updated metadata until a new key logs in")
    delete: Latency = Field(default=around(60, 300), description="from the delete call to 404")
    delete_kills: Share = Field(default=0.2, description="workers die after this share of it")
    stop: Latency = Field(default=around(40, 120), description="StopNode and StartNode")
    preempted_shown: Latency = Field(default=around(30, 180), description="from workers dead to PREEMPTED in the API")
    health_known: Latency = Field(default=around(30, 120), description="from READY until health is not 0 any more")
    address_reuse: Seconds = Field(default=2.0, description="an address is given out again after this")


FAST: Mapping[str, object] = {
    "read": around(0.005, 0.02),
    "write": around(0.01, 0.04),
    "visible": around(0.02, 0.05),
    "list_lag": around(0.05, 0.2),
    "stockout": around(0.3, 0.6),
    "create_single": around(0.4, 0.8),
    "create_slice": around(0.6, 1.2),
    "create_large": around(1.0, 2.0),
    "boot_skew": 0.2,
    "boot_late": around(0.1, 0.3),
    "reboot": around(0.3, 0.6),
    "operation_done": around(0.05, 0.2),
    "operation_lingers": around(3, 10),
    "update": around(0.05, 0.2),
    "keys_usable": around(0.1, 0.3),
    "delete": around(0.5, 1.0),
    "stop": around(0.3, 0.6),
    "preempted_shown": around(0.3, 0.8),
    "health_known": around(0.2, 0.6),
    "address_reuse": 0.5,
}
"""Latencies of the fast mode, where they differ from the defaults."""

FAST_QUEUE: Mapping[str, object] = {
    "accept": around(0.05, 0.2),
    "grant": around(0.2, 1.0),
    "look_every": 0.2,
    "retry_for": 10.0,
    "retry_every": around(0.2, 0.5),
    "suspend": around(0.2, 0.6),
    "delete": around(0.1, 0.3),
}
"""The same for queued resources."""
