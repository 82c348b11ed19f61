"""
The files of one emulated worker: its home, keys, sshd files, command stubs, and its first metadata.

Comments name each place where a worker differs from a real TPU VM on purpose. `worker` starts the processes.
"""

from __future__ import annotations

import math
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tpucare.model.local_files import replace_file
from tpucare.testbed.emulator.machines import own_files
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.sandbox import Sandbox
from tpucare.testbed.emulator.world.config import Guest
from tpucare.testbed.emulator.world.machine_effects import Boot
from tpucare.testbed.emulator.world.records import (
    INSTANCE_ATTRIBUTES,
    MAINTENANCE_ATTRIBUTE,
    NO_MAINTENANCE,
    PREEMPTED_ATTRIBUTE,
)

SSH_KEYS_ATTRIBUTE = INSTANCE_ATTRIBUTES + "ssh-keys"


@dataclass(frozen=True, slots=True)
class Site:
    """Settings that all workers of one emulator share. `mark` begins the mark of each of their processes."""

    workers: Path
    sockets: Path
    bin: Path
    mark: str
    sandbox: Sandbox
    sshd: Path
    sftp_server: Path
    use_pam: bool
    ssh_port: int
    path_prefix: Sequence[Path]
    extra_env: Mapping[str, str]
    metadata: MetadataServer
    guest: Guest


def folders_of(site: Site, order: Boot, short_name: str) -> Folders:
    """The folders of a worker: the same at every boot, except those for sockets."""
    name = f"{order.path.node_id}.{order.node_id}.{order.worker}"
    return Folders(site.workers / name, site.sockets / short_name, site.bin)


def prepare(site: Site, folders: Folders, order: Boot, *, mark: str, boot_id: str) -> None:
    """Write all files for a boot. An existing home and host key stay, as at a reboot."""
    is_first_boot = not folders.home.exists()
    # `tmp` and `screens` are new at each boot: a real machine's boot empties them, too.
    for folder in (folders.root, folders.home, folders.tmp, folders.screens):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    if is_first_boot:
        for name, text in home_files(folders, site.path_prefix).items():
            (folders.home / name).write_text(text)
        make_host_key(folders)
    own_files.write(
        folders.root,
        boot_id=boot_id,
        chips=order.chips,
        metadata_address=order.address,
        one_group=site.sandbox is Sandbox.USER_NAMESPACE,
    )
    authorize(folders, order.attributes.get(SSH_KEYS_ATTRIBUTE, "") if order.takes_keys else "")
    _write_sshd_files(site, folders, order, mark, boot_id)


def _write_sshd_files(site: Site, folders: Folders, order: Boot, mark: str, boot_id: str) -> None:
    env = session_env(
        folders,
        hostname=order.hostname,
        metadata=f"{order.address}:{site.metadata.port}",
        mark_value=mark,
        boot_id=boot_id,
        path_prefix=site.path_prefix,
        extra={**site.extra_env, **_chip_env(site, folders, order)},
    )
    replace(folders.wrapper, session_wrapper(env, sftp_server=site.sftp_server), 0o700)
    config = sshd_config(
        folders,
        order.address,
        site.ssh_port,
        sftp_server=site.sftp_server,
        use_pam=site.use_pam,
        mark_value=mark,
        default_limits=site.guest.sshd_limits == "default",
    )
    replace(folders.sshd_config, config, 0o600)


def chip(site: Site, folders: Folders) -> Path:
    """The first chip's file, as the worker sees it."""
    return (Path("/dev") if site.sandbox.mounts else own_files.chips_folder(folders.root)) / "accel0"


def _chip_env(site: Site, folders: Folders, order: Boot) -> dict[str, str]:
    """Where the chips are, and libtpu's lock file, whose folder /tmp the workers share with the machine."""
    if not (site.sandbox.mounts or site.guest.containers or order.holds_chips):
        return {}
    first = chip(site, folders)
    lock = {"TPUEMU_CHIP": str(first), "TPUCARE_LIBTPU_LOCK": str(folders.tmp / "libtpu_lockfile")}
    return lock if site.sandbox.mounts else {**lock, "TPUCARE_DEVICE_GLOB": f"{first.parent}/accel*"}


def move_sshd(folders: Folders, address: str, port: int) -> None:
    """Let sshd, once it reads its files again, release *port* and listen on another port of that address."""
    with socket.create_server((address, 0)) as listener:
        free = listener.getsockname()[1]
    config = folders.sshd_config.read_text().replace(
        f"ListenAddress {address}:{port}\n", f"ListenAddress {address}:{free}\n"
    )
    replace(folders.sshd_config, config, 0o600)


