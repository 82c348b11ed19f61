"""What an emulated cloud shows to the network: gRPC and REST over one world, opened and closed together."""

from __future__ import annotations

from contextlib import ExitStack

from tpucare.emulator import grpc
from tpucare.emulator.carrying import Carrier
from tpucare.emulator.rest import RestFace


class Faces:
    """Serves from its making until `stop`; a port of 0 is a free one."""

    def __init__(self, carrier: Carrier, port: int = 0, rest_port: int = 0) -> None:
        """Raises: ConfigError: a port is taken."""
        with ExitStack() as opened:
            service = grpc.Service(carrier, port)
            opened.callback(service.stop)
            rest = RestFace(carrier).serve(rest_port)
            opened.callback(rest.stop)
            self.port, self.rest_port = service.port, rest.port
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """Cut off what is under way, and wait for its threads: `Carrier.wait` must return by then."""
        self._opened.close()
