"""
The folder that one emulated worker lives in: its home, keys, sshd files, and what its metadata server says at boot.

The texts come from `outfit`; what runs in the folder is for `worker` to say.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tpucare.testbed.emulator.machines import outfit
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.outfit import Folders
from tpucare.testbed.emulator.machines.sandbox import Sandbox
from tpucare.testbed.emulator.world.config_project import Guest
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
    """What all workers of one emulator share. `mark` begins the mark of each of their processes."""

    workers: Path
    screens: Path
    bin: Path
    mark: str
    way: Sandbox
    sshd: Path
    sftp_server: Path
    use_pam: bool
    ssh_port: int
    path_prefix: Sequence[Path]
    extra_env: Mapping[str, str]
    metadata: MetadataServer
    guest: Guest


def folders_of(site: Site, order: Boot, short_name: str) -> Folders:
    """The same at every boot of a worker, but for the sockets of its screens."""
    name = f"{order.path.node_id}.{order.node_id}.{order.worker}"
    return Folders(site.workers / name, site.screens / short_name, site.bin)


def furnish(site: Site, folders: Folders, order: Boot, *, mark: str, boot_id: str) -> None:
    """Make everything ready for a boot. Home and host key that are there already stay: a reboot."""
    is_first_boot = not folders.home.exists()
    # /tmp and the screens' sockets are emptied by a real machine's boot, too.
    for emptied in (folders.tmp, folders.screens):
        shutil.rmtree(emptied, ignore_errors=True)
    for folder in (folders.root, folders.home, folders.tmp, folders.screens):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    if is_first_boot:
        for name, text in outfit.home_files(folders, site.path_prefix).items():
            (folders.home / name).write_text(text)
        make_host_key(folders)
    replace(folders.boot_id, f"{boot_id}\n", 0o644)
    authorize(folders, order.attributes.get(SSH_KEYS_ATTRIBUTE, "") if order.takes_keys else "")
    _write_sshd_files(site, folders, order, mark, boot_id)


def _write_sshd_files(site: Site, folders: Folders, order: Boot, mark: str, boot_id: str) -> None:
    env = outfit.session_env(
        folders,
        hostname=order.hostname,
        metadata=f"{order.address}:{site.metadata.port}",
        mark_value=mark,
        boot_id=boot_id,
        path_prefix=site.path_prefix,
        extra={**site.extra_env, **_chip_env(site, folders, order)},
    )
    replace(folders.wrapper, outfit.session_wrapper(env, sftp_server=site.sftp_server), 0o700)
    config = outfit.sshd_config(
        folders,
        order.address,
        site.ssh_port,
        sftp_server=site.sftp_server,
        use_pam=site.use_pam,
        mark_value=mark,
        default_limits=site.guest.sshd_limits == "default",
    )
    replace(folders.sshd_config, config, 0o600)


def has_chips(guest: Guest, order: Boot) -> bool:
    """Whether a device stands for the worker's chips: only where an image's services are imitated."""
    return guest.containers or order.holds_chips


def _chip_env(site: Site, folders: Folders, order: Boot) -> dict[str, str]:
    if not has_chips(site.guest, order):
        return {}
    folders.chip.parent.mkdir(exist_ok=True)
    folders.chip.touch()
    lock = folders.tmp / "libtpu_lockfile"
    return {"TPUCARE_DEVICE_GLOB": f"{folders.chip.parent}/accel*", "TPUCARE_LIBTPU_LOCK": str(lock)}


def move_sshd(folders: Folders, address: str, port: int) -> None:
    """When sshd reads its files again, it makes room at *port* and listens at another of that address."""
    with socket.create_server((address, 0)) as listener:
        free = listener.getsockname()[1]
    config = folders.sshd_config.read_text().replace(
        f"ListenAddress {address}:{port}\n", f"ListenAddress {address}:{free}\n"
    )
    replace(folders.sshd_config, config, 0o600)


def authorize(folders: Folders, ssh_keys: str) -> None:
    """From the next login on, the keys of this `ssh-keys` metadata let in, and no others."""
    replace(folders.authorized_keys, outfit.authorized_keys(ssh_keys), 0o600)


def make_host_key(folders: Folders) -> None:
    """A new ed25519 key; sshd takes it up when it starts or is sent SIGHUP."""
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
    """What the order says, over what every instance has."""
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
    """Written beside and renamed, so that sshd never reads half of it."""
    beside = path.with_name(f".{path.name}.new")
    beside.touch(mode)
    beside.chmod(mode)
    beside.write_text(text)
    beside.replace(path)
