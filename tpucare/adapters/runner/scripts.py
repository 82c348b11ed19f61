"""
A job -> the texts that run on a worker: scripts, environment, and the commands that push, start, probe and stop.

Pure: the same order gives the same texts, byte for byte. Every text from a fleet file, a name or an environment passes
through `shlex.quote` (the templates' filter `q`) or travels in a file that no shell reads; secrets are in the file
`env` alone, as `name=value` between NULs. The templates are in `templates/` of a source checkout and in
`tpucare/_templates` of a wheel. Sending the texts is left to `launcher`, packing a local folder to `bundle`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Job
from tpucare.model.runs import LaunchOrder

if TYPE_CHECKING:
    import jinja2

# The beginning of a line, or of a line that is overwritten.
_BEGIN = r"(?:\A|[\r\n])[ \t]*"
_TITLE = rf"{_BEGIN}(?:(?:epoch|train|step|iter)[^|\r\n]{{0,60}}?[ \t])?[ \t]*"
_COUNT = r"(\d+(?:\.\d+)?[kMG]?)"
# Each repetition is bounded, so that matching takes time in proportion to the log. A bar of tqdm counts if it has no
# title or one of training: the bars of downloads and data preparation do not count steps.
DEFAULT_PROGRESS = "(?i)" + "|".join(
    (
        # A loop of the user's own, MaxText, trainers that print a dictionary; not dates, durations or percentages.
        r"\bstep[\"']?[ =:]+(\d+)\b(?!\.\d|%|-\d\d-)",
        # tqdm, Lightning.
        rf"{_TITLE}\d{{1,3}}%\|[^|\r\n]{{0,200}}\|[ \t]*{_COUNT}/\S{{1,12}} \[\d",
        rf"{_TITLE}{_COUNT}it \[\d",
        # levanter.
        rf"\bprogress on:[ \t]?train[ \t]+{_COUNT}it/",
        # Keras, and rich's bars.
        rf"{_BEGIN}(\d+)/\d+ (?:\[[=>.]{{5}}|\u2501{{3}})",
        r"\u2501[\u2578\u257a]?[ \t]*(\d+)/\d+[ \t]\d+:\d\d",
    )
)
TOOL_NAMES = (
    "checkpoints.py",
    "environment.py",
    "files.py",
    "foreign.py",
    "metadata.py",
    "prefetch.py",
    "probe.py",
    "processes.py",
    "resolve.py",
    "runner.py",
    "sessions.py",
    "stop.py",
)
LOG_BYTES = 64 << 20
# Linux limits one argument of a command to 128 KiB (MAX_ARG_STRLEN); quoting may lengthen a text.
SCRIPT_LIMIT = 64 << 10
# That limit also holds for `name=value` of a variable with the NUL behind it.
VARIABLE_LIMIT = (128 << 10) - 1
# All variables and the arguments of a command: a quarter of the stack, whose usual limit is 8 MiB (execve(2)).
ENVIRONMENT_LIMIT = 1 << 20

SCREEN_SECONDS = 5
ANSWER_SECONDS = 15
RESOLVE_SECONDS = 60
# The runner asks the metadata server only after this time: importing its client would delay the start of the run.
WATCH_AFTER_SECONDS = 3.0

# The variable that marks a launch on a worker; its command begins with it.
LAUNCH_MARK = "TPUCARE_LAUNCH"

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); __import__(sys.argv[2]).main(sys.argv[3:])"

_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.\d{1,9}")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIALS = re.compile(r"^[a-z+]+://[^/@]*:[^/@]*@|^https?://[^/@]+@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PushedFile:
    """One file of the stream that a launch sends, relative to the run's folder."""

    path: str
    content: bytes
    mode: int = 0o600


def run_files(order: LaunchOrder, secrets: Mapping[str, str], bundle: str = "") -> list[PushedFile]:
    """
    The folder of a run: tools, scripts, `env` (mode 0600, the only file with secrets), the job's files.

    `bundle` is the file name of the packed workdir; its content is not in the result.
    Raises: ConfigError: the job is invalid (`check_job`), or its environment is too large.
    """
    job = order.job
    check_job(job)
    environment = _environment_file(run_environment(order, secrets))
    texts = {"run.sh": render("run.sh.j2", command=job.run)}
    if job.setup:
        texts["setup.sh"] = render("setup.sh.j2", setup=job.setup)
    if "fetch" in phases(job):
        texts["fetch.sh"] = _fetch_script(order, bundle)
    if needs_commit(job):
        texts["resolve.sh"] = _resolve_script(order)
    pushed = [
        *tool_files(),
        PushedFile("env", environment),
        PushedFile("askpass.sh", render("askpass.sh.j2", origin=_origin(job.repository)).encode(), 0o700),
    ]
    pushed += [PushedFile(name, text.encode()) for name, text in sorted(texts.items())]
    pushed += [PushedFile(f"files/{path}", content) for path, content in sorted(job.files.items())]
    return pushed


