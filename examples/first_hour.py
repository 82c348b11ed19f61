#!/usr/bin/env python3
"""
Ask the real service what its documentation leaves open, with one small node that is deleted again.

    python3 examples/first_hour.py --project my-project --zone us-central1-a --type v5litepod-1

The script asks ten questions (docs/real-cloud.md). Each observation is a line of JSON on standard output, with the
seconds since the start. The script prints the price and asks before it starts, watches for 30 minutes at most, and
does not return before GetNode says NOT_FOUND, not even after Ctrl-C. It prints no key, token, address or account.
Use --endpoint for the emulated cloud.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.api_core.exceptions import GoogleAPICallError, NotFound
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tpucare.model import accelerators
from tpucare.model.resources import Provisioning

LONGEST_MINUTES = 30
CALL_SECONDS = 30.0
BANNER_SECONDS = 5.0
LOGIN_SECONDS = 10.0
GONE_SECONDS = 3.0
DELETE_EVERY_TURNS = 20
MAY_COME_SECONDS = 60.0
METADATA = (
    "curl -s -m 5 -H 'Metadata-Flavor: Google' http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1"
)

INSIDE = {
    "image": "head -2 /etc/os-release; uname -r; uptime -p",
    "python": "python -c 1 2>/dev/null && echo python || echo no python; python3 --version",
    "programs": "for p in screen git tar flock curl docker lsof; do command -v $p || echo no $p; done",
    "sshguard": "systemctl is-active sshguard fail2ban; systemctl is-active google-guest-agent ssh",
    "sshd": "sudo -n sshd -T 2>/dev/null | grep -iE 'maxstartups|maxsessions|persource' || echo unknown",
    "sudo": "sudo -n true && echo without a password",
    "dpkg": "sudo -n fuser /var/lib/dpkg/lock-frontend >/dev/null 2>&1 && echo locked || echo free",
    "chips": "ls /dev/accel* /dev/vfio/* 2>/dev/null; sudo -n lsof -w -F cn /dev/accel* /dev/vfio/* || echo no process",
    "containers": "sudo -n docker ps --format '{{.Names}} {{.Image}}' 2>&1 | head -20",
    "attributes": f"{METADATA}/instance/attributes/",
    "preempted": f"{METADATA}/instance/preempted; {METADATA}/instance/maintenance-event",
    "guest attributes": f"{METADATA}/instance/guest-attributes/hostkeys/ | wc -l",
    "ssh log": "sudo -n journalctl -u ssh --no-pager 2>/dev/null | grep -cE 'Connection closed|preauth' || :",
}
"""Questions for the worker: name -> shell command. No command prints a key, a token or an address."""


_PERSONAL = re.compile(r"[\w.+-]+@[\w.-]+|\b\d{1,3}(?:\.\d{1,3}){3}\b|projects?[ /#]\d{6,}")
"""Accounts, addresses and project numbers, which the service includes in its texts."""


class Notes:
    """Prints observations without personal data; a repeated question prints only changed answers."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._began = time.monotonic()
        self._last: dict[str, object] = {}

    def add(self, what: str, said: object) -> None:
        seconds = round(time.monotonic() - self._began, 2)
        line = json.dumps({"seconds": seconds, "what": what, "said": said}).replace(self._project, "PROJECT")
        print(_PERSONAL.sub("...", line), flush=True)

    def add_if_changed(self, what: str, said: object) -> None:
        if self._last.get(what) != said:
            self._last[what] = said
            self.add(what, said)


