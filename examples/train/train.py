"""
Train a small character-level language model on every host of a TPU slice (or on CPUs), and survive preemption.

The final parameters are the same, bit for bit, whether the run was undisturbed or was killed and resumed any
number of times on the same number of hosts: batches depend on the step alone, everything a step needs is in the
checkpoint, and the numerics are pinned.

Exit status: 0 trained to the end; 75 an error, for instance another host died; 143 stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hosts

HOST = hosts.Host.from_environment(os.environ)
hosts.prepare_jax(HOST, os.environ)  # before JAX is imported

import jax  # noqa: E402
import language_model  # noqa: E402
import numpy as np  # noqa: E402
from checkpoints import Checkpoints, params_sha256, write_result  # noqa: E402
from etils import epath  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

BY_DEVICE, REPLICATED = PartitionSpec("data"), PartitionSpec()
CORPUS = Path(__file__).with_name("corpus.txt")
FAILED, TERMINATED = 75, 128 + signal.SIGTERM


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--save-every", type=int, default=25, help="steps between checkpoints; 0: the interval that tpucare advises"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="windows per step over all hosts (rounded up)")
    parser.add_argument("--log-every", type=int, default=1, help="steps between checks of loss, notice and SIGTERM")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step")
    return parser.parse_args()


def say(text: str) -> None:
    if HOST.index == 0:
        print(text, flush=True)


def data_parallel_step(mesh: Mesh) -> Callable[[language_model.State, jax.Array], language_model.State]:
    """The step of the model, each device on its own windows; one average of gradients, after the backward pass."""
    average = partial(jax.lax.pmean, axis_name="data")
    step = partial(language_model.train_step, average=average)
    specs = {"in_specs": (REPLICATED, BY_DEVICE), "out_specs": REPLICATED}
    # With check_vma, JAX would sum the gradients itself, across hosts, in each iteration of the model's loop.
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


class Training:
    """One run: from the newest complete checkpoint (or the beginning) to the last step."""

    def __init__(self, options: argparse.Namespace, requests: hosts.Requests) -> None:
        self.options = options
        self.requests = requests
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("data",))
        self.batch_size = -(-options.batch // devices.size) * devices.size
        self.by_device = NamedSharding(mesh, BY_DEVICE)
        self.on_all_devices = NamedSharding(mesh, REPLICATED)
        self.train_step = data_parallel_step(mesh)
        self.corpus = language_model.Corpus(CORPUS.read_text())
        # Orbax needs an absolute path, and an address such as gs://bucket/run has to stay unchanged.
        is_address = "://" in HOST.checkpoint
        self.folder = epath.Path(HOST.checkpoint if is_address else os.path.abspath(HOST.checkpoint))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folder, say)
        self.cadence = hosts.Cadence(HOST.cadence)

    def run(self) -> int:
        """Train to the end, or until a stop request; returns the exit status."""
        state, step = self.resume()
        first = step + 1
        while step < self.options.steps:
            started = time.monotonic()
            state = self.train_step(state, self.windows(step))
            step += 1
            is_check = step == first or step % self.options.log_every == 0
            wish = self.check_requests(step, state) if is_check else hosts.Wish.NONE
            if wish or self.is_save_step(step):
                self.save(step, state)
            if wish == hosts.Wish.SAVE_AND_STOP:
                return self.stop(step)
            self.checkpoints.report()
            time.sleep(max(0.0, self.options.step_seconds - (time.monotonic() - started)))
        return self.finish(step, state)

    def resume(self) -> tuple[language_model.State, int]:
        def initial() -> language_model.State:
            return language_model.initial_state(self.options.seed, self.corpus.alphabet_size)

        step = hosts.agree_on_step(HOST, self.checkpoints.newest())
        if not step:
            say("starting from the beginning")
            return jax.jit(initial, out_shardings=self.on_all_devices)(), 0
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.on_all_devices),
            jax.eval_shape(initial),
        )
        state = self.checkpoints.restore(step, like)
        say(f"resumed from step {step}")
        return state, step

    def windows(self, step: int) -> jax.Array:
        windows = self.corpus.batch(self.options.seed, step, self.batch_size)
        return jax.make_array_from_callback(windows.shape, self.by_device, lambda index: windows[index])

    def is_save_step(self, step: int) -> bool:
        every = self.options.save_every
        return step == self.options.steps or (every > 0 and step % every == 0)

    def save(self, step: int, state: language_model.State) -> None:
        began = time.monotonic()
        self.checkpoints.save(step, state)
        self.cadence.saved(began)

    def check_requests(self, step: int, state: language_model.State) -> hosts.Wish:
        """Print the progress, and return the largest wish of all hosts."""
        say(f"step {step} loss {float(state['loss']):.4f}")
        asked = hosts.agree(HOST, self.requests.wish())
        wish = asked
        if not wish and not self.options.save_every:
            wish = hosts.agree(HOST, self.cadence.wish())
        if asked:
            say(f"asked to save at step {step}")
        return wish

    def stop(self, step: int) -> int:
        self.checkpoints.close()
        say(f"terminated after step {step}")
        return TERMINATED

    def finish(self, step: int, state: language_model.State) -> int:
        self.checkpoints.close()
        result = {
            "final_step": step,
            "params_sha256": params_sha256(state["params"]),
            "loss": float(state["loss"]),
        }
        if HOST.index == 0:
            write_result(self.folder, result)
        say(f"finished at step {step}: loss {result['loss']:.4f} params_sha256 {result['params_sha256']}")
        return 0


def main() -> None:
    options = parse_arguments()
    requests = hosts.Requests(HOST.notice)
    try:
        hosts.join(HOST)
        requests.listen()
        status = Training(options, requests).run()
        hosts.leave(HOST)
    except BaseException:
        # An ordinary exit would first wait for the other hosts (JAX's shutdown barrier), and one of them is likely
        # dead. Exit at once, so that the whole gang can restart.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(FAILED)
    sys.exit(status)


if __name__ == "__main__":
    main()
