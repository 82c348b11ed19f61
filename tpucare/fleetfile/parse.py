"""
Text of a fleet.yaml -> `FleetSpec`, from which every `Slot` follows; or a ConfigError with one line per problem.

The caller reads the file and knows its path. The shape is checked in `schema`, single values in `values`, combinations
of keys and the catalogue in `rules`. Nothing here asks the cloud or the environment.
"""

from __future__ import annotations

import functools
import os.path
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from tpucare.fleetfile import rules, yaml_document
from tpucare.fleetfile.problems import PROBLEMS_LIMIT, shape_problems
from tpucare.fleetfile.rules import SLOT_PLACEHOLDER
from tpucare.fleetfile.schema import (
    COUNT_LIMIT,
    AddressKind,
    CareSection,
    CountSection,
    Fence,
    FleetFile,
    JobSection,
    NetworkSection,
    Stopped,
    TpuSection,
)
from tpucare.fleetfile.values import CACHE_AUTO
from tpucare.fleetfile.yaml_document import Document
from tpucare.model import accelerators
from tpucare.model.errors import ConfigError, Problem
from tpucare.model.local_files import EVERYWHERE_PRIVATE, Private, open_below, open_regular
from tpucare.model.resources import (
    UNBOUNDED,
    Bounds,
    Care,
    DueWork,
    Job,
    Network,
    OnSuccess,
    Place,
    PlacementOrder,
    Provisioning,
    SaveBounds,
    Slot,
)
from tpucare.model.text import shown

# --- `job.files`: paths on the workers and on this machine, and their contents ----------------------------------------
# On a worker a path stays below the job's folder; on this machine below the folder of the fleet file (`local_files`).
# The caller hands in the function that reads; `read_local` is the usual one.


ReadFile = Callable[[Path, str], bytes]
"""Content of the file at a relative path below a folder. Raises: OSError, ValueError."""

FILES_LIMIT = 100
FILE_LIMIT_BYTES = 1 << 20
TOTAL_LIMIT_BYTES = 16 << 20
# Files per slot are read at every parse, on the thread of the loop: 10,000 take half a second.
READS_LIMIT = 10_000


def read_local(folder: Path, path: str, private: Private = EVERYWHERE_PRIVATE) -> bytes:
    """
    Content of a regular file; of a larger one, one byte more than FILE_LIMIT_BYTES.

    Raises:
        OSError: As `local_files.open_below`.
    """
    with open_below(folder, path, private) as file:
        return file.read(FILE_LIMIT_BYTES + 1)


