"""
The shape of a fleet file: every key with its type, default and meaning. Error lines, the JSON schema for editors and
`docs/fleet-file.md` all come from these models.

Checks of single values are left to `values`, rules over several keys to `rules`, turning the models into slots to
`parse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from tpucare.fleetfile import values
from tpucare.model.accelerators import known_types, known_zones
from tpucare.model.resources import Care, HostKeys, OnSuccess, PlacementOrder, Provisioning

COUNT_LIMIT = 10_000
ALTERNATIVES_LIMIT = 20
ZONES_LIMIT = 50

# Keys of later versions. The error names them, so that a user does not believe that they have an effect.
LATER_KEYS = ("image", "notify")

# Words of other tools -> the key to write here.
SYNONYMS: Mapping[str, str] = {
    "zone": "zones: [ZONE]",
    "accelerator": "type",
    "accelerator_type": "type",
    "tpu_type": "type",
    "spot": "provisioning: spot",
    "preemptible": "provisioning: preemptible",
    "reserved": "provisioning: reserved",
    "tier": "provisioning",
    "runtime_version": "runtime",
    "version": "runtime",
    "replicas": "count",
    "slots": "count",
    "command": "run",
    "cmd": "run",
    "script": "run",
    "queue": "queued: true",
    "queued_resource": "queued: true",
    "valid_until_duration": "valid_for",
    "repo": "repository",
    "git": "repository",
    "environment": "env",
    "envs": "env",
    "bucket": "checkpoint",
    "enable-oslogin": "os_login",
    "enable_oslogin": "os_login",
    "oslogin": "os_login",
}


class Fence(StrEnum):
    """The choice when an older node cannot be proven dead for `fence_after`."""

    WAIT = "wait"
    PROCEED = "proceed"


class Stopped(StrEnum):
    """The choice for a node that a person stopped."""

    HOLD = "hold"
    DELETE = "delete"


class AddressKind(StrEnum):
    """The addresses by which the daemon reaches the workers."""

    EXTERNAL = "external"
    INTERNAL = "internal"


def _as_list(value: object) -> object:
    """A single alternative stands for a list of one."""
    return [value] if isinstance(value, dict) else value


def _as_zone(value: object) -> object:
    """A zone's bare name stands for a mapping without settings of its own."""
    return {"zone": value} if isinstance(value, str) else value


def _length(default: timedelta, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"default": duration_text(default)})


def _inherited(default: object, description: str) -> Any:
    """A key whose default comes from elsewhere, mostly the section around it: the schema for editors shows none."""

    def without_default(schema: dict[str, Any]) -> None:
        schema.pop("default", None)

    return Field(default, description=description, json_schema_extra=without_default)


