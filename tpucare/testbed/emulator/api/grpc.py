"""
The emulated cloud over gRPC, under the real service's names, so that the official client works on it unmodified:
google.cloud.tpu.v2.Tpu, google.cloud.tpu.v2alpha1.Tpu, google.longrunning.Operations and
google.cloud.location.Locations on one port.

`calls` makes each call; grpc itself answers UNIMPLEMENTED to methods that are not emulated.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.api.calls import ServedWorld, run_call, status_of
from tpucare.testbed.emulator.api.methods import Method, services
from tpucare.testbed.emulator.world.records import ApiError
from tpucare.testbed.peers import is_ours

THREADS = 256
STOP_GRACE_SECONDS = 0.2

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second emulator on the same port must fail, not share the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


class Service:
    """The running gRPC server and the threads of its calls."""

    def __init__(self, served: ServedWorld, port: int = 0) -> None:
        """Serve on the loopback (*port* 0: a free one). Raises: ConfigError: the port is taken."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="emulator-call")
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        for service, methods in services().items():
            handlers = {name: self._handler(served, name, method) for name, method in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        except RuntimeError as error:
            raise ConfigError(f"port {port} cannot be listened on: is another emulator running?") from error
        self._server.start()

    def stop(self) -> None:
        """Cut calls in flight, and wait for their threads: `ServedWorld.wait` must return by then."""
        self._server.stop(grace=STOP_GRACE_SECONDS).wait()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _handler(self, served: ServedWorld, name: str, method: Method) -> Any:
        def call(request: Any, context: Any) -> Any:
            # A page cannot speak HTTP/2 without TLS. grpc does not show connections, so each call is checked.
            kind, host, port = context.peer().split(":")
            if kind != "ipv4" or not is_ours((host, int(port)), ("127.0.0.1", self.port)):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "The emulator is not for other users.")
            return _run(served, name, method, request, context)

        return grpc.unary_unary_rpc_method_handler(
            call, request_deserializer=method.request.FromString, response_serializer=_serialize
        )


def _serialize(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())


def _run(served: ServedWorld, name: str, method: Method, request: Any, context: Any) -> Any:
    refusal: ApiError | None = None
    answer: Any = None
    try:
        answer = run_call(served, name, method, request, context.peer())
    except ApiError as error:
        refusal = error
    if (date := served.date()) is not None:
        context.send_initial_metadata((("date", date),))
    return answer if refusal is None else _abort(context, refusal)


def _abort(context: Any, error: ApiError) -> NoReturn:
    context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort returned")
