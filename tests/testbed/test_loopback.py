"""Two emulators on one machine: their workers listen on the same ports, so each takes a part of the loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.machines import loopback
from tpucare.testbed.emulator.machines.loopback import claim


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        yield free.getsockname()[1]


def test_each_emulator_has_a_part_of_its_own_until_it_ends(port: int) -> None:
    with closing(claim([port])) as one, closing(claim([port])) as two:
        assert not one.network.overlaps(two.network)
        assert all(part.network.subnet_of(loopback.WHOLE) for part in (one, two))
    with closing(claim([port])) as again:
        assert again.network == one.network


def test_a_part_where_something_else_listens_is_passed_by(port: int) -> None:
    with closing(claim([port])) as one:
        first = one.network
    with socket.create_server((str(first[1]), port)), closing(claim([port])) as other:
        assert other.network != first


def test_a_port_that_is_taken_everywhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "WHOLE", next(loopback.WHOLE.subnets(new_prefix=15)))
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        taken = everywhere.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {taken} is taken"):
            claim([taken])
    with closing(claim([])), closing(claim([])), pytest.raises(ConfigError, match="other emulators use"):
        claim([])
