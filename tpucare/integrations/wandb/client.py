"""
Client of W&B for the state of sweeps: a few GraphQL calls over the standard library, behind a protocol.

The fields are those of W&B's own queries (`SweepWithRuns` and `Runs` of wandb 0.31), so that every server for agents
answers them. Every failure is `SweepSilent` (the state is unknown) or `SweepRefused` (a person must change something).
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from tpucare.integrations.wandb.account import is_private_way
from tpucare.integrations.wandb.rules import SweepPath, SweepReport
from tpucare.model.errors import TpuCareError

TIMEOUT_SECONDS = 20.0
ANSWER_LIMIT = 16 << 20
PAGE = 500
PAGES_LIMIT = 100

_SWEEP = """
query SweepState($entity: String, $project: String, $sweep: String!) {
  project(name: $project, entityName: $entity) {
    sweep(sweepName: $sweep) { id name state runCountExpected }
  }
}
"""
_RUNS = """
query SweepRuns($project: String!, $entity: String!, $cursor: String, $perPage: Int, $filters: JSONString) {
  project(name: $project, entityName: $entity) {
    runs(filters: $filters, after: $cursor, first: $perPage) {
      edges { node { name state } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
"""
_VIEWER = "query Viewer { viewer { entity } }"


class SweepSilent(TpuCareError):
    """W&B did not answer, or not as expected: the state of the sweep is unknown."""


class SweepRefused(TpuCareError):
    """W&B does not know the sweep, or refuses the key; a person has to change one of them."""


class SweepService(Protocol):
    """One W&B server. Its methods block."""

    def report(self, path: SweepPath) -> SweepReport:
        """Raises: SweepSilent, SweepRefused."""
        ...


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """None: the redirect itself is the answer, which is an error."""


_OPENER = urllib.request.build_opener(_NoRedirects)


class GraphqlSweeps:
    """
    One W&B server and one key. Thread-safe: it has no state.

    Raises: SweepRefused: *base_url* is plain HTTP to another machine, so the key would cross the network unencrypted.
    """

    def __init__(self, base_url: str, key: str) -> None:
        if not is_private_way(base_url):
            raise SweepRefused(f"the W&B key is not sent to {base_url}: write https://")
        self._url = f"{base_url}/graphql"
        self._authorization = f"Basic {base64.b64encode(f'api:{key}'.encode()).decode()}"

    def report(self, path: SweepPath) -> SweepReport:
        below = self._project(_SWEEP, path, {"sweep": path.name})
        sweep = below.get("sweep")
        if not isinstance(sweep, Mapping):
            raise SweepRefused(f"W&B has no sweep {path}, or this key may not see it")
        expected = sweep.get("runCountExpected")
        state = str(sweep.get("state", "")).upper()
        return SweepReport(state, expected if isinstance(expected, int) else None, self._runs(path))

    def entity(self) -> str:
        """The default entity of the key. Raises: SweepSilent, SweepRefused."""
        viewer = self._ask(_VIEWER, {}).get("viewer")
        name = viewer.get("entity") if isinstance(viewer, Mapping) else None
        if not isinstance(name, str) or not name:
            raise SweepRefused("W&B does not know this key")
        return name

    def _runs(self, path: SweepPath) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        cursor: str | None = None
        for _ in range(PAGES_LIMIT):
            asked = {"cursor": cursor, "perPage": PAGE, "filters": json.dumps({"sweep": path.name})}
            runs = self._project(_RUNS, path, asked).get("runs")
            if not isinstance(runs, Mapping):
                raise SweepSilent("W&B answered without the runs of the sweep")
            counts.update(str(edge["node"]["state"]) for edge in runs["edges"])
            cursor = runs["pageInfo"]["endCursor"]
            if not runs["pageInfo"]["hasNextPage"]:
                break
        return dict(counts)

    def _project(self, query: str, path: SweepPath, more: Mapping[str, Any]) -> Mapping[str, Any]:
        data = self._ask(query, {"entity": path.entity, "project": path.project, **more})
        project = data.get("project")
        if not isinstance(project, Mapping):
            raise SweepRefused(f"W&B has no project {path.entity}/{path.project}, or this key may not see it")
        return project

    def _ask(self, query: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        question = json.dumps({"query": query, "variables": variables}).encode()
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, question, headers)
        try:
            with _OPENER.open(request, timeout=TIMEOUT_SECONDS) as answer:
                body = json.loads(answer.read(ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise SweepRefused(f"W&B at {self._url} refuses the key ({error.code})") from None
            raise SweepSilent(f"W&B at {self._url} answered {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SweepSilent(f"W&B at {self._url} does not answer: {error}") from None
        data = body.get("data") if isinstance(body, Mapping) else None
        if not isinstance(data, Mapping):
            raise SweepSilent(f"W&B answered with an error: {_first_error(body)}")
        return data


def _first_error(body: object) -> str:
    errors = body.get("errors") if isinstance(body, Mapping) else None
    first = errors[0] if isinstance(errors, list) and errors else {}
    return str(first.get("message", "without a reason") if isinstance(first, Mapping) else first)[:200]
