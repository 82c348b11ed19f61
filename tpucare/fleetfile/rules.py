"""
Rules over several keys of a fleet file: types and zones of the catalogue, and keys that exclude or need each other.

They read the plain values, even of a file with a wrong shape, so that one reading reports every problem. A value of
the right shape that is unwise gives a warning.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tpucare.fleetfile import values
from tpucare.fleetfile.schema import ALTERNATIVES_LIMIT, ZONES_LIMIT, AddressKind
from tpucare.fleetfile.yaml_document import Document, KeyPath
from tpucare.model import accelerators
from tpucare.model.accelerators import Accelerator
from tpucare.model.errors import ConfigError, Problem
from tpucare.model.resources import PlacementOrder, Provisioning, SaveBounds
from tpucare.model.text import hint, length, naming, nearest, shown

_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?key|token|secret|password|passwd|credentials?|private_key)s?$")
SLOT_PLACEHOLDER = "{slot}"
_IN_BRACES = re.compile(r"\{[^{}/]*\}")
_CONTAINER = re.compile(r"\b(?:docker|podman)\s+(?:container\s+)?run\b")
_OWN_IMAGE = frozenset({"v5e", "v5p", "v6e"})
_UNEXPANDED = ("setup", "repository", "branch", "workdir", "progress")


@dataclass(frozen=True, slots=True)
class _Finding:
    """`is_recent`: earlier versions accepted it, so a file that they accepted gets a warning."""

    path: KeyPath
    text: str
    is_warning: bool = False
    is_recent: bool = False


def check(document: Document, *, accepted: bool = False) -> tuple[list[Problem], list[Problem]]:
    """
    Problems, which refuse the file, and warnings, which let it pass; values of a wrong shape are skipped.

    accepted: an earlier version accepted the file: a finding with `is_recent` is a warning, and its fleet goes on.
    """
    top = _mapping(document.value)
    job = _mapping(top.get("job"))
    problems: list[Problem] = []
    warnings: list[Problem] = []
    found = (*_tpu(top), *_job(job), *_care(_mapping(top.get("care"))), *_placement(top), *_shape(top), *_pool(top))
    for one in (*found, *(replace(one, is_recent=True) for one in _checkpoint(job))):
        is_warning = one.is_warning or (accepted and one.is_recent)
        (warnings if is_warning else problems).append(document.problem(one.path, one.text))
    return problems, warnings


# --- tpu: against the catalogue ----------------------------------------------------------------------------------


def _tpu(top: dict[str, object]) -> Iterator[_Finding]:
    tpu = top.get("tpu")
    for index, entry in enumerate(tpu[:ALTERNATIVES_LIMIT] if isinstance(tpu, list) else [tpu]):
        alternative = _mapping(entry)
        yield from _alternative(alternative, ("tpu", index), unlisted=alternative.get("unlisted") is True)


def _alternative(alternative: dict[str, object], path: KeyPath, *, unlisted: bool) -> Iterator[_Finding]:
    word, accelerator = alternative.get("type"), None
    if isinstance(word, str):
        try:
            accelerator = accelerators.derive(word) if unlisted else accelerators.lookup(word)
        except ConfigError as error:
            is_new = not unlisted and _is_derivable(word)
            text = _unlisted(word, accelerators.nearest_types(word)) if is_new else str(error)
            yield _Finding((*path, "type"), text)
    if accelerator and not accelerator.topology:
        text = f"{accelerator.type} is not listed; {accelerator.hosts} hosts are derived from its name"
        yield _Finding((*path, "type"), text, is_warning=True)
    yield from _terms(alternative, path, accelerator, unlisted=unlisted)
    yield from _queue(alternative, path)
    yield from _login(alternative, path)
    around = _mapping(alternative.get("network"))
    yield from _reach(around, (*path, "network"))
    for index, entry in enumerate(_list(alternative.get("zones"))[:ZONES_LIMIT]):
        here = (*path, "zones", index)
        if isinstance(entry, str):
            yield from _zone(entry, here, accelerator, unlisted=unlisted)
            continue
        settings = _mapping(entry)
        yield from _zone(settings.get("zone"), (*here, "zone"), accelerator, unlisted=unlisted)
        yield from _terms(settings, here, accelerator, unlisted=unlisted)
        if own := _mapping(settings.get("network")):
            yield from _reach({**around, **own}, (*here, "network"))


def _queue(alternative: dict[str, object], path: KeyPath) -> Iterator[_Finding]:
    """Terms that the service has no queue for, and a validity without a queue."""
    queued, valid, refused = False, None, set()
    for index, entry in enumerate(_list(alternative.get("zones"))[:ZONES_LIMIT]):
        own, here = _mapping(entry), (*path, "zones", index)
        settings = {**alternative, **own}
        is_queued = settings.get("queued") is True
        queued, valid = queued or is_queued, valid or (here if "valid_for" in own else None)
        if is_queued and settings.get("provisioning") == Provisioning.PREEMPTIBLE:
            refused.add((*(here if own.keys() & {"queued", "provisioning"} else path), "provisioning"))
    for one in refused:
        text = "is preemptible, for which there is no queue: write spot, on-demand or reserved, or drop `queued`"
        yield _Finding(one, text)
    where = path if "valid_for" in alternative else valid
    if where is not None and not queued:
        yield _Finding((*where, "valid_for"), "is for a queue: write `queued: true` beside it, or remove it")


def _reach(network: dict[str, object], path: KeyPath) -> Iterator[_Finding]:
    if network.get("reach") == AddressKind.EXTERNAL and network.get("external_ips") is False:
        yield _Finding((*path, "reach"), "is external, but workers have no external address (`external_ips: false`)")


def _login(alternative: dict[str, object], path: KeyPath) -> Iterator[_Finding]:
    if alternative.get("os_login") is True:
        text = "tpucare does not support OS Login yet: it logs in only if its key was added to the account by hand"
        yield _Finding((*path, "os_login"), text, is_warning=True)
    for key in _mapping(alternative.get("metadata")):
        if _SECRET_NAME.search(key.replace("-", "_")):
            text = "looks like a secret, and every user on a worker can read metadata; name it in `job.secrets` instead"
            yield _Finding((*path, "metadata", key), text, is_warning=True)


def _zone(zone: object, path: KeyPath, accelerator: Accelerator | None, *, unlisted: bool) -> Iterator[_Finding]:
    if not isinstance(zone, str):
        return
    known = accelerators.known_zones()
    if zone not in known:
        if unlisted and _is_zone(zone):
            yield _Finding(path, f"{zone} is not listed{hint(zone, known)}", is_warning=True)
        elif not unlisted:
            text = (
                _unlisted(zone, nearest(zone, known))
                if _is_zone(zone)
                else f"{shown(zone)} is not a known zone{hint(zone, known)}"
            )
            yield _Finding(path, text)
    elif accelerator is not None:
        yield from _offer(accelerator, zone, path, unlisted=unlisted)


def _offer(accelerator: Accelerator, zone: str, path: KeyPath, *, unlisted: bool) -> Iterator[_Finding]:
    offer = accelerators.offer(accelerator.type, zone)
    if offer is None:
        zones = ", ".join(offer.zone for offer in accelerators.zones_for(accelerator.type)[:4])
        text = f"{accelerator.generation} is not offered in {zone}; it is in {zones}"
        yield _Finding(path, text, is_warning=unlisted)
    elif offer.only and accelerator.type not in offer.only:
        text = f"only {', '.join(offer.only)} is listed for {zone}; {accelerator.type} may be refused there"
        yield _Finding(path, text, is_warning=True)


def _terms(
    settings: dict[str, object], path: KeyPath, accelerator: Accelerator | None, *, unlisted: bool
) -> Iterator[_Finding]:
    if accelerator is None:
        return
    tier, runtime = settings.get("provisioning"), settings.get("runtime")
    if isinstance(tier, str) and tier in set(Provisioning) - set(accelerator.provisionings):
        offered = ", ".join(accelerator.provisionings)
        text = f"{accelerator.generation} is not offered as {tier}; it is as {offered}"
        yield _Finding((*path, "provisioning"), text, is_warning=unlisted)
    if isinstance(runtime, str) and runtime:
        yield from _runtime(runtime, (*path, "runtime"), accelerator, unlisted=unlisted)


def _runtime(runtime: str, path: KeyPath, accelerator: Accelerator, *, unlisted: bool) -> Iterator[_Finding]:
    if fnmatch.fnmatchcase(runtime, "tpu-vm-tf-*-pod"):
        # Its service `tpu-runtime` holds the chips on every host, so a run could not begin on any node.
        text = f"{shown(runtime)} holds the chips for TensorFlow's own server; write {runtime}-pjrt"
        yield _Finding(path, text, is_recent=True)
    elif not _fits(runtime, accelerator.runtimes):
        text = f"{shown(runtime)} is not listed for {accelerator.generation}; usual is {accelerator.default_runtime}"
        # These chips need an image of their own: on another one a run finds no TPU (docs, "TPU VM images").
        is_foreign = accelerator.generation in _OWN_IMAGE and not unlisted
        yield _Finding(path, text, is_warning=not is_foreign, is_recent=True)


def _fits(runtime: str, patterns: Iterable[str]) -> bool:
    """True if *runtime* is in the catalogue, which writes a family of names as `tpu-vm-tf-<version>[-pod][-pjrt]`."""
    return any(fnmatch.fnmatchcase(runtime, re.sub(r"<.*", "*", pattern)) for pattern in patterns)


def _unlisted(word: str, close: Sequence[str]) -> str:
    return f"{word} is not listed (`unlisted: true` accepts it){naming(close)}"


def _is_derivable(word: str) -> bool:
    try:
        accelerators.derive(word)
    except ConfigError:
        return False
    return True


def _is_zone(word: str) -> bool:
    try:
        values.zone(word)
    except ValueError:
        return False
    return True


# --- job: keys that exclude or need each other -------------------------------------------------------------------


def _job(job: dict[str, object]) -> Iterator[_Finding]:
    if job.get("repository") and job.get("workdir"):
        yield _Finding(("job", "workdir"), "excludes `repository`; keep one of the two")
    if not job.get("repository"):
        for key in ("branch", "follow"):
            if job.get(key):
                yield _Finding(("job", key), "needs `repository`")
    if job.get("cache") and not job.get("setup"):
        yield _Finding(("job", "cache"), "needs `setup`, whose results it keeps")
    place = job.get("checkpoint")
    is_shared = (
        isinstance(place, str) and bool(place) and SLOT_PLACEHOLDER not in place.removeprefix("gs://").split("/")[0]
    )
    if job.get("cache") == values.CACHE_AUTO and not is_shared:
        text = "is auto, beside the checkpoints, and no place is beside those of all slots: write gs://BUCKET/PATH"
        yield _Finding(("job", "cache"), text)
    if job.get("prefetch") is True and not (isinstance(place, str) and place.startswith("gs://")):
        yield _Finding(("job", "prefetch"), "needs a `checkpoint` in a bucket: gs://BUCKET/PATH")
    if "cache_paths" in job and not job.get("cache"):
        yield _Finding(("job", "cache_paths"), "needs `cache`")
    env = _mapping(job.get("env"))
    yield from _secrets(_list(job.get("secrets")), env)
    yield from _job_warnings(job, env)


def _care(care: dict[str, object]) -> Iterator[_Finding]:
    bounds, usual = _mapping(care.get("save_every")), SaveBounds()
    try:
        shortest = values.duration(bounds["min"]) if "min" in bounds else usual.shortest
        longest = values.duration(bounds["max"]) if "max" in bounds else usual.longest
    except ValueError:
        return  # The shape of the file says so.
    if shortest > longest:
        yield _Finding(("care", "save_every"), f"`min` ({length(shortest)}) is above `max` ({length(longest)})")


def _placement(top: dict[str, object]) -> Iterator[_Finding]:
    if "value" in top and top.get("placement") == PlacementOrder.ORDERED:
        yield _Finding(("value",), "has no effect beside `placement: ordered`", is_warning=True)


def _checkpoint(job: dict[str, object]) -> Iterator[_Finding]:
    """The runner reads only gs:// and local paths, and an unknown placeholder would become a folder's name."""
    cache = job.get("cache")
    if isinstance(cache, str) and _IN_BRACES.search(cache):
        yield _Finding(("job", "cache"), "has a placeholder: all slots of the fleet share their environments")
    if isinstance(cache, str) and "://" in cache and not cache.startswith("gs://"):
        yield _Finding(
            ("job", "cache"), f"{shown(cache.partition('://')[0])}:// is not supported; write gs://BUCKET/PATH"
        )
    value = job.get("checkpoint")
    if not isinstance(value, str):
        return
    path = ("job", "checkpoint")
    scheme, colon, _ = value.partition("://")
    if colon and scheme != "gs":
        text = f"{shown(scheme)}:// is not supported; write gs://BUCKET/PATH, or an absolute path that all nodes share"
        yield _Finding(path, text)
    for found in dict.fromkeys(_IN_BRACES.findall(value)):
        if found != SLOT_PLACEHOLDER:
            yield _Finding(path, f"{shown(found)} is not a placeholder; {SLOT_PLACEHOLDER} is the only one")


