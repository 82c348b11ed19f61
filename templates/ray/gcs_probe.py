"""
The demand and the hosts of a Ray cluster, asked from its control store (GCS): one JSON line in, one out.

It runs under the Python that has the cluster's Ray, as a child of the daemon, which itself imports no Ray; it ends with
its input. Arguments: HOST:PORT of GCS, owner and host name of the daemon. RAY_AUTH_TOKEN_PATH names the token's file.
Standard library and Ray, Python 3.9 and newer.

A question has an `op`. An answer has `ok`; if false `error`, and `cause`: `away` (the head does not answer), `token`,
`version` (of Ray), `failed` (anything else).

  state   nothing                         -> as `tpucare/integrations/ray/demand.py: read_state` reads it
  drain   ids, reason, seconds, text      -> drained: by id true, or why not; seconds: until the host is gone, 0 = open
  report  pending: [{slot, pool, type, why}], unmet: [{what, why, count}]
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import platform
import queue
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

# 2.56 is the first whose SlicePlacementGroup waits as long as a slice may take to come. 2.56.1 and 2.60.0 were run.
OLDEST = (2, 56)
UNTRIED = (2, 61)
WANTED = "ray>=2.56,<2.61"

CONNECT_SECONDS = 1.0
CALL_SECONDS = 3.0
DRAIN_SECONDS = 2.0
ALL_DRAINS_SECONDS = 4.0
DRAINS_AT_ONCE = 32

# Ray's autoscaler reports every 5 s; one that was silent for so long has ended.
AUTOSCALER_SECONDS = 30.0
# A tpucare reports every 10 s.
TPUCARE_SECONDS = 60.0
NAMESPACE = b"tpucare"
HEARTBEAT = b"tpucare:caretaker"
# Our reports have it where Ray's autoscaler writes the version of the state that it saw, which is positive.
OUR_MARK = -1

STATUS = {1: "RUNNING", 2: "DEAD", 3: "IDLE", 4: "DRAINING"}
REASONS = {"IDLE_TERMINATION": 1, "PREEMPTION": 2}
NOT_IN = 2
# `TPU_group_ID`, `TPU_group_INDEX_ID`, as `ray._private.utils` knows them.
IN_GROUP = re.compile(r".+_group_(\d+_)?[0-9a-f]{36}")
PR_SET_PDEATHSIG = 1


class Failure(Exception):
    """An answer that is an error; `cause`: one of the module's list."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Caretaker(NamedTuple):
    """A daemon of tpucare; another process of the same two is the same daemon, started again."""

    owner: str
    host: str


