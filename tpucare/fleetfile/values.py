"""
Single values of a fleet file: each function takes a value as written and returns the parsed one.

Raises ValueError with the tail of an error line, which says what to write; pydantic adds the place. A value that may
be a secret (URL, key, environment) is never quoted. Rules over several keys are left to `rules`.
"""

from __future__ import annotations

import base64
import binascii
import os.path
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from tpucare.fleetfile.yaml_document import WrittenFloat, WrittenInt
from tpucare.model.resources import OS_LOGIN, SSH_KEYS
from tpucare.model.text import shown

SCRIPT_LIMIT = 64 * 1024
# Linux limits `name=value` to 128 KiB; the rest is for the name.
VARIABLE_LIMIT = 127 * 1024
LINE_LIMIT = 1024
PATTERN_LIMIT = 500
LONGEST = timedelta(days=30)
DOLLARS_LIMIT = 1_000_000_000
HOURS_LIMIT = 100_000

_FLEET_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")
_NUMBERED = re.compile(r".*-a?[0-9]+")
_DURATION = re.compile(r"(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,8})s)?", re.ASCII)
_FRACTION = re.compile(r"\d+\.\d+\s*[dhms]", re.ASCII)
_INSTANT = re.compile(r"20\d\d-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:\d\d)?)?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Ids are documented as 6 to 30 characters; shorter ones exist, and the API decides about those.
_PROJECT = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}:)?[a-z][a-z0-9-]{0,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]{1,3}-[a-z0-9]{1,8}")
_RUNTIME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_SERVICE_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}@[a-z0-9][a-z0-9.-]{0,99}\.gserviceaccount\.com")
_NETWORK = re.compile(r"(projects/[a-z0-9.:-]+/global/networks/)?[a-z][a-z0-9-]{0,62}")
_SUBNETWORK = re.compile(r"(projects/[a-z0-9.:-]+/regions/[a-z0-9-]+/subnetworks/)?[a-z][a-z0-9-]{0,62}")
_TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_SCP_URL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9.-]*:[^-\s:?#][^\s:?#]*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_BRANCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+@#=-]{0,249}")
CACHE_AUTO = "auto"
_CHECKPOINT = re.compile(r"(/|[a-z][a-z0-9+.-]*://[^/\s])\S*")
_LOGIN = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
# Atomic groups and possessive quantifiers are new in Python 3.11; escapes, comments and sets are skipped.
_NEW_SYNTAX = re.compile(
    r"\\.|\(\?#[^)]*\)|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<new>\(\?>|(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})\+)", re.DOTALL
)
_KEY_TYPES = frozenset(
    {
        "ssh-ed25519",
        "ssh-rsa",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "sk-ssh-ed25519@openssh.com",
        "sk-ecdsa-sha2-nistp256@openssh.com",
    }
)


_METADATA_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_OWN_METADATA = {SSH_KEYS: "name people in `tpu.ssh_keys`", OS_LOGIN: "write `tpu.os_login: true` to leave it out"}

# The agent of a W&B sweep and the Ray of a pool's hosts read these from the job; tpucare sets every other TPUCARE_
# variable itself.
_OPEN_VARIABLES = frozenset({"TPUCARE_SWEEP", "TPUCARE_SWEEP_CHECKPOINT", "TPUCARE_RAY_ARGS"})


def text(value: str) -> str:
    """Text of any number of lines that a shell, a file and an environment can hold."""
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode") from None
    return value


def script(value: str) -> str:
    """A shell script: not empty, at most 64 KB."""
    if not value.strip():
        raise ValueError("must not be empty")
    if len(text(value).encode()) > SCRIPT_LIMIT:
        raise ValueError(f"is longer than {SCRIPT_LIMIT // 1024} KB; put it into the repository and call it")
    return value


def line(value: str) -> str:
    """Text on one line without control characters."""
    if not value or value != value.strip():
        raise ValueError("must not be empty, nor begin or end with a blank")
    if len(value) > LINE_LIMIT:
        raise ValueError(f"is longer than {LINE_LIMIT} characters")
    if not value.isprintable():
        raise ValueError("must be one line without control characters")
    return value


def fleet_name(value: str) -> str:
    """Name of a fleet, from which those of slots (`<fleet>-<i>`) and nodes (`<slot>-a<number>`) follow."""
    if not _FLEET_NAME.fullmatch(value):
        raise ValueError(f"{shown(value)} must be 1 to 24 of a-z, 0-9 and -, beginning with a letter")
    if _NUMBERED.fullmatch(value):
        raise ValueError(f"{shown(value)} must not end in -<digits> or -a<digits>: slots and nodes are named so")
    return value


def project(value: str) -> str:
    if value.isdecimal():
        raise ValueError("is a project's number; write its id, as `gcloud projects list` shows it")
    return _matching(_PROJECT, value, "a project id (a-z, 0-9 and -, 2 to 30 characters)")


def zone(value: str) -> str:
    return _matching(_ZONE, value, "a zone's name, such as us-central2-b")


def runtime(value: str) -> str:
    return _matching(_RUNTIME, value, "a runtime version, such as tpu-ubuntu2204-base")


def service_account(value: str) -> str:
    return _matching(_SERVICE_ACCOUNT, value, "a service account, such as NAME@PROJECT.iam.gserviceaccount.com")


def network(value: str) -> str:
    return _matching(_NETWORK, value, "a network: write its name or projects/PROJECT/global/networks/NAME")


def subnetwork(value: str) -> str:
    wanted = "a subnetwork: write its name or projects/PROJECT/regions/REGION/subnetworks/NAME"
    return _matching(_SUBNETWORK, value, wanted)


def tag(value: str) -> str:
    return _matching(_TAG, value, "a network tag (a-z, 0-9 and -, beginning with a letter)")


def duration(value: object) -> timedelta:
    """A length of time such as `90s`, `30m`, `1h30m` or `2d`, at most 30 days."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = shown(str(getattr(value, "text", value)))
        raise ValueError(f"{number} has no unit; write {number}s or {number}m")  # noqa: TRY004 - as pydantic wants
    if not isinstance(value, str):
        raise ValueError("must be a duration such as 90s, 30m or 1h30m")  # noqa: TRY004
    match = _DURATION.fullmatch(value)
    if match is None or not any(match.groups()):
        fraction = "; write 1h30m rather than 1.5h" if _FRACTION.fullmatch(value) else ""
        raise ValueError(f"{shown(value)} is not a duration such as 90s, 30m, 1h30m or 2d{fraction}")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if length > LONGEST:
        raise ValueError(f"{shown(value)} is longer than {LONGEST.days}d")
    return length


def positive(value: timedelta) -> timedelta:
    if not value:
        raise ValueError("must be longer than 0s")
    return value


def variable(value: str) -> str:
    """Name of an environment variable that tpucare does not set itself."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{shown(value)} is not a name of an environment variable (A-Z, a-z, 0-9 and _)")
    if value.startswith("TPUCARE_") and value not in _OPEN_VARIABLES:
        raise ValueError(f"{value} is reserved: variables that begin with TPUCARE_ are set by tpucare")
    return value