def _origin(repository: str) -> str:
    """`https://host:port` of a repository that is fetched over HTTP, as in git's password prompt; else empty."""
    scheme, found, rest = repository.partition("://")
    if not found or scheme not in ("http", "https"):
        return ""
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def tool_files() -> list[PushedFile]:
    """The tools of TOOL_NAMES: modules of the standard library alone, the same for every run."""
    return [PushedFile(f"{tools_folder()}/{name}", content) for name, content in _tools()]


@cache
def tools_folder() -> str:
    """Folder name of this version's tools: a worker may have the tools of other versions, too."""
    digest = hashlib.sha256()
    for name, content in _tools():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return f"tools-{digest.hexdigest()[:16]}"


@cache
def _tools() -> tuple[tuple[str, bytes], ...]:
    return tuple((name, _template(name).read_bytes()) for name in TOOL_NAMES)


def run_environment(order: LaunchOrder, secrets: Mapping[str, str]) -> dict[str, str]:
    """The run's environment without TPUCARE_WORKER, TPUCARE_NOTICE and TPUCARE_COMMIT, which each worker adds."""
    job = order.job
    env = {"PYTHONUNBUFFERED": "1"}
    if job.checkpoint:
        env["JAX_COMPILATION_CACHE_DIR"] = _beside(job.checkpoint)
    env |= {**job.env, **secrets}
    own = {
        "TPUCARE_SLOT": order.slot,
        "TPUCARE_NODE": order.token.rpartition(".")[0],
        "TPUCARE_ATTEMPT": str(order.attempt),
        "TPUCARE_RUN": order.token,
        "TPUCARE_WORKERS": str(len(order.workers)),
        "TPUCARE_COORDINATOR": order.coordinator,
        "TPUCARE_CHECKPOINT": job.checkpoint,
    }
    return env | own


def _environment_file(variables: Mapping[str, str]) -> bytes:
    """Raises: ConfigError: it exceeds Linux' limits, so every run would end before its first line."""
    # A secret may have bytes that are not UTF-8: the daemon's environment has them as surrogates.
    entries = {name: f"{name}={value}".encode(errors="surrogateescape") for name, value in sorted(variables.items())}
    for name, entry in entries.items():
        if len(entry) > VARIABLE_LIMIT:
            raise ConfigError(f"{name} has more than 128 KiB, Linux' limit of a variable; put it into a file")
    content = b"".join(entry + b"\0" for entry in entries.values())
    if len(content) > ENVIRONMENT_LIMIT:
        raise ConfigError("job.env and job.secrets have more than 1 MiB together; put long values into files")
    return content


def needs_commit(job: Job) -> bool:
    """True if the branch has to be resolved before the gang starts, so that all its workers get the same commit."""
    return bool(job.repository) and not job.follow and not _COMMIT.fullmatch(job.branch)


def phases(job: Job) -> tuple[str, ...]:
    """The phases of this job, in their order."""
    fetch = ("fetch",) if job.repository or job.workdir or job.files else ()
    return (*fetch, *(("setup",) if job.setup else ()), "run")


def check_job(job: Job) -> None:
    """Raises: ConfigError: a key of the job is invalid, too long, or excludes another one."""
    if job.repository and job.workdir:
        raise ConfigError("job: repository and workdir exclude each other; keep one")
    if holds_credentials(job.repository):
        raise ConfigError("job.repository has credentials; put them into secrets (GIT_TOKEN or GIT_SSH_KEY) instead")
    for key, text in (("run", job.run), ("setup", job.setup)):
        if len(text.encode()) > SCRIPT_LIMIT or "\0" in text:
            raise ConfigError(f"job.{key} has more than {SCRIPT_LIMIT >> 10} KiB, or a NUL; put it into a file")
    for name, value in job.env.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ConfigError(f"job.env: {name!r} is not a variable that an environment can hold")
    for path in job.files:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise ConfigError(f"job.files: {path!r} is not a path below the job's folder")


def holds_credentials(repository: str) -> bool:
    """True if a URL has a password or token, which would end up in scripts and logs."""
    return _CREDENTIALS.search(repository) is not None


def launch_command(
    order: LaunchOrder, worker: int, *, push: bool = False, start: bool = False, resolve: bool = False,
    bundle: str = "", commit: str = "", error: str = "",
) -> str:  # fmt: skip
    """
    One command for one worker: push (a tar stream on standard input), resolve the branch, start the runner, or several.

    `commit` is the resolved branch; `error` is the reason if that failed: the run then fails in its fetch phase.
    """
    if not _TOKEN.fullmatch(order.token):
        raise ConfigError(f"{order.token!r} is not a run token: <node>.<number>")
    text = render(
        "launch.sh.j2",
        token=order.token,
        tools=tools_folder(),
        boot=BOOT,
        session=f"tpucare-{order.slot}",
        order=_pairs(_runner_order(order, worker, commit, error)),
        bundle=bundle,
        push=push,
        resolve=resolve,
        start=start,
        screen_seconds=SCREEN_SECONDS,
        answer_seconds=ANSWER_SECONDS,
    )
    # The marks come first, so that a stop finds a launch that has not reached the runner yet.
    marks = f"{LAUNCH_MARK}={shlex.quote(order.token)} TPUCARE_WORKER={worker}"
    return f"{marks} exec bash -c {shlex.quote(text)}"


