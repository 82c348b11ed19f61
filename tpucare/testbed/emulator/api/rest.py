"""
The emulated cloud over REST, as the real service serves it: `/v2/projects/...` and `/v2alpha1/...`, JSON in and out.

The same methods over the same world as `grpc`; here stands only which path and verb mean which method. Source of the
paths: the HTTP rules in the transports of google-cloud-tpu, and the discovery documents of v2 and v2alpha1. Not
honoured: the system parameters `fields`, `callback` and `prettyPrint`; credentials are not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from tpucare.testbed.emulator.api.calls import Carrier, carry
from tpucare.testbed.emulator.api.methods import LOCATIONS, OPERATIONS, VERSIONS, Method
from tpucare.testbed.emulator.api.rest_json import build, error_json, parse_body, parse_query, to_json
from tpucare.testbed.emulator.api.services import services
from tpucare.testbed.emulator.http_server import HttpAnswer, HttpRequest, HttpService
from tpucare.testbed.emulator.world.records import ApiError

_PLACE = "projects/*/locations/*"
_NODE = f"{_PLACE}/nodes/*"
_QUEUED = f"{_PLACE}/queuedResources/*"
_OPERATION = f"{_PLACE}/operations/*"

_TPU_RULES: tuple[tuple[str, str, str, str], ...] = (
    ("ListNodes", "GET", f"{{parent={_PLACE}}}/nodes", ""),
    ("GetNode", "GET", f"{{name={_NODE}}}", ""),
    ("CreateNode", "POST", f"{{parent={_PLACE}}}/nodes", "node"),
    ("DeleteNode", "DELETE", f"{{name={_NODE}}}", ""),
    ("StopNode", "POST", f"{{name={_NODE}}}:stop", "*"),
    ("StartNode", "POST", f"{{name={_NODE}}}:start", "*"),
    ("UpdateNode", "PATCH", f"{{node.name={_NODE}}}", "node"),
    ("GetGuestAttributes", "POST", f"{{name={_NODE}}}:getGuestAttributes", "*"),
    ("SimulateMaintenanceEvent", "POST", f"{{name={_NODE}}}:simulateMaintenanceEvent", "*"),
    ("PerformMaintenance", "POST", f"{{name={_NODE}}}:performMaintenance", "*"),
    ("ListQueuedResources", "GET", f"{{parent={_PLACE}}}/queuedResources", ""),
    ("GetQueuedResource", "GET", f"{{name={_QUEUED}}}", ""),
    ("CreateQueuedResource", "POST", f"{{parent={_PLACE}}}/queuedResources", "queued_resource"),
    ("DeleteQueuedResource", "DELETE", f"{{name={_QUEUED}}}", ""),
    ("ResetQueuedResource", "POST", f"{{name={_QUEUED}}}:reset", "*"),
    ("PerformMaintenanceQueuedResource", "POST", f"{{name={_QUEUED}}}:performMaintenanceQueuedResource", "*"),
    ("GenerateServiceIdentity", "POST", f"{{parent={_PLACE}}}:generateServiceIdentity", "*"),
    ("ListAcceleratorTypes", "GET", f"{{parent={_PLACE}}}/acceleratorTypes", ""),
    ("GetAcceleratorType", "GET", f"{{name={_PLACE}/acceleratorTypes/*}}", ""),
    ("ListRuntimeVersions", "GET", f"{{parent={_PLACE}}}/runtimeVersions", ""),
    ("GetRuntimeVersion", "GET", f"{{name={_PLACE}/runtimeVersions/*}}", ""),
    ("ListReservations", "GET", f"{{parent={_PLACE}}}/reservations", ""),
)
_OPERATION_RULES: tuple[tuple[str, str, str, str], ...] = (
    ("GetOperation", "GET", f"{{name={_OPERATION}}}", ""),
    ("ListOperations", "GET", f"{{name={_PLACE}}}/operations", ""),
    ("CancelOperation", "POST", f"{{name={_OPERATION}}}:cancel", "*"),
    ("DeleteOperation", "DELETE", f"{{name={_OPERATION}}}", ""),
)
_LOCATION_RULES: tuple[tuple[str, str, str, str], ...] = (
    ("ListLocations", "GET", "{name=projects/*}/locations", ""),
    ("GetLocation", "GET", f"{{name={_PLACE}}}", ""),
)

_OF_V1 = frozenset({"ListLocations", "GetLocation", "ListAcceleratorTypes", "GetAcceleratorType"})

SYSTEM_PARAMETERS = frozenset(
    {
        "$.xgafv",
        "$alt",
        "access_token",
        "alt",
        "callback",
        "fields",
        "key",
        "oauth_token",
        "prettyPrint",
        "quotaUser",
        "uploadType",
        "upload_protocol",
    }
)
"""Query parameters that belong to no method. Source: the discovery documents."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method under one path of one version. `variable`: field that the path fills; `body`: "", "*" or a field."""

    name: str
    method: Method
    verb: str
    pattern: re.Pattern[str]
    variable: str
    body: str


