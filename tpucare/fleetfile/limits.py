"""
Warnings about default quotas that a fleet may exceed: such a quota otherwise fails a create hours later.

Pure. The numbers are the usual defaults of a project, seen in the wild. Reading the real quotas needs a permission
that tpucare does not ask for, so the result is a warning, never an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tpucare.fleetfile.parse import FleetSpec
from tpucare.model.accelerators import region_of

QUOTA_PAGE = "https://console.cloud.google.com/iam-admin/quotas"
ADDRESSES_PER_REGION = 8
# 75 health checks, of which each host takes about five.
HOSTS_PER_PROJECT = 15


def warnings_of(fleets: Sequence[FleetSpec]) -> list[str]:
    """One line per quota that all *fleets* together may exceed, and one per fleet without a service account."""
    return [*_accounts(fleets), *_addresses(fleets), *_health_checks(fleets)]


def _accounts(fleets: Iterable[FleetSpec]) -> Iterable[str]:
    for fleet in fleets:
        if not all(place.service_account for place in fleet.places):
            yield (
                f"{fleet.file}: tpu.service_account: is not set: nodes run as the project's default Compute Engine "
                "account, which may edit the whole project, or do nothing where an organisation removed its roles"
            )


def _addresses(fleets: Iterable[FleetSpec]) -> Iterable[str]:
    hosts: Counter[tuple[str, str]] = Counter()
    for fleet in fleets:
        for region in sorted({region_of(place.zone) for place in fleet.places}):
            own = [p.workers for p in fleet.places if region_of(p.zone) == region and p.network.external_ips]
            hosts[fleet.project or "", region] += fleet.count * max(own, default=0)
    for (project, region), count in sorted(hosts.items()):
        if count > ADDRESSES_PER_REGION:
            yield (
                f"{_prefix(project)}{count} hosts with external addresses may be in {region}, and the default quota is "
                f'{ADDRESSES_PER_REGION} per region: request more "In-use regional external IPv4 addresses" '
                f"({QUOTA_PAGE}), or set `network: {{external_ips: false}}` under `tpu`"
            )


def _health_checks(fleets: Iterable[FleetSpec]) -> Iterable[str]:
    hosts: Counter[str] = Counter()
    for fleet in fleets:
        hosts[fleet.project or ""] += fleet.count * fleet.workers
    for project, count in sorted(hosts.items()):
        if count > HOSTS_PER_PROJECT:
            yield (
                f'{_prefix(project)}{count} hosts in all, and the default quota of 75 "Health checks" is enough for '
                f"about {HOSTS_PER_PROJECT}: request more ({QUOTA_PAGE}), which may take days, or begin with fewer"
            )


def _prefix(project: str) -> str:
    return f"project {project}: " if project else ""
