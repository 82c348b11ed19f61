"""What all tests share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.virtual.harness")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    For `-n 2 --dist loadgroup`: tests with machines of their own, which share loopback addresses and ports, one after
    the other on one process; the others beside them, each file as a whole, since it shares what it builds.
    """
    for item in items:
        group = "machines" if item.get_closest_marker("machines") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