def authorize(folders: Folders, ssh_keys: str) -> None:
    """Accept the keys of this `ssh-keys` metadata, and no others, from the next login on."""
    replace(folders.authorized_keys, authorized_keys(ssh_keys), 0o600)


def make_host_key(folders: Folders) -> None:
    """Write a new ed25519 key; sshd reads it at its start and at SIGHUP."""
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    replace(folders.host_key, text.decode(), 0o600)
    replace(folders.host_key.with_suffix(".pub"), public.decode(), 0o600)


def host_keys(folders: Folders) -> dict[str, str]:
    """`ssh-ed25519` -> base64, as guest attributes publish it."""
    kind, _, key = folders.host_key.with_suffix(".pub").read_text().strip().partition(" ")
    return {kind: key}


def first_metadata(order: Boot) -> dict[str, str]:
    """The metadata of every instance, with the attributes of the order over them."""
    path = order.path
    return {
        "instance/id": str(order.node_id),
        "instance/name": order.hostname,
        "instance/hostname": f"{order.hostname}.{path.zone}.c.{path.project}.internal",
        "instance/zone": f"projects/{path.project}/zones/{path.zone}",
        PREEMPTED_ATTRIBUTE: "FALSE",
        MAINTENANCE_ATTRIBUTE: NO_MAINTENANCE,
        INSTANCE_ATTRIBUTES + "agent-worker-number": str(order.worker),
        INSTANCE_ATTRIBUTES + "worker-network-endpoints": ",".join(f"unknown:unknown:{ip}" for ip in order.peers),
        "project/project-id": path.project,
        **order.attributes,
    }


def replace(path: Path, text: str, mode: int) -> None:
    """Write *text* to a file whole or not at all, so that sshd never reads half of it."""
    replace_file(path, text.encode(), mode=mode, durable=False)


# --- the texts of a worker: sshd configuration, session wrapper, profile and command stubs ----------------------------
# Pure text.


MARK = "TPUEMU_WORKER"
"""Environment variable of every process of a worker, by which a later emulator finds processes left by a crash."""

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# One key exchange (by both of its names: paramiko knows the older): the default, sntrup761, costs 8 times the CPU.
_SSHD_CONFIG = """\
ListenAddress {address}:{port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
PidFile none
LogLevel INFO
StrictModes no
UsePAM {use_pam}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
UseDNS no
{limits}KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
Subsystem sftp {sftp_server}
ForceCommand {wrapper}
SetEnv HOME=/nonexistent {mark}={mark_value}
"""

# The default (10:30:100, 10) drops connections at random when many come at once.
_ROOMY = "MaxStartups 500\nMaxSessions 200\n"

# sshd's own shell must not read the dot files of the emulator's user (hence HOME=/nonexistent); this script then gives
# exec, login shell, scp and sftp the worker's home.
_WRAPPER = """\
#!/bin/bash
{exports}
cd "$HOME" || exit 255
case "$SSH_ORIGINAL_COMMAND" in
  "") exec -a -bash /bin/bash ;;
  internal-sftp*|*/sftp-server*) exec {sftp_server} ;;
  *) exec /bin/bash -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""

FLOODING_WRAPPER = """\
#!/bin/bash
line=$(printf '%4000s' '' | tr ' ' x)
yes "$line" >&2 &
exec yes "$line"
"""
"""Replaces the script of every SSH session: the output of any command never ends."""

# /etc/profile, which a login shell reads first, sets PATH anew.
_PROFILE = """\
if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi
export PATH={path}
"""

_BASHRC = """\
case $- in *i*) ;; *) return ;; esac
PS1='\\u@'"${HOSTNAME:-tpu}"':\\w\\$ '
"""

# Real TPU VMs have passwordless sudo; here it does not change the user, because there is only one.
_SUDO = """\
#!/bin/bash
while [ $# -gt 0 ]; do
  case "$1" in
    --) shift; break ;;
    -u|-g|-h|-p|-C|-T|-U|--user|--group) shift 2 ;;
    -i|-s|--login|--shell) shell=1; shift ;;
    -*) shift ;;
    *=*) export "$1"; shift ;;
    *) break ;;
  esac
done
if [ $# -gt 0 ]; then exec "$@"; fi
if [ -n "$shell" ]; then exec /bin/bash; fi
"""

# There is no cron: lines for a reboot are run at the worker's next boot (`boot_command`), others never.
_CRONTAB = """\
#!/bin/sh
case "$1" in
  -l) exec cat "$HOME/.crontab" ;;
  -r) exec rm -f "$HOME/.crontab" ;;
esac
cat -- "${1:--}" >"$HOME/.crontab.new" && mv "$HOME/.crontab.new" "$HOME/.crontab"
"""

_BOOT = """\
while read -r when line; do
  [ "$when" != @reboot ] || SSH_ORIGINAL_COMMAND=$line setsid "$1" </dev/null >/dev/null 2>&1 &