def routes() -> Sequence[Route]:
    """Every path of both versions."""
    known = services()
    found = []
    for version in VERSIONS:
        tables = (
            (known[f"google.cloud.tpu.{version}.Tpu"], _TPU_RULES),
            (known[OPERATIONS], _OPERATION_RULES),
            (known[LOCATIONS], _LOCATION_RULES),
        )
        for methods, rules in tables:
            found += [
                _route(version, methods[name], name, verb, template, body)
                for name, verb, template, body in rules
                if name in methods
            ]
    # Current tools still ask v1 for these two lists.
    methods = {**known["google.cloud.tpu.v2.Tpu"], **known[LOCATIONS]}
    found += [
        _route("v1", methods[name], name, verb, template, body)
        for name, verb, template, body in (*_TPU_RULES, *_LOCATION_RULES)
        if name in _OF_V1
    ]
    return found


def _route(version: str, method: Method, name: str, verb: str, template: str, body: str) -> Route:
    variable, wanted, rest = re.fullmatch(r"\{([a-z._]+)=([^}]*)\}(.*)", template).groups()  # type: ignore[union-attr]
    # A project may be called `example.com:name`; in all other names a colon begins a custom verb.
    parts = wanted.replace("projects/*", "projects/[^/]+").split("/")
    middle = "/".join("[^/:]+" if part == "*" else part for part in parts)
    return Route(name, method, verb, re.compile(f"/{version}/({middle}){re.escape(rest)}"), variable, body)


class RestFace:
    """Answers HTTP requests by carrying calls to the world."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._routes = routes()

    def serve(self, port: int = 0) -> HttpService:
        """Raises: ConfigError: the port is taken."""
        return HttpService(self.answer, port)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        request = _overridden(request)
        meant = self._meant(request)
        if meant is None:
            return _no_such_page(request)
        route, subject = meant
        try:
            code, said = 200, self._carry(route, subject, request)
        except ApiError as error:
            code, said = error_json(error)
        date = self._carrier.date()
        headers = {"Date": date} if date else {}
        return HttpAnswer(code, json.dumps(said, indent=2).encode() + b"\n", headers=headers)

    def _meant(self, request: HttpRequest) -> tuple[Route, str] | None:
        """The method that a path and a verb mean, and the name in the path."""
        for route in self._routes:
            if route.verb == request.method and (match := route.pattern.fullmatch(request.path)):
                return route, unquote(match[1])
        return None

    def _carry(self, route: Route, subject: str, request: HttpRequest) -> Mapping[str, Any]:
        message = _message(route, subject, request)
        answer = carry(self._carrier, route.name, route.method, message, request.peer)
        if isinstance(answer, bytes):
            answer = route.method.answer.FromString(answer)
        numbers = any("enum-encoding=int" in request.value(name) for name in ("$alt", "alt"))
        return to_json(answer, numbers=numbers)


def _message(route: Route, subject: str, request: HttpRequest) -> Any:
    """The request message from path, query and body. Raises: ApiError (3)."""
    asked = [(name, value) for name, value in request.query if name not in SYSTEM_PARAMETERS]
    values = parse_query(route.method.request, asked)
    if route.body == "*":
        values |= parse_body(request.body)
    elif route.body:
        values[route.body] = parse_body(request.body)
    place = values
    *path, last = route.variable.split(".")
    for part in path:
        place = place.setdefault(part, {})
    place[last] = subject
    return build(route.method.request, values)


def _overridden(request: HttpRequest) -> HttpRequest:
    """A client whose address grew too long sends it as a form, and says which verb is meant."""
    verb = request.headers.get("x-http-method-override")
    if not verb or request.method != "POST":
        return request
    form = parse_qsl(request.body.decode(errors="replace"), keep_blank_values=True)
    return replace(request, method=verb.upper(), query=(*request.query, *form), body=b"")


def _no_such_page(request: HttpRequest) -> HttpAnswer:
    """What Google's front end says to a path that nothing serves: a page, not JSON."""
    text = f"<!DOCTYPE html><title>Error 404 (Not Found)!!1</title><p>{request.method} is not served here."
    return HttpAnswer(404, text.encode(), "text/html; charset=UTF-8")
