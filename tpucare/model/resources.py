"""
The nouns of tpucare: slots, places, nodes, workers, and the records that cross the Cloud, Remote and Store ports.

Memory of a slot is in `memory`, orders to workers in `runs`. Numbers of states and health are those of
google.cloud.tpu.v2 (Cloud TPU API v2, `Node.State`, `Node.Health`). Frozen, standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import NamedTuple

LABEL_OWNER = "tpucare-owner"
LABEL_FLEET = "tpucare-fleet"
LABEL_SLOT = "tpucare-slot"
LABEL_NUMBER = "tpucare-attempt"
LABEL_SPENT = "tpucare-spent"

SSH_KEYS = "ssh-keys"
OS_LOGIN = "enable-oslogin"
"""Keys of node metadata that tpucare alone writes."""

_NODE_NAME = re.compile(r"^(?P<slot>.+)-a(?P<number>\d+)$")


class _OpenEnum(IntEnum):
    """An enum of the API; an unknown number becomes a member `NUMBER_n`, never an error."""

    @classmethod
    def _missing_(cls, value: object) -> _OpenEnum | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"NUMBER_{value}"
        member._value_ = value
        return member


class NodeState(_OpenEnum):
    """`Node.State` of Cloud TPU API v2."""

    STATE_UNSPECIFIED = 0
    CREATING = 1
    READY = 2
    RESTARTING = 3
    REIMAGING = 4
    DELETING = 5
    REPAIRING = 6
    STOPPED = 8
    STOPPING = 9
    STARTING = 10
    PREEMPTED = 11
    TERMINATED = 12
    HIDING = 13
    HIDDEN = 14
    UNHIDING = 15
    UNKNOWN = 16


PENDING_STATES = frozenset({NodeState.CREATING, NodeState.STARTING, NodeState.RESTARTING})
USABLE_STATES = frozenset({NodeState.READY, NodeState.REPAIRING})
DEAD_STATES = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED})


class Health(_OpenEnum):
    """`Node.Health` of Cloud TPU API v2; often 0 and rarely decisive."""

    UNSPECIFIED = 0
    HEALTHY = 1
    TIMEOUT = 3
    UNHEALTHY_TENSORFLOW = 4
    UNHEALTHY_MAINTENANCE = 5


class QueuedState(_OpenEnum):
    """`QueuedResourceState.State` of Cloud TPU API v2. WAITING_FOR_RESOURCES replaced ACCEPTED; both mean waiting."""

    STATE_UNSPECIFIED = 0
    CREATING = 1
    ACCEPTED = 2
    PROVISIONING = 3
    FAILED = 4
    DELETING = 5
    ACTIVE = 6
    SUSPENDING = 7
    SUSPENDED = 8
    WAITING_FOR_RESOURCES = 9


class Provisioning(StrEnum):
    """How the capacity is paid for, in the words of the fleet file."""

    SPOT = "spot"
    PREEMPTIBLE = "preemptible"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


@dataclass(frozen=True, slots=True)
class Network:
    """
    The network of a node's workers; empty strings mean the project's default network.

    `reach_internal`: the daemon connects to internal addresses even where there are external ones.
    """

    name: str = ""
    subnetwork: str = ""
    tags: tuple[str, ...] = ()
    external_ips: bool = True
    reach_internal: bool = False

    @property
    def is_reached_externally(self) -> bool:
        return self.external_ips and not self.reach_internal


@dataclass(frozen=True, slots=True)
class Place:
    """
    One way to create a node: zone, accelerator type, terms and network.

    `metadata`: the fleet's own keys of the node's metadata. `os_login`: keep the project's setting of OS Login, which
    tpucare else switches off for the node. `price`: dollars an hour of one node there, None = not known; no part of
    the key, so that an edited price changes nothing on a node. `queued`: a queued resource waits for the capacity, at
    most `valid_for` (None: without end). `entry`: index of the entry of the fleet's `tpu` list that declares it.
    """

    zone: str
    accelerator_type: str
    provisioning: Provisioning
    runtime: str
    service_account: str = ""
    network: Network = Network()
    workers: int = 1
    metadata: tuple[tuple[str, str], ...] = ()
    os_login: bool = False
    price: float | None = None
    queued: bool = False
    valid_for: timedelta | None = None
    entry: int = 0

    @property
    def key(self) -> str:
        """Key of this place in `Memory.places`; of a queue and of direct creates at one zone there are two."""
        network = self.network
        parts = (self.zone, self.accelerator_type, self.provisioning.value, self.service_account)
        direct = "/".join((*parts, network.name, network.subnetwork, "ext" if network.external_ips else "int"))
        return f"{direct}/queued" if self.queued else direct


class PlacementOrder(StrEnum):
    """The order in which the places of one `tpu` entry and one kind of terms are asked."""

    WORTH = "worth"
    ORDERED = "ordered"


class OnSuccess(StrEnum):
    """The fate of a node whose run finished."""

    DELETE = "delete"
    KEEP = "keep"
    RESTART = "restart"


class HostKeys(StrEnum):
    """The policy for nodes whose host keys are not in guest attributes."""

    AUTO = "auto"
    VOUCHED = "vouched"


@dataclass(frozen=True, slots=True)
class SaveBounds:
    """The shortest and the longest interval of saves that a run is told."""

    shortest: timedelta = timedelta(minutes=1)
    longest: timedelta = timedelta(hours=1)


class OnExit(StrEnum):
    """The reaction to the end of a foreign run, whose success is unknown."""

    LEAVE = "leave"
    RESTART = "restart"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Job:
    """
    The job of one slot, placeholders expanded, as it runs on every worker of its node.

    foreign: a user's function starts the runs, not tpucare's runner; `run` is empty
    repository, workdir: exclude each other; both empty: nothing is fetched
    workdir: absolute path on the daemon's machine    files: content by path below the job's folder
    secrets: names; the values are read at each launch and never stored
    cache:   where what `setup` made (`cache_paths`, below the job's folder) is kept for later nodes; empty: nowhere
    prefetch: copy the newest checkpoint to each host while its environment is made
    """

    run: str
    setup: str = ""
    repository: str = ""
    branch: str = ""
    follow: bool = False
    workdir: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    checkpoint: str = ""
    progress: str = ""
    foreign: bool = False
    cache: str = ""
    cache_paths: tuple[str, ...] = ("venv",)
    prefetch: bool = False

    @property
    def setup_mark(self) -> str:
        """Digest of the set-up and the files of the job; without those of its repository or workdir."""
        digest = hashlib.sha256(self.setup.encode())
        for path, content in sorted(self.files.items()):
            digest.update(b"\0" + path.encode() + b"\0" + hashlib.sha256(content).digest())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Care:
    """Limits and choices of a slot's care (docs/fleet-file.md). Lengths count observed time (design, rule 11)."""

    boot_timeout: timedelta = timedelta(minutes=30)
    unreachable_after: timedelta = timedelta(minutes=3)
    unhealthy_after: timedelta = timedelta(hours=1)
    stalled_after: timedelta = timedelta(minutes=30)
    setup_timeout: timedelta = timedelta(minutes=60)
    first_step_timeout: timedelta = timedelta(minutes=60)
    fence_after: timedelta = timedelta(minutes=30)
    keep_failed: timedelta = timedelta(hours=1)
    grace: timedelta = timedelta(seconds=30)
    success_after: timedelta = timedelta(seconds=60)
    fence_proceed: bool = False
    stopped_delete: bool = False
    host_keys: HostKeys = HostKeys.AUTO
    on_success: OnSuccess = OnSuccess.DELETE
    on_exit: OnExit = OnExit.LEAVE
    crash_budget: int = 10
    setup_budget: int = 5
    sigterm_on_preemption: bool = True
    save_every: SaveBounds = SaveBounds()


@dataclass(frozen=True, slots=True)
class DueWork:
    """So many hours of training of each slot are due then."""

    hours_of_work: float
    by: datetime


@dataclass(frozen=True, slots=True)
class Bounds:
    """
    What a fleet may cost, and until when it runs. None: no bound.

    max_price: dollars an hour of one slot    max_cost: dollars of the whole fleet
    """

    max_price: float | None = None
    until: datetime | None = None
    max_cost: float | None = None
    deadline: DueWork | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the fleet ends at some time by itself."""
        return self.until is not None or self.max_cost is not None

    def excludes(self, place: Place) -> bool:
        """Whether *place* is dearer than `max_price`; a place without a known price is not."""
        return self.max_price is not None and place.price is not None and place.price > self.max_price


UNBOUNDED = Bounds()


@dataclass(frozen=True, slots=True)
class Slot:
    """
    A place that should always hold one live node, with everything needed to create the next one.

    `job_problem`: why the job is unknown (a file could not be read); `job` is None then.
    `lacks`: a missing requirement of every launch, such as a secret that is not set; no node is created meanwhile.
    `elastic`: the slot has a node only while demand wants one (`Memory.awake`); else it rests.
    `value`: dollars that an hour of useful work is worth; None: by the prices of its places.
    """

    name: str
    fleet: str
    project: str
    places: tuple[Place, ...]
    job: Job | None = None
    care: Care = Care()
    ssh_keys: tuple[str, ...] = ()
    workers: int = 1
    job_problem: str = ""
    lacks: str = ""
    elastic: bool = False
    bounds: Bounds = UNBOUNDED
    order: PlacementOrder = PlacementOrder.WORTH
    value: float | None = None

    def place(self, key: str) -> Place | None:
        """The declared place of that key; None: it is withdrawn."""
        return next((place for place in self.places if place.key == key), None)


class NodeKey(NamedTuple):
    """The path of a node: `projects/<project>/locations/<zone>/nodes/<name>`."""

    project: str
    zone: str
    name: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Addresses of one worker; either may be empty while the node is being made."""

    internal: str
    external: str = ""


class _Owned:
    """What the key and the labels of a resource say of its owner (rule 2)."""

    __slots__ = ()
    key: NodeKey
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def owner(self) -> str:
        return self.labels.get(LABEL_OWNER, "")

    @property
    def fleet(self) -> str:
        return self.labels.get(LABEL_FLEET, "")

    @property
    def slot(self) -> str:
        return self.labels.get(LABEL_SLOT, "")


@dataclass(frozen=True, slots=True)
class Node(_Owned):
    """
    One Cloud TPU resource as last listed or read.

    `id` and `create_time` (the cloud's clock) tell nodes of one name apart.
    `endpoints`: one entry per worker, index = worker number; may be short or empty while CREATING.
    """

    key: NodeKey
    id: int
    create_time: datetime
    state: NodeState
    health: Health = Health.UNSPECIFIED
    accelerator_type: str = ""
    provisioning: Provisioning = Provisioning.ON_DEMAND
    labels: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[Endpoint, ...] = ()
    queued_resource: str = ""


def shared_labels(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Labels that all of *each* have alike; none, where there are none."""
    if not each:
        return {}
    first, *others = each
    return {key: value for key, value in first.items() if all(labels.get(key) == value for labels in others)}


def node_name(slot: str, number: int) -> str:
    """Name of the node that create number *number* of *slot* asks for."""
    return f"{slot}-a{number}"


def parse_node_name(name: str) -> tuple[str, int] | None:
    """Slot and create number of a node name, or None when it is not of that form."""
    match = _NODE_NAME.match(name)
    return (match["slot"], int(match["number"])) if match else None


class Worker(NamedTuple):
    """
    One host VM of a node, as SSH reaches it.

    `node_id` is part of the identity: other nodes reuse an address soon, with other host keys.
    """

    key: NodeKey
    node_id: int
    number: int
    host: str


def workers_of(node: Node, *, external: bool, expected: int) -> tuple[Worker, ...] | None:
    """
    Every worker of *node*, or None while the node does not list all *expected* endpoints with a usable address.

    Shape: one entry per host VM, index = worker number; a v3-32 (32 cores, 8 per host) gives 4.
    Source: Cloud TPU API v2, `Node.network_endpoints[].access_config.external_ip` and `.ip_address`.
    """
    hosts = [endpoint.external if external else endpoint.internal for endpoint in node.endpoints]
    if len(hosts) < expected or not all(hosts):
        return None
    return tuple(Worker(node.key, node.id, number, host) for number, host in enumerate(hosts))


def reaches_externally(node: Node, place: Place | None, places: Sequence[Place]) -> bool:
    """
    Whether tpucare reaches the workers of *node* at their external addresses.

    place: where its slot created the node, of the declared *places*; None (an adopted node): externally if it has an
    external address, unless all of *places* are reached inside the VPC
    """
    if place is not None:
        return place.network.is_reached_externally
    is_inside = bool(places) and all(one.network.reach_internal for one in places)
    return not is_inside and any(endpoint.external for endpoint in node.endpoints)


# --- what crosses the Cloud port ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listing:
    """
    One complete answer of ListNodes over all zones of a project, with what differs from the answer before it.

    unreachable: zones that did not answer; their nodes are unknown, not gone, and absent from `nodes`
    gone:        keys in the previous listing and not in this one, unreachable zones left out
    cloud_time:  the service's clock at the answer; None: not given
    """

    project: str
    nodes: Mapping[NodeKey, Node]
    changed: frozenset[NodeKey]
    gone: frozenset[NodeKey]
    unreachable: frozenset[str] = frozenset()
    cloud_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """The content of a CreateNode call. `metadata` has `ssh-keys`; never a secret."""

    key: NodeKey
    place: Place
    labels: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """
    The content of a CreateQueuedResource call for one node. The name in `key` is that of the resource and of its node.

    request_id: the service answers a repeated call with the same id as it answered the first
    """

    key: NodeKey
    place: Place
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    request_id: str


@dataclass(frozen=True, slots=True)
class QueuedResource(_Owned):
    """
    One queued resource as last listed or read: `projects/<project>/locations/<zone>/queuedResources/<name>`.

    labels: of its node_spec, since the resource has none of its own    nodes: names of the nodes that it asks for
    error:  why it is FAILED (a CloudError)    suspended_by_service: SUSPENDING or SUSPENDED, and no caller asked for it
    """

    key: NodeKey
    create_time: datetime
    state: QueuedState
    labels: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    error: Exception | None = None
    suspended_by_service: bool = False


@dataclass(frozen=True, slots=True)
class QueueListing:
    """
    One complete answer of ListQueuedResources over all zones of a project.

    unreachable: zones that did not answer; their resources are unknown, not gone, and absent from `resources`
    """

    project: str
    resources: Mapping[NodeKey, QueuedResource]
    unreachable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Operation:
    """A long-running operation as last read; `error` (a CloudError) is set only when `done`."""

    name: str
    done: bool = False
    error: Exception | None = None
    create_time: datetime | None = None


# --- what crosses the Remote port --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ran to its end on a worker. `truncated`: output beyond the limit was dropped."""

    exit_status: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False


# --- what crosses the Store port ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event log: `text` for people, `kind` and `fields` for scripts; never a secret."""

    at: datetime
    kind: str
    text: str
    slot: str = ""
    node: str = ""
    level: str = "info"
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