done <"$0"
shift
exec "$@"
"""

# In the first minutes of a real image; `-o DPkg::Lock::Timeout=` waits as apt does.
_LOCKED = """\
#!/bin/bash
free=$(( $(stat -c %Y "$HOME/../boot_id") + {seconds} ))
while [ "$(date +%s)" -lt "$free" ]; do
  case "$*" in
    *DPkg::Lock::Timeout=*) sleep 0.2 ;;
    *) echo "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1234 (unattended-upgr)" >&2
       exit 100 ;;
  esac
done
echo "emulated worker: ${{0##*/}} $* (pretended)" >&2
"""
_NO_PYTHON = '#!/bin/sh\necho "bash: line 1: python: command not found" >&2\nexit 127\n'

# The client writes down what to run and waits; `_SERVICES` runs it as a child of the daemon, without the client's
# environment. A privileged container holds the chip.
_DOCKER = """\
#!/bin/bash
folder=$HOME/../docker verb=$1 name=c$$ chips= detached=
shift
case "$verb" in
  run) ;;
  rm|stop|kill)
    for name in "$@"; do [ ! -e "$folder/$name.pid" ] || kill -TERM "-$(cat "$folder/$name.pid")"; done; exit 0 ;;
  ps) cd "$folder" && ls *.pid 2>/dev/null | sed 's/[.]pid$//'; exit 0 ;;
  *) echo "emulated worker: docker $verb is not known" >&2; exit 1 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --name) name=$2; shift 2 ;;
    --privileged) chips=1; shift ;;
    -d|--detach) detached=1; shift ;;
    -e|-v|-w|-u|--env|--volume|--workdir|--user|--network|--net|--entrypoint) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
shift
[ -z "$chips" ] || chips="exec 9<$TPUEMU_CHIP;"
{ echo "$chips cd /"; printf 'exec'; printf ' %q' "$@"; echo; } >"$folder/$name.sh"
echo "$name" >"$folder/orders"
[ -z "$detached" ] || exit 0
trap '[ ! -e "$folder/$name.pid" ] || kill -TERM "-$(cat "$folder/$name.pid")"' TERM
until [ -e "$folder/$name.exit" ]; do sleep 0.1; done
cat "$folder/$name.log"
exit "$(cat "$folder/$name.exit")"
"""

# Starts the services of an image, as a public process list of such a host names them, and Docker's daemon; then the
# command from $4 on. $1: the worker's folder, $2: the service that holds the chip, if any, $3: the chip.
_SERVICES = """\
google="google-runtime-monitor google-collectd"
for name in tpu-runtime instance_agent vbarcontrolagent $google healthagent monitoringagent; do
  device=/dev/null
  [ "$name" != "$2" ] || device=$3
  (exec -a "$name" sleep infinity <"$device" >/dev/null 2>&1) &
