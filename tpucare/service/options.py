"""
Options: folders, addresses and intervals from flags and the environment, resolved once and passed on explicitly.

Standard library only, since every command begins here. Nothing is opened, and no cloud is called.

An emulated cloud has a state folder of its own by default: otherwise the fleets of the real cloud would be looked for
in a cloud that has none of their nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpucare.model.errors import ConfigError
from tpucare.model.local_files import Private
from tpucare.service import emulator_address

# Every TPU VM image has it, with sudo and a home; the first tpucare logged in as it, and scripts name its folders.
DEFAULT_USER = "ubuntu"
DAEMON_STORE = "tpucare"
SSH_PORT = 22
FLEETS_NOTE = "fleets.path"
# Secrets that tpucare makes itself: tokens of Ray clusters, each a file of its name in the state folder's `secrets`.
RAY_TOKEN_PREFIX = "TPUCARE_RAY_TOKEN_"
# Printable, without blanks, so that stores and the API can take it. The API checks the rest of its own rule.
_PROJECT = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class Options:
    """
    state:     the state folder: stores, key, host keys, logs, control sockets
    store:     the store that is meant in it: the daemon's, or one of the Python API
    endpoint:  `127.0.0.1:PORT` of an emulator; empty = the real service
    project:   for fleets that name none; empty = to be found where gcloud looks
    ssh_user, ssh_port: of every worker
    emulator:  state folder of the emulator that is meant, if one is
    poll, fast_poll, probe, fast_probe: seconds; see `engine.Settings`
    sweep_poll: seconds between two looks at a W&B sweep
    fleets_in: the folder of fleet files; goes before the environment and the state folder
    """

    state: Path
    endpoint: str = ""
    project: str = ""
    ssh_user: str = DEFAULT_USER
    ssh_port: int = SSH_PORT
    emulator: Path | None = None
    poll: float = 5.0
    fast_poll: float = 1.0
    probe: float = 15.0
    fast_probe: float = 1.0
    creates_per_minute: int = 60
    sweep_poll: float = 30.0
    store: str = DAEMON_STORE
    fleets_in: Path | None = None

    @property
    def socket(self) -> Path:
        """The control socket of the process that holds the store."""
        return self.state / ("control.sock" if self.store == DAEMON_STORE else f"{self.store}.sock")

    @property
    def key(self) -> Path:
        """The private key for logins on workers."""
        return self.state / "ssh" / "id_ed25519"

    @property
    def secrets(self) -> Path:
        """The folder of the secrets that tpucare makes itself."""
        return self.state / "secrets"

    @property
    def host_keys(self) -> Path:
        return self.state / "hostkeys"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def fleets(self, env: Mapping[str, str]) -> Path:
        """The folder of fleet files: TPUCARE_FLEETS, else the one that the last daemon of this state folder used."""
        if self.fleets_in is not None:
            return self.fleets_in
        if given := env.get("TPUCARE_FLEETS"):
            return Path(given).absolute()
        try:
            noted = (self.state / FLEETS_NOTE).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            noted = ""
        return Path(noted) if noted else self.state / "fleets"

    def private(self, env: Mapping[str, str]) -> Private:
        """What no fleet may have sent to workers: this folder, but for its fleets, and what the user logs in with."""
        home = Path(env.get("HOME") or Path.home())
        named = [env.get(name) for name in ("CREDENTIALS_DIRECTORY", "GOOGLE_APPLICATION_CREDENTIALS")]
        return Private.of(
            (
                self.state,
                home / ".local" / "state" / "tpucare",
                home / ".ssh",
                env.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud",
                env.get("NETRC") or home / ".netrc",
                *(path for path in named if path),
            ),
            shown=self.fleets(env),
        )


def resolve(
    env: Mapping[str, str], *, state: str = "", endpoint: str = "", project: str = "", emulator: str = ""
) -> Options:
    """
    Options from flags (empty = not given), the environment and a running emulator, in this order.

    Raises: ConfigError: a number, project or home that is none, or no emulator runs where one was named.
    """
    folder = emulator or env.get("TPUCARE_EMULATOR", "")
    found = emulator_address.find(Path(folder).absolute()) if folder else None
    address = endpoint or (found.endpoint if found else env.get("TPUCARE_ENDPOINT", ""))
    user = env.get("TPUCARE_SSH_USER", "") or (found.ssh_user if found else "") or DEFAULT_USER
    port = _number(env, "TPUCARE_SSH_PORT", (found.ssh_port if found else 0) or SSH_PORT)
    if not 0 < port < 1 << 16:
        raise ConfigError(f"TPUCARE_SSH_PORT={port} is no port: a number from 1 to 65535")
    project = project or env.get("TPUCARE_PROJECT", "") or (found.project if found else "")
    if not _PROJECT.fullmatch(project):
        raise ConfigError(f"{project!r} is not a project id: see --project and TPUCARE_PROJECT")
    return Options(
        state=_state_folder(env, state, folder, address),
        endpoint=address,
        project=project,
        ssh_user=user,
        ssh_port=int(port),
        emulator=Path(folder).absolute() if folder else None,
        poll=_number(env, "TPUCARE_POLL", 5.0),
        fast_poll=_number(env, "TPUCARE_FAST_POLL", 1.0),
        probe=_number(env, "TPUCARE_PROBE", 15.0),
        fast_probe=_number(env, "TPUCARE_FAST_PROBE", 1.0),
        creates_per_minute=int(_number(env, "TPUCARE_CREATES_PER_MINUTE", 60)),
        sweep_poll=_number(env, "TPUCARE_SWEEP_POLL", 30.0),
    )


def _state_folder(env: Mapping[str, str], given: str, emulator: str, endpoint: str) -> Path:
    named = given or env.get("TPUCARE_STATE", "")
    if named:
        return expanded(named)
    if emulator:
        return Path(emulator).absolute() / "tpucare"
    # systemd gives a list when a unit has more than one state directory; ours is the first.
    service = env.get("STATE_DIRECTORY", "").partition(":")[0]
    home = Path(service) if service else Path(env.get("HOME") or Path.home()) / ".local" / "state" / "tpucare"
    return home / "endpoints" / re.sub(r"[^0-9A-Za-z.]", "_", endpoint) if endpoint else home


def expanded(path: str) -> Path:
    """*path* with a home for `~`, absolute. Raises: ConfigError: there is no such user."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{path}: no home of such a user is known; write the folder in full") from None


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1e6:
        raise ConfigError(f"{name}={text!r} is not a number from 0.01 to 1000000")
    return value