class Cluster:
    """One control store. Of the head of `session`, `facts`: its Ray, its Python, warnings; `has_v2`: its autoscaler."""

    def __init__(self, address: str, us: Caretaker) -> None:
        self.address, self.us = address, us
        self.client: Any = None
        self.session = ""
        self.facts: dict[str, Any] = {}
        self.has_v2 = True
        self.since = time.monotonic()
        # What others write into the store: the newest value, and when (monotonic seconds) it replaced another one.
        self.seen: dict[str, tuple[Any, float]] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        operation = {"state": self.state, "drain": self.drain, "report": self.report}[question["op"]]
        try:
            self.connect()
            return {"ok": True, **operation(question)}
        except Failure as failure:
            cause, text = failure.cause, str(failure)
        except Exception as error:
            cause, text = "failed", first_line(error)
            if is_about_token(error):
                cause, text = "token", f"the head at {self.address} refuses the token in {token_path()}"
        # A head that was started anew refuses the client of the old one.
        self.client = None
        return {"ok": False, "cause": cause, "error": text}

    def connect(self) -> None:
        """Have a client for a head that listens; against another one Ray blocks for 40 s, and may end the process."""
        check_ray()
        check_token()
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise Failure("away", f"the head does not answer at {self.address}: {error.strerror or error}") from error
        if self.client is None:
            from ray._raylet import GcsClient

            self.client, self.session = GcsClient(address=self.address), ""

    def state(self, question: dict[str, Any]) -> dict[str, Any]:
        del question
        status = self.status()
        cluster = status.cluster_resource_state
        constraints = [one for each in cluster.cluster_resource_constraints for one in each.resource_requests]
        return {
            **self.facts,
            "session": cluster.cluster_session_name,
            "requests": [counted_bundle(one) for one in cluster.pending_resource_requests if is_demand(one)],
            "gangs": [gang_of(one) for one in cluster.pending_gang_resource_requests],
            "floor": [counted_bundle(one) for one in constraints if one.count > 0],
            "hosts": [host_of(one) for one in cluster.node_states if one.status in STATUS],
            "reporter": self.reporter(status.autoscaling_state),
        }

    def drain(self, question: dict[str, Any]) -> dict[str, Any]:
        client, reason, text = self.client, REASONS[question["reason"]], str(question["text"])
        seconds = float(question["seconds"])
        deadline = int((time.time() + seconds) * 1000) if seconds else 0
        # Ray 2.56 has no such limit, and waits for a host that is silent.
        limit = {"timeout": DRAIN_SECONDS} if "timeout" in inspect.signature(client.drain_node).parameters else {}

        def drain_host(host: str) -> bool | str:
            # Ray takes the id in hexadecimal. It accepts any other text, too, and then drains nothing.
            if not re.fullmatch("[0-9a-f]{2,128}", host):
                return f"{host[:80]!r} is not the id of a host"
            try:
                accepted, why = client.drain_node(host, reason, text, deadline, **limit)
            except Exception as error:
                return first_line(error)
            return True if accepted else first_line(why) or "refused"

        threads = ThreadPoolExecutor(DRAINS_AT_ONCE)
        answers = {host: threads.submit(drain_host, host) for host in question["ids"]}
        wait(answers.values(), ALL_DRAINS_SECONDS)
        threads.shutdown(wait=False)
        return {"drained": {host: one.result() if one.done() else "no answer in time" for host, one in answers.items()}}

    def report(self, question: dict[str, Any]) -> dict[str, Any]:
        from ray.core.generated import autoscaler_pb2

        before = self.status().autoscaling_state
        if other := self.reporter(before):
            raise Failure("failed", f"{other} reports for this cluster")
        # Ray keeps the report with the higher version, and of equal ones the later: so Ray's own is never shut out.
        report = autoscaler_pb2.AutoscalingState(
            autoscaler_state_version=before.autoscaler_state_version, last_seen_cluster_resource_state_version=OUR_MARK
        )
        now = int(time.time())
        for one in question["pending"]:
            report.pending_instances.add(
                instance_id=one["slot"],
                ray_node_type_name=one["pool"],
                instance_type_name=one["type"],
                details=one["why"],
            )
        # What nobody can give is a failed request, which is only shown. Of infeasible ones Ray may cancel the tasks
        # (RAY_enable_infeasible_task_early_exit), and those with the same resources whose labels some hosts have.
        for one in question["unmet"]:
            report.failed_instance_requests.add(
                ray_node_type_name=one["what"], count=one["count"], reason=one["why"], start_ts=now, failed_ts=now
            )
        beat = json.dumps({**self.us._asdict(), "pid": os.getppid(), "at": now}).encode()
        self.client.internal_kv_put(HEARTBEAT, beat, True, NAMESPACE, timeout=CALL_SECONDS)
        self.client.report_autoscaling_state(report.SerializeToString(), timeout_s=CALL_SECONDS)
        return {}

    def status(self) -> Any:
        """The answer to `get_cluster_resource_state`, and the newest report of an autoscaler, in one request."""
        from ray.core.generated import autoscaler_pb2

        reply = autoscaler_pb2.GetClusterStatusReply()
        reply.ParseFromString(self.client.get_cluster_status(timeout_s=CALL_SECONDS))
        session = reply.cluster_resource_state.cluster_session_name
        if session != self.session:
            self.has_v2 = self.value(b"__autoscaler_v2_enabled", b"__autoscaler") == b"1"
            self.facts = self.read_facts()
            # Who else looks after another head is not known yet.
            self.session, self.since, self.seen = session, time.monotonic(), {}
        return reply

    def value(self, key: bytes, namespace: bytes | None) -> bytes:
        found: bytes | None = self.client.internal_kv_get(key, namespace, timeout=CALL_SECONDS)
        return found or b""

    def read_facts(self) -> dict[str, Any]:
        import ray

        metadata = json.loads(self.value(b"CLUSTER_METADATA", b"cluster") or b"{}")
        head = (str(metadata.get("ray_version", "")), minor(str(metadata.get("python_version", ""))))
        own = (ray.__version__, minor(platform.python_version()))
        warnings = []
        if parsed(own[0]) >= UNTRIED:
            warnings.append(f"Ray {own[0]} was not tried with this tpucare; tried is {WANTED}")
        if own != head:
            warnings.append(
                f"the head has Ray {head[0]}, Python {head[1]}, but {sys.executable} has Ray {own[0]}, Python {own[1]}"
            )
        if not self.has_v2:
            warnings.append(
                "the head was started without RAY_enable_autoscaler_v2=1: request_resources is not seen, "
                "and `ray status` does not show the slices that come"
            )
        return {"ray": head[0], "python": head[1], "warnings": warnings}

    # --- two caretakers ----------------------------------------------------------------------------------------------

    def reporter(self, newest: Any) -> str:
        """The other caretaker of this cluster, for people; empty: there is none."""
        other = self.other_tpucare(self.value(HEARTBEAT, NAMESPACE))
        return other or ("Ray's own autoscaler" if self.has_autoscaler(newest) else "")

    def has_autoscaler(self, newest: Any) -> bool:
        """True if Ray's monitor works, as it does on a head that was started without --no-monitor."""
        if self.has_v2:
            version = newest.last_seen_cluster_resource_state_version
            silent = self.changed("version", version) if version > 0 else AUTOSCALER_SECONDS
        else:
            silent = self.changed("legacy", self.value(b"__autoscaling_status", None))
        if silent < AUTOSCALER_SECONDS:
            return True
        # It leaves its address at its start. Whether it still lives shows only after some time.
        watched = time.monotonic() - self.since
        return watched < AUTOSCALER_SECONDS and bool(self.value(b"AutoscalerMetricsAddress", None))

    def other_tpucare(self, beat: bytes) -> str:
        try:
            found = json.loads(beat or b"{}")
            one, age = Caretaker(str(found["owner"]), str(found["host"])), time.time() - float(found["at"])
        except (ValueError, KeyError, TypeError):
            return ""
        silent = self.changed("heartbeat", beat, age=abs(age))
        return f"tpucare {one.owner} on {one.host}" if one != self.us and silent < TPUCARE_SECONDS else ""

    def changed(self, name: str, value: Any, age: float = float("inf")) -> float:
        """Seconds since *value* replaced another one; *age* if it is the first that is seen."""
        now = time.monotonic()
        if name not in self.seen:
            self.seen[name] = (value, now - age)
        elif self.seen[name][0] != value:
            self.seen[name] = (value, now)
        return now - self.seen[name][1]