done
rm -rf "$1/docker" && mkdir "$1/docker" && mkfifo "$1/docker/orders"
(cd "$1/docker" && exec <>orders && while read -r name; do
  (setsid bash -c 'echo $$ >"$0.pid"; exec bash "$0.sh" >"$0.log" 2>&1 </dev/null' "$name"
   status=$?; rm "$name.pid"; echo "$status" >"$name.new" && mv "$name.new" "$name.exit") &
done) >/dev/null 2>&1 &
shift 3
exec "$@"
"""

# The workers share one real machine; they must not change its packages, services or power.
_PRETENDS = '#!/bin/sh\necho "emulated worker: ${0##*/} $* (pretended)" >&2\n'
_REFUSES = (
    '#!/bin/sh\necho "emulated worker: ${0##*/} is refused; ask the emulator to reboot or preempt it" >&2\nexit 1\n'
)

STUBS: Mapping[str, str] = {
    "sudo": _SUDO,
    "crontab": _CRONTAB,
    **dict.fromkeys(("apt-get", "apt", "snap", "systemctl"), _PRETENDS),
    **dict.fromkeys(("reboot", "shutdown", "poweroff", "halt"), _REFUSES),
}
"""Commands before the system's on a worker's PATH: file name -> content."""


def stubs(guest: Guest) -> dict[str, str]:
    """STUBS, and further ones for an image that is not ready or lacks a command."""
    found = dict(STUBS)
    if not guest.python:
        found["python"] = _NO_PYTHON
    if guest.containers:
        found["docker"] = _DOCKER
    if guest.dpkg_locked:
        found |= dict.fromkeys(("apt-get", "apt", "dpkg"), _LOCKED.format(seconds=math.ceil(guest.dpkg_locked)))
    return found


@dataclass(frozen=True, slots=True)
class Folders:
    """
    The paths of a worker. `bin` holds the stubs of all workers.

    `tmp` and `screens` have short paths outside the root, because a socket's path has 107 bytes at most: Ray's part of
    one is 62, and Ray's folder below TMPDIR takes 13.
    """

    root: Path
    tmp: Path
    bin: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def screens(self) -> Path:
        return self.tmp.with_name(f"{self.tmp.name}.screens")

    @property
    def crontab(self) -> Path:
        return self.home / ".crontab"

    @property
    def host_key(self) -> Path:
        return self.root / "host_ed25519"

    @property
    def authorized_keys(self) -> Path:
        return self.root / "authorized_keys"

    @property
    def sshd_config(self) -> Path:
        return self.root / "sshd_config"

    @property
    def wrapper(self) -> Path:
        return self.root / "session.sh"

    @property
    def pids(self) -> Path:
        return self.root / "pids"

    @property
    def log(self) -> Path:
        return self.root / "sshd.log"


def sshd_config(
    folders: Folders,
    address: str,
    port: int,
    *,
    sftp_server: Path,
    use_pam: bool,
    mark_value: str,
    default_limits: bool = False,
) -> str:
    """Raises: ValueError: a path that sshd_config cannot express."""
    return _SSHD_CONFIG.format(
        address=address,
        port=port,
        host_key=_quoted(folders.host_key),
        authorized_keys=_quoted(folders.authorized_keys),
        use_pam="yes" if use_pam else "no",
        sftp_server=_quoted(sftp_server),
        limits="" if default_limits else _ROOMY,
        wrapper=shlex.quote(str(folders.wrapper)),
        mark=MARK,
        mark_value=mark_value,
    )


def session_wrapper(env: Mapping[str, str], *, sftp_server: Path) -> str:
    """The script that starts every SSH session."""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
    return _WRAPPER.format(exports=exports, sftp_server=shlex.quote(str(sftp_server)))


def session_env(
    folders: Folders,
    *,
    hostname: str,
    metadata: str,
    mark_value: str,
    boot_id: str,
    path_prefix: Sequence[Path],
    extra: Mapping[str, str],
) -> dict[str, str]:
    """
    The environment of a session. `metadata` is `address:port` of the metadata server.

    HOSTNAME only names the worker: the kernel's host name stays the machine's, which gloo must be able to resolve.
    """
    return {
        "HOME": str(folders.home),
        "PATH": search_path(folders, path_prefix),
        "TMPDIR": str(folders.tmp),
        "SCREENDIR": str(folders.screens),
        "HOSTNAME": hostname,
        "LANG": "C.UTF-8",
        "GCE_METADATA_HOST": metadata,
        "GCE_METADATA_IP": metadata,
        "GCE_METADATA_ROOT": metadata,
        "TPUEMU_BOOT_ID": boot_id,
        **extra,
        MARK: mark_value,
    }


def boot_command(folders: Folders, sshd: Sequence[str], *, services: bool, holder: str, chip: Path) -> list[str]:
    """
    The first command of a boot: the image's own services and the `@reboot` lines of the worker's crontab, then sshd.

    holder: the service that holds the chip, empty: none
    """
    if services:
        sshd = ["/bin/bash", "-c", _SERVICES, "services", str(folders.root), holder, str(chip), *sshd]
    if not folders.crontab.is_file():
        return list(sshd)
    return ["/bin/bash", "-c", _BOOT, str(folders.crontab), str(folders.wrapper), *sshd]


def search_path(folders: Folders, path_prefix: Iterable[Path]) -> str:
    return ":".join([str(folders.bin), *map(str, path_prefix), _SYSTEM_PATH])


def home_files(folders: Folders, path_prefix: Iterable[Path]) -> dict[str, str]:
    """Dot files of a fresh home: name -> content."""
    return {".profile": _PROFILE.format(path=shlex.quote(search_path(folders, path_prefix))), ".bashrc": _BASHRC}


def authorized_keys(ssh_keys: str) -> str:
    """
    `ssh-keys` metadata (`user:ssh-… key comment`, one a line) as sshd reads it.

    An emulated worker has one user, whom the key of every line lets in. Lines that are not plain keys are left out, for
    example those with options of authorized_keys.
    """
    keys = [line.partition(":")[2].strip() for line in ssh_keys.splitlines()]
    return "".join(f"{key}\n" for key in keys if key.startswith(("ssh-", "ecdsa-", "sk-")))


def _quoted(path: Path) -> str:
    text = str(path)
    if any(character in text for character in '"\\%\n'):
        raise ValueError(f"sshd cannot use the path {text!r}; choose a folder without quotes, backslashes and %")
    return f'"{text}"'
