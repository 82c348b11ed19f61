"""
What a zone has and what a project may take of it: capacity that is constant or comes and goes, and quotas.

How the capacity of a pool moves is `capacity`'s, what a quota refuses `quota`'s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tpucare.testbed.emulator.world.latency import Latency, Seconds, Share, Strict, around

Tier = Literal["spot", "on-demand", "reserved"]


class Process(Strict):
    """
    Capacity as a seeded birth and death process with bursts, between 0 and `maximum`.

    Rates are per hour: `births` add one, `deaths` take one, `bursts` take `burst_share` of what is there at once and
    let nothing be born for `stockout`. Real spot capacity goes that way: bursts, then hours of nothing.
    """

    maximum: int = Field(ge=0)
    initial: int | None = Field(default=None, ge=0)
    births: float = Field(default=1.0, ge=0)
    deaths: float = Field(default=0.5, ge=0)
    bursts: float = Field(default=0.05, ge=0)
    burst_share: Share = 1.0
    stockout: Latency = around(3600, 4 * 3600)


class Capacity(Strict):
    """
    Capacity of one pool: an accelerator type, or a generation, or everything of a zone, on one tier.

    Exactly one of `amount`, `process`, `schedule` and `trace`. Spot and preemptible nodes share the tier `spot`.
    `schedule`: pairs of an offset from the start of the world and an amount. `trace`: `<dataset>/<zone>` of those that
    are shipped, or the path of a file in format spot-capacity-trace/1; it begins at tick `trace_from` and repeats.
    When capacity falls below what is in use, spot nodes are preempted, within `burst` seconds.
    """

    type: str = Field(default="", description="accelerator type or generation; empty: any")
    tier: Tier = "spot"
    unit: Literal["nodes", "hosts", "chips"] | None = Field(default=None, description="nodes; for a trace: hosts")
    amount: int | None = Field(default=None, ge=0)
    process: Process | None = None
    schedule: tuple[tuple[Seconds, Annotated[int, Field(ge=0)]], ...] = ()
    trace: str = ""
    trace_from: int = Field(default=0, ge=0)
    burst: Seconds = 60.0

    @model_validator(mode="after")
    def _one_source(self) -> Capacity:
        given = [self.amount is not None, self.process is not None, bool(self.schedule), bool(self.trace)]
        if sum(given) != 1:
            raise ValueError("give exactly one of amount, process, schedule, trace")
        return self


class Zone(Strict):
    """
    One zone. What no pool of `capacity` covers is unlimited.

    `accelerators` and `runtimes` default to the catalogue's for a zone it knows, and to everything for one it does not;
    `accelerators: ["*"]` is everything, sizes that the catalogue does not list included.
    """

    capacity: tuple[Capacity, ...] = ()
    accelerators: tuple[str, ...] | None = None
    runtimes: tuple[str, ...] | None = None
    supported: bool = Field(default=True, description="false: 'The requested zone is not supported'")
    denied_types: tuple[str, ...] = Field(default=(), description="types that the project is not allow-listed for")
    dark: bool = Field(default=False, description="never answers: named in `unreachable` of every list")
    create_errors: Share = Field(default=0.0, description="share of creates that end with an internal error")


class Quota(Strict):
    """
    A limit of the project: of one generation and tier, in one zone or region.

    `types` narrows it to some accelerator types, `size` to slices of one host or of several: single devices and pods of
    v2 and v3 have quotas of their own, and so have sizes for serving and for training of v5e. `id` and `form` shape the
    refusal; both have usual forms.
    """

    generation: str = ""
    types: tuple[str, ...] = ()
    size: Literal["", "single-host", "multi-host"] = ""
    tier: Tier = "spot"
    zone: str = ""
    region: str = ""
    limit: int = Field(ge=0)
    unit: Literal["chips", "cores", "nodes"] = "chips"
    id: str = ""
    form: Literal["limit", "exhausted"] = "limit"

    @model_validator(mode="after")
    def _one_scope(self) -> Quota:
        if bool(self.zone) == bool(self.region):
            raise ValueError("give either zone or region")
        return self