def _secrets(names: list[object], env: dict[str, object]) -> Iterator[_Finding]:
    seen = set()
    for index, name in enumerate(names):
        if not isinstance(name, str):
            continue
        if name in env:
            yield _Finding(("job", "secrets", index), f"{shown(name)} is in `env` too; keep one of the two")
        if name in seen:
            yield _Finding(("job", "secrets", index), f"{shown(name)} is listed twice")
        seen.add(name)


def _job_warnings(job: dict[str, object], env: dict[str, object]) -> Iterator[_Finding]:
    for name in env:
        if _SECRET_NAME.search(name):
            text = "looks like a secret, and `env` is stored and shown; name it in `job.secrets` instead"
            yield _Finding(("job", "env", name), text, is_warning=True)
    for key in _UNEXPANDED:
        if isinstance(value := job.get(key), str) and SLOT_PLACEHOLDER in value:
            yield _Finding(("job", key), f"{SLOT_PLACEHOLDER} is not expanded here; use $TPUCARE_SLOT", is_warning=True)
    if isinstance(run := job.get("run"), str) and _CONTAINER.search(run):
        text = "processes in a container are not processes of the run, and may survive its stop (docs/training.md)"
        yield _Finding(("job", "run"), text, is_warning=True)
    if "run" in job and "checkpoint" not in job:
        yield _Finding(("job",), "has no checkpoint: every new node begins at step 0", is_warning=True)