def optional_variable(value: str) -> str:
    return variable(value) if value else value


def address(value: str) -> str:
    """`HOST:PORT` of a server; empty: none."""
    host, colon, port = value.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if value and not (colon and _HOST.fullmatch(host) and is_port):
        raise ValueError(f"{shown(value)} is not an address, such as 10.128.0.5:6379")
    return value


def variable_value(value: object) -> str:
    """Text, or a number as it was written. Words such as true mean different things to different programs."""
    written = text_or_number(value)
    if len(written.encode()) > VARIABLE_LIMIT:
        raise ValueError(f"is longer than {VARIABLE_LIMIT // 1024} KB, the limit of a variable; put it into a file")
    return written


def text_or_number(value: object) -> str:
    """Text, or a number as written. Metadata's limit, 256 KB, is that of a whole fleet file: no limit of its own."""
    if isinstance(value, WrittenInt | WrittenFloat):
        return value.text
    if isinstance(value, bool) or value is None:
        wanted = '"1" or "true"' if value else '"" or "0" or "false"'
        raise ValueError(f"must be text or a number; quote what the program expects: {wanted}")
    if not isinstance(value, str):
        raise ValueError("must be text or a number; quote a value that begins with { or [")  # noqa: TRY004
    return text(value)


def dollars(value: object) -> float:
    """An amount of US dollars, or a price in them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= DOLLARS_LIMIT:
        raise ValueError(f"must be a number of US dollars, 0 to {DOLLARS_LIMIT:,}")
    return float(value)


def hours(value: object) -> float:
    """A length of time in hours."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= HOURS_LIMIT:
        raise ValueError(f"must be a number of hours, more than 0 and at most {HOURS_LIMIT:,}")
    return float(value)


def instant(value: object) -> datetime:
    """An instant, in UTC where it names no other zone; a date alone is the instant at which that day begins."""
    wanted = "must be an instant such as 2026-12-31T18:00+01:00 (without an offset: UTC), or a date"
    if not isinstance(value, str) or not _INSTANT.fullmatch(value):
        raise ValueError(wanted)
    try:
        read = datetime.fromisoformat(value.replace(" ", "T"))
        return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(wanted) from None


def positive_dollars(value: object) -> float:
    """An amount of US dollars above 0."""
    amount = dollars(value)
    if amount == 0:
        raise ValueError("must be above 0")
    return amount


def metadata_key(value: str) -> str:
    """Key of a node's metadata that tpucare does not write itself."""
    if value in _OWN_METADATA:
        raise ValueError(f"{value} is set by tpucare: {_OWN_METADATA[value]}")
    return _matching(_METADATA_KEY, value, "a key of metadata (A-Z, a-z, 0-9, _ and -, at most 128)")


