"""
The emulated cloud over REST, as the real service serves it: `/v2/projects/...` and `/v2alpha1/...`, JSON in and out.

The same methods over the same world as `grpc`; this module maps paths and verbs to methods, and proto3 JSON to the
official message classes. Source of the paths: the HTTP rules in the transports of google-cloud-tpu, and the discovery
documents of v2 and v2alpha1. The system parameters `fields`, `callback` and `prettyPrint` have no effect; credentials
are not checked.

It adds to protobuf's own JSON mapping: query parameters, the service's texts of refusals, names for enum numbers that
no package knows, and fields of REST that the packages lack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from google.protobuf import json_format, unknown_fields  # type: ignore[import-untyped]
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # noqa: F401  (details are found by name)

from tpucare.testbed.emulator.api.calls import ServedWorld, run_call, status_of
from tpucare.testbed.emulator.api.methods import LOCATIONS, OPERATIONS, VERSIONS, Method, services
from tpucare.testbed.emulator.http_server import HttpAnswer, HttpRequest, HttpService
from tpucare.testbed.emulator.world.records import ApiError

HTTP_CODES: Mapping[int, tuple[int, str]] = {
    1: (499, "CANCELLED"),
    2: (500, "UNKNOWN"),
    3: (400, "INVALID_ARGUMENT"),
    4: (504, "DEADLINE_EXCEEDED"),
    5: (404, "NOT_FOUND"),
    6: (409, "ALREADY_EXISTS"),
    7: (403, "PERMISSION_DENIED"),
    8: (429, "RESOURCE_EXHAUSTED"),
    9: (400, "FAILED_PRECONDITION"),
    10: (409, "ABORTED"),
    11: (400, "OUT_OF_RANGE"),
    12: (501, "UNIMPLEMENTED"),
    13: (500, "INTERNAL"),
    14: (503, "UNAVAILABLE"),
    15: (500, "DATA_LOSS"),
    16: (401, "UNAUTHENTICATED"),
}
"""gRPC status number -> HTTP status and name. Source: google/rpc/code.proto."""

# Fields of the REST documents that no package has: the emulator accepts and ignores them.
_REST_ONLY = frozenset(
    {
        "bootDiskConfig",
        "upcomingMaintenance",
        "protectionTier",
        "provisioningModel",
        "reservationName",
        "terminationTimestamp",
        "runDuration",
    }
)

LATER = {"laterCount": 7, "laterText": "later", "laterSettings": {"level": 3}}
"""The fields of `messages.UNKNOWN_FIELDS` in JSON."""


def error_json(error: ApiError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of a refusal."""
    code, name = HTTP_CODES.get(error.code, (500, "UNKNOWN"))
    body: dict[str, Any] = {"code": code, "message": error.message, "status": name}
    details = [json_format.MessageToDict(detail) for detail in status_of(error).details]
    if details:
        body["details"] = details
    return code, {"error": body}


# --- answers -----------------------------------------------------------------------------------------------------


def to_json(message: Any, *, numbers: bool = False) -> dict[str, Any]:
    """
    The message as JSON values: fields at their defaults are left out, int64 are strings.

    numbers: enums as numbers (`$alt=json;enum-encoding=int`) instead of names
    """
    content: dict[str, Any] = json_format.MessageToDict(message, use_integers_for_enums=numbers)
    _complete(message, content, numbers)
    return content


def _complete(message: Any, content: dict[str, Any], numbers: bool) -> None:
    """Add names for enum numbers that the package does not know, as the service does, and fields of later versions."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.type == FieldDescriptor.TYPE_ENUM and not numbers:
            content[field.json_name] = _named(field.enum_type, value, content[field.json_name])
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            below = content.get(field.json_name)
            pairs = zip(value, below, strict=True) if isinstance(below, list) else [(value, below)]
            for one, shown in pairs:
                if isinstance(shown, dict) and "@type" not in shown:
                    _complete(one, shown, numbers)
    if len(unknown_fields.UnknownFieldSet(message)):
        content |= LATER


def _named(enum: Any, number: int, shown: object) -> object:
    return shown if number in enum.values_by_number else f"{enum.name.upper()}_{number}"


# --- requests ----------------------------------------------------------------------------------------------------


def parse_body(body: bytes) -> dict[str, Any]:
    """Raises: ApiError (3): not a JSON object."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{error}") from None
    if not isinstance(value, dict):
        raise _invalid("Root element must be a message.")
    return value


