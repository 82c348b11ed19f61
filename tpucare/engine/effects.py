"""
Turns actions into effects: each one blocking call, run by the Executor. Every choice was made by the planner.

Time passes between decision and effect, so a node is read again before its delete (rule 2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

from tpucare.model.actions import (
    AddSshKey,
    Create,
    Delete,
    DeleteRequest,
    Effect,
    Enqueue,
    FetchHostKeys,
    GetNode,
    GetOperation,
    GetRequest,
    Launch,
    SendNotice,
    Stop,
)
from tpucare.model.errors import LostRace, NodeGone, WorkerSilent
from tpucare.model.memory import Memory, StoredArchive
from tpucare.model.ports import Cloud, Lane, Launcher
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    LABEL_SPENT,
    OS_LOGIN,
    SSH_KEYS,
    NodeKey,
    NodeRequest,
    QueuedRequest,
    Slot,
    Worker,
)
from tpucare.model.runs import LaunchOrder, NoticeOrder, StopOrder
from tpucare.planner.budget import spent_label
from tpucare.planner.predicates import cache_scope

COORDINATOR_PORT = 9470
"""Port of jax.distributed on CPUs. On a TPU host 8476 is libtpu's mesh controller, 8482 JAX's own coordinator."""

LANES: Mapping[type, Lane] = {
    Launch: Lane.LAUNCH,
    Stop: Lane.STOP,
    SendNotice: Lane.LAUNCH,
}


SAME_INSTANT = timedelta(seconds=1)
NO_ARCHIVES: Mapping[str, StoredArchive] = MappingProxyType({})


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
    action: Effect,
    slot: Slot,
    memory: Memory,
    workers: tuple[Worker, ...] | None,
    coordinator: str,
    ports: Ports,
    spent: float | None = None,
    archives: Mapping[str, StoredArchive] = NO_ARCHIVES,
) -> Callable[[], object]:
    """
    The effect of *action* as a call without arguments; its inputs are read now, on the engine's thread.

    spent: dollars that the fleet has cost, if it has a `max_cost`
    archives: stored environments by scope
    """
    match action:
        case Create():
            request = node_request(action, slot, ports, spent)
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
        case Enqueue():
            queued = queued_request(action, slot, memory, ports)
            return lambda: ports.cloud.create_queued(queued)
        case DeleteRequest(key=key):
            return lambda: delete_own_request(key, ports.cloud, ports.owner)
        case GetRequest(key=key):
            return lambda: ports.cloud.get_queued(key)
        case Launch() | Stop() | SendNotice():
            return _prepare_run(action, slot, memory, workers, coordinator, ports, archives)


def _prepare_run(
    action: Launch | Stop | SendNotice,
    slot: Slot,
    memory: Memory,
    workers: tuple[Worker, ...] | None,
    coordinator: str,
    ports: Ports,
    archives: Mapping[str, StoredArchive],
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
            scope = cache_scope(slot, memory, action.key.name)
            stored = archives.get(scope)
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
                cache_scope=scope,
                archive=stored.archive if stored is not None else None,
            )
            return lambda: ports.launcher.launch(launch)


def queued_request(action: Enqueue, slot: Slot, memory: Memory, ports: Ports) -> QueuedRequest:
    # Without `spent`: the label is read as of the node's creation, days after the request, and would hide what other
    # slots have cost meanwhile.
    same, intent = node_request(action, slot, ports), memory.request(action.name)
    assert intent is not None
    return QueuedRequest(same.key, same.place, same.labels, same.metadata, intent.request_id)


def node_request(action: Create | Enqueue, slot: Slot, ports: Ports, spent: float | None = None) -> NodeRequest:
    labels = labels_of(slot, action.number, ports)
    if spent is not None:
        # It outlives a lost store.
        labels[LABEL_SPENT] = spent_label(spent)
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


def delete_own_request(key: NodeKey, cloud: Cloud, owner: str) -> None:
    """
    Read the queued resource and its nodes again, and delete them. Raises: ChangedMeanwhile: one is not ours. NodeGone.
    """
    resource = cloud.get_queued(key)
    if resource.owner != owner:
        raise ChangedMeanwhile(f"the queued resource {key.name} is not ours: nothing deleted")
    for name in resource.nodes:
        with contextlib.suppress(NodeGone):
            if cloud.get_node(NodeKey(key.project, key.zone, name)).owner != owner:
                raise ChangedMeanwhile(f"{name} of the queued resource {key.name} is not ours: nothing deleted")
    cloud.delete_queued(key)


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
