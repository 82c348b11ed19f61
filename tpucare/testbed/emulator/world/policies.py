"""
Creates that the project or its organisation refuses, in the call or in its operation, and OS Login.

The texts are those of Compute Engine; how Cloud TPU passes them on is a guess (docs/emulator.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from tpucare.model.accelerators import region_of
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.config import Project
from tpucare.testbed.emulator.world.error_texts import Status
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.emulator.world.state import NodeLife

DEFAULT_NETWORK = "default"
OS_LOGIN = "enable-oslogin"


def check_network(project: str, spec: NodeSpec, settings: Project) -> None:
    """Raises: ApiError (3): there is no such network."""
    if settings.networks is None:
        return
    wanted = (spec.network.network or DEFAULT_NETWORK).rpartition("/")[2]
    if wanted not in settings.networks and not spec.network.subnetwork:
        raise texts.no_network(project, wanted)


def refusal(life: NodeLife, others: Iterable[NodeLife], settings: Project) -> Status | None:
    """The error with which Compute Engine refuses the workers of *life*, if any; *others* use quota too."""
    spec, project = life.record.spec, life.path.project
    external = spec.network.enable_external_ips
    if external and not settings.external_ips:
        return texts.constraint("compute.vmExternalIpAccess", project)
    if settings.os_login == "required" and _os_login_is(spec, "FALSE"):
        return texts.constraint("compute.requireOsLogin", project)
    if settings.addresses_per_region is None and settings.health_checks is None:
        return None
    # Workers of a node that was preempted are stopped: they hold neither an address nor a check.
    living = [one for one in others if one is not life and one.path.project == project and not one.dead]
    hosts = len(life.workers)
    if external and settings.addresses_per_region is not None:
        region = region_of(life.path.zone)
        used = sum(len(one.workers) for one in living if _has_addresses_in(one, region))
        if used + hosts > settings.addresses_per_region:
            return texts.compute_quota("IN_USE_ADDRESSES", settings.addresses_per_region, f"in region {region}")
    if settings.health_checks is not None:
        used = sum(len(one.workers) for one in living)
        if (used + hosts) * settings.health_checks_per_worker > settings.health_checks:
            return texts.compute_quota("HEALTH_CHECKS", settings.health_checks, "globally")
    return None


def has_os_login(spec: NodeSpec, settings: Project) -> bool:
    """True when keys in metadata have no effect on such a node; its own `enable-oslogin` wins over the project's."""
    if _os_login_is(spec, "FALSE"):
        return False
    return settings.os_login != "off" or _os_login_is(spec, "TRUE")


def _os_login_is(spec: NodeSpec, word: str) -> bool:
    return spec.metadata.get(OS_LOGIN, "").strip().upper() == word


def _has_addresses_in(life: NodeLife, region: str) -> bool:
    return life.record.spec.network.enable_external_ips and region_of(life.path.zone) == region
