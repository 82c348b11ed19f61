"""
The reason of each action, wait and end, for code: scripts, checks and stores read the cause, people the text.

The values are a promise: events, `--json` and stores hold them. The text beside a cause may change at any time.
Standard library only.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The reason to act, to wait or to end. Several actions may share a cause."""

    # A store of an older version kept the text alone.
    UNRECORDED = ""

    # People, and what they declared.
    ADOPTING = "adopting"
    BEHIND_DEADLINE = "behind-deadline"
    COST_REACHED = "cost-reached"
    COST_UNKNOWN = "cost-unknown"
    DEADLINE_NEAR = "deadline-near"
    DECLARATION_INCOMPLETE = "declaration-incomplete"
    DEMAND = "demand"
    DOWN = "down"
    GC_ASKED = "gc-asked"
    HEAD_MOVED = "head-moved"
    JOB_MISSING = "job-missing"
    JOB_UNKNOWN = "job-unknown"
    NODE_STOPPED = "node-stopped"
    PAUSED = "paused"
    PLACE_WITHDRAWN = "place-withdrawn"
    REPLACE_ASKED = "replace-asked"
    RESTING = "resting"
    RESTART_ASKED = "restart-asked"
    SPOT_SOUGHT = "spot-sought"
    SLOT_ENDED = "slot-ended"
    SWEEP_OVER = "sweep-over"
    UNTIL_REACHED = "until-reached"

    # Observation, and its gaps.
    NODE_ABSENT = "node-absent"
    NODE_HIDDEN = "node-hidden"
    NODE_OUT_OF_SIGHT = "node-out-of-sight"
    NODE_TAKEN = "node-taken"
    NOT_RUNNING = "not-running"
    NO_OBSERVATION = "no-observation"
    STORE_LOST = "store-lost"
    STORE_OLD = "store-old"
    UNDER_WAY = "under-way"
    ZONE_UNREACHABLE = "zone-unreachable"

    # Creates and their admission.
    ANSWER_LOST = "answer-lost"
    CREATE_ABANDONED = "create-abandoned"
    CREATE_BUDGET = "create-budget"
    CREATE_FAILED = "create-failed"
    CREATE_SEMAPHORE = "create-semaphore"
    CREATE_UNDER_WAY = "create-under-way"
    NO_NODE = "no-node"
    NO_PLACE_OPEN = "no-place-open"

    # Queued resources.
    ANOTHER_REQUEST_STANDS = "another-request-stands"
    QUEUED = "queued"
    REQUEST_ABANDONED = "request-abandoned"
    REQUEST_ABSENT = "request-absent"
    REQUEST_EXPIRED = "request-expired"
    REQUEST_SPENT = "request-spent"

    # Nodes.
    ANOTHER_NODE_HOLDS_SLOT = "another-node-holds-slot"
    BOOTING = "booting"
    BOOT_TIMEOUT = "boot-timeout"
    BRAKE = "brake"
    CANARY = "canary"
    DELETE_STUCK = "delete-stuck"
    DIRTY_HOST = "dirty-host"
    END_OF_DAY = "end-of-day"
    FENCED = "fenced"
    HELD_BY_OTHERS = "held-by-others"
    NOT_FREE_AFTER_KILL = "not-free-after-kill"
    REPAIRING = "repairing"
    REPORTED_DEAD = "reported-dead"
    REVIVED = "revived"
    SET_ASIDE = "set-aside"
    SEVERAL_NODES = "several-nodes"
    STATE_ODD = "state-odd"
    STATE_UNKNOWN = "state-unknown"
    UNHEALTHY = "unhealthy"

    # Workers: reachability, login, host keys.
    HOST_KEYS_UNANSWERED = "host-keys-unanswered"
    HOST_KEYS_UNPUBLISHED = "host-keys-unpublished"
    HOST_KEYS_UNVOUCHED = "host-keys-unvouched"
    HOST_KEY_CHANGED = "host-key-changed"
    KEY_REFUSED = "key-refused"
    NEVER_ANSWERED = "never-answered"
    SILENT = "silent"
    WORKERS_MISSING = "workers-missing"

    # Runs.
    BACKOFF = "backoff"
    CRASHED = "crashed"
    FOREIGN_RUN_ENDED = "foreign-run-ended"
    INTERRUPTED = "interrupted"
    LAUNCH_FAILED = "launch-failed"
    LAUNCH_INCOMPLETE = "launch-incomplete"
    NO_FIRST_STEP = "no-first-step"
    PARTLY_FINISHED = "partly-finished"
    QUIET = "quiet"
    REBOOTED = "rebooted"
    RUNNING = "running"
    RUN_FINISHED = "run-finished"
    RUN_GONE = "run-gone"
    SETUP_FAILED = "setup-failed"
    SETUP_INTERRUPTED = "setup-interrupted"
    SETUP_TIMEOUT = "setup-timeout"
    SETTING_UP = "setting-up"
    STALLED = "stalled"
    STOPPING = "stopping"


class Reason(StrEnum):
    """Why a node is deleted. The brake (rule 12) counts JUDGED alone."""

    DEAD = "dead"
    JUDGED = "judged"
    ASKED = "asked"
    FINISHED = "finished"
    SURPLUS = "surplus"