def repository(value: str) -> str:
    """
    URL of a git repository: https, ssh (also `git@host:path`) or file, without credentials.

    The URL ends up in scripts, logs and `git remote -v` on every worker, so a token in it would leak.
    """
    line(value)
    if _SCP_URL.fullmatch(value) and "://" not in value:
        return value
    try:
        url = urlsplit(value)
        host, password, user = url.hostname or "", url.password, url.username
        _ = url.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if url.scheme not in ("https", "ssh", "file"):
        raise ValueError("must be an https://, ssh:// or file:// URL, or git@HOST:PATH; a folder is `workdir`")
    if password is not None or (user is not None and url.scheme != "ssh") or url.query or url.fragment:
        raise ValueError("must hold no credentials, query or fragment; put GIT_TOKEN or GIT_SSH_KEY into `secrets`")
    if " " in value or (url.scheme != "file" and not _HOST.fullmatch(host)) or (user or "").startswith("-"):
        raise ValueError("is not a URL of a repository")
    if len(url.path) < 2 or (url.scheme == "file" and host):
        raise ValueError("has no path to a repository" + ("; write file:///PATH" if url.scheme == "file" else ""))
    return value


def branch(value: str) -> str:
    """A branch, tag or commit, by the rules of `git check-ref-format` and without a leading dash."""
    wrong = (
        not _BRANCH.fullmatch(value)
        or any(part in value for part in ("..", "//", "@{", "/."))
        or value.endswith((".", "/", ".lock"))
        or ".lock/" in value
    )
    if wrong:
        raise ValueError(f"{shown(value)} is not a branch, tag or commit")
    return value


def folder(value: str) -> str:
    """A folder on this machine, absolute or relative to the fleet file."""
    line(value)
    if value.startswith("~"):
        raise ValueError("must not begin with ~: it depends on the user that the daemon runs as")
    return value


def checkpoint(value: str) -> str:
    """Location of the checkpoints: `gs://bucket/path`, or an absolute path that all nodes share."""
    line(value)
    if not _CHECKPOINT.fullmatch(value):
        raise ValueError(f"{shown(value)} must be a URL such as gs://BUCKET/PATH, or an absolute path, without blanks")
    return value


def cache(value: str) -> str:
    """Location of stored environments: `auto`, or as a checkpoint."""
    return value if value == CACHE_AUTO else checkpoint(value)


def cache_path(value: str) -> str:
    """A path below the job's folder."""
    line(value)
    if value.startswith(("/", "~")) or value != os.path.normpath(value) or value.split("/")[0] in ("..", "."):
        raise ValueError(
            f"{shown(value)} must stay below the job's folder: relative, without .. and without / at its end"
        )
    if ":" in value or value.split("/")[0] in (".git", ".tpucare"):
        raise ValueError(f"{shown(value)} is not for the cache of environments")
    return value


def progress(value: str) -> str:
    """A regular expression whose one group is the step, e.g. `step[ =:]+(\\d+)`."""
    if not value or len(value) > PATTERN_LIMIT:
        raise ValueError(f"must have 1 to {PATTERN_LIMIT} characters")
    try:
        groups = re.compile(text(value)).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {shown(str(error))}") from None
    if found := next((match["new"] for match in _NEW_SYNTAX.finditer(value) if match["new"]), ""):
        raise ValueError(f"has {found}, which needs Python 3.11; workers may have Python 3.8")
    if groups != 1:
        raise ValueError(rf"must have one group, which is the step, such as step[ =:]+(\d+); it has {groups}")
    return value


def ssh_key(value: str) -> str:
    """A line of `ssh-keys` metadata: `user:ssh-ed25519 AAAA… comment`; the guest agent makes that user."""
    line(value)
    if "PRIVATE KEY" in value:
        raise ValueError("is a private key; write the line of the .pub file")
    user, colon, key = value.partition(":")
    kind, _, rest = key.partition(" ")
    if not colon or not _LOGIN.fullmatch(user):
        raise ValueError("must be USER:KEY, such as me:ssh-ed25519 AAAA…")
    if kind not in _KEY_TYPES:
        raise ValueError(f"has no key of a known type ({', '.join(sorted(_KEY_TYPES)[:4])}, …)")
    if not _is_key_blob(rest.partition(" ")[0], kind):
        raise ValueError(f"is not a complete {kind} key; copy the line of the .pub file")
    return value


def _is_key_blob(encoded: str, kind: str) -> bool:
    """True if *encoded* is base64 of a blob that begins with the length and name of *kind* (RFC 4253 §6.6)."""
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return False
    head = len(kind).to_bytes(4, "big") + kind.encode()
    return blob.startswith(head) and len(blob) >= len(head) + 32


def _matching(pattern: re.Pattern[str], value: str, wanted: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{shown(value)} is not {wanted}")
    return value
