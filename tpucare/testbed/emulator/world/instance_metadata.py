"""
The content of a worker's metadata server at boot: path -> value.

Sources: Compute Engine's documentation on predefined metadata keys; torch_xla, jax, levanter and Ray, which read
`accelerator-type`, `agent-worker-number`, `worker-network-endpoints`, `instance-id` and `tpu-env`. Values that none of
them documents are guesses, listed in docs/emulator.md.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping

from tpucare.model.accelerators import Accelerator, region_of
from tpucare.testbed.emulator.world.records import (
    INSTANCE_ATTRIBUTES,
    MAINTENANCE_ATTRIBUTE,
    NO_MAINTENANCE,
    PREEMPTED_ATTRIBUTE,
)
from tpucare.testbed.emulator.world.state import NodeLife, WorkerLife

SERVICE_ACCOUNT = "instance/service-accounts/"
DEFAULT_SCOPE = "https://www.googleapis.com/auth/cloud-platform"

_CHIP_BOUNDS: Mapping[int, tuple[int, int, int]] = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Arrangement of the chips of one host, by their number."""

_ENVIRONMENT_TYPES = {"v5e": "V5LITE_POD"}
"""TYPE in `tpu-env` of a generation whose name in the API is not the generation's, in capitals."""

_SMALL_BOXES: Mapping[int, str] = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}
"""Topologies of slices of v4 and v5p that are no whole cubes of 4x4x4 chips, by their chips."""


def worker_attributes(
    life: NodeLife, worker: WorkerLife, peers: tuple[str, ...], megascale: Mapping[str, str]
) -> dict[str, str]:
    """*megascale*: MEGASCALE_* variables of a multislice, empty for a node on its own."""
    spec, zone, project = life.record.spec, life.path.zone, life.path.project
    name = f"{life.hostname_stem}-w-{worker.number}"
    own = {INSTANCE_ATTRIBUTES + key: value for key, value in spec.metadata.items()}
    number = project_number(project)
    return {
        **own,
        INSTANCE_ATTRIBUTES + "accelerator-type": life.accelerator.type,
        INSTANCE_ATTRIBUTES + "agent-worker-number": str(worker.number),
        INSTANCE_ATTRIBUTES + "worker-network-endpoints": ",".join(f"unknown:unknown:{peer}" for peer in peers),
        INSTANCE_ATTRIBUTES + "tpu-env": tpu_env(life, worker, megascale),
        INSTANCE_ATTRIBUTES + "instance-id": life.path.node_id,
        INSTANCE_ATTRIBUTES + "physical-topology": topology(life.accelerator),
        "instance/id": str(instance_id(life.record.id, worker.number)),
        "instance/name": name,
        "instance/hostname": f"{name}.{zone}.c.{project}.internal",
        "instance/zone": f"projects/{number}/zones/{zone}",
        "instance/image": f"projects/cloud-tpu-images/global/images/{spec.runtime_version}",
        "instance/machine-type": f"projects/{number}/machineTypes/n1-standard-96",
        "instance/network-interfaces/0/ip": worker.address,
        "instance/network-interfaces/0/network": f"projects/{number}/networks/{_last(spec.network.network)}",
        "instance/network-interfaces/0/access-configs/0/external-ip": (
            worker.address if spec.network.enable_external_ips else ""
        ),
        "instance/scheduling/preemptible": "TRUE" if spec.is_preemptible else "FALSE",
        "instance/scheduling/automatic-restart": "FALSE" if spec.is_preemptible else "TRUE",
        "instance/scheduling/on-host-maintenance": "TERMINATE",
        "project/project-id": project,
        "project/numeric-project-id": str(number),
        PREEMPTED_ATTRIBUTE: "FALSE",
        MAINTENANCE_ATTRIBUTE: NO_MAINTENANCE,
        **_service_account(life),
        **life.attributes,
    }


