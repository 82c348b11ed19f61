"""
Turns actions into effects: each one blocking call, run by the Executor. Every choice was made by the planner.

Time passes between decision and effect, so a node is read again before its delete (rule 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from tpucare.model.actions import (
    AddSshKey,
    Create,
    Delete,
    Effect,
    FetchHostKeys,
    GetNode,
    GetOperation,
    Launch,
    SendNotice,
    Stop,
)
from tpucare.model.errors import LostRace, WorkerSilent
from tpucare.model.memory import Memory
from tpucare.model.ports import Cloud, Lane, Launcher
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    OS_LOGIN,
    SSH_KEYS,
    NodeKey,
    NodeRequest,
    Slot,
    Worker,
)
from tpucare.model.runs import LaunchOrder, NoticeOrder, StopOrder

COORDINATOR_PORT = 9470
"""Port of jax.distributed on CPUs. On a TPU host 8476 is libtpu's mesh controller, 8482 JAX's own coordinator."""

LANES: Mapping[type, Lane] = {
    Launch: Lane.LAUNCH,
    Stop: Lane.STOP,
    SendNotice: Lane.LAUNCH,
}


SAME_INSTANT = timedelta(seconds=1)


class ChangedMeanwhile(LostRace):
    """The node of that name is not the one decided about: nothing was deleted."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of effects. `ssh_key`: our `user:ssh-… key` line; `owner`: our owner label."""

    cloud: Cloud
    launcher: Launcher
    owner: str
    ssh_key: str


def lane_of(action: Effect) -> Lane:
    return LANES.get(type(action), Lane.CLOUD)


def prepare(
    action: Effect, slot: Slot, memory: Memory, workers: tuple[Worker, ...] | None, coordinator: str, ports: Ports
) -> Callable[[], object]:
    """The effect of *action* as a call without arguments; its inputs are read now, on the engine's thread."""
    match action:
        case Create():
            request = node_request(action, slot, ports)
            return lambda: ports.cloud.create_node(request)
        case Delete():
            return lambda: delete_ours(action, ports.cloud, ports.owner)
        case GetNode(key=key):
            return lambda: ports.cloud.get_node(key)
        case GetOperation(operation=operation):
            return lambda: ports.cloud.get_operation(operation)
        case AddSshKey(key=key):
            return lambda: ports.cloud.add_ssh_key(key, ports.ssh_key)
        case FetchHostKeys(key=key):
            return lambda: pin_published_keys(key, workers or (), ports)
        case Launch() | Stop() | SendNotice():
            return _prepare_run(action, slot, memory, workers, coordinator, ports)


def _prepare_run(
    action: Launch | Stop | SendNotice,
    slot: Slot,
    memory: Memory,
    workers: tuple[Worker, ...] | None,
    coordinator: str,
    ports: Ports,
) -> Callable[[], object]:
    if workers is None:
        raise WorkerSilent(f"{action.key.name} does not list its workers")
    past = memory.node(action.key.name)
    attempt = past.attempt if past is not None else memory.attempts
    match action:
        case Stop():
            order = StopOrder(workers, slot.name, attempt, slot.care.grace, action.stacks)
            return lambda: ports.launcher.stop(order)
        case SendNotice():
            notice = NoticeOrder(workers, action.token, action.text)
            return lambda: ports.launcher.notice(notice)
        case Launch():
            assert slot.job is not None
            launch = LaunchOrder(
                workers=workers,
                slot=slot.name,
                fleet=slot.fleet,
                token=action.token,
                attempt=attempt,
                job=slot.job,
                coordinator=f"{coordinator}:{COORDINATOR_PORT}",
                grace=slot.care.grace,
                sigterm_on_preemption=slot.care.sigterm_on_preemption,
            )
            return lambda: ports.launcher.launch(launch)


def node_request(action: Create, slot: Slot, ports: Ports) -> NodeRequest:
    labels = labels_of(slot, action.number, ports)
    metadata = dict(action.place.metadata)
    metadata[SSH_KEYS] = "\n".join((ports.ssh_key, *slot.ssh_keys))
    if not action.place.os_login:
        # With OS Login the guest agent ignores `ssh-keys`, so no login would work.
        metadata[OS_LOGIN] = "FALSE"
    key = NodeKey(slot.project, action.place.zone, action.name)
    return NodeRequest(key, action.place, labels, metadata)


def delete_ours(action: Delete, cloud: Cloud, owner: str) -> None:
    """Read the node again and delete it. Raises: ChangedMeanwhile: not that node, or not ours. NodeGone."""
    node = cloud.get_node(action.key)
    # ListNodes and GetNode write instants with different precision, so equality would stop every delete.
    is_other = node.id != action.id or abs(node.create_time - action.create_time) >= SAME_INSTANT
    if is_other or node.owner != owner:
        raise ChangedMeanwhile(f"{action.key.name} is not the node it was: nothing deleted")
    cloud.delete_node(action.key)


def pin_published_keys(key: NodeKey, workers: tuple[Worker, ...], ports: Ports) -> bool:
    """Pin the host keys in guest attributes. True: they had keys of every worker."""
    vouched = ports.launcher.pin_host_keys(workers, ports.cloud.host_keys(key))
    return bool(workers) and vouched >= {worker.number for worker in workers}


def labels_of(slot: Slot, number: int | None, ports: Ports) -> dict[str, str]:
    """Labels of a node of ours and of *slot*. *number*: of its create; None: adopted."""
    return {
        LABEL_OWNER: ports.owner,
        LABEL_FLEET: slot.fleet,
        LABEL_SLOT: slot.name,
        LABEL_NUMBER: "adopted" if number is None else str(number),
    }