def path_problems(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(path on the worker, error text) per entry whose path on the worker or on this machine is refused."""
    if len(files) > FILES_LIMIT:
        yield "", f"must not have more than {FILES_LIMIT} entries; send a folder with `workdir`"
        return
    taken: dict[PurePosixPath, str] = {}
    for remote, local in files.items():
        text = _remote_problem(remote) or _local_problem(local) or _clash(PurePosixPath(remote), taken)
        if text:
            yield remote, text
        taken[PurePosixPath(remote)] = remote


def read_all(paths: Collection[str], folder: Path, read_file: ReadFile) -> tuple[dict[str, bytes], dict[str, str]]:
    """
    Contents of the local *paths*, and an error text per path that could not be read; both by path as written.

    Ends after PROBLEMS_LIMIT errors.
    """
    contents: dict[str, bytes] = {}
    wrong: dict[str, str] = {}
    total = 0
    for path in dict.fromkeys(paths):
        if len(wrong) > PROBLEMS_LIMIT:
            break
        try:
            content = read_file(folder, path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            wrong[path] = f"{shown(path)} cannot be read: {shown(reason)}"
            continue
        total += len(content)
        if len(content) > FILE_LIMIT_BYTES:
            wrong[path] = f"{shown(path)} is larger than {FILE_LIMIT_BYTES >> 20} MB; keep it in a bucket"
        elif total > TOTAL_LIMIT_BYTES:
            wrong[path] = f"all files together are larger than {TOTAL_LIMIT_BYTES >> 20} MB; keep them in a bucket"
            break
        else:
            contents[path] = content
    return contents, wrong


def _remote_problem(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or len(path) > 255 or not path.isprintable() or path != path.strip():
        return "the path on the worker must be 1 to 255 printable characters"
    if path.startswith(("/", "~")) or ".." in parts or path.endswith("/"):
        return "the path on the worker must stay below the job's folder: relative and without .."
    if parts[0] in (".git", ".tpucare"):
        return f"{parts[0]} on the worker is not for files of a fleet"
    return ""


def _local_problem(path: str) -> str:
    if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
        return f"{shown(path)} must lie in the folder of the fleet file or below: relative and without .."
    return ""


def _clash(path: PurePosixPath, taken: Mapping[PurePosixPath, str]) -> str:
    for other, written in taken.items():
        if path == other or path in other.parents or other in path.parents:
            return f"clashes with {shown(written)} on the worker"
    return ""


# --- sections of a fleet file -> records of the model: places, the job, the care with its defaults --------------------
# The sections have passed every check.


def places_of(alternative: TpuSection, entry: int = 0) -> Iterator[Place]:
    """One place per zone of that entry, in declared order; a zone's own settings override those of the section."""
    accelerator = accelerators.derive(alternative.type)
    for choice in alternative.zones:
        tier = choice.provisioning if "provisioning" in choice.model_fields_set else alternative.provisioning
        stated = choice.price if choice.price is not None else alternative.price
        listed = accelerators.node_hour_price(accelerator.type, choice.zone, tier) if stated is None else None
        yield Place(
            zone=choice.zone,
            accelerator_type=accelerator.type,
            provisioning=tier,
            runtime=choice.runtime or alternative.runtime or accelerator.default_runtime,
            service_account=choice.service_account or alternative.service_account,
            network=_network(alternative.network, choice.network),
            workers=accelerator.hosts,
            metadata=tuple(alternative.metadata.items()),
            os_login=alternative.os_login,
            price=listed if stated is None else stated,
            entry=entry,
            queued=choice.queued if "queued" in choice.model_fields_set else alternative.queued,
            valid_for=choice.valid_for or alternative.valid_for,
        )


def _network(around: NetworkSection, own: NetworkSection) -> Network:
    merged = around.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
    return Network(
        name=merged.name,
        subnetwork=merged.subnetwork,
        tags=tuple(merged.tags),
        external_ips=merged.external_ips,
        reach_internal=merged.reach is AddressKind.INTERNAL,
    )


def bounds_of(declared: FleetFile) -> Bounds:
    due = declared.deadline
    deadline = DueWork(due.hours_of_work, due.by) if due is not None else None
    return Bounds(declared.max_price, declared.until, declared.max_cost, deadline)


def job_template(job: JobSection, folder: Path | None) -> Job:
    """The job of every slot, with unexpanded placeholders and without the content of files."""
    same = job.model_dump(exclude={"files", "workdir", "secrets", "cache", "cache_paths"})
    cache = _beside_checkpoints(job.checkpoint) if job.cache == CACHE_AUTO else job.cache
    workdir = os.path.normpath((folder or Path()) / job.workdir) if job.workdir else ""
    secrets, cache_paths = tuple(job.secrets), tuple(job.cache_paths)
    return Job(**same, workdir=workdir, secrets=secrets, cache=cache, cache_paths=cache_paths)


def _beside_checkpoints(template: str) -> str:
    """Where all slots of a fleet keep environments, beside the checkpoints of all of them."""
    head = template.partition(SLOT_PLACEHOLDER)
    path = (head[0].rpartition("/")[0] if head[1] else template).rstrip("/")
    is_bucket = path.startswith("gs://") and "/" not in path[5:]
    return f"{path}/environments" if is_bucket or not path else f"{path}.environments"


def care_of(declared: CareSection, workers: int, *, is_pool: bool = False) -> Care:
    same: dict[str, Any] = declared.model_dump(exclude={"fence", "stopped", "boot_timeout", "save_every"})
    is_given = "boot_timeout" in declared.model_fields_set
    if is_pool:
        # Ray on a host never finishes. Its host script drains the host at a notice; a SIGTERM would cut that short.
        same |= {"on_success": OnSuccess.RESTART, "sigterm_on_preemption": False}
    return Care(
        **same,
        boot_timeout=declared.boot_timeout if is_given else default_boot_timeout(workers),
        fence_proceed=declared.fence is Fence.PROCEED,
        stopped_delete=declared.stopped is Stopped.DELETE,
        save_every=SaveBounds(declared.save_every.min, declared.save_every.max),
    )


def default_boot_timeout(workers: int) -> timedelta:
    """
    Time within which all *workers* hosts of a new node have to answer.

    Source: single hosts were seen to take minutes, slices of several hosts 12 minutes; marin (PR 7030) waits 60
    minutes, twice that from 64 hosts and three times from 256.
    """
    if workers <= 16:
        return timedelta(minutes=30)
    factor = 3 if workers >= 256 else 2 if workers >= 64 else 1
    return factor * timedelta(minutes=60)


# --- the fleet --------------------------------------------------------------------------------------------------------

# Texts with a placeholder are kept in memory once per slot.
EXPANDED_LIMIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class RayPool:
    """
    The part of a fleet that makes it a pool of a Ray cluster.

    minimum: slots that have a node without any demand    accelerator: the type of all slices
    address, token: of a head that somebody else runs; empty: a head of this state folder
    python:  relative to the job's folder, or absolute
    """

    cluster: str
    accelerator: str
    minimum: int = 0
    address: str = ""
    token: str = ""
    python: str = "venv/bin/python"
    idle: timedelta = timedelta(minutes=10)
    priority: int = 0


def pool_of(declared: FleetFile, accelerator: str) -> RayPool | None:
    if declared.ray is None:
        return None
    same: dict[str, Any] = declared.ray.model_dump(exclude={"cluster"})
    least = declared.count.min if isinstance(declared.count, CountSection) else declared.count
    return RayPool(declared.ray.cluster or declared.name, accelerator, least, **same)


@functools.lru_cache(maxsize=1024)
def cluster_of(name: str, text: str) -> str:
    """The Ray cluster of the fleet *name*, whatever else is wrong in its *text*; empty: it is no pool."""
    try:
        value = yaml_document.read(text).value
    except yaml_document.Unreadable:
        return ""
    ray = value.get("ray") if isinstance(value, dict) else None
    return str(ray.get("cluster") or name) if isinstance(ray, dict) else ""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """
    The declaration in one file: *count* equal slots; of a pool (`ray`), that many at most.

    `job` is a template: its placeholders are unexpanded and its files empty (`slot` fills both in). `files`: path on
    the worker -> local path; `contents`: by local path with placeholders expanded. `project` is None when neither the
    file nor the caller named one. `warnings` are lines for a person, of the same form as the lines of a ConfigError.
    """

    name: str
    count: int
    project: str | None
    places: tuple[Place, ...]
    job: Job
    care: Care
    ssh_keys: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    file: str = ""
    ray: RayPool | None = None
    bounds: Bounds = UNBOUNDED
    order: PlacementOrder = PlacementOrder.WORTH
    value: float | None = None

    @property
    def workers(self) -> int:
        """Hosts of the largest type among the places."""
        return max(place.workers for place in self.places)

    def slot_name(self, index: int) -> str:
        return f"{self.name}-{index}"

    def slot(self, index: int) -> Slot:
        """
        Slot *index* with its job and care. An index beyond `count` serves slots that a lowered count left running.

        Raises:
            ConfigError: No project was named, or a file of a surplus slot was not read.
        """
        if not 0 <= index < COUNT_LIMIT:
            raise ConfigError(f"{self.file}: {self.name} has no slot {index}")
        if self.project is None:
            raise ConfigError(
                f"{self.file}: project: is missing; add it here, or set GOOGLE_CLOUD_PROJECT, "
                "or run `gcloud config set project PROJECT`"
            )
        name = self.slot_name(index)
        return Slot(
            name=name,
            fleet=self.name,
            project=self.project,
            places=self.places,
            job=self._job_of(index, name),
            care=self.care,
            ssh_keys=self.ssh_keys,
            workers=self.workers,
            elastic=self.ray is not None,
            bounds=self.bounds,
            order=self.order,
            value=self.value,
        )

    def slots(self) -> tuple[Slot, ...]:
        """All `count` slots in order. Raises: ConfigError, as `slot`."""
        return tuple(self.slot(index) for index in range(self.count))

    def index_of(self, word: str) -> int | None:
        """Index of the slot called *word*: `<fleet>-<i>`, or `<fleet>` for slot 0; None for any other word."""
        if word == self.name:
            return 0
        digits = word.removeprefix(f"{self.name}-")
        is_index = digits.isascii() and digits.isdecimal() and len(digits) <= 4 and str(int(digits)) == digits
        return int(digits) if is_index and digits != word else None

    def local_files(self, index: int) -> tuple[str, ...]:
        """Local paths, as in `contents`, of the files that the job of slot *index* names."""
        return tuple(_expand(local, self.slot_name(index)) for local in self.files.values())

    def _job_of(self, index: int, name: str) -> Job:
        job = self.job
        try:
            files = {_expand(remote, name): self.contents[_expand(local, name)] for remote, local in self.files.items()}
        except KeyError as error:
            raise ConfigError(f"{self.file}: job.files: {error.args[0]} was not read for slot {name}") from None
        return replace(
            job,
            run=_expand(job.run, name),
            env={key: _expand(value, name) for key, value in job.env.items()},
            checkpoint=self.checkpoint_of(index),
            files=files,
        )

    def checkpoint_of(self, index: int) -> str:
        """Location of the checkpoints of slot *index*; empty if none is declared."""
        template, name = self.job.checkpoint, self.slot_name(index)
        if not template or SLOT_PLACEHOLDER in template:
            return _expand(template, name)
        # Two slots that write to one folder destroy each other's checkpoints; a surplus slot has a folder of its own.
        return f"{template.rstrip('/')}/{name}" if self.count > 1 or index > 0 else template


def parse(
    text: str,
    *,
    file: str,
    folder: Path | None = None,
    default_project: str | None = None,
    read_file: ReadFile = read_local,
    accepted: bool = False,
) -> FleetSpec:
    """
    The fleet that *text* declares.

    `file` is only named in errors; relative paths in the text start at `folder` (absolute). `default_project` is used
    if the text names no project. `accepted`: an earlier version accepted this text, so a rule that is newer than that
    gives a warning instead of an error.

    Raises:
        ConfigError: One or more lines `file:line: key.path: problem`, in the order of the file.
    """
    try:
        document = yaml_document.read(text)
    except yaml_document.Unreadable as error:
        raise ConfigError.of([error.problem], file) from None
    problems, warnings = rules.check(document, accepted=accepted)
    rules_hold = not problems
    problems += document.problems
    declared: FleetFile | None = None
    contents: dict[str, bytes] = {}
    if isinstance(document.value, dict):
        try:
            declared = FleetFile.model_validate(document.value)
        except ValidationError as error:
            problems += shape_problems(document, error)
    else:
        problems.append(document.problem((), "must be a mapping (key: value) that begins with `name: …`"))
    if declared is not None:
        problems += _job_problems(declared, document, folder)
        if rules_hold:
            problems += _place_problems(declared, document)
        contents, unread = _read_files(declared, document, folder, read_file)
        problems += unread
    if problems or declared is None:
        raise ConfigError.of(_first(problems), file)
    places = tuple(place for entry, one in enumerate(declared.tpu) for place in places_of(one, entry))
    bounds = bounds_of(declared)
    warnings += _price_warnings(bounds, places, document)
    tiers = {place.provisioning for place in places if not bounds.excludes(place)}
    if bounds.deadline is not None and Provisioning.ON_DEMAND not in tiers:
        text = "has no on-demand place to keep it with: add one to `tpu`, or remove the key"
        warnings.append(document.problem(("deadline",), text))
    if bounds.max_cost is not None and (unknown := _unpriced(places)):
        text = f"needs the price of {_listed(unknown)}, which is not known: write `price` there (0 for a grant)"
        raise ConfigError.of([document.problem(("max_cost",), text)], file)
    pool = pool_of(declared, places[0].accelerator_type)
    return FleetSpec(
        name=declared.name,
        count=_slots_of(declared),
        project=declared.project or default_project or None,
        places=places,
        job=job_template(declared.job, folder),
        care=care_of(declared.care, max(place.workers for place in places), is_pool=pool is not None),
        ssh_keys=tuple(dict.fromkeys(key for alternative in declared.tpu for key in alternative.ssh_keys)),
        files=declared.job.files,
        contents=contents,
        warnings=tuple(warning.render(file) for warning in _first(warnings)),
        file=file,
        ray=pool,
        bounds=bounds,
        order=declared.placement,
        value=declared.value,
    )


def _slots_of(declared: FleetFile) -> int:
    return declared.count.max if isinstance(declared.count, CountSection) else declared.count


def read_text(path: Path) -> str:
    """
    Text of the fleet file at *path*, for `parse` and for the store.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8; save it as UTF-8 text") from None


def refuse_shared_names(fleets: Iterable[FleetSpec]) -> None:
    """
    Refuse two fleets of one name: the names of slots are unique over all fleets of a project.

    Raises:
        ConfigError: One line per name that is declared again.
    """
    first: dict[str, FleetSpec] = {}
    lines = [
        f"{fleet.file}: name: {fleet.name} is declared in {first[fleet.name].file} already; choose another"
        for fleet in fleets
        if first.setdefault(fleet.name, fleet) is not fleet
    ]
    if lines:
        raise ConfigError("\n".join(lines))


# --- checking ----------------------------------------------------------------------------------------------------


def _job_problems(declared: FleetFile, document: Document, folder: Path | None) -> Iterator[Problem]:
    workdir = declared.job.workdir
    if workdir and folder is None and not os.path.isabs(workdir):
        yield document.problem(("job", "workdir"), "must be an absolute path: this text has no folder")
    texts = [declared.job.run, *declared.job.env.values()]
    size = (slots := _slots_of(declared)) * sum(len(text) for text in texts if SLOT_PLACEHOLDER in text)
    if size > EXPANDED_LIMIT_BYTES:
        text = (
            f"`run` and `env` with {SLOT_PLACEHOLDER} are {size >> 20} MB for {slots} slots, more than "
            f"{EXPANDED_LIMIT_BYTES >> 20} MB; read $TPUCARE_SLOT in the script, or put the text into the repository"
        )
        yield document.problem(("job",), text)


def _place_problems(declared: FleetFile, document: Document) -> Iterator[Problem]:
    """A place's memory is stored under its key, so two places with one key would mix their memories."""
    taken = set()
    for number, alternative in enumerate(declared.tpu):
        for index, place in enumerate(places_of(alternative)):
            if place.key in taken:
                text = f"{_terms_of(place)} is listed twice"
                yield document.problem(("tpu", number, "zones", index), text)
            taken.add(place.key)


def _price_warnings(bounds: Bounds, places: Sequence[Place], document: Document) -> Iterator[Problem]:
    """One line for the places that are above `max_price`, and one for those whose price is not known."""
    if bounds.max_price is None:
        return
    dear = [place for place in places if bounds.excludes(place)]
    if dear:
        named = _listed(f"{_terms_of(place)} at {place.price:.4g}" for place in dear)
        verb = "leaves no place" if len(dear) == len(places) else "excludes"
        yield document.problem(("max_price",), f"{verb}: {named} dollars an hour")
    if unknown := _unpriced(places):
        text = f"cannot exclude {_listed(unknown)}: no price is known; write `price` there"
        yield document.problem(("max_price",), text)


def _unpriced(places: Sequence[Place]) -> list[str]:
    return [_terms_of(place) for place in places if place.price is None]


def _terms_of(place: Place) -> str:
    return f"{place.accelerator_type} as {place.provisioning} in {place.zone}"


def _listed(names: Iterable[str]) -> str:
    first = [*names]
    return ", ".join([*first[:5], *([f"and {len(first) - 5} more"] if len(first) > 5 else [])])


def _read_files(
    declared: FleetFile, document: Document, folder: Path | None, read_file: ReadFile
) -> tuple[dict[str, bytes], list[Problem]]:
    files = declared.job.files
    wrong = list(path_problems(files))
    if not wrong and files and folder is None:
        wrong = [("", "needs a folder to read from: this text has no folder")]
    if wrong or folder is None:
        return {}, [document.problem(_file_path(remote), text) for remote, text in wrong]
    names = [f"{declared.name}-{index}" for index in range(_slots_of(declared))]
    reads = sum(len(names) if SLOT_PLACEHOLDER in local else 1 for local in files.values())
    if reads > (limit := READS_LIMIT):
        text = f"names {reads} files for {len(names)} slots, more than {limit}; send a folder with `workdir`"
        return {}, [document.problem(("job", "files"), text)]
    owner = {path: remote for remote, local in files.items() for path in _expansions(local, names)}
    contents, unread = read_all(owner, folder, read_file)
    return contents, [document.problem(_file_path(owner[path]), text) for path, text in unread.items()]


def _file_path(remote: str) -> tuple[str, ...]:
    return ("job", "files", remote) if remote else ("job", "files")


def _first(problems: Sequence[Problem]) -> Iterator[Problem]:
    """The first PROBLEMS_LIMIT problems without repetition, in the order of the file, and how many more there are."""
    unique = sorted(set(problems))
    yield from unique[:PROBLEMS_LIMIT]
    if len(unique) > PROBLEMS_LIMIT:
        yield Problem(unique[PROBLEMS_LIMIT].line, "", f"and {len(unique) - PROBLEMS_LIMIT} more")


def _expand(text: str, name: str) -> str:
    """Replace only the exact token, so that `${VAR}`, awk and f-strings survive."""
    return text.replace(SLOT_PLACEHOLDER, name)


def _expansions(text: str, names: Sequence[str]) -> Iterable[str]:
    return dict.fromkeys(_expand(text, name) for name in names) if SLOT_PLACEHOLDER in text else (text,)