def _service_account(life: NodeLife) -> dict[str, str]:
    """The account under `default` and under its own name; `token` is the secret that the server wraps in JSON."""
    spec = life.record.spec
    email = spec.service_account or default_account(life.path.project)
    secret = hashlib.sha256(f"{life.record.id}/{email}".encode()).hexdigest()
    values = {
        "aliases": "default",
        "email": email,
        "scopes": "\n".join(spec.scopes or (DEFAULT_SCOPE,)),
        "token": f"ya29.emulated-{secret}",
    }
    return {f"{SERVICE_ACCOUNT}{name}/{key}": value for name in ("default", email) for key, value in values.items()}


def default_account(project: str) -> str:
    """The account of Compute Engine, under which a node runs that was given no other."""
    return f"{project_number(project)}-compute@developer.gserviceaccount.com"


def project_number(project: str) -> int:
    """The number that stands for a project's name in some answers; twelve digits, the same every time."""
    return 10**11 + int(hashlib.sha256(project.encode()).hexdigest(), 16) % (9 * 10**11)


def instance_id(node_id: int, worker: int) -> int:
    """Compute Engine's id of one worker."""
    return (node_id * 257 + worker) % (1 << 63)


def tpu_env(life: NodeLife, worker: WorkerLife, megascale: Mapping[str, str]) -> str:
    """The YAML of attribute `tpu-env`, one variable a line; Ray's and W&B's regular expressions want the quotes."""
    chips, hosts = bounds(life.accelerator)
    generation = life.accelerator.generation
    environment = {
        "ACCELERATOR_TYPE": life.accelerator.type,
        "TYPE": _ENVIRONMENT_TYPES.get(generation, generation.upper()),
        "TOPOLOGY": topology(life.accelerator),
        "CHIPS_PER_HOST_BOUNDS": chips,
        "HOST_BOUNDS": hosts,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": chips,
        "TPU_PROCESS_BOUNDS": hosts,
        "ZONE": life.path.zone,
        "REGION": region_of(life.path.zone),
        "WORKER_ID": str(worker.number),
        "NODE_ID": life.path.node_id,
        "CONSUMER_PROJECT_ID": life.path.project,
        "RUNTIME_VERSION": life.record.spec.runtime_version,
        **megascale,
    }
    return "".join(f"{key}: '{value}'\n" for key, value in environment.items())


def topology(accelerator: Accelerator) -> str:
    """
    Chips along each axis, as `2x2x4`.

    A size that the catalogue does not list gets the most even sides, of v4 and v5p in cubes of 4x4x4 chips; empty
    where there is none.
    """
    if accelerator.topology:
        return accelerator.topology
    if accelerator.generation not in ("v4", "v5p"):
        return _evenest(accelerator.chips, 2, 1)
    cubes, rest = divmod(accelerator.chips, 64)
    return _evenest(cubes, 3, 4) if not rest else _SMALL_BOXES.get(accelerator.chips, "")


def _evenest(count: int, axes: int, unit: int) -> str:
    """The sides of a box of *count* cubes, each *unit* chips long, shortest first."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    boxes = (box for box in itertools.combinations_with_replacement(divisors, axes) if math.prod(box) == count)
    return "x".join(str(side * unit) for side in min(boxes, key=lambda box: box[-1] - box[0], default=()))


def bounds(accelerator: Accelerator) -> tuple[str, str]:
    """
    Chips per host and hosts along each axis, as `2,2,1`.

    A v4-32 (topology 2x2x4, 4 chips a host) gives `2,2,1` and `1,1,4`.
    """
    chips = _CHIP_BOUNDS.get(accelerator.chips_per_host, (accelerator.chips_per_host, 1, 1))
    sides = [int(side) for side in topology(accelerator).split("x") if side.isdigit()]
    sides += [1] * (3 - len(sides))
    hosts = [max(1, side // own) for side, own in zip(sides, chips, strict=True)]
    if math.prod(hosts) != accelerator.hosts:
        hosts = [1, 1, accelerator.hosts]  # a size of which no topology is known
    return ",".join(map(str, chips)), ",".join(map(str, hosts))


def _last(name: str) -> str:
    return name.rpartition("/")[2] or "default"