class Hour:
    """One node and all questions about it. `names` holds every requested node until it is gone."""

    def __init__(self, chosen: argparse.Namespace, client: tpu_v2.TpuClient, notes: Notes, keys: Path) -> None:
        self.chosen, self.client, self.notes, self.keys = chosen, client, notes, keys
        self.parent = f"projects/{chosen.project}/locations/{chosen.zone}"
        self.names: list[str] = []
        # A create with a lost answer may take effect shortly after GetNode said NOT_FOUND.
        self.may_come_until: dict[str, float] = {}
        self.until = time.monotonic() + chosen.minutes * 60

    def answer(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of *call*; None if the service refused it, which is an observation."""
        try:
            return call()
        except GoogleAPICallError as error:
            status = error.grpc_status_code
            self.notes.add_if_changed(what, {"code": status.name if status else "?", "message": error.message})
            return None

    def create(self, suffix: str) -> str:
        """Name of the operation; empty if the service refused the call."""
        chosen, name = self.chosen, f"first-hour-{secrets.token_hex(4)}{suffix}"
        node = tpu_v2.Node(
            accelerator_type=chosen.type,
            runtime_version=chosen.runtime,
            network_config=tpu_v2.NetworkConfig(enable_external_ips=not chosen.internal, network=chosen.network),
            scheduling_config=tpu_v2.SchedulingConfig(spot=not chosen.on_demand),
            metadata={"ssh-keys": f"{chosen.user}:{self._public()}", "enable-oslogin": "FALSE"},
            labels={"made-by": "first-hour"},
        )
        self.names.append(name)
        self.may_come_until[name] = time.monotonic() + CALL_SECONDS + MAY_COME_SECONDS
        line = f"gcloud compute tpus tpu-vm delete {name} --zone={chosen.zone} --project={chosen.project}"
        print(f"if this script is killed: {line}", file=sys.stderr, flush=True)
        operation = self.answer(
            "create", lambda: self.client.create_node(parent=self.parent, node_id=name, node=node, timeout=CALL_SECONDS)
        )
        if operation is None:
            return ""
        del self.may_come_until[name]
        return str(operation.operation.name)

    def _public(self) -> str:
        return (self.keys / "key.pub").read_text().strip()

    def path(self, name: str) -> str:
        return f"{self.parent}/nodes/{name}"

    # --- the questions

    def ask_pages(self) -> None:
        """Is page_size 1000 accepted, and what does `unreachable` contain?"""
        everywhere = f"projects/{self.chosen.project}/locations/-"
        for size in (1000, 100):
            request = tpu_v2.ListNodesRequest(parent=everywhere, page_size=size)
            pager = self.answer(f"page_size {size}", lambda: self.client.list_nodes(request=request, timeout=60))  # noqa: B023
            if pager is not None:
                self.notes.add(f"page_size {size}", {"taken": True, "unreachable": list(pager.unreachable)})

    def watch(self, name: str, operation: str) -> None:
        """Poll each second until the worker answered all questions, the create failed, or time is up."""
        tried_port = tried_login = 0.0
        while time.monotonic() < self.until:
            node = self.answer("GetNode", lambda: self.client.get_node(name=self.path(name), timeout=CALL_SECONDS))
            if node is not None:
                self.notes.add_if_changed("node", _shown(node))
            self._ask_list(name)
            self._ask_guest_attributes(name)
            if self._has_failed(operation):
                return
            host = self._host(node)
            now = time.monotonic()
            if host and now - tried_port >= BANNER_SECONDS:
                tried_port = now
                self.notes.add_if_changed("banner", _banner(host, self.chosen.ssh_port))
            if host and now - tried_login >= LOGIN_SECONDS:
                tried_login = now
                result = self._login(host, "true")
                self.notes.add_if_changed("login", result)
                if result == "in":
                    self._ask_inside(host)
                    return
            time.sleep(1)
        self.notes.add("time", "up before the worker could answer")

    def _ask_list(self, name: str) -> None:
        found = self.answer("ListNodes", lambda: list(self.client.list_nodes(parent=self.parent, timeout=CALL_SECONDS)))
        if found is not None:
            self.notes.add_if_changed("listed", [one.state.name for one in found if one.name.endswith(f"/{name}")])

    def _ask_guest_attributes(self, name: str) -> None:
        request = tpu_v2.GetGuestAttributesRequest(name=self.path(name), query_path="hostkeys/")
        found = self.answer("GetGuestAttributes", lambda: self.client.get_guest_attributes(request=request, timeout=30))
        if found is not None:
            items = [item for one in found.guest_attributes for item in one.query_value.items]
            self.notes.add_if_changed("GetGuestAttributes", sorted(f"{one.key} {_digest(one.value)}" for one in items))

    def _has_failed(self, name: str) -> bool:
        operation = self.answer("GetOperation", lambda: self.client.get_operation({"name": name}, timeout=CALL_SECONDS))
        if operation is None:
            return False
        error = {"code": operation.error.code, "message": operation.error.message}
        failed = operation.done and operation.HasField("error")
        self.notes.add_if_changed("operation", {"done": operation.done, **({"error": error} if failed else {})})
        return bool(failed)

    def _host(self, node: Any) -> str:
        if node is None or not node.network_endpoints:
            return ""
        endpoint = node.network_endpoints[0]
        return str(endpoint.ip_address if self.chosen.internal else endpoint.access_config.external_ip)

    def _login(self, host: str, command: str) -> str:
        """`in`, or the last line of ssh's error output."""
        done = self._ssh(host, command)
        return "in" if done.returncode == 0 else _last_line(done.stderr)

    def _ssh(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        known = self.keys / "known_hosts"
        options = [
            "BatchMode=yes",
            "ConnectTimeout=8",
            "StrictHostKeyChecking=accept-new",
            f"UserKnownHostsFile={known}",
        ]
        words = [word for option in options for word in ("-o", option)]
        line = ["ssh", "-F", "none", "-i", str(self.keys / "key"), "-p", str(self.chosen.ssh_port), *words]
        line += [f"{self.chosen.user}@{host}", command]
        try:
            return subprocess.run(
                line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(line, 255, "", "no answer for 90 s")

    def _ask_inside(self, host: str) -> None:
        known = (self.keys / "known_hosts").read_text().split()
        self.notes.add("host key that was shown", _digest(known[-1]) if known else "none")
        for question, command in INSIDE.items():
            done = self._ssh(host, command)
            self.notes.add(f"inside: {question}", done.stdout.strip().splitlines()[:30] or _last_line(done.stderr))

    def ask_burst(self, name: str) -> None:
        """Are 100 reads at once refused, and how?"""
        refused: dict[str, int] = {}
        began = time.monotonic()
        for _ in range(100):
            try:
                self.client.get_node(name=self.path(name), timeout=CALL_SECONDS)
            except GoogleAPICallError as error:
                refused[error.message] = refused.get(error.message, 0) + 1
        self.notes.add("100 GetNode", {"seconds": round(time.monotonic() - began, 1), "refused": refused})

    # --- the end

    def delete_all(self) -> None:
        """Delete until GetNode says NOT_FOUND for every requested name, however long that takes."""
        for turn in itertools.count():
            for name in list(self.names):
                self._delete(name, asks=turn % DELETE_EVERY_TURNS == 0)
            if not self.names:
                return
            time.sleep(GONE_SECONDS)

    def _delete(self, name: str, *, asks: bool) -> None:
        path = self.path(name)
        try:
            self.client.get_node(name=path, timeout=CALL_SECONDS)
        except NotFound:
            if time.monotonic() >= self.may_come_until.get(name, 0.0):
                self.names.remove(name)
                self.notes.add("gone", name)
            return
        except Exception as error:
            self.notes.add_if_changed("GetNode at the end", type(error).__name__)
        if asks:
            with contextlib.suppress(Exception):
                self.client.delete_node(name=path, timeout=CALL_SECONDS)


def main() -> int:
    chosen = _arguments()
    notes = Notes(chosen.project)
    print(_price(chosen), file=sys.stderr)
    if not chosen.yes and input("Create it? [y/N] ").strip().lower() not in ("y", "yes"):
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    with _client(chosen.endpoint) as client, _key() as keys:
        hour = Hour(chosen, client, notes, keys)
        try:
            hour.ask_pages()
            if operation := hour.create(""):
                name = hour.names[-1]
                hour.watch(name, operation)
                hour.ask_burst(name)
                hour.answer("delete", lambda: client.delete_node(name=hour.path(name), timeout=CALL_SECONDS))
                hour.answer("second delete", lambda: client.delete_node(name=hour.path(name), timeout=CALL_SECONDS))
            if second := hour.create("-b"):
                # Delete a node while it is CREATING: how does its operation end?
                time.sleep(3)
                late = hour.names[-1]
                hour.answer("early delete", lambda: client.delete_node(name=hour.path(late), timeout=CALL_SECONDS))
                notes.add("operation of a create that was deleted", hour._has_failed(second))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda *_: print("deleting the created nodes first", file=sys.stderr))
            hour.delete_all()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--type", default="v5litepod-1")
    parser.add_argument("--runtime", default="", help="default: the catalogue's runtime for the type")
    parser.add_argument("--network", default="")
    parser.add_argument("--internal", action="store_true", help="no external address; run this inside the VPC")
    parser.add_argument("--on-demand", action="store_true", help="instead of spot")
    parser.add_argument("--user", default="ubuntu")
    parser.add_argument("--minutes", type=float, default=15.0, help=f"how long to watch, at most {LONGEST_MINUTES}")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--endpoint", default="", help="an emulated cloud, as 127.0.0.1:PORT")
    parser.add_argument("--ssh-port", type=int, default=22)
    chosen = parser.parse_args()
    chosen.minutes = min(chosen.minutes, LONGEST_MINUTES)
    chosen.runtime = chosen.runtime or accelerators.derive(chosen.type).default_runtime
    return chosen


def _price(chosen: argparse.Namespace) -> str:
    tier = Provisioning.ON_DEMAND if chosen.on_demand else Provisioning.SPOT
    price = accelerators.chip_hour_price(chosen.type, chosen.zone, tier)
    chips = accelerators.derive(chosen.type).chips
    cost = f"about {price.usd_per_chip_hour * chips:.2f} USD an hour" if price else "price not in the catalogue"
    what = f"{chosen.type} as {tier.value} in {chosen.zone}"
    return f"{what}: {cost}; watched for {chosen.minutes:g} minutes at most, then deleted; a second is deleted at once"


@contextlib.contextmanager
def _client(endpoint: str) -> Iterator[tpu_v2.TpuClient]:
    if not endpoint:
        yield tpu_v2.TpuClient()
        return
    with grpc.insecure_channel(endpoint) as channel:
        yield tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))


@contextlib.contextmanager
def _key() -> Iterator[Path]:
    """A folder with a new key for this run, and its known hosts."""
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    try:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "first-hour", "-f", folder / "key"], check=True
        )
        yield folder
    finally:
        shutil.rmtree(folder)


def _shown(node: Any) -> dict[str, object]:
    """The relevant fields of a node, without addresses, keys and accounts."""
    network = node.network_config
    return {
        "state": getattr(node.state, "name", str(node.state)),
        "health": getattr(node.health, "name", str(node.health)),
        "endpoints": len(node.network_endpoints),
        "with external address": sum(bool(one.access_config.external_ip) for one in node.network_endpoints),
        "has id": bool(node.id),
        "metadata": sorted(node.metadata),
        "network is named in full": "/" in network.network,
        "queued resource": bool(node.queued_resource),
    }


def _banner(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=4) as connection:
            connection.settimeout(4)
            return connection.recv(100).decode(errors="replace").strip() or "closed without a banner"
    except OSError as error:
        return type(error).__name__


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