def duration_text(length: timedelta) -> str:
    """The shortest way to write *length* in a fleet file: `90s`, `30m`, `1h`, `2d`."""
    seconds = int(length.total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


_CARE = Care()
_DURATION_SCHEMA = Annotated[
    str, Field(pattern=r"^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$", examples=["90s", "30m", "1h30m"])
]
Duration = Annotated[timedelta, BeforeValidator(values.duration, json_schema_input_type=_DURATION_SCHEMA)]
PositiveDuration = Annotated[Duration, AfterValidator(values.positive)]
Variable = Annotated[str, AfterValidator(values.variable)]
VariableValue = Annotated[str, BeforeValidator(values.variable_value, json_schema_input_type=str | int | float)]
MetadataKey = Annotated[str, AfterValidator(values.metadata_key)]
MetadataValue = Annotated[str, BeforeValidator(values.text_or_number, json_schema_input_type=str | int | float)]
Script = Annotated[str, AfterValidator(values.script)]
Line = Annotated[str, AfterValidator(values.line)]
Tier = Annotated[Provisioning, Field(strict=False)]
Dollars = Annotated[float | None, BeforeValidator(values.dollars, json_schema_input_type=Annotated[float, Field(ge=0)])]
_INSTANT_SCHEMA = Annotated[str, Field(examples=["2026-12-31", "2026-12-31T18:00+01:00"])]
Instant = Annotated[datetime | None, BeforeValidator(values.instant, json_schema_input_type=_INSTANT_SCHEMA)]
PositiveDollars = Annotated[
    float | None, BeforeValidator(values.positive_dollars, json_schema_input_type=Annotated[float, Field(gt=0)])
]
_HOURS_SCHEMA = Annotated[float, Field(gt=0)]
Budget = Annotated[int, Field(ge=0, le=1000)]
Zone = Annotated[str, AfterValidator(values.zone)]
Runtime = Annotated[str, AfterValidator(values.runtime)]
ServiceAccount = Annotated[str, AfterValidator(values.service_account)]


class Section(BaseModel):
    """Unknown keys and wrong types are errors: a typo that passes costs days of a grant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NetworkSection(Section):
    """The network of the workers. Default: the project's default network, with external addresses."""

    external_ips: bool = Field(
        True, description="Every worker gets an external address. If false, the daemon reaches workers inside the VPC."
    )
    reach: Annotated[AddressKind, Field(strict=False)] = _inherited(
        AddressKind.EXTERNAL,
        "Addresses that the daemon uses; `internal` needs a daemon inside the VPC. Default: external ones if present.",
    )
    name: Annotated[str, AfterValidator(values.network)] = Field(
        "", description="Network: its name, or `projects/PROJECT/global/networks/NAME`."
    )
    subnetwork: Annotated[str, AfterValidator(values.subnetwork)] = Field(
        "", description="Subnetwork: its name, or `projects/PROJECT/regions/REGION/subnetworks/NAME`."
    )
    tags: list[Annotated[str, AfterValidator(values.tag)]] = Field(
        [], max_length=64, description="Network tags for firewall rules."
    )


class ZoneSection(Section):
    """One zone with its own settings; absent keys are inherited from the enclosing `tpu` section."""

    zone: Zone = Field(description="Zone, such as `us-central2-b`.")
    provisioning: Tier = _inherited(Provisioning.SPOT, "As `tpu.provisioning`, for this zone.")
    runtime: Runtime = _inherited("", "As `tpu.runtime`, for this zone.")
    service_account: ServiceAccount = _inherited("", "As `tpu.service_account`, for this zone.")
    network: NetworkSection = _inherited(
        NetworkSection(), "As `tpu.network`, for this zone: keys here override those there."
    )
    price: Dollars = _inherited(None, "As `tpu.price`, for this zone.")
    queued: bool = _inherited(False, "As `tpu.queued`, for this zone.")
    valid_for: PositiveDuration | None = _inherited(None, "As `tpu.valid_for`, for this zone.")


ZoneChoice = Annotated[ZoneSection, BeforeValidator(_as_zone, json_schema_input_type=str | ZoneSection)]


class TpuSection(Section):
    """The TPU to request. A list of such sections is a list of alternatives, tried in order, round by round."""

    type: Line = Field(description="Accelerator type, such as `v4-32`.")
    zones: list[ZoneChoice] = Field(
        min_length=1,
        max_length=ZONES_LIMIT,
        description="Zones, which take turns by `placement`: names, or mappings with their own settings.",
    )
    provisioning: Tier = Field(Provisioning.SPOT, description="Provisioning model of the capacity.")
    runtime: Runtime = _inherited(
        "", "Runtime version. Default: the catalogue's version for the type; v5e, v5p and v6e run on no other."
    )
    service_account: ServiceAccount = Field(
        "", description="Service account of the workers. Default: the project's default one."
    )
    network: NetworkSection = Field(NetworkSection(), description="The network of the workers.")
    ssh_keys: list[Annotated[str, AfterValidator(values.ssh_key)]] = Field(
        [], max_length=50, description="Keys of more people who may log in: lines `USER:ssh-ed25519 AAAA… COMMENT`."
    )
    metadata: dict[MetadataKey, MetadataValue] = Field(
        {},
        max_length=100,
        description="Metadata of the node, such as `startup-script`: text, or numbers as written. "
        "Every user on a worker can read it: no secrets.",
    )
    os_login: bool = Field(
        False,
        description="Keep the project's OS Login setting. By default tpucare switches OS Login off for the node "
        "(`enable-oslogin: FALSE`), since it logs in with a key in the metadata.",
    )
    price: Dollars = _inherited(
        None,
        "Dollars an hour of one node as you pay it: 0 for a grant such as TRC. Default: the list price of the "
        "catalogue for type, zone and terms, if it has one.",
    )
    queued: bool = Field(
        False,
        description="Stand in the queue (a queued resource) for these places instead of asking again and again. One "
        "request of a slot stands at a time; alternatives without `queued` are asked meanwhile, and the first node "
        "that comes up holds the slot.",
    )
    valid_for: PositiveDuration | None = _inherited(
        None,
        "With `queued`: the request is withdrawn after this time, and the next queued place is asked. Default: it "
        "stands until it is granted.",
    )
    unlisted: bool = Field(
        False, description="Accept types, zones and terms outside the catalogue; each is then a warning."
    )


class JobSection(Section):
    """The job, which all workers of a node run together."""

    run: Script = _inherited(
        "",
        "Shell script that trains. Exit status 0 on every worker means finished. Required, except in a pool (`ray`).",
    )
    setup: Script = _inherited("", "Shell script that prepares a new node, once per node.")
    repository: Annotated[str, AfterValidator(values.repository)] = Field(
        "", description="Git repository to run in: an https, ssh or file URL, without credentials. Excludes `workdir`."
    )
    branch: Annotated[str, AfterValidator(values.branch)] = Field(
        "", description="Branch, tag or commit of the repository. Default: its default branch."
    )
    follow: bool = Field(
        False, description="Each worker fetches the branch's newest commit itself, instead of one commit for all."
    )
    workdir: Annotated[str, AfterValidator(values.folder)] = Field(
        "", description="Folder to send and run in, relative to the fleet file. Excludes `repository`."
    )
    files: dict[str, Line] = Field(
        {}, description="More files to send: path below the job's folder -> local path, relative to the fleet file."
    )
    env: dict[Variable, VariableValue] = Field({}, description="Environment: text, or numbers as written.")
    secrets: list[Variable] = Field(
        [],
        max_length=100,
        description="Names of variables whose values the daemon holds and sends over SSH only. "
        "`GIT_TOKEN` or `GIT_SSH_KEY` give access to a private repository.",
    )
    checkpoint: Annotated[str, AfterValidator(values.checkpoint)] = Field(
        "", description="Location of the checkpoints: `gs://BUCKET/PATH`, or an absolute path that all nodes share."
    )
    cache: Annotated[str, AfterValidator(values.cache)] = Field(
        "",
        description="Where what `setup` made is kept for later nodes: `gs://BUCKET/PATH`, an absolute path that all "
        "nodes share, or `auto`, beside the checkpoint ([how](training.md#the-environment-kept-across-nodes)).",
    )
    cache_paths: list[Annotated[str, AfterValidator(values.cache_path)]] = Field(
        ["venv"],
        min_length=1,
        max_length=20,
        description="Files and folders that `cache` keeps, below the job's folder. All that `setup` makes elsewhere is "
        "missing on a restored node.",
    )
    prefetch: bool = Field(
        False,
        description="Copy the newest checkpoint (`gs://`) to every host while its environment is restored or made, for "
        "a script that asks `tpucare.training.prefetched` for it.",
    )
    progress: Annotated[str, AfterValidator(values.progress)] = _inherited(
        "",
        "Regular expression whose one group matches the step in the log. Default: common forms of `step 123`, and the "
        "progress bars of tqdm, Lightning, Keras and levanter.",
    )


class SaveEverySection(Section):
    """
    Bounds of the interval of saves that a run is told (`TPUCARE_CADENCE`), whatever the lives of nodes and the cost of
    a save suggest.
    """

    min: PositiveDuration = _length(
        _CARE.save_every.shortest, "Never save more often. A save in the background has to end within this time."
    )
    max: PositiveDuration = _length(_CARE.save_every.longest, "Never save more seldom: the most training that is lost.")


class CareSection(Section):
    """Care settings of the slots. Durations count observed time: none of them passes while the daemon is suspended."""

    boot_timeout: PositiveDuration = _inherited(
        _CARE.boot_timeout,
        "A node whose workers do not all answer within this time is replaced. Default by hosts of the largest type: "
        "30m up to 16, 1h above, 2h from 64, 3h from 256.",
    )
    unreachable_after: PositiveDuration = _length(
        _CARE.unreachable_after, "A ready node with a silent worker and no progress is replaced after this time."
    )
    unhealthy_after: PositiveDuration = _length(
        _CARE.unhealthy_after, "An unhealthy node without progress is replaced after this time."
    )
    stalled_after: PositiveDuration = _length(
        _CARE.stalled_after,
        "A run without a new step for this time, or for 10 times its usual gap if longer, is restarted. Workers are "
        "probed every 15 s, so the limit is at least 150 s.",
    )
    setup_timeout: PositiveDuration = _length(_CARE.setup_timeout, "Limit of `job.setup`.")
    first_step_timeout: PositiveDuration = _length(
        _CARE.first_step_timeout,
        "Limit from the start of `job.run` to the first step, including restore; `restored at step 100` is not a step.",
    )
    fence: Annotated[Fence, Field(strict=False)] = Field(
        Fence.WAIT, description="If an older node cannot be proven dead: wait for proof, or proceed without it."
    )
    fence_after: PositiveDuration = _length(_CARE.fence_after, "Time to wait for proof before `fence` applies.")
    stopped: Annotated[Stopped, Field(strict=False)] = Field(
        Stopped.HOLD, description="If a node was stopped by hand: hold the slot, or replace the node by a new one."
    )
    host_keys: Annotated[HostKeys, Field(strict=False)] = Field(
        HostKeys.AUTO,
        description="If guest attributes do not confirm the host keys of a node (not published within 2 minutes, "
        "switched off, not permitted): `auto` trusts the keys of the first login and reports it, `vouched` sends no "
        "job and waits for a person. `auto` waits only 10 s if a node of that project and runtime published none in "
        "the last 24 hours.",
    )
    on_success: Annotated[OnSuccess, Field(strict=False)] = Field(
        OnSuccess.DELETE, description="When a run has finished: delete its node, keep it, or restart the run."
    )
    keep_failed: Duration = _length(_CARE.keep_failed, "Time to keep the node of a failed slot for inspection.")
    grace: Duration = _length(_CARE.grace, "Time between SIGTERM and SIGKILL.")
    success_after: Duration = _length(
        _CARE.success_after, "A run that exited 0 has finished if every worker still answers after this time."
    )
    crash_budget: Budget = Field(
        _CARE.crash_budget,
        description="Consecutive crashes that are retried; one more fails the slot (stalls: 6; reboots: 12).",
    )
    setup_budget: Budget = Field(
        _CARE.setup_budget,
        description="Consecutive failed setups that are retried; one more fails the slot.",
    )
    sigterm_on_preemption: bool = Field(
        _CARE.sigterm_on_preemption, description="Send SIGTERM to the run once when a preemption is announced."
    )
    save_every: SaveEverySection = Field(
        SaveEverySection(), description="Bounds of the interval of saves that runs are told (docs/training.md)."
    )


class CountSection(Section):
    """Bounds of a pool (`ray`): demand decides how many slots of it have a node. A number stands for both bounds."""

    min: int = Field(0, ge=0, le=COUNT_LIMIT, description="Slots that have a node without any demand.")
    max: int = Field(ge=1, le=COUNT_LIMIT, description="Slots that may have a node at once.")


class RaySection(Section):
    """Makes the fleet a pool of a Ray cluster: its slots get nodes when tasks, actors or groups ask for their TPUs."""

    cluster: Annotated[str, AfterValidator(values.fleet_name)] = _inherited(
        "", "Cluster, as named to `tpucare ray head`. Default: the fleet's name."
    )
    address: Annotated[str, AfterValidator(values.address)] = Field(
        "", description="Head that somebody else runs, as `HOST:PORT`; needs `token`."
    )
    token: Annotated[str, AfterValidator(values.optional_variable)] = Field(
        "", description="Name of the secret with the token of that head. A head of tpucare has one of its own."
    )
    python: Line = Field(
        "venv/bin/python", description="The Python that has Ray on a host, relative to the job's folder."
    )
    idle: PositiveDuration = _length(
        timedelta(minutes=10), "A slice of which no host did anything for this time, and that nothing asks for, goes."
    )
    priority: int = Field(
        0, ge=0, le=1000, description="Pools that fit a demand are tried in order of this number, then of their name."
    )


def _count_kind(value: object) -> str:
    return COUNT_BOUNDS if isinstance(value, dict | CountSection) else COUNT_NUMBER


# In brackets like pydantic's own `[key]`, since they become steps of an error's path (`problems.path_of`).
COUNT_NUMBER, COUNT_BOUNDS = "[number]", "[bounds]"
Count = Annotated[
    Annotated[int, Field(ge=1, le=COUNT_LIMIT), Tag(COUNT_NUMBER)] | Annotated[CountSection, Tag(COUNT_BOUNDS)],
    Discriminator(_count_kind),
]
Alternatives = Annotated[
    list[TpuSection], BeforeValidator(_as_list, json_schema_input_type=TpuSection | list[TpuSection])
]


class DeadlineSection(Section):
    """Work that is due at an instant: on-demand places of `tpu` are used where spot capacity does not suffice."""

    hours_of_work: Annotated[float, BeforeValidator(values.hours, json_schema_input_type=_HOURS_SCHEMA)] = Field(
        description="Hours of training of each slot, without boots and repeated steps."
    )
    by: Annotated[datetime, BeforeValidator(values.instant, json_schema_input_type=_INSTANT_SCHEMA)] = Field(
        description="Instant at which they are due, written like `until`."
    )


class FleetFile(Section):
    """A fleet of equal slots: their TPU, their job, their care settings."""

    name: Annotated[str, AfterValidator(values.fleet_name)] = Field(
        description="Name of the fleet, and prefix of its slots (`<name>-<i>`) and nodes: up to 24 of a-z, 0-9 and `-`."
    )
    count: Count = Field(
        1, description=f"Number of slots, up to {COUNT_LIMIT}; in a pool (`ray`) also `{{min: N, max: N}}`."
    )
    project: Annotated[str, AfterValidator(values.project)] = _inherited(
        "", "Google Cloud project. Default: from the environment, gcloud's settings or the credentials."
    )
    tpu: Alternatives = Field(
        min_length=1,
        max_length=ALTERNATIVES_LIMIT,
        description="The TPU to request, or a list of alternatives in order.",
    )
    max_price: Dollars = _inherited(
        None,
        "Dollars an hour of one slot. Dearer places are never asked; `check` names them, and those without a known "
        "price, which are asked. Default: no bound.",
    )
    until: Instant = _inherited(
        None,
        "Instant at which the fleet is taken down, in UTC unless it names an offset; a date is the beginning of that "
        "day (docs/cost.md). Default: no bound.",
    )
    max_cost: Dollars = _inherited(
        None,
        "Dollars of the whole fleet, from its first node on. Once they are spent, it is taken down (docs/cost.md). "
        "Each place that may be asked needs a price. Default: no bound.",
    )
    placement: Annotated[PlacementOrder, Field(strict=False)] = Field(
        PlacementOrder.WORTH,
        description="Order in which the places of one `tpu` entry and one provisioning model are asked: by `worth`, "
        "as learned (docs/placement.md), or `ordered`, as declared, for zones that were chosen for their data.",
    )
    value: PositiveDollars = _inherited(
        None,
        "Dollars that an hour of useful work of one slot is worth: the more, the less do prices count beside the lives "
        "of nodes. Default: 5 times the cheapest known price of its places, about what the hour costs on demand.",
    )
    deadline: DeadlineSection | None = _inherited(None, "Work that is due at an instant (docs/cost.md).")
    job: JobSection = _inherited(JobSection(), "The job that runs; in a pool (`ray`), how its hosts are prepared.")
    care: CareSection = _inherited(CareSection(), "Care settings of the slots.")
    ray: RaySection | None = _inherited(None, "Makes the fleet a pool of a Ray cluster (docs/ray.md).")


# Every section by the path of its keys, without list positions. Of two sections with one key, the usual one comes last.
SECTIONS: Mapping[tuple[str, ...], type[Section]] = {
    ("tpu", "zones", "network"): NetworkSection,
    ("tpu", "network"): NetworkSection,
    ("tpu", "zones"): ZoneSection,
    ("tpu",): TpuSection,
    ("job",): JobSection,
    ("care", "save_every"): SaveEverySection,
    ("care",): CareSection,
    ("count",): CountSection,
    ("deadline",): DeadlineSection,
    ("ray",): RaySection,
    (): FleetFile,
}


def json_schema() -> dict[str, Any]:
    """
    JSON schema (2020-12) of a fleet file, for the completion and checks of editors.

    Types and zones of the catalogue are suggestions in it: `tpu.unlisted` allows others.
    """
    schema = FleetFile.model_json_schema()
    sections = schema["$defs"]
    _suggest(sections["TpuSection"]["properties"]["type"], known_types())
    _suggest(sections["ZoneSection"]["properties"]["zone"], known_zones())
    _suggest(sections["TpuSection"]["properties"]["zones"]["items"]["anyOf"][0], known_zones())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "tpucare fleet"}


def _suggest(schema: dict[str, Any], words: tuple[str, ...]) -> None:
    schema.pop("type", None)
    schema["anyOf"] = [{"enum": list(words)}, {"type": "string"}]
