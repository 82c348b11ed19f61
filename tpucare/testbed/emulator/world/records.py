"""
The records of the emulated API: nodes, operations, the parts of requests and answers.

Plain dataclasses without protobuf, so that a world can run in virtual time; `api` translates them. Records that the
world returns are frozen and are replaced, never changed: the same object means the same content, so a server may cache
a translation by identity. Numbers are those of google.cloud.tpu.v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol

from tpucare.model.resources import Health, NodeState

PREEMPTED_ATTRIBUTE = "instance/preempted"
MAINTENANCE_ATTRIBUTE = "instance/maintenance-event"
NO_MAINTENANCE = "NONE"
INSTANCE_ATTRIBUTES = "instance/attributes/"


class ApiError(Exception):
    """
    An answer that is not OK.

    code:     gRPC status number
    resource: name for a google.rpc.ResourceInfo detail, empty for none
    quota:    (subject, description) for a google.rpc.QuotaFailure detail
    reason:   for a google.rpc.ErrorInfo detail, for example LOCATION_POLICY_VIOLATED
    field:    (field, description) for a google.rpc.BadRequest detail
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        resource: str = "",
        quota: tuple[str, str] | None = None,
        reason: str = "",
        field: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.resource = resource
        self.quota = quota
        self.reason = reason
        self.field = field


# --- nodes ---------------------------------------------------------------------------------------------------------


class NodePath(NamedTuple):
    """`projects/<project>/locations/<zone>/nodes/<node_id>`; sorts in the order of listings."""

    project: str
    zone: str
    node_id: str

    def __str__(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}/nodes/{self.node_id}"

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"


def parse_node_path(name: str) -> NodePath:
    """Raises: ApiError (3): not the name of a node."""
    parts = name.split("/")
    if len(parts) != 6 or parts[0::2] != ["projects", "locations", "nodes"] or not all(parts):
        raise ApiError(3, f"Invalid resource name '{name}'; expected projects/*/locations/*/nodes/*")
    return NodePath(parts[1], parts[3], parts[5])


def parse_parent(parent: str) -> tuple[str, str]:
    """Project and zone (`-` for all zones) of a parent. Raises: ApiError (3)."""
    parts = parent.split("/")
    if len(parts) != 4 or parts[0::2] != ["projects", "locations"] or not all(parts):
        raise ApiError(3, f"Invalid parent '{parent}'; expected projects/*/locations/*")
    return parts[1], parts[3]


@dataclass(frozen=True, slots=True)
class AcceleratorConfig:
    """`type` is the number of `AcceleratorConfig.Type` (V2=2 V3=4 V4=7 V5LITE_POD=9 V5P=10 V6E=11)."""

    type: int
    topology: str


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """`Node.network_config`."""

    network: str = ""
    subnetwork: str = ""
    enable_external_ips: bool = False
    can_ip_forward: bool = False
    queue_count: int = 0


@dataclass(frozen=True, slots=True)
class DataDisk:
    """`mode`: READ_WRITE 1, READ_ONLY 2."""

    source_disk: str
    mode: int = 1


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """
    The settings of a node that a caller may choose. Either `accelerator_type` or `accelerator_config` is given.

    networks:    `network_configs`, which excludes `network_config`; has_network: whether `network_config` was given
    api_version: the version of the request, a number of `Node.ApiVersion`: V2_ALPHA1 3, V2 4
    """

    accelerator_type: str = ""
    accelerator_config: AcceleratorConfig | None = None
    runtime_version: str = ""
    preemptible: bool = False
    spot: bool = False
    reserved: bool = False
    network: NetworkConfig = NetworkConfig()
    networks: tuple[NetworkConfig, ...] = ()
    has_network: bool = False
    service_account: str = ""
    scopes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    description: str = ""
    data_disks: tuple[DataDisk, ...] = ()
    secure_boot: bool = False
    autocheckpoint: bool = False
    api_version: int = 4

    @property
    def tier(self) -> str:
        """`spot`, `preemptible`, `reserved` or `on-demand`."""
        if self.spot:
            return "spot"
        if self.preemptible:
            return "preemptible"
        return "reserved" if self.reserved else "on-demand"

    @property
    def is_preemptible(self) -> bool:
        """Spot and preemptible nodes draw on one capacity and one quota, and both may be taken away."""
        return self.spot or self.preemptible


class AddressPair(NamedTuple):
    """Addresses of one worker; `external` is empty without external IPs, `internal` until the worker is made."""

    internal: str
    external: str = ""


@dataclass(frozen=True, slots=True)
class Symptom:
    """`Node.symptoms[]`; `symptom_type` is the number of `Symptom.SymptomType`."""

    create_time: datetime
    symptom_type: int
    details: str = ""
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """
    One node as the API shows it at this instant.

    `endpoints`: index = worker number; empty or short while CREATING; kept after PREEMPTED. Port is 8470.
    `state` and `health` are plain numbers: an operator may set some that no package knows. `unknown_fields`: the API
    shows it with fields that no package knows. `queued_resource`: name of its owner, empty for a plain node.
    """

    path: NodePath
    id: int
    create_time: datetime
    spec: NodeSpec
    state: int = NodeState.CREATING
    health: int = Health.UNSPECIFIED
    health_description: str = ""
    endpoints: tuple[AddressPair, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    queued_resource: str = ""
    multislice: bool = False
    unknown_fields: bool = False

    @property
    def name(self) -> str:
        return str(self.path)


class Response(Protocol):
    """The resource of an operation at its end: a node or a queued resource."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """
    A long-running operation as last known. Verbs: create, delete, update, stop, start, reset, and those of alpha.

    `error` is (code, message) of a google.rpc.Status. `response` is the node or queued resource, None for Empty.
    `api_version`: of the call that began it; its metadata and answer are messages of that version.
    """

    name: str
    verb: str
    target: str
    create_time: datetime
    end_time: datetime | None = None
    done: bool = False
    error: tuple[int, str] | None = None
    response: Response | None = None
    cancel_requested: bool = False
    api_version: str = "v2"


@dataclass(frozen=True, slots=True)
class NodePage:
    """One page of ListNodes; `unreachable` holds names of zones that did not answer."""

    nodes: tuple[NodeRecord, ...]
    next_page_token: str = ""
    unreachable: tuple[str, ...] = ()


class GuestAttribute(NamedTuple):
    """One entry of GetGuestAttributes."""

    namespace: str
    key: str
    value: str


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallFate:
    """
    The fate of one call: drawn before the call, honoured by the server that makes it.

    Wait `before_seconds`; if `applied`, call the world (with this fate, for the audit log); wait `after_seconds`; if
    `error` is set, answer with it instead of the world's answer (which was lost after the call took effect).
    Not `applied`: the world must not be called; `CallPath.fate` has logged the call already.
    """

    before_seconds: float = 0.0
    after_seconds: float = 0.0
    error: ApiError | None = None
    applied: bool = True
    peer: str = ""

    @property
    def latency_seconds(self) -> float:
        return self.before_seconds + self.after_seconds


PLAIN = CallFate()
"""The fate of a call without latency and without faults."""
