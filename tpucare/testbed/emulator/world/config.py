"""
The settings of a world: zones, capacity, quotas, latencies, faults, policies of a project. Strict, loadable from YAML.

`speed: fast` shrinks every latency to fractions of a second, for tests and demos with real machines. Lengths are
numbers of seconds or texts such as `90s`, `5m`, `1h`, `2d`. `latency` defines the lengths; `capacity` follows supplies
and counts quotas, and `faults` draws the faults of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.world.latency import FAST, FAST_QUEUE, Latencies, Latency, Seconds, Share, Strict, around

Tier = Literal["spot", "on-demand", "reserved"]


class CapacityProcess(Strict):
    """
    Capacity as a seeded birth and death process with bursts, between 0 and `maximum`.

    Rates are per hour: `births` add one, `deaths` take one, `bursts` take `burst_share` of the amount at once, and no
    birth follows for `stockout`. Real spot capacity moves in such bursts, followed by hours without any.
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
    `schedule`: pairs of an offset from the start of the world and an amount. `trace`: `<dataset>/<zone>` of a shipped
    trace, or the path of a file in format spot-capacity-trace/1; it begins at tick `trace_from` and repeats.
    When capacity falls below its use, spot nodes are preempted, within `burst` seconds.
    """

    type: str = Field(default="", description="accelerator type or generation; empty: any")
    tier: Tier = "spot"
    unit: Literal["nodes", "hosts", "chips"] | None = Field(default=None, description="nodes; for a trace: hosts")
    amount: int | None = Field(default=None, ge=0)
    process: CapacityProcess | None = None
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


class ZoneConfig(Strict):
    """
    One zone. Nodes that no pool of `capacity` covers are unlimited.

    `accelerators` and `runtimes` default to those of the catalogue for the zone, and to all of them where the catalogue
    does not know the zone; `accelerators: ["*"]` is every type, and sizes that the catalogue does not list.
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


# --- faults that chance draws: calls, outages, stuck deletes, preemptions, health -------------------------------------


class FaultRates(Strict):
    """Chances per call. `lost_before`: 14, without effect. `lost_after`: 14, although the call took effect."""

    unavailable: Share = 0.0
    internal: Share = 0.0
    lost_before: Share = 0.0
    lost_after: Share = 0.0
    slow: Share = 0.0
    slow_latency: Latency = around(20, 60)


class Outage(Strict):
    """An outage at a fixed time; offsets count from the start of the world."""

    at: Seconds
    duration: Seconds
    kind: Literal["api", "internal", "zone", "slow"]
    zone: str = ""
    seconds: Seconds = 30.0


class Faults(Strict):
    """Faults that chance draws."""

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
    """The end of nodes that lose their capacity, reach their lifetime, or are preempted by an operator."""

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


# --- policies of a project and its organisation, and the image of a worker --------------------------------------------
# The reasons why a first day fails; all of them are off by default. `policies` applies them to the API, `worker_files`
# and `guard` to workers.


Refusal = Literal["", "api-disabled", "no-quota-project", "billing-disabled", "narrow-scopes"]


class Project(Strict):
    """The project itself. Quotas of Compute Engine count living nodes and are refused in the operation of a create."""

    refuses: Refusal = Field(default="", description="every call is refused with 7, and the text for this reason")
    networks: tuple[str, ...] | None = Field(default=None, description="the only networks there are; none: any")
    external_ips: bool = Field(default=True, description="false: compute.vmExternalIpAccess refuses external addresses")
    os_login: Literal["off", "on", "required"] = Field(
        default="off",
        description="on: keys in metadata count for nothing, unless the node says enable-oslogin: FALSE; "
        "required: a node that says so is refused",
    )
    addresses_per_region: int | None = Field(default=None, ge=0, description="IN_USE_ADDRESSES: one a worker")
    health_checks: int | None = Field(default=None, ge=0, description="HEALTH_CHECKS of the project")
    health_checks_per_worker: int = Field(default=5, ge=0)


