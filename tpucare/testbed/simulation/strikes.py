"""
What each kind of fault does to the world, to machines, to runs, to the daemon and to what people ask for.

A strike acts through doors that exist for others too: the operator's hand on the world, the machines, a person's wish.
Each says whether it took hold; what did not (nothing to preempt just now) is not counted. How often they come is in
`faults`; the acts themselves are in `strikes_nodes`, `strikes_workers`, `strikes_api`, `strikes_daemon`,
`strikes_people`, `strikes_edits` and `strikes_sweeps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tpucare.model.memory import Wish
from tpucare.model.resources import NodeState
from tpucare.model.runs import Failure
from tpucare.testbed.simulation import strikes_api as api
from tpucare.testbed.simulation import strikes_daemon as daemon
from tpucare.testbed.simulation import strikes_edits as edits
from tpucare.testbed.simulation import strikes_nodes as nodes
from tpucare.testbed.simulation import strikes_people as people
from tpucare.testbed.simulation import strikes_sweeps as sweeps
from tpucare.testbed.simulation import strikes_workers as workers
from tpucare.testbed.simulation.hand import Act
from tpucare.testbed.simulation.store import DiskFault

QUOTA_TEXT = "Quota limit 'TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8 in zone {zone}."
POLICY_TEXT = "Constraint constraints/compute.requireOsLogin violated for project simulated."
RATE_TEXT = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute' of service 'tpu.googleapis.com'."  # noqa: E501

STRIKES: Mapping[str, Act] = MappingProxyType(
    {
        "preempted": nodes.preempt,
        "preempted-in-a-burst": nodes.burst,
        "preempted-unreported": lambda hand: nodes.preempt(hand, shown="never"),
        "preempted-shown-otherwise": nodes.preempt_otherwise,
        "preempted-silently": lambda hand: nodes.preempt(hand, silent=True),
        "preempted-while-creating": nodes.preempt_creating,
        "terminated": nodes.terminate,
        "forgotten": nodes.forget,
        "flips-back": nodes.flip_back,
        "silent-worker": workers.silence,
        "lost-worker": workers.lose_worker,
        "missing-worker": workers.miss_worker,
        "rebooted": workers.reboot,
        "key-refused": workers.next_boot("refuses"),
        "key-refused-for-good": workers.next_boot("refuses for good"),
        "host-key-changed": workers.change_host_key,
        "guest-404": workers.change_key_unvouched,
        "dirty-host": workers.next_boot("dirty"),
        "foreign-process": workers.next_boot("foreign"),
        "chips-held": workers.next_boot("held"),
        "container-left": workers.leave_container,
        "guarded": workers.next_boot("guarded"),
        "address-reused": people.take_addresses,
        "crashed": workers.end_run(1),
        "out-of-memory": workers.end_run(None),
        "hung": workers.hang,
        "hang-then-restart": workers.hang_and_restart,
        "one-signal-hang": workers.hang_early,
        "dependency-down": workers.fail_together,
        "finished-then-preempted": workers.finish_and_preempt,
        "notice-without-end": workers.notice_without_end,
        "exit-0-under-preemption": workers.exit_on_notice,
        "setup-failed": workers.end_run(1, Failure.SETUP),
        "stop-ignored": workers.ignore_stop,
        "launch-lost-before": workers.lose("launch-before"),
        "launch-lost-after": workers.lose("launch-after"),
        "stop-lost": workers.lose("stop"),
        "unhealthy": nodes.unhealthy,
        "repairing": nodes.show(int(NodeState.REPAIRING)),
        "repair-failed": nodes.show(int(NodeState.UNKNOWN)),
        "odd-state": nodes.show(int(NodeState.HIDDEN), int(NodeState.REIMAGING), 0, 77),
        "missing-from-list": nodes.hide,
        "stuck-delete": nodes.stick,
        "stopped-by-somebody": nodes.stop_node,
        "stockout": api.fail_create(8, 'There is no more capacity in the zone "{zone}"', in_operation=True),
        "zone-sold-out": api.sold_out,
        "quota-refused": api.fail_create(8, QUOTA_TEXT, in_operation=False),
        "rate-limited": api.fail_create(8, RATE_TEXT, in_operation=False),
        "permission-denied": api.fail_create(7, "Permission 'tpu.nodes.create' denied", in_operation=False),
        "policy-refused": api.fail_create(9, POLICY_TEXT, in_operation=True),
        "create-failed": api.fail_create(13, "an internal error has occurred", in_operation=True),
        "create-granted-late": api.late_create,
        "answer-lost-before": api.lose_answer(applied=False),
        "answer-lost-after": api.lose_answer(applied=True),
        "listing-failed": api.fail_listing,
        "reads-limited": api.limit_reads,
        "zone-unreachable": api.outage("zone"),
        "zone-dark-for-ever": api.darken_for_ever,
        "api-down": api.outage("api"),
        "api-slow": api.outage("slow"),
        "everything-slow": api.all_slow,
        "network-dark": api.go_dark,
        "workers-unreachable": api.deafen,
        "killed": daemon.kill,
        "killed-before-effects": daemon.kill_before_effects,
        "killed-with-effects-under-way": daemon.kill_under_way,
        "torn-commit": daemon.disk(DiskFault.TORN),
        "killed-after-commit": daemon.disk(DiskFault.CUT),
        "disk-full": daemon.disk(DiskFault.FULL),
        "clock-forward": daemon.jump(1),
        "clock-back": daemon.jump(-1),
        "suspended": lambda _hand: True,
        "paused": people.wish(Wish.PAUSED),
        "taken-down": people.wish(Wish.DOWN),
        "replaced": people.asked("replace"),
        "restarted": people.asked_again,
        "edited": edits.edit,
        "relabelled": edits.relabel,
        "taken-back": edits.take_back,
        "wandb-down": sweeps.silence_server,
        "sweep-stopped": sweeps.stop_interrupted,
        "foreign-node": people.foreign,
        "stray": people.stray,
    }
)
