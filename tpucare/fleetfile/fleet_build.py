"""
Sections of a fleet file -> records of `model`: places with what they inherit, the job, the care with its defaults.

Everything is known to be right here; expansion per slot is left to `fleet`.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.fleetfile.schema import CareSection, Fence, JobSection, NetworkSection, Reach, Stopped, TpuSection
from tpucare.model import accelerators
from tpucare.model.resources import Care, Job, Network, Place


def places_of(alternative: TpuSection) -> Iterator[Place]:
    """One place per zone in order; a zone's own settings go before those around it."""
    accelerator = accelerators.derive(alternative.type)
    for choice in alternative.zones:
        given = choice.model_fields_set
        yield Place(
            zone=choice.zone,
            accelerator_type=accelerator.type,
            provisioning=choice.provisioning if "provisioning" in given else alternative.provisioning,
            runtime=choice.runtime or alternative.runtime or accelerator.default_runtime,
            service_account=choice.service_account or alternative.service_account,
            network=_network(alternative.network, choice.network),
            workers=accelerator.hosts,
            metadata=tuple(alternative.metadata.items()),
            os_login=alternative.os_login,
        )


def _network(around: NetworkSection, own: NetworkSection) -> Network:
    merged = around.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
    return Network(
        name=merged.name,
        subnetwork=merged.subnetwork,
        tags=tuple(merged.tags),
        external_ips=merged.external_ips,
        reach_internal=merged.reach is Reach.INTERNAL,
    )


def job_template(job: JobSection, folder: Path | None) -> Job:
    """The job of every slot, with placeholders as they stand and without the content of files."""
    workdir = os.path.normpath((folder or Path()) / job.workdir) if job.workdir else ""
    return Job(
        run=job.run,
        setup=job.setup,
        repository=job.repository,
        branch=job.branch,
        follow=job.follow,
        workdir=workdir,
        env=job.env,
        secrets=tuple(job.secrets),
        checkpoint=job.checkpoint,
        progress=job.progress,
    )


def care_of(declared: CareSection, workers: int) -> Care:
    same: dict[str, Any] = declared.model_dump(exclude={"fence", "stopped", "boot_timeout"})
    is_given = "boot_timeout" in declared.model_fields_set
    return Care(
        **same,
        boot_timeout=declared.boot_timeout if is_given else default_boot_timeout(workers),
        fence_proceed=declared.fence is Fence.PROCEED,
        stopped_delete=declared.stopped is Stopped.DELETE,
    )


def default_boot_timeout(workers: int) -> timedelta:
    """
    How long a node of *workers* hosts may take until all of them answer.

    Source: single hosts were seen to take minutes, slices of some hosts 12 minutes; marin (PR 7030) waits 60 minutes,
    twice that from 64 hosts and three times from 256.
    """
    if workers <= 16:
        return timedelta(minutes=30)
    factor = 3 if workers >= 256 else 2 if workers >= 64 else 1
    return factor * timedelta(minutes=60)
