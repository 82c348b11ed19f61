"""
GraphQL without schema or parser: the name of an operation selects the change to the state, and the answer has more
fields than any client asks for.

An unknown operation is answered with an error that names it, and logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tpucare.testbed.wandb.answers import Answer, Variables, View
from tpucare.testbed.wandb.records import Run, Sweep, SweepState, parse_storage_id
from tpucare.testbed.wandb.search import BadSweep
from tpucare.testbed.wandb.state import NotFound, WandbState

_OPERATION = re.compile(r"\b(query|mutation)\b\s*(\w*)")
_FIELD = re.compile(r"\{\s*(?:\w+\s*:\s*)?(\w+)")
DETAILS = ("groupName", "jobType", "description", "notes", "tags", "commit", "host", "program", "repo")

Mutate = Callable[[Variables, float], Answer]


class GraphQLRefusal(Exception):
    """The request is understood and cannot be done; the text is returned as a GraphQL error."""


class GraphQL:
    """Answers requests. `storage`: the URL for uploads of a run's files, without a slash at its end."""

    def __init__(self, world: WandbState, view: View, storage: Callable[[], str]) -> None:
        self._world, self._view, self._storage = world, view, storage
        # Mutations by the field they call, since clients name operations differently.
        self._mutations: Mapping[str, Mutate] = {
            "upsertSweep": self._upsert_sweep,
            "createAgent": self._create_agent,
            "agentHeartbeat": self._heartbeat,
            "upsertBucket": self._upsert_run,
            "createRunFiles": self._create_files,
            "rewindRun": self._rewind,
            "stopRun": self._stop_run,
            "deleteSweep": self._delete_sweep,
            "upsertModel": lambda variables, _: {"model": self._head(variables), "project": self._head(variables)},
            "markRunFilesUploaded": lambda *_: {"success": True},
        }

    def answer(self, body: Mapping[str, Any], now: float) -> Answer:
        """
        The whole answer to one request, errors included.

        Raises: NotFound: clients want this as HTTP 404.
        """
        query, variables = str(body.get("query", "")), body.get("variables") or {}
        kind, name = self._operation(query)
        if kind == "mutation":
            field = _first_field(query)
            if field not in self._mutations:
                self._world.note(now, "unknown", operation=name, field=field)
                return _error(f"{field or name} is not supported by this server")
            try:
                return {"data": {field: self._mutations[field](variables, now)}}
            except (GraphQLRefusal, BadSweep, ValueError) as error:
                return _error(str(error))
        self._world.pass_time(now)
        try:
            return {"data": self._query(name, variables)}
        except ValueError as error:
            return _error(str(error))

    @staticmethod
    def _operation(query: str) -> tuple[str, str]:
        found = _OPERATION.search(query)
        return (found[1], found[2]) if found is not None else ("query", "")

    # --- queries -----------------------------------------------------------------------------------------------------

    def _query(self, name: str, variables: Variables) -> Answer:
        entity, project = self._place(variables)
        if name.startswith("Probe"):
            # Introspection by clients before 0.20: the server has no optional part.
            empty: Answer = {"fields": [], "inputFields": []}
            probed = ("QueryType", "MutationType", "ServerInfoType", "RunInput", "UpsertBucketInput", "ServerSettings")
            return dict.fromkeys(probed, empty) | {"__type": empty}
        if not project and "entityName" in variables:
            return {"entity": self._view.entity(entity)}
        below = self._view.project(entity, project, variables) if project else None
        return {
            "viewer": self._view.viewer(),
            "entity": self._view.entity(entity),
            "serverInfo": {
                "features": [],
                "cliVersionInfo": {"max_cli_version": "9.9.9", "min_cli_version": "0.0.0"},
                "latestLocalVersionInfo": None,
                "expiredLicense": False,
            },
            "project": below,
            "model": below,
        }

    def _place(self, variables: Variables) -> tuple[str, str]:
        entity = variables.get("entity") or variables.get("entityName") or self._world.entity
        project = variables.get("project") or variables.get("projectName") or ""
        return str(entity), str(project)

    def _head(self, variables: Variables) -> Answer:
        entity, project = self._place(variables)
        return self._view.project_head(entity, project or str(variables.get("name") or "uncategorized"))

    # --- sweeps ------------------------------------------------------------------------------------------------------

    def _upsert_sweep(self, variables: Variables, now: float) -> Answer:
        if variables.get("id"):
            sweep = self._sweep(str(variables["id"]))
            if variables.get("state"):
                self._world.set_sweep_state(sweep, _sweep_state(str(variables["state"])), now)
            sweep.display_name = str(variables.get("displayName") or sweep.display_name)
        else:
            entity, project = self._place(variables)
            text, shown = str(variables.get("config") or ""), str(variables.get("displayName") or "")
            sweep = self._world.create_sweep(entity, project or "uncategorized", text, now, shown)
            sweep.description = str(variables.get("description") or "")
        return {"sweep": self._view.sweep(sweep, {}), "configValidationWarnings": []}

    def _sweep(self, ident: str) -> Sweep:
        parts = parse_storage_id(ident)
        if parts is None or parts[0] != "Sweep":
            raise GraphQLRefusal(f"{ident!r} is not the id of a sweep")
        _, name, project, entity = parts
        return self._world.sweep(entity, project, name)

    def _delete_sweep(self, variables: Variables, now: float) -> Answer:
        self._world.delete_sweep(self._sweep(str(variables.get("id"))), now)
        return {"success": True}

    def _create_agent(self, variables: Variables, now: float) -> Answer:
        entity, project = self._place(variables)
        sweep = self._world.sweep(entity, project, str(variables.get("sweep")))
        agent = self._world.create_agent(sweep, str(variables.get("host", "")), now)
        return {"agent": self._view.agent(agent, sweep)}

    def _heartbeat(self, variables: Variables, now: float) -> Answer:
        reported = json.loads(variables.get("runState") or "{}")
        ident = str(variables.get("id"))
        commands = self._world.heartbeat(ident, reported, now)
        return {"agent": {"id": ident}, "commands": json.dumps(commands)}

    # --- runs --------------------------------------------------------------------------------------------------------

    def _upsert_run(self, variables: Variables, now: float) -> Answer:
        inserted = False
        if variables.get("id"):
            run = self._run(str(variables["id"]))
        else:
            entity, project = self._place(variables)
            sweep, name = str(variables.get("sweep") or ""), str(variables.get("name") or "")
            run, inserted = self._world.begin_run(entity, project or "uncategorized", name, sweep, now)
        for key, field in (("config", "config"), ("summaryMetrics", "summary")):
            if variables.get(key):
                getattr(run, field).update(json.loads(variables[key]))
        shown = variables.get("displayName") or variables.get("display_name")
        run.display_name = str(shown or run.display_name)
        run.details.update({key: variables[key] for key in DETAILS if variables.get(key) is not None})
        return {"bucket": self._view.run(run, {}), "inserted": inserted}

    def _run(self, ident: str) -> Run:
        parts = parse_storage_id(ident)
        found = self._world.find_run(parts[3], parts[2], parts[1]) if parts is not None else None
        if found is None:
            raise GraphQLRefusal(f"run {ident!r} not found")
        return found

    def _create_files(self, variables: Variables, _: float) -> Answer:
        entity, project = self._place(variables)
        run = self._world.find_run(entity, project, str(variables.get("run")))
        if run is None:
            raise GraphQLRefusal(f"run {variables.get('run')!r} not found")
        base = f"{self._storage()}/{entity}/{project}/{run.name}"
        files = [{"name": name, "uploadUrl": f"{base}/{name}"} for name in variables.get("files") or []]
        return {"runID": run.id, "uploadHeaders": [], "files": files}

    def _rewind(self, variables: Variables, now: float) -> Answer:
        entity, project = self._place(variables)
        run = self._world.find_run(entity, project, str(variables.get("runName")))
        if run is None:
            raise GraphQLRefusal(f"run {variables.get('runName')!r} not found")
        last = float(variables.get("metricValue") or 0)
        run.history = [line for line in run.history if line and json.loads(line).get("_step", 0) <= last]
        self._world.note(now, "rewind", run=run.name, step=last)
        self._world.begin_run(entity, project, run.name, "", now)
        return {"rewoundRun": self._view.run(run, {})}

    def _stop_run(self, variables: Variables, now: float) -> Answer:
        self._world.stop_run(self._run(str(variables.get("id"))), now)
        return {"success": True}


def _first_field(query: str) -> str:
    """The one field that a mutation calls: the first after its opening brace; an alias goes before a colon."""
    found = _FIELD.search(query, query.find("mutation"))
    return found[1] if found is not None else ""


def _sweep_state(word: str) -> SweepState:
    try:
        return SweepState(word.upper())
    except ValueError:
        raise GraphQLRefusal(f"a sweep cannot become {word!r}") from None


def _error(text: str) -> Answer:
    return {"data": None, "errors": [{"message": text}]}


__all__ = ["GraphQL", "NotFound"]
