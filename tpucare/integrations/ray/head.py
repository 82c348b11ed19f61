"""
`tpucare ray head`: prepares the head of a cluster, then becomes `ray start --head`.

No parent process stays, so a service manager, a terminal or tmux holds the head itself. Everything that Ray would tell
late, or in a traceback, is checked before: its version, addresses, ports, and processes of a head that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from tpucare.integrations.ray.cluster import HeadRecord, cluster_folder, make_token, write_head
from tpucare.model.errors import ConfigError

# Older ones lack what slices need: SlicePlacementGroup without a time limit is new in 2.56.
LEAST_RAY = (2, 56)
GCS_PORT = 6379
DASHBOARD_PORT = 8265
MARK = "TPUCARE_RAY_HEAD"
# A socket path has 107 bytes at most, and Ray's own part of it is 62.
FOLDER_BYTES = 45
RAY_FOLDER = "t"
PYTHON_SECONDS = 60.0
TERM_SECONDS = 5.0
KILL_SECONDS = 10.0

# Word of `ray start` -> the way in which tpucare sets it.
OWN_WORDS: Mapping[str, str] = {
    "--head": "it is always given",
    "--block": "it is always given",
    "--no-monitor": "it is always given",
    "--address": "write --address before --",
    "--node-ip-address": "write --address IP before --",
    "--port": "write --address IP:PORT before --",
    "--temp-dir": "write --temp-dir before --",
    "--dashboard-host": "dashboard and jobs listen on 127.0.0.1; see `tpucare ray tunnel`",
    "--dashboard-port": "write --dashboard-port before --",
    "--include-dashboard": "jobs need the dashboard",
    "--autoscaling-config": "tpucare makes the slices, and two caretakers of one cluster would fight",
}

# The names that ray/dashboard/optional_deps.py imports; without one of them there is no dashboard, and no jobs.
_ABOUT = """
import importlib.metadata, importlib.util, json, sys
try:
    ray = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError:
    ray = ""
