"""
Ray Train over a slice of two hosts: survives preemptions, and ends with the bits of an undisturbed training.

usage: python jax_trainer.py --storage FOLDER [--steps 200] [--save-every 20]

FOLDER is storage that all hosts and the head share: a mounted bucket, or an address such as gs://bucket/folder.
"""

from __future__ import annotations

import argparse
import os
from typing import Any


def train(config: dict[str, Any]) -> None:
    """One host of the slice. JaxTrainer has joined it with the others (`jax.distributed`)."""
    import hashlib
    import tempfile
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray.train
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    rank, hosts = jax.process_index(), jax.process_count()
    per_host = config["batch"] // hosts

    def batch(step: int) -> tuple[jax.Array, jax.Array]:
        """This host's part of the step's batch, which depends on seed and step alone."""
        rng = np.random.default_rng([config["seed"], step])
        inputs = rng.normal(size=(config["batch"], 16)).astype(np.float32)
        targets = np.tanh(inputs[:, :4].sum(1, keepdims=True))
        mine = slice(rank * per_host, (rank + 1) * per_host)
        return tuple(jax.make_array_from_process_local_data(split, each[mine]) for each in (inputs, targets))

    def initial() -> dict[str, np.ndarray]:
        rng = np.random.default_rng(config["seed"])
        shapes = {"first": (16, 64), "last": (64, 1)}
        return {name: (rng.normal(size=shape) / 8).astype(np.float32) for name, shape in shapes.items()}

    def loss(params: dict[str, jax.Array], inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(inputs @ params["first"]) @ params["last"] - targets) ** 2)

    @jax.jit
    def update(params: dict[str, jax.Array], *data: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, slopes = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda each, slope: each - 0.05 * slope, params, slopes), value

    start, values = 0, initial()
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder, np.load(os.path.join(folder, "state.npz")) as saved:
            start, values = int(saved["step"]), {name: saved[name] for name in values}
    print(f"begins at step {start} on {os.environ.get('TPU_NAME')}, host {rank} of {hosts}", flush=True)
    params = {name: jax.device_put(value, whole) for name, value in values.items()}
    for step in range(start + 1, config["steps"] + 1):
        params, value = update(params, *batch(step))
        time.sleep(config["step_seconds"])
        if step % config["save_every"] and step != config["steps"]:
            continue
        values = {
            name: np.asarray(multihost_utils.process_allgather(each, tiled=True)) for name, each in params.items()
        }
        bits = hashlib.sha256(b"".join(values[name].tobytes() for name in sorted(values))).hexdigest()
        metrics = {"step": step, "loss": float(value), "params_sha256": bits}
        with tempfile.TemporaryDirectory() as folder:
            # Each host calls `report`, and the first one brings the checkpoint, since all have the same parameters.
            if rank == 0:
                np.savez(os.path.join(folder, "state.npz"), step=step, **values)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder or address that all hosts share")
    parser.add_argument("--name", default="regression", help="a training of the same name goes on where it was")
    parser.add_argument("--type", default="TPU-V4", help="accelerator, as Ray writes it")
    parser.add_argument("--topology", default="2x2x2")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0, help="time that each step waits, for trials")
    wanted = parser.parse_args()
    # Before Ray is imported: what two hosts say is no repetition.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")

    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    ray.init()
    trainer = JaxTrainer(
        train,
        train_loop_config={
            "seed": 0,
            "batch": 64,
            "steps": wanted.steps,
            "save_every": wanted.save_every,
            "step_seconds": wanted.step_seconds,
        },
        scaling_config=ScalingConfig(
            use_tpu=True,
            accelerator_type=wanted.type,
            topology=wanted.topology,
            num_workers=wanted.hosts,
            resources_per_worker={"TPU": 4},
        ),
        run_config=RunConfig(
            name=wanted.name,
            storage_path=wanted.storage,
            # A preemption is a failure: as many as there are. An error in `train` is one, too, so try it with 0 first.
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            worker_runtime_env={"env_vars": XLA},
        ),
    )
    metrics = trainer.fit().metrics
    print(f"finished at step {metrics['step']}: loss {metrics['loss']:.4f} params_sha256 {metrics['params_sha256']}")


# On CPUs the order of sums depends on the number of threads; a TPU reads none of this.
XLA = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
}


if __name__ == "__main__":
    main()
