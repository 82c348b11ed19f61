"""The cluster as a program sees it: hosts, slices and their labels. Asks for nothing, so no slice is made."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import ray

SLICE, TYPE, WORKER = "ray.io/tpu-slice-name", "ray.io/tpu-pod-type", "ray.io/tpu-worker-id"


def main() -> None:
    ray.init()
    hosts = [node for node in ray.nodes() if node["Alive"]]
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for host in hosts:
        if SLICE in host["Labels"]:
            slices[host["Labels"][SLICE]].append(host)
    print(f"hosts: {len(hosts)} with the head; slices: {len(slices)}")
    for name, members in sorted(slices.items()):
        members.sort(key=lambda host: int(host["Labels"][WORKER]))
        chips = sum(host["Resources"].get("TPU", 0) for host in members)
        print(f"slice {name}: {members[0]['Labels'][TYPE]}, {len(members)} hosts, {chips:.0f} chips")
        for host in members:
            print(f"  host {host['Labels'][WORKER]} at {host['NodeManagerAddress']}")
            for label, value in sorted(host["Labels"].items()):
                print(f"    {label}: {value}")
    free = ray.available_resources()
    print(f"free: {free.get('CPU', 0):.0f} CPUs, {free.get('TPU', 0):.0f} chips")


if __name__ == "__main__":
    main()