lacks = [name for name in ("aiohttp", "aiohttp_cors", "opencensus") if importlib.util.find_spec(name) is None]
print(json.dumps({"ray": ray, "python": "%d.%d" % sys.version_info[:2], "lacks": lacks}))
"""


@dataclass(frozen=True, slots=True)
class Head:
    """
    A head that is ready to start.

    folder: of the cluster    words: the command line    env: what it adds to the environment
    """

    record: HeadRecord
    folder: Path
    words: tuple[str, ...]
    env: Mapping[str, str]


def prepare_head(
    name: str,
    *,
    state: Path,
    python: str,
    now: datetime,
    address: str = "",
    dashboard_port: int = DASHBOARD_PORT,
    temp_dir: str = "",
    ray_words: Sequence[str] = (),
) -> Head:
    """
    Check everything, end the processes of a killed head, and make token and folders; nothing else is written.

    python: the program that has Ray    address: `IP[:PORT]`    ray_words: more words for `ray start`
    Raises: ConfigError: one line that says what to change; OSError: a folder cannot be made.
    """
    folder = cluster_folder(state, name)
    for word in ray_words:
        option = word.partition("=")[0]
        if option in OWN_WORDS:
            raise ConfigError(f"{option} after --: tpucare sets it; {OWN_WORDS[option]}")
    ray, python_version = _about(python)
    ip, port = _address(address)
    end_leftovers(name, folder)
    _require_free(ip, port, f"{ip}:{port}: it is in use; choose another port: --address {ip}:PORT")
    _require_free(
        "127.0.0.1", dashboard_port, f"127.0.0.1:{dashboard_port}: it is in use; choose another one: --dashboard-port"
    )
    # Ray opens its own folder to all users of the machine: the one above it keeps them out.
    temp = _private_folder(Path(temp_dir or _default_temp(folder))) / RAY_FOLDER
    # The last head's address. Beside a host on this machine, whose raylet names it too, Ray would refuse to start.
    (temp / "ray_current_cluster").unlink(missing_ok=True)
    token = make_token(state, name)
    (folder / "work").mkdir(mode=0o700, parents=True, exist_ok=True)
    gcs = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    dashboard = f"127.0.0.1:{dashboard_port}"
    record = HeadRecord(name, gcs, dashboard, python, ray, python_version, str(token), now)
    words = (
        *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"),
        *(f"--node-ip-address={ip}", f"--port={port}", f"--temp-dir={temp}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
        # Ray chooses one. Its usual port is on 127.0.0.1, too: of two heads that start at the same moment, one would
        # have no agent, and take no jobs.
        "--dashboard-agent-listen-port=0",
        *ray_words,
    )
    env = {
        MARK: str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_NODE_TYPE_NAME": "head",
        "RAY_CLOUD_INSTANCE_ID": "head",
    }
    return Head(record, folder, words, env)


def become_head(head: Head, state: Path, env: Mapping[str, str]) -> NoReturn:
    """Write the record, and replace this process by the head. Raises: OSError."""
    write_head(state, head.record)
    # `python -m` imports from the current folder first, and tasks on the head begin there: an empty one of its own.
    os.chdir(head.folder / "work")
    # A token in the environment goes before the file, and an address would lead tasks to another cluster.
    kept = {name: value for name, value in env.items() if name not in ("RAY_AUTH_TOKEN", "RAY_ADDRESS")}
    # `ray job submit -- python train.py` means the Python that has Ray, as it does in its own virtual environment.
    path = os.pathsep.join(filter(None, (os.path.dirname(head.words[0]), env.get("PATH", os.defpath))))
    os.execve(head.words[0], list(head.words), {**kept, **head.env, "PATH": path})


# --- checks ----------------------------------------------------------------------------------------------------------


def _about(python: str) -> tuple[str, str]:
    """Versions of Ray and Python of a program. Raises: ConfigError: no Python, no Ray, or one that is too old."""
    try:
        done = subprocess.run(
            [python, "-c", _ABOUT],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PYTHON_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
        ray, version, lacks = str(found["ray"]), str(found["python"]), list(found["lacks"])
    except OSError as error:
        why = f"--python {python}: cannot be run ({error.strerror})"
        raise ConfigError(f"{why}: name the one that has Ray") from error
    except (subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--python {python}: is no Python that works: name the one that has Ray") from error
    least = ".".join(map(str, LEAST_RAY))
    install = f"{python} -m pip install 'ray[default]>={least}'"
    if not ray:
        raise ConfigError(f"--python {python}: it has no Ray: {install}, or name another Python with --python")
    numbers = re.match(r"(\d+)\.(\d+)", ray)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST_RAY:
        raise ConfigError(f"--python {python}: it has Ray {ray}, and slices need {least} or later: {install}")
    if lacks:
        raise ConfigError(f"--python {python}: its Ray has no dashboard, which jobs need ({lacks[0]}): {install}")
    return ray, version


def _address(text: str) -> tuple[str, int]:
    """IP and port of GCS. Raises: ConfigError."""
    if not text:
        return _internal_ip(), GCS_PORT
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::([^:]*))?", text)
    # Only one colon: IP and port; none, or several: an address alone.
    host, port = (
        bracketed.groups(default=str(GCS_PORT))
        if bracketed
        else (text, str(GCS_PORT))
        if text.count(":") != 1
        else text.split(":")
    )
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--address {text}: write this machine's internal address as IP or IP:PORT") from None
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"--address {text}: the port must be a number from 1 to 65535")
    if str(ip) in ("127.0.0.1", "::1") or ip.is_unspecified:
        # services.py, resolve_ip_for_localhost: Ray takes another address of the machine in its place.
        raise ConfigError(
            f"--address {text}: Ray replaces this one by another; name the internal address that slices reach"
        )
    return str(ip), int(port)


def _internal_ip() -> str:
    """The address of this machine's default route. Raises: ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # To an address that documentation uses; UDP sends no packet here.
        probe.connect(("192.0.2.1", 9))
        found = str(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    raise ConfigError("this machine has no default route: name its internal address with --address IP")


def _require_free(ip: str, port: int, taken: str) -> None:
    """Raises: ConfigError: *taken*, or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of an earlier head that still end do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except PermissionError:
            raise ConfigError(f"{ip}:{port}: only root may use a port below 1024") from None
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                raise ConfigError(taken) from None
            why = f"--address {ip}: is no address of this machine ({error.strerror})"
            raise ConfigError(f"{why}: name its internal address") from None


def _default_temp(folder: Path) -> str:
    """A folder per cluster with a short path; in the service a private /tmp, which ends with the head."""
    mark = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    path = str(Path(tempfile.gettempdir()) / f"ray-{mark}")
    return path if _fits(path) else f"/tmp/ray-{mark}"


def _fits(path: str) -> bool:
    return len(os.fsencode(f"{path}/{RAY_FOLDER}")) <= FOLDER_BYTES


def _private_folder(path: Path) -> Path:
    """*path*, made for this user alone. Raises: ConfigError: too long, or another user's; OSError."""
    path = path.absolute()
    if not _fits(str(path)):
        longest = FOLDER_BYTES - len(f"/{RAY_FOLDER}")
        raise ConfigError(f"--temp-dir {path}: is longer than {longest} bytes, and Ray's sockets lie in it")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path}: is another user's, or a link; remove it, or choose another one with --temp-dir")
    path.chmod(0o700)
    return path


# --- processes of an earlier head ------------------------------------------------------------------------------------


def end_leftovers(name: str, folder: Path) -> None:
    """
    End the processes that a killed head of this cluster left: its agents, workers and jobs.

    Raises: ConfigError: a head of this cluster runs, or some processes do not end.
    """
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        left = _marked(folder)
        if head := next((pid for pid in left if _is_head(pid)), None):
            raise ConfigError(f"cluster {name}: its head runs already, as process {head}; it ends with: kill {head}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = _marked(folder)
    if left:
        pids = ", ".join(map(str, sorted(left)))
        why = f"cluster {name}: processes of its last head do not end"
        raise ConfigError(f"{why}: end {pids}, or start the machine anew")


def _marked(folder: Path) -> list[int]:
    """Processes of a head of this cluster, without this one and its ancestors."""
    mark = f"{MARK}={folder}".encode()
    line, pid = {os.getpid()}, os.getpid()
    while (pid := _parent(pid)) > 1:
        line.add(pid)
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid not in line and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _is_head(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return {b"ray.scripts.scripts", b"start", b"--head", b"--block"} <= set(words)