class SshGuard(Strict):
    """
    sshguard of some Ubuntu images: it blocks an address that connects and does not log in.

    `attacks` are refused logins and connections that end before a login. Each block is `growth` times the last.
    """

    attacks: int = Field(default=4, ge=1)
    within: Seconds = Field(default=120.0, gt=0)
    block: Seconds = Field(default=120.0, gt=0)
    growth: float = Field(default=1.5, ge=1)


class Guest(Strict):
    """The image of a worker: its services, its limits, and when it is ready."""

    keys_late: Latency | None = Field(default=None, description="from sshd's start until keys of the metadata log in")
    sshguard: SshGuard | None = None
    sshd_limits: Literal["roomy", "default"] = Field(
        default="roomy", description="default: MaxStartups 10:30:100 and MaxSessions 10, as OpenSSH has them"
    )
    python: bool = Field(default=True, description="false: there is `python3`, and no `python`")
    dpkg_locked: Seconds = Field(default=0.0, description="after a boot, the image's own upgrades hold dpkg's lock")
    containers: bool = Field(default=False, description="the image's own services run, and hold no chip")
    chip_holding_runtimes: tuple[str, ...] = Field(
        default=(), description="runtime versions (a `*` at the end) whose service tpu-runtime holds the chips"
    )


# --- the world --------------------------------------------------------------------------------------------------------


_WORLDS = Path(__file__).parents[1] / "worlds"


class Rates(Strict):
    """Calls per minute and project; None = unlimited. 91 creates a minute were seen in one large project."""

    create: int | None = Field(default=91, ge=0)
    delete: int | None = Field(default=None, ge=0)
    read: int | None = Field(default=None, ge=0, description="every Get and List; no public number is known")


class Queueing(Strict):
    """Queued resources. Only the rules are documented; the lengths and shares are guesses."""

    accept: Latency = Field(default=around(5, 15), description="from the create call until it waits")
    grant: Latency = Field(default=around(120, 4 * 3600), description="from then until capacity is checked")
    look_every: Seconds = Field(default=30.0, description="and checked again when there is none", gt=0)
    retry_for: Seconds = Field(default=45 * 60.0, description="how long failed creates are tried again")
    retry_every: Latency = around(60, 300)
    suspend: Latency = Field(default=around(60, 300), description="from SUSPENDING to SUSPENDED")
    delete: Latency = Field(default=around(20, 60), description="from the delete call to 404, without nodes")
    old_name_share: Share = Field(default=0.0, description="share that waits as ACCEPTED")
    expired_lingers: Share = Field(default=0.1, description="share that stays waiting when valid_until has passed")
    quota_waits: bool = Field(default=False, description="true: wait for quota; false: FAILED without it")
    shells_hold_quota: bool = Field(default=True, description="SUSPENDED and FAILED ones count until they are deleted")
    limit: int | None = Field(default=100, ge=0, description="per project and zone")
    spurious_exists: Share = Field(default=0.0, description="share of creates answered ALREADY_EXISTS though new")


class Access(Strict):
    """Permissions of the caller. `service_accounts`: the only ones that the caller may use; none = all."""

    projects: tuple[str, ...] | None = Field(default=None, description="the only projects there are; none = any")
    denied_permissions: tuple[str, ...] = Field(default=(), description="for example tpu.nodes.create")
    service_accounts: tuple[str, ...] | None = None
    free_trial: bool = False


class GuestAttributes(Strict):
    """
    The answer of GetGuestAttributes about host keys. The answer of the TPU service while they are not published is not
    documented; Compute Engine, which it asks, says NOT_FOUND.
    """

    published_after: Seconds | None = Field(default=0.0, description="from sshd on until they can be read; none: never")
    unpublished: Literal["empty", "not-found"] = Field(default="empty", description="the answer until then")


class ListPages(Strict):
    """Page sizes of ListNodes. The real limits are not published."""

    page_default: int = Field(default=100, ge=1)
    page_cap: int = Field(default=1000, ge=1)
    page_refused: int | None = Field(default=None, ge=1, description="a larger page_size is refused with 3")


class Addresses(Strict):
    """
    Workers get unique addresses of this network; on Linux all of 127/8 needs no set-up.

    Where no network is named, `tpucare emulator` uses a part of it that no other emulator of the machine uses.
    """

    network: str = "127.64.0.0/10"


