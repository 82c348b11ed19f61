"""
The job of a pool's slot: its user's setup prepares a host, and the host script runs Ray there. Pure.

The script itself is templates/ray/host.py, which travels with the job's files.
"""

from __future__ import annotations

import dataclasses
import shlex

from tpucare.adapters.runner.scripts import read_template
from tpucare.integrations.ray.cluster import HeadRecord, token_variable
from tpucare.model.resources import Job

SCRIPT = ".tpucare-ray/host.py"
DEFAULT_PYTHON = "venv/bin/python"


def outfit(job: Job, head: HeadRecord, pool_name: str, python: str = DEFAULT_PYTHON, *, token: str = "") -> Job:
    """
    *job*, so that each host of its slot joins *head*.

    python: on the host, relative to the job's folder; it has Ray after the setup
    token: name of the secret with the cluster's token; default: the secret that `tpucare ray head` makes
    """
    secret = token or token_variable(head.cluster)
    command = f"{shlex.quote(python)} {SCRIPT}"
    missing = f"job.setup made no {python} in the job's folder: make it, or write its path to ray.python"
    setup = [
        # In a shell of its own: its `cd` and `exit 0` must not reach the check.
        *([f"bash -ec {shlex.quote(job.setup)}"] if job.setup else []),
        f"command -v {shlex.quote(python)} >/dev/null || {{ echo {shlex.quote(missing)} >&2; exit 1; }}",
        f"{command} check {shlex.quote(head.ray)} {shlex.quote(head.python_version)}",
    ]
    own = {
        "TPUCARE_RAY_ADDRESS": head.address,
        "TPUCARE_RAY_POOL": pool_name,
        "TPUCARE_RAY_TOKEN_FROM": secret,
        # For job.setup, which so follows a new Ray of the head without a change of the fleet file.
        "TPUCARE_RAY_VERSION": head.ray,
        "TPUCARE_RAY_PYTHON": head.python_version,
    }
    return dataclasses.replace(
        job,
        run=f"exec {command} run",
        setup="\n".join(setup),
        env={**job.env, **own},
        secrets=job.secrets if secret in job.secrets else (*job.secrets, secret),
        files={**job.files, SCRIPT: read_template("ray/host.py").encode()},
    )