# --- a fleet of runs, or a pool of a Ray cluster -----------------------------------------------------------------


def _shape(top: dict[str, object]) -> Iterator[_Finding]:
    """A job that runs is a fleet; a `ray` section makes a pool, whose jobs are submitted to its cluster."""
    if "ray" in top:
        return
    if "job" not in top:
        yield _Finding(("job",), "is missing")
    elif isinstance(top["job"], dict) and "run" not in top["job"]:
        yield _Finding(("job", "run"), "is missing")
    if isinstance(top.get("count"), dict):
        yield _Finding(("count",), "is a number, the slots that always run; bounds are for a pool (`ray`)")


def _pool(top: dict[str, object]) -> Iterator[_Finding]:
    if "ray" not in top:
        return
    if top["ray"] is None:
        yield _Finding(("ray",), "is empty; write `ray: {}` for a pool with all defaults, or remove the key")
    ray, job, care, count = (_mapping(top.get(key)) for key in ("ray", "job", "care", "count"))
    for key, instead in _NOT_IN_POOLS.items():
        if key in job:
            yield _Finding(("job", key), f"is not for a pool: {instead}")
    for key in ("on_success", "sigterm_on_preemption"):
        if key in care:
            yield _Finding(("care", key), "is not for a pool: Ray runs on its hosts for as long as they live")
    if "deadline" in top:
        yield _Finding(("deadline",), "is not for a pool: how much work its jobs have is not known")
    least, most = count.get("min"), count.get("max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield _Finding(("count", "max"), f"is below `min`: write {least} or more")
    if ray.get("address") and not ray.get("token"):
        yield _Finding(("ray", "address"), "needs `token`: the name of the secret with the token of that head")
    if ray.get("token") and not ray.get("address"):
        yield _Finding(("ray", "token"), "is for a head of somebody else (`address`): a head of tpucare has its own")
    yield from _pool_tpu(top.get("tpu"))


_NOT_IN_POOLS = {
    "run": "its hosts run Ray, and jobs are submitted to the cluster (`ray job submit`)",
    "checkpoint": "each job that is submitted names its own",
    "progress": "each job that is submitted has its own log",
}


def _pool_tpu(tpu: object) -> Iterator[_Finding]:
    entries = [_mapping(entry) for entry in (tpu[:ALTERNATIVES_LIMIT] if isinstance(tpu, list) else [tpu])]
    first = entries[0].get("type") if entries else None
    for index, entry in enumerate(entries):
        path = ("tpu", index) if isinstance(tpu, list) else ("tpu",)
        if entry.get("type") != first:
            text = f"is not that of the first alternative, {shown(str(first))}: write a pool (a file) for each type"
            yield _Finding((*path, "type"), text)
        network = _mapping(entry.get("network"))
        if network.get("external_ips") is not False and not network.get("tags"):
            text = (
                "leaves the hosts external addresses without a firewall tag, and parts of Ray listen on all addresses: "
                "write `network: {external_ips: false}`, or `tags` of a firewall rule (docs/ray.md)"
            )
            yield _Finding((*path, "network"), text, is_warning=True)


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
