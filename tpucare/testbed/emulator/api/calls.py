"""
One call over any transport: draw its fate, wait, act on the world, wait, return the answer or lose it.

Latency is slept in the call's own thread, never under the world's lock. `methods` lists the methods, `world` implements
them; `grpc` and `rest` turn bytes into requests and answers into bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage  # type: ignore[import-untyped]
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from tpucare.testbed.emulator.api.messages import UNKNOWN_FIELDS
from tpucare.testbed.emulator.api.methods import Method
from tpucare.testbed.emulator.world.records import ApiError, CallFate
from tpucare.testbed.emulator.world.world import World


@dataclass(frozen=True, slots=True)
class ServedWorld:
    """
    A world behind servers: its lock, its clock, and the way to wait.

    changed: called after each call, so that the server handles effects and new events
    dated:   whether answers have a `date` header, as those of the real service
    """

    world: World
    lock: AbstractContextManager[Any]
    now: Callable[[], datetime]
    wait: Callable[[float], object]
    changed: Callable[[], None]
    dated: bool = True

    def date(self) -> str | None:
        """The `date` header of an answer at this instant; None: without one."""
        return format_datetime(self.now(), usegmt=True) if self.dated else None


def run_call(served: ServedWorld, name: str, method: Method, request: Any, peer: str) -> Any:
    """
    Make one call and return its answer: a message, or the bytes of one.

    Raises: ApiError: it was refused, or its answer is lost.
    """
    with served.lock:
        fate = served.world.calls.fate(name, method.subject(request), served.now(), peer)
    served.wait(fate.before_seconds)
    refusal, answer = _act(served, method, request, fate) if fate.applied else (None, None)
    served.wait(fate.after_seconds)
    if (error := fate.error or refusal) is not None:
        raise error
    shown = method.show(answer, request)
    return _with_unknown_fields(shown) if served.world.state.unknown_fields else shown


def _act(served: ServedWorld, method: Method, request: Any, fate: CallFate) -> tuple[ApiError | None, Any]:
    try:
        with served.lock:
            return None, method.act(served.world, request, served.now(), fate)
    except ApiError as error:
        return error, None
    finally:
        served.changed()


def _with_unknown_fields(answer: Any) -> Any:
    """The answer with additional fields that no package knows."""
    if isinstance(answer, bytes):
        return answer + UNKNOWN_FIELDS
    answer.MergeFromString(UNKNOWN_FIELDS)
    return answer


def status_of(error: ApiError) -> Any:
    """The error as a google.rpc.Status, whose details clients decode."""
    return status_pb2.Status(code=error.code, message=error.message, details=_details(error))


def _details(error: ApiError) -> list[AnyMessage]:
    details: list[Any] = []
    if error.resource:
        details.append(error_details_pb2.ResourceInfo(resource_type="tpu.googleapis.com", resource_name=error.resource))
    if error.quota is not None:
        subject, description = error.quota
        violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if error.reason:
        details.append(error_details_pb2.ErrorInfo(reason=error.reason, domain="tpu.googleapis.com"))
    if error.field is not None:
        field, description = error.field
        wrong = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
        details.append(error_details_pb2.BadRequest(field_violations=[wrong]))
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    return packed