class WorldConfig(Strict):
    """All settings of a world except its seed and its start."""

    zones: dict[str, ZoneConfig] = Field(min_length=1)
    latencies: Latencies = Latencies()
    quotas: tuple[Quota, ...] = ()
    rates: Rates = Rates()
    faults: Faults = Faults()
    preemption: Preemption = Preemption()
    queue: Queueing = Queueing()
    health: HealthCourse = HealthCourse()
    access: Access = Access()
    project: Project = Project()
    guest: Guest = Guest()
    listing: ListPages = ListPages()
    guest_attributes: GuestAttributes = GuestAttributes()
    addresses: Addresses = Addresses()
    buckets: tuple[str, ...] = Field(default=(), description="Cloud Storage buckets that exist from the start")
    audit_reads: bool = Field(default=True, description="log Get and List calls too")
    speed: Literal["real", "fast"] = "real"

    @model_validator(mode="before")
    @classmethod
    def _fill_fast(cls, value: object) -> object:
        """`speed: fast` changes the defaults of lengths; lengths given beside it still count."""
        if not isinstance(value, Mapping) or value.get("speed") != "fast":
            return value
        latencies = value.get("latencies") or {}
        latencies = {**FAST, **latencies} if isinstance(latencies, Mapping) else latencies
        preemption = value.get("preemption") or {}
        preemption = {"notice": None, **preemption} if isinstance(preemption, Mapping) else preemption
        queue = value.get("queue") or {}
        queue = {**FAST_QUEUE, **queue} if isinstance(queue, Mapping) else queue
        return {**value, "latencies": latencies, "preemption": preemption, "queue": queue}

    @classmethod
    def fast(cls, **changes: Any) -> WorldConfig:
        """Two zones of constant capacity and no faults, everything within fractions of a second; keys as in YAML."""
        zones = {"us-central1-a": {"accelerators": ["*"]}, "europe-west4-a": {"accelerators": ["*"]}}
        return cls.model_validate({"zones": zones, **changes, "speed": "fast"})

    @classmethod
    def calm(cls, **changes: Any) -> WorldConfig:
        """Real speed without chance: constant latencies and no faults. For stories in virtual time."""
        merged = {key: {**_CALM[key], **changes.get(key, {})} for key in ("latencies", "preemption", "faults", "queue")}
        return cls.model_validate({**_CALM, **changes, **merged})


_CALM: dict[str, dict[str, Any]] = {
    "zones": {"us-central1-a": {"accelerators": ["*"]}, "europe-west4-a": {"accelerators": ["*"]}},
    "latencies": {
        **{
            name: around(field.default.median)
            for name, field in Latencies.model_fields.items()
            if field.annotation is Latency
        },
        "list_lag_share": 0.0,
        "boot_skew": 0.0,
        "boot_early_share": 0.0,
        "operation_lingers_share": 0.0,
    },
    "preemption": {"notice": None, "silent_share": 0.0},
    "faults": {"repeated_delete": (0,)},
    "queue": {
        **{
            name: around(field.default.median)
            for name, field in Queueing.model_fields.items()
            if field.annotation is Latency
        },
        "expired_lingers": 0.0,
    },
}


def parse_world(text: str, source: str = "world") -> WorldConfig:
    """A world from the text of a YAML file. Raises: ConfigError: one line that names *source* and the key."""
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: a world is a mapping with the key zones")
    try:
        return WorldConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from error


def shipped_worlds() -> tuple[str, ...]:
    """Names that `load_world` takes instead of a file."""
    return tuple(sorted(file.stem for file in _WORLDS.glob("*.yaml")))


def load_world(path: Path) -> WorldConfig:
    """A file, or the name of a shipped world. Raises: ConfigError: cannot be read, or see `parse_world`."""
    if str(path) in shipped_worlds() and not path.exists():
        path = _WORLDS / f"{path}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_world(text, str(path))


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    text = "unknown key" if first["type"] == "extra_forbidden" else str(first["msg"]).removeprefix("Value error, ")
    more = len(error.errors()) - 1
    return f"{key}: {text}" + (f" (and {more} more)" if more else "")