def tool_command(verb: str, question: Mapping[str, object]) -> str:
    """`probe`, `stop` or `foreign` (claim) on a worker; prints one line of JSON."""
    text = render("tool.sh.j2", tools=tools_folder(), boot=BOOT, verb=verb, question=_pairs(question))
    return f"exec bash -c {shlex.quote(text)}"


def install_command() -> str:
    """Install only the tools on a worker; standard input: a tar stream of `tool_files`."""
    return f"exec bash -c {shlex.quote(render('install.sh.j2', tools=tools_folder()))}"


def notice_command(token: str, text: str) -> str:
    """Append a line to the notice file of a run, if its folder exists."""
    folder = f'"$HOME/.tpucare/"{shlex.quote(token)}'
    line = shlex.quote(" ".join(text.split())[:500])
    body = f'umask 077; cd {folder} || exit 66; printf "%s %s\\n" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" {line} >>notice'
    return f"exec bash -c {shlex.quote(body)}"


def read_template(name: str) -> str:
    """Text of a template."""
    return _template(name).read_text(encoding="utf-8")


def _runner_order(order: LaunchOrder, worker: int, commit: str, error: str) -> dict[str, object]:
    job = order.job
    if not commit and _COMMIT.fullmatch(job.branch):
        commit = job.branch
    return {
        "token": order.token,
        "worker": worker,
        "phases": ",".join(phases(job)),
        "grace": order.grace.total_seconds(),
        "watch_after": WATCH_AFTER_SECONDS,
        "sigterm_on_preemption": order.sigterm_on_preemption,
        "checkpoint": job.checkpoint,
        "setup_key": job.setup_mark,
        "log_bytes": LOG_BYTES,
        "commit": commit,
        "error": error[:2000],
        **_cache_order(order),
        **({"prefetch": True} if job.prefetch and job.checkpoint.startswith("gs://") else {}),
    }


def _cache_order(order: LaunchOrder) -> dict[str, object]:
    """What the runner and `environment` read about stored environments; nothing for a job that keeps none."""
    job, archive = order.job, order.archive
    if not (job.cache and job.setup and order.cache_scope):
        return {}
    known = (
        {"archive_key": archive.key, "archive_sha256": archive.sha256, "archive_bytes": archive.bytes}
        if archive
        else {}
    )
    return {
        # A folder per fleet, for people; the scope tells fleets apart.
        "cache": f"{job.cache.rstrip('/')}/{order.fleet}",
        "cache_scope": order.cache_scope,
        "cache_paths": ":".join(job.cache_paths),
        "secrets": ",".join(job.secrets),
        **known,
    }


def _pairs(values: Mapping[str, object]) -> list[str]:
    """`name=value`, as the tools read it; true and false are 1 and 0."""
    return [f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in sorted(values.items())]


def _fetch_script(order: LaunchOrder, bundle: str) -> str:
    job = order.job
    return render(
        "fetch.sh.j2",
        token=order.token,
        repository=job.repository,
        branch=job.branch,
        bundle=bundle,
        files=bool(job.files),
    )


def _resolve_script(order: LaunchOrder) -> str:
    branch = order.job.branch
    refs = [f"refs/heads/{branch}", f"refs/tags/{branch}^{{}}", f"refs/tags/{branch}"] if branch else ["HEAD"]
    return render(
        "resolve.sh.j2",
        token=order.token,
        repository=order.job.repository,
        branch=branch,
        refs=refs,
        resolve_seconds=RESOLVE_SECONDS,
    )


def _beside(checkpoint: str) -> str:
    """JAX's compile cache survives the node, like the checkpoints; beside them, since their folder is the job's own."""
    path = checkpoint.rstrip("/")
    is_bucket = path.startswith("gs://") and "/" not in path[5:]
    return f"{path}/.jax-cache" if is_bucket else f"{path}.jax-cache"


def _template(name: str) -> Traversable:
    """A tool or a template of the wheel, or of the source checkout around this module; of `ray/` with its folder."""
    path = name if "/" in name else f"{'worker' if name.endswith('.py') else 'shell'}/{name}"
    packaged = resources.files("tpucare") / "_templates" / path
    return packaged if packaged.is_file() else Path(__file__).parents[3] / "templates" / path


def render(name: str, **values: object) -> str:
    """A template with its values; the filter `q` quotes for the shell."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> jinja2.Environment:
    # Imported late: it costs 60 ms, and most commands launch nothing.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["q"] = shlex.quote
    return environment
