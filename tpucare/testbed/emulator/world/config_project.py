"""
What a project and its organisation allow, and what the image of a worker brings: the ways in which a first day fails.

Everything is off by default. What each comes to is in `policies` for the API, and in `outfit` and `guard` for workers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tpucare.testbed.emulator.world.latency import Latency, Seconds, Strict

Refusal = Literal["", "api-disabled", "no-quota-project", "billing-disabled", "narrow-scopes"]


class Project(Strict):
    """The project itself. Quotas of Compute Engine count what lives; they are told in the operation of a create."""

    refuses: Refusal = Field(default="", description="every call is refused with 7, and the text of this")
    networks: tuple[str, ...] | None = Field(default=None, description="the only networks there are; none: any")
    external_ips: bool = Field(default=True, description="false: compute.vmExternalIpAccess refuses external addresses")
    os_login: Literal["off", "on", "required"] = Field(
        default="off",
        description="on: keys in metadata count for nothing, unless the node says enable-oslogin: FALSE; "
        "required: a node that says so is refused",
    )
    addresses_per_region: int | None = Field(default=None, ge=0, description="IN_USE_ADDRESSES: one a worker")
    health_checks: int | None = Field(default=None, ge=0, description="HEALTH_CHECKS of the project")
    health_checks_per_worker: int = Field(default=5, ge=0)


class SshGuard(Strict):
    """
    A guard that blocks an address which connects and does not log in, as some Ubuntu images have it.

    A refused login and a connection that is closed before any are `attacks`. Each block is `growth` times the last.
    """

    attacks: int = Field(default=4, ge=1)
    within: Seconds = Field(default=120.0, gt=0)
    block: Seconds = Field(default=120.0, gt=0)
    growth: float = Field(default=1.5, ge=1)


class Guest(Strict):
    """What an image brings, and when it is ready."""

    keys_late: Latency | None = Field(default=None, description="from sshd's start until keys of the metadata log in")
    sshguard: SshGuard | None = None
    sshd_limits: Literal["roomy", "default"] = Field(
        default="roomy", description="default: MaxStartups 10:30:100 and MaxSessions 10, as OpenSSH has them"
    )
    python: bool = Field(default=True, description="false: there is `python3`, and no `python`")
    dpkg_locked: Seconds = Field(default=0.0, description="after a boot, the image's own upgrades hold dpkg's lock")
    containers: bool = Field(default=False, description="the image's own services run, and hold no chip")
    chip_holding_runtimes: tuple[str, ...] = Field(
        default=(), description="runtime versions (a `*` at the end) whose service tpu-runtime holds the chips"
    )
