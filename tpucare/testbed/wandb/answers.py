"""
Runs, sweeps and agents as the API shows them, with every field that a client is known to ask for.

A client ignores fields that it has not asked for, so that no query needs to be parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from tpucare.testbed.wandb import filters
from tpucare.testbed.wandb.records import Agent, Run, Sweep, storage_id
from tpucare.testbed.wandb.state import WandbState

Answer = dict[str, Any]
Variables = Mapping[str, Any]
TAIL_LINES = 1
PER_PAGE = 50


class View:
    """Makes answers. `wall` turns seconds of the state's clock into seconds since the epoch."""

    def __init__(self, world: WandbState, wall: Callable[[float], float]) -> None:
        self._world, self._wall = world, wall

    # --- whole answers -----------------------------------------------------------------------------------------------

    def project(self, entity: str, name: str, variables: Variables) -> Answer:
        """Every field of a project; resources that the variables do not name are absent."""
        answer: Answer = {**self.project_head(entity, name), "internalId": "1", "readOnly": False, "isReadOnly": False}
        rows = self._chosen(entity, name, variables)
        first = int(variables.get("perPage") or variables.get("first") or PER_PAGE)
        begin = int(variables.get("cursor") or variables.get("after") or 0)
        page = rows[begin : begin + first]
        edges = [{"node": self.run(run, variables), "cursor": str(begin + at + 1)} for at, run in enumerate(page)]
        answer["runCount"] = len(rows)
        more = begin + len(page) < len(rows)
        answer["runs"] = {"edges": edges, "pageInfo": {"endCursor": str(begin + len(page)), "hasNextPage": more}}
        sweeps = [sweep for key, sweep in self._world.sweeps.items() if key[:2] == (entity, name)]
        answer["totalSweeps"] = len(sweeps)
        answer["sweeps"] = _connection(self.sweep(sweep, variables) for sweep in sweeps)
        wanted = variables.get("run") or variables.get("runName") or variables.get("name") or ""
        run = self._world.find_run(entity, name, str(wanted))
        answer["run"] = answer["bucket"] = self.run(run, variables) if run is not None else None
        named = self._world.sweeps.get((entity, name, str(variables.get("sweep") or variables.get("name") or "")))
        answer["sweep"] = self.sweep(named, variables) if named is not None else None
        return answer

    def project_head(self, entity: str, name: str) -> Answer:
        ident = storage_id("Project", name, name, entity)
        return {"id": ident, "name": name, "entityName": entity, "entity": self.entity(entity)}

    def entity(self, name: str) -> Answer:
        ident = storage_id("Entity", name, "", name)
        return {"id": ident, "name": name, "organization": {"coreWeaveOrganizationId": None}, "isTeam": False}

    def viewer(self) -> Answer:
        name = self._world.entity
        return {
            "id": storage_id("User", name, "", name),
            "entity": name,
            "username": name,
            "name": name,
            "email": f"{name}@localhost",
            "admin": False,
            "flags": "{}",
            "deletedAt": None,
            "apiKeys": {"edges": []},
            "teams": {"edges": [{"node": {"name": name}}]},
        }

    # --- parts -------------------------------------------------------------------------------------------------------

    def run(self, run: Run, variables: Variables) -> Answer:
        keys = _history_keys(run)
        return {
            "__typename": "Run",
            "id": run.id,
            "name": run.name,
            "displayName": run.display_name or run.name,
            "projectId": "1",
            "project": self.project_head(run.entity, run.project),
            "sweepName": run.sweep or None,
            "sweep": {"name": run.sweep} if run.sweep else None,
            "state": run.state.value,
            "running": run.state.value == "running",
            "failed": run.state.value in ("failed", "crashed"),
            "stopped": run.stop_asked,
            "shouldStop": run.stop_asked,
            "exitcode": run.exit_code,
            "config": json.dumps(run.config),
            "summaryMetrics": json.dumps(run.summary),
            "systemMetrics": "{}",
            "wandbConfig": json.dumps({"t": run.config.get("_wandb", {}).get("value", {}).get("t", 1)}),
            "createdAt": self.instant(run.created),
            "heartbeatAt": self.instant(run.heard),
            "updatedAt": self.instant(run.heard),
            "historyLineCount": len(run.history),
            "eventsLineCount": len(run.events),
            "logLineCount": len(run.output),
            "historyTail": json.dumps(run.history[-TAIL_LINES:]),
            "eventsTail": json.dumps(run.events[-TAIL_LINES:]),
            "historyKeys": keys,
            "history": _page(run.history, variables),
            "events": run.events,
            "sampledHistory": [_sample(run, spec) for spec in _specs(variables)],
            "parquetHistory": {"parquetUrls": [], "liveData": [json.loads(line) for line in run.history if line]},
            "files": _connection(self._file(run, name) for name in run.files),
            "fileCount": len(run.files),
            "user": {"name": run.entity, "username": run.entity},
            "tags": run.details.get("tags") or [],
            "notes": run.details.get("notes"),
            "description": run.details.get("description"),
            "group": run.details.get("groupName"),
            "jobType": run.details.get("jobType"),
            "commit": run.details.get("commit"),
            "host": run.details.get("host"),
            "readOnly": False,
        }

    def sweep(self, sweep: Sweep, variables: Variables) -> Answer:
        runs = self._world.runs_of(sweep)
        agents = list(sweep.agents.values())
        asked = sweep.agents.get(str(variables.get("agentID", "")))
        return {
            "__typename": "Sweep",
            "id": sweep.id,
            "name": sweep.name,
            "displayName": sweep.display_name or None,
            "description": sweep.description,
            "method": sweep.config.get("method"),
            "state": sweep.state.value,
            "config": sweep.text,
            "bestLoss": self._best(sweep),
            "createdAt": self.instant(sweep.created),
            "updatedAt": self.instant(max((run.heard for run in runs), default=sweep.created)),
            "heartbeatAt": self.instant(max((agent.heard for agent in agents), default=sweep.created)),
            "earlyStopJobRunning": False,
            "controller": None,
            "scheduler": None,
            "controllerRunName": None,
            "runCount": len(runs),
            "runCountExpected": sweep.expected,
            "project": self.project_head(sweep.entity, sweep.project),
            "runs": _connection(self.run(run, variables) for run in runs),
            "agents": _connection(self.agent(agent, sweep) for agent in agents),
            "agent": self.agent(asked, sweep) if asked is not None else None,
        }

    def agent(self, agent: Agent, sweep: Sweep) -> Answer:
        own = [run for run in self._world.runs_of(sweep) if run.agent == agent.id]
        return {
            "__typename": "Agent",
            "id": agent.id,
            "name": agent.id,
            "host": agent.host,
            "state": "FINISHED" if agent.left else "RUNNING",
            "heartbeatAt": self.instant(agent.heard),
            "createdAt": self.instant(agent.heard),
            "metrics": "{}",
            "totalRuns": len(own),
            "runs": _connection(self.run(run, {}) for run in own),
        }

    def instant(self, seconds: float) -> str:
        return datetime.fromtimestamp(self._wall(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    # --- runs of a query ---------------------------------------------------------------------------------------------

    def _chosen(self, entity: str, project: str, variables: Variables) -> list[Run]:
        found = {run.name: run for key, run in self._world.runs.items() if key[:2] == (entity, project)}
        wanted = variables.get("filters")
        rows = filters.select(map(self._row, found.values()), json.loads(wanted) if wanted else {})
        order = str(variables.get("order") or "+created_at")
        return [found[row["name"]] for row in filters.sort(rows, order)]

    def _row(self, run: Run) -> Answer:
        return {
            **run.details,
            "name": run.name,
            "displayName": run.display_name,
            "display_name": run.display_name,
            "state": run.state.value,
            "sweep": run.sweep,
            "group": run.details.get("groupName"),
            "config": run.config,
            "summary_metrics": run.summary,
            "summaryMetrics": run.summary,
            "created_at": run.created,
            "createdAt": self.instant(run.created),
            "heartbeat_at": run.heard,
            "tags": run.details.get("tags") or [],
        }

    def _best(self, sweep: Sweep) -> float | None:
        metric = sweep.config.get("metric")
        if not isinstance(metric, Mapping):
            return None
        values = [run.summary.get(str(metric.get("name"))) for run in self._world.runs_of(sweep)]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        best = max if metric.get("goal") == "maximize" else min
        return best(numbers, default=None)

    def _file(self, run: Run, name: str) -> Answer:
        size = len(run.files[name])
        return {"id": name, "name": name, "sizeBytes": size, "directUrl": "", "url": "", "mimetype": None, "md5": None}


def _connection(nodes: Iterable[Answer]) -> Answer:
    edges = [{"node": node, "cursor": str(at + 1)} for at, node in enumerate(nodes)]
    return {"edges": edges, "pageInfo": {"endCursor": str(len(edges)), "hasNextPage": False}, "totalCount": len(edges)}


def _specs(variables: Variables) -> list[Mapping[str, Any]]:
    given = variables.get("specs") or variables.get("spec") or []
    texts = given if isinstance(given, list) else [given]
    specs = [json.loads(text) for text in texts]
    return [spec for spec in specs if isinstance(spec, Mapping)]


def _sample(run: Run, spec: Mapping[str, Any]) -> list[Answer]:
    """The rows that have all requested keys, with only those keys."""
    keys = [str(key) for key in spec.get("keys") or []]
    rows = [json.loads(line) for line in run.history if line]
    # The client asks for an inclusive range here, and for a half-open one in `_page`.
    least, most = spec.get("minStep"), spec.get("maxStep")
    most = int(most) + 1 if most is not None else None
    chosen = [row for row in rows if all(key in row for key in keys) and _is_between(row, least, most)]
    return [{key: row[key] for key in keys} if keys else row for row in chosen]


def _page(lines: list[str], variables: Variables) -> list[str]:
    least, most = variables.get("minStep"), variables.get("maxStep")
    if least is None and most is None:
        return lines
    return [line for line in lines if line and _is_between(json.loads(line), least, most)]


def _is_between(row: Answer, least: Any, most: Any) -> bool:
    step = row.get("_step", 0)
    return (least is None or step >= int(least)) and (most is None or step < int(most))


def _history_keys(run: Run) -> Answer:
    counts: dict[str, int] = {}
    last = -1
    for line in run.history:
        row = json.loads(line) if line else {}
        last = max(last, row.get("_step", -1))
        for key in row:
            counts[key] = counts.get(key, 0) + 1
    keys = {key: {"typeCounts": [{"type": "number", "count": count}]} for key, count in counts.items()}
    return {"lastStep": last, "keys": keys, "sets": []}
