"""What an emulated cloud shows to the network: gRPC and REST over one world, and its buckets; one life for all."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from tpucare.testbed.emulator.api import grpc
from tpucare.testbed.emulator.api.calls import Carrier
from tpucare.testbed.emulator.api.rest import RestFace
from tpucare.testbed.emulator.storage.object_face import ObjectFace
from tpucare.testbed.emulator.storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Ports:
    """Where to listen on the loopback; 0 is a free port."""

    api: int = 0
    rest: int = 0
    storage: int = 0


class Faces:
    """Serves from its making until `stop`; `ports` are those that were found."""

    def __init__(self, carrier: Carrier, objects: ObjectStore, ports: Ports) -> None:
        """Raises: ConfigError: a port is taken."""
        with ExitStack() as opened:
            service = grpc.Service(carrier, ports.api)
            opened.callback(service.stop)
            rest = RestFace(carrier).serve(ports.rest)
            opened.callback(rest.stop)
            storage = ObjectFace(objects).serve(ports.storage)
            opened.callback(storage.stop)
            self.ports = Ports(service.port, rest.port, storage.port)
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """Cut off what is under way, and wait for its threads: `Carrier.wait` must return by then."""
        self._opened.close()
