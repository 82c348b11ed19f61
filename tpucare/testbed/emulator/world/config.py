"""
What a world is made of: zones, capacity, quotas, latencies, faults. Strict, loadable from YAML.

`speed: fast` shrinks every latency to fractions of a second, for tests and demos with real machines. Lengths are
numbers of seconds or texts such as `90s`, `5m`, `1h`, `2d`. What there is of a zone is in `config_zones`, what goes
wrong in `config_faults`, how long things take in `lengths`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.world.config_faults import Faults, HealthCourse, Preemption
from tpucare.testbed.emulator.world.config_project import Guest, Project
from tpucare.testbed.emulator.world.config_zones import Quota, Zone
from tpucare.testbed.emulator.world.latency import FAST, FAST_QUEUE, Latencies, Latency, Seconds, Share, Strict, around

_WORLDS = Path(__file__).parents[1] / "worlds"


class Rates(Strict):
    """Calls per minute and project; None = unlimited. 91 creates a minute were seen in one large project."""

    create: int | None = Field(default=91, ge=0)
    delete: int | None = Field(default=None, ge=0)
    read: int | None = Field(default=None, ge=0, description="every Get and List; no public number is known")


class Queueing(Strict):
    """How queued resources fare. Only the rules are documented; the lengths and shares are guesses."""

    accept: Latency = Field(default=around(5, 15), description="from the create call until it waits")
    grant: Latency = Field(default=around(120, 4 * 3600), description="from then until capacity is looked for")
    look_every: Seconds = Field(default=30.0, description="and looked for again when there is none", gt=0)
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
    """Who may do what. `service_accounts`: the only ones the caller may use, none = all."""

    projects: tuple[str, ...] | None = Field(default=None, description="the only projects there are; none = any")
    denied_permissions: tuple[str, ...] = Field(default=(), description="for example tpu.nodes.create")
    service_accounts: tuple[str, ...] | None = None
    free_trial: bool = False


class GuestAttributes(Strict):
    """
    What GetGuestAttributes answers of host keys. What the TPU service says of keys that are not published is not
    documented; Compute Engine, which it asks, says NOT_FOUND.
    """

    published_after: Seconds | None = Field(default=0.0, description="from sshd on until they can be read; none: never")
    unpublished: Literal["empty", "not-found"] = Field(default="empty", description="the answer until then")


class Listing(Strict):
    """Page sizes of ListNodes. The real limits are not published."""

    page_default: int = Field(default=100, ge=1)
    page_cap: int = Field(default=1000, ge=1)
    page_refused: int | None = Field(default=None, ge=1, description="a larger page_size is refused with 3")


class Addresses(Strict):
    """
    Workers get unique addresses of this network; on Linux all of 127/8 needs no set-up.

    Where it is not named, `tpucare emulator` takes a part of it that no other emulator of the machine uses.
    """

    network: str = "127.64.0.0/10"


class WorldConfig(Strict):
    """Everything about a world but its seed and its start."""

    zones: dict[str, Zone] = Field(min_length=1)
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
    listing: Listing = Listing()
    guest_attributes: GuestAttributes = GuestAttributes()
    addresses: Addresses = Addresses()
    buckets: tuple[str, ...] = Field(default=(), description="Cloud Storage buckets that exist from the start")
    audit_reads: bool = Field(default=True, description="log Get and List calls too")
    speed: Literal["real", "fast"] = "real"

    @model_validator(mode="before")
    @classmethod
    def _fill_fast(cls, value: object) -> object:
        """`speed: fast` changes the defaults of lengths; what is written beside it still counts."""
        if not isinstance(value, Mapping) or value.get("speed") != "fast":
            return value
        given = value.get("latencies") or {}
        latencies = {**FAST, **given} if isinstance(given, Mapping) else given
        taken = value.get("preemption") or {}
        preemption = {"notice": None, **taken} if isinstance(taken, Mapping) else taken
        waits = value.get("queue") or {}
        queue = {**FAST_QUEUE, **waits} if isinstance(waits, Mapping) else waits
        return {**value, "latencies": latencies, "preemption": preemption, "queue": queue}

    @classmethod
    def two_zones(cls) -> WorldConfig:
        """The default world: two zones where small v2, v3 and v6e spot slices come and go, at real speed."""
        return cls.model_validate(yaml.safe_load(_TWO_ZONES))

    @classmethod
    def fast(cls, **changes: Any) -> WorldConfig:
        """Two zones of constant capacity and no faults, everything within fractions of a second; keys as in YAML."""
        zones = {"us-central1-a": {"accelerators": ["*"]}, "europe-west4-a": {"accelerators": ["*"]}}
        return cls.model_validate({"zones": zones, **changes, "speed": "fast"})

    @classmethod
    def calm(cls, **changes: Any) -> WorldConfig:
        """Real speed without chance: constant latencies, nothing goes wrong by itself. For stories in virtual time."""
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

_TWO_ZONES = """
zones:
  us-central1-a:
    capacity:
      - {type: v2, unit: hosts, process: {maximum: 24, initial: 16, births: 6, deaths: 3, bursts: 0.2}}
      - {type: v3, unit: hosts, process: {maximum: 16, initial: 8, births: 4, deaths: 2, bursts: 0.2}}
      - {type: v5e, trace: gcp-h100-2025/us-central1-a}
  europe-west4-a:
    capacity:
      - {type: v2, unit: hosts, process: {maximum: 16, initial: 8, births: 4, deaths: 2, bursts: 0.1}}
      - {type: v3, unit: hosts, process: {maximum: 64, initial: 32, births: 8, deaths: 4, bursts: 0.1}}
      - {type: v6e, trace: gcp-h100-2025/europe-west1-c}
faults:
  calls: {unavailable: 0.002, internal: 0.001}
  methods:
    CreateNode: {unavailable: 0.005, lost_before: 0.002, lost_after: 0.005}
    DeleteNode: {unavailable: 0.005, lost_before: 0.002, lost_after: 0.005}
  delete_stuck: 0.01
  failed_create_left: 0.02
  missing_worker: 0.02
preemption: {never_shown: 0.01, shown_otherwise: 0.02}
health: {flap_every: 1d}
"""


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
    said = "unknown key" if first["type"] == "extra_forbidden" else str(first["msg"]).removeprefix("Value error, ")
    more = len(error.errors()) - 1
    return f"{key}: {said}" + (f" (and {more} more)" if more else "")