# --- Ray's records ----------------------------------------------------------------------------------------------------


def bundle_of(request: Any) -> dict[str, Any]:
    # Further selectors are alternatives for when no host has the first.
    selectors = list(request.label_selectors)[:1]
    constraints = [one for selector in selectors for one in selector.label_constraints]
    return {
        "shape": dict(request.resources_bundle),
        "selector": {one.label_key: condition(one.operator, list(one.label_values)) for one in constraints},
    }


def condition(operator: int, values: list[str]) -> str:
    """Ray's own notation: `a`, `in(a,b)`, `!a`, `!in(a,b)`; Ray keeps the values in no order."""
    text = values[0] if len(values) == 1 else f"in({','.join(sorted(values))})"
    return f"!{text}" if operator == NOT_IN else text


def counted_bundle(one: Any) -> dict[str, Any]:
    return {**bundle_of(one.request), "count": one.count}


def is_demand(one: Any) -> bool:
    """False for tasks and actors of a placement group: they wait for the group, which is the demand."""
    return one.count > 0 and not any(IN_GROUP.fullmatch(name) for name in one.request.resources_bundle)


def gang_of(gang: Any) -> dict[str, Any]:
    # Several selectors are alternatives; a head that knows none of them has the plain requests.
    requests = gang.bundle_selectors[0].resource_requests if gang.bundle_selectors else gang.requests
    # `ID:STRATEGY|STATE`
    name, _, rest = gang.details.partition(":")
    return {"bundles": [bundle_of(one) for one in requests], "name": name, "strategy": rest.partition("|")[0]}


def host_of(node: Any) -> dict[str, Any]:
    # Ray lists up to 1,000 dead hosts.
    alive = STATUS[node.status] != "DEAD"
    return {
        "id": node.node_id.hex(),
        "instance": node.instance_id,
        "pool": node.ray_node_type_name,
        "status": STATUS[node.status],
        "idle_seconds": max(0, node.idle_duration_ms) / 1000 if STATUS[node.status] == "IDLE" else 0,
        "labels": dict(node.labels) if alive else {},
        "total": dict(node.total_resources) if alive else {},
        "available": dict(node.available_resources) if alive else {},
        "ip": node.node_ip_address,
    }


# --- what has to be there ---------------------------------------------------------------------------------------------


def check_ray() -> None:
    """Raises: Failure: this Python has no Ray, or one whose interfaces are others."""
    try:
        import ray
    except ImportError as error:
        raise Failure("version", f"{sys.executable} cannot import Ray; install {WANTED}") from error
    if parsed(ray.__version__) < OLDEST:
        raise Failure("version", f"{sys.executable} has Ray {ray.__version__}; on head and hosts install {WANTED}")


def check_token() -> None:
    """Raises: Failure: there is no token; Ray would abort the process."""
    try:
        with open(token_path(), "rb") as file:
            found = file.read(1 << 16).strip()
    except OSError as error:
        raise Failure("token", f"the token's file cannot be read: {first_line(error)}") from error
    if not found:
        raise Failure("token", f"the token's file {token_path()} is empty")


def token_path() -> str:
    return os.environ.get("RAY_AUTH_TOKEN_PATH", "")


def is_about_token(error: Exception) -> bool:
    from ray import exceptions

    return isinstance(error, exceptions.AuthenticationError)


def parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def first_line(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__ if isinstance(error, Exception) else ""]
    return lines[0][:300]


def end_with_parent() -> None:
    """The daemon's end kills this process; while Ray hangs in a call it may not see the end of its input."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# --- lines in, lines out ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    end_with_parent()
    # Ray writes to standard output; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_questions, args=(questions,), daemon=True).start()
    address, owner, host = arguments
    cluster = Cluster(address, Caretaker(owner, host))
    while True:
        print(json.dumps(cluster.answer(json.loads(questions.get()))), file=answers, flush=True)


def read_questions(questions: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        questions.put(line)
    # The daemon ended; a request that is under way is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
