"""
The emulated cloud served under the real service's names, so that the official client works on it unmodified:
google.cloud.tpu.v2.Tpu, google.longrunning.Operations and google.cloud.location.Locations on one port.

Each call: draw its fate, wait, act on the world, wait, answer or lose the answer. Latency is slept in the call's own
thread, never under the world's lock. Which methods there are is `methods`, how they look on the wire `messages`, what
they mean `world`. Those that are not emulated (queued resources) are answered UNIMPLEMENTED by grpc itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage  # type: ignore[import-untyped]
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from tpucare.emulator import messages
from tpucare.emulator.methods import Method, services
from tpucare.emulator.records import ApiError, CallFate
from tpucare.emulator.world import World
from tpucare.errors import ConfigError

THREADS = 256
STOP_GRACE_SECONDS = 0.2

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second emulator on the same port must fail, not share the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class Carrier:
    """
    What carries the world: its lock, its clock, and how time is waited for.

    changed: called after each act, so that effects and new events are seen to
    dated:   whether answers bear a `date` header, as the real service's do
    """

    world: World
    lock: AbstractContextManager[Any]
    now: Callable[[], datetime]
    wait: Callable[[float], object]
    changed: Callable[[], None]
    dated: bool = True


class Service:
    """The running gRPC server and the threads of its calls."""

    def __init__(self, carrier: Carrier, port: int = 0) -> None:
        """Serve on the loopback (*port* 0: a free one). Raises: ConfigError: the port is taken."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="emulator-call")
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        for service, methods in services(messages.NodePages()).items():
            handlers = {name: _handler(carrier, name, method) for name, method in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        except RuntimeError as error:
            raise ConfigError(f"port {port} cannot be listened on: is another emulator running?") from error
        self._server.start()

    def stop(self) -> None:
        """Cut off what is under way, and wait for its threads: `Carrier.wait` must return by then."""
        self._server.stop(grace=STOP_GRACE_SECONDS).wait()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _handler(carrier: Carrier, name: str, method: Method) -> Any:
    def call(request: Any, context: Any) -> Any:
        return _carry(carrier, name, method, request, context)

    return grpc.unary_unary_rpc_method_handler(
        call, request_deserializer=method.request.FromString, response_serializer=_serialize
    )


def _serialize(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())


def _carry(carrier: Carrier, name: str, method: Method, request: Any, context: Any) -> Any:
    """One call from its arrival to its answer."""
    with carrier.lock:
        fate = carrier.world.fate(name, method.subject(request), carrier.now(), context.peer())
    carrier.wait(fate.before_seconds)
    refusal, answer = _act(carrier, method, request, fate) if fate.applied else (None, None)
    carrier.wait(fate.after_seconds)
    if carrier.dated:
        context.send_initial_metadata((("date", format_datetime(carrier.now(), usegmt=True)),))
    if (error := fate.error or refusal) is not None:
        _abort(context, error)
    return method.show(answer, request)


def _act(carrier: Carrier, method: Method, request: Any, fate: CallFate) -> tuple[ApiError | None, Any]:
    try:
        with carrier.lock:
            return None, method.act(carrier.world, request, carrier.now(), fate)
    except ApiError as error:
        return error, None
    finally:
        carrier.changed()


def _abort(context: Any, error: ApiError) -> NoReturn:
    """End the call with a google.rpc.Status, whose details the client decodes."""
    status = status_pb2.Status(code=error.code, message=error.message, details=_details(error))
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort returned")


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
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    return packed
