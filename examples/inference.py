#!/usr/bin/env python3
"""
Keep a swarm of HTTP servers alive on preemptible TPUs, and check their health.

    python examples/inference.py serve --zone us-central1-a --tpus 4 --accelerator-type v5litepod-1
    python examples/inference.py health --zone us-central1-a --tpus 4

    $ curl -d '{"prompt": "The ", "length": 80}' http://NODE:8000/generate

tpucare replaces a preempted node and restarts a server that ended; behind a load balancer, clients do not notice. The
server is inference_server.py: put your model there. `health` asks each server from within its node, so no port has
to be open, and exits with status 1 unless all servers answer.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tpucare

HERE = Path(__file__).resolve().parent
SERVER = HERE / "inference_server.py"

# The server listens on the address of the SSH connection: the VPC address of a TPU VM, the worker's in the emulator.
START = """\
set -eu
address=$(echo "$SSH_CONNECTION" | cut -d ' ' -f 3)
screen -dmS server bash -c 'exec python3 inference_server.py "$@" >>server.log 2>&1' server \\
  --address "$address" --port "$1" --text corpus.txt
"""
HEALTH = """\
address=$(echo "$SSH_CONNECTION" | cut -d ' ' -f 3)
exec python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())' \\
  "http://$address:$1/health"
"""


class Swarm:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def created(self, host: str, context: dict[str, object] | None) -> dict[str, object]:
        """Called once for each new node. The returned context survives nodes and restarts."""
        served = int(str(context["served"])) if context else 0
        return {"host": host, "served": served + 1}

    def start(self, context: dict[str, object], worker: int) -> None:
        """Called for every host of a new node, and again when its server has ended: sends files, starts the server."""
        host, zone = str(context["host"]), self.options.zone
        tpucare.send_to_tpu(host, zone, "inference_server.py", SERVER.read_text(), worker)
        tpucare.send_to_tpu(host, zone, "corpus.txt", self.options.text.read_text(), worker)
        tpucare.exec_on_tpu(host, zone, f"bash -c {shlex.quote(START)} start {self.options.port}", worker)

    def health(self) -> bool:
        """Ask all servers at once and print a line for each; True if all answer."""
        names = [f"{self.options.prefix}-{number}" for number in range(self.options.tpus)]
        with ThreadPoolExecutor(max_workers=32) as pool:
            rows = list(pool.map(self.ask_health, names))
        for name, row in zip(names, rows, strict=True):
            print(f"{name:20} {'up  ' if 'requests' in row else 'down'}  {json.dumps(row)}")
        return all("requests" in row for row in rows)

    def ask_health(self, name: str) -> dict[str, object]:
        try:
            output = tpucare.exec_on_tpu(
                name, self.options.zone, f"bash -c {shlex.quote(HEALTH)} health {self.options.port}"
            )
            answer: dict[str, object] = json.loads(output)
            return answer
        except (tpucare.TpuCareError, ValueError) as error:
            return {"why": str(error).splitlines()[0]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("serve", "health"))
    parser.add_argument("--prefix", default="serve", help="the slots are PREFIX-0, PREFIX-1, ...")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--tpus", type=int, default=2, help="number of nodes to keep")
    parser.add_argument("--accelerator-type", default="v5litepod-1")
    parser.add_argument("--service-account")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--text", type=Path, default=HERE / "train" / "corpus.txt", help="training text of the model")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    swarm = Swarm(options)
    if options.do == "health":
        sys.exit(0 if swarm.health() else 1)
    tpucare.start_multiple(
        prefix=options.prefix,
        # From v5 on only the type name matters; these two values do not.
        tpu_version=5,
        slices=1,
        accelerator_type=options.accelerator_type,
        zone=options.zone,
        preemptible=True,
        service_account=options.service_account,
        start_fn=swarm.start,
        creation_callback=swarm.created,
        tpus=options.tpus,
        on_exit="restart",
    )


if __name__ == "__main__":
    main()