def parse_query(request: Any, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Query parameters as the JSON of a *request* class. Raises: ApiError (3): a name that it lacks."""
    found: dict[str, Any] = {}
    for name, text in query:
        place, descriptor = found, request.DESCRIPTOR
        *path, last = name.split(".")
        for part in path:
            field = _field(descriptor, part, name)
            place = place.setdefault(field.json_name, {})
            descriptor = field.message_type
        field = _field(descriptor, last, name)
        value: Any = _boolean(text, field) if field.type == FieldDescriptor.TYPE_BOOL else text
        if field.message_type is not None and field.message_type.full_name == "google.protobuf.FieldMask":
            value = ",".join(json_format.MessageToDict(_mask(text)).split(",")) if "_" in text else text
        if field.is_repeated:
            place.setdefault(field.json_name, []).append(value)
        else:
            place[field.json_name] = value
    return found


def _boolean(text: str, field: Any) -> bool:
    """Clients write `force=True` and `force=1`, and the service accepts them."""
    if text.lower() not in ("true", "1", "false", "0", ""):
        raise _wrong_value(field, text)
    return text.lower() in ("true", "1")


def _mask(text: str) -> Any:
    """Some clients write `network_config.enable_external_ips`, which the service accepts as well as camel case."""
    from google.protobuf.field_mask_pb2 import FieldMask  # type: ignore[import-untyped]

    return FieldMask(paths=text.split(","))


def _field(descriptor: Any, part: str, name: str) -> Any:
    fields = descriptor.fields if descriptor is not None else ()
    for field in fields:
        if part in (field.json_name, field.name):
            return field
    what = f"Cannot bind query parameter. Field '{name}' could not be found in request message."
    raise _invalid(f'Unknown name "{name}": {what}', "")


def build(request: Any, values: dict[str, Any]) -> Any:
    """The request message. Raises: ApiError (3): names the field that does not fit."""
    _drop_rest_only(request.DESCRIPTOR, values)
    _check_names(request.DESCRIPTOR, values, "")
    try:
        return json_format.ParseDict(values, request())
    except json_format.ParseError as error:
        raise _invalid(" ".join(str(error).split())) from None


def _check_names(descriptor: Any, values: dict[str, Any], place: str) -> None:
    """Raises: ApiError (3): a name that the message lacks, or a word for a number, in the service's words."""
    known = {name: field for field in descriptor.fields for name in (field.json_name, field.name)}
    for name, value in values.items():
        field = known.get(name)
        if field is None:
            at = f" at '{place}'" if place else ""
            raise _invalid(f'Unknown name "{name}"{at}: Cannot find field.', place)
        if field.message_type is None:
            if field.cpp_type in _NUMBERS and isinstance(value, str) and not _is_number(value):
                raise _wrong_value(field, value, place)
            continue
        if field.message_type.GetOptions().map_entry or field.message_type.file.package == "google.protobuf":
            continue
        inside = f"{place}.{field.name}" if place else field.name
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, dict):
                _check_names(field.message_type, one, f"{inside}[{index}]" if isinstance(value, list) else inside)


_NUMBERS = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _wrong_value(field: Any, text: str, place: str = "") -> ApiError:
    name = f"{place}.{field.name}" if place else field.name
    kind = {FieldDescriptor.TYPE_BOOL: "TYPE_BOOL", FieldDescriptor.TYPE_INT64: "TYPE_INT64"}.get(
        field.type, "TYPE_INT32"
    )
    message = f"Invalid value at '{name}' ({kind}), \"{text}\""
    return ApiError(3, message, field=(name, message))


def _drop_rest_only(descriptor: Any, values: dict[str, Any]) -> None:
    known = {name: field for field in descriptor.fields for name in (field.json_name, field.name)}
    for name in [name for name in values if name not in known and name in _REST_ONLY]:
        del values[name]
    for name, value in values.items():
        field = known.get(name)
        if field is None or field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                _drop_rest_only(field.message_type, one)


def _invalid(what: str, field: str | None = None) -> ApiError:
    """*field*: its place, for the detail that clients decode; None for text that is not JSON at all."""
    message = f"Invalid JSON payload received. {what}"
    return ApiError(3, message, field=None if field is None else (field, message))


# --- paths and verbs --------------------------------------------------------------------------------------------------


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
    """One method under one path of one version. `variable`: the field in the path; `body`: "", "*" or a field."""

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


class RestServer:
    """Answers HTTP requests with calls of the world's methods."""

    def __init__(self, served: ServedWorld) -> None:
        self._served = served
        self._routes = routes()

    def serve(self, port: int = 0) -> HttpService:
        """Raises: ConfigError: the port is taken."""
        return HttpService(self.answer, port)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        request = _overridden(request)
        found = self._find_route(request)
        if found is None:
            return _no_such_page(request)
        route, subject = found
        try:
            code, body = 200, self._run(route, subject, request)
        except ApiError as error:
            code, body = error_json(error)
        date = self._served.date()
        headers = {"Date": date} if date else {}
        return HttpAnswer(code, json.dumps(body, indent=2).encode() + b"\n", headers=headers)

    def _find_route(self, request: HttpRequest) -> tuple[Route, str] | None:
        """The method for a path and a verb, and the name in the path."""
        for route in self._routes:
            if route.verb == request.method and (match := route.pattern.fullmatch(request.path)):
                return route, unquote(match[1])
        return None

    def _run(self, route: Route, subject: str, request: HttpRequest) -> Mapping[str, Any]:
        message = _message(route, subject, request)
        answer = run_call(self._served, route.name, route.method, message, request.peer)
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
    """A client whose address is too long sends it as a form, with the verb in a header."""
    verb = request.headers.get("x-http-method-override")
    if not verb or request.method != "POST":
        return request
    form = parse_qsl(request.body.decode(errors="replace"), keep_blank_values=True)
    return replace(request, method=verb.upper(), query=(*request.query, *form), body=b"")


def _no_such_page(request: HttpRequest) -> HttpAnswer:
    """The answer of Google's front end to an unknown path: a page, not JSON."""
    text = f"<!DOCTYPE html><title>Error 404 (Not Found)!!1</title><p>{request.method} is not served here."
    return HttpAnswer(404, text.encode(), "text/html; charset=UTF-8")
