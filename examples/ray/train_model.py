"""
Trains one small model; hydra makes a sweep of it, one host for each combination.

python train_model.py --multirun hydra/launcher=ray model=mlp,cnn optimizer.lr=1e-3,1e-4                # on TPUs
python train_model.py --multirun hydra/launcher=ray model=mlp,cnn optimizer.lr=1e-3,1e-4 device=cpu    # on CPUs
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import hydra

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Before Ray is imported: the results of two trainings are no repetition.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
SIDE, CLASSES = 8, 4


def batch(seed: int, step: int, size: int) -> tuple[Any, Any]:
    """Noisy pictures with a bright line in one of four places; they depend on seed and step alone."""
    import numpy as np

    rng = np.random.default_rng([seed, step])
    labels = rng.integers(0, CLASSES, size)
    pictures = rng.normal(0, 1, (size, SIDE, SIDE)).astype(np.float32)
    pictures[np.arange(size), 2 * labels] += 1
    return pictures, labels


def initial(model: DictConfig, seed: int) -> dict[str, Any]:
    import jax

    first, last = jax.random.split(jax.random.key(seed))
    inputs = SIDE * SIDE if model.name == "mlp" else model.width * SIDE * SIDE
    shapes = {"mlp": (inputs, model.width), "cnn": (3, 3, 1, model.width)}
    hidden = model.width if model.name == "mlp" else inputs
    return {
        "first": jax.random.normal(first, shapes[model.name]) * 0.1,
        "last": jax.random.normal(last, (hidden, CLASSES)) * 0.1,
    }


def logits(model: DictConfig, params: dict[str, Any], pictures: Any) -> Any:
    import jax

    if model.name == "mlp":
        hidden = pictures.reshape(len(pictures), -1) @ params["first"]
    else:
        layout = ("NHWC", "HWIO", "NHWC")
        hidden = jax.lax.conv_general_dilated(pictures[..., None], params["first"], (1, 1), "SAME", None, None, layout)
    return jax.nn.relu(hidden).reshape(len(pictures), -1) @ params["last"]


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    import jax  # only where it trains: the driver of a sweep must not take the chips
    import optax

    optimizer = optax.adam(config.optimizer.lr)
    params = initial(config.model, config.seed)
    state = optimizer.init(params)

    def loss(params: Any, pictures: Any, labels: Any) -> Any:
        answers = logits(config.model, params, pictures)
        return optax.softmax_cross_entropy_with_integer_labels(answers, labels).mean()

    @jax.jit
    def step(params: Any, state: Any, pictures: Any, labels: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(jax.grad(loss)(params, pictures, labels), state)
        return optax.apply_updates(params, changes), state

    for number in range(config.steps):
        params, state = step(params, state, *batch(config.seed, number, config.batch))
    pictures, labels = batch(config.seed, config.steps, 1000)
    right = float((logits(config.model, params, pictures).argmax(1) == labels).mean())
    where = os.environ.get("TPU_NAME", "the head")
    words = f"model={config.model.name} lr={config.optimizer.lr} accuracy={right:.3f}"
    print(f"{words} on {where} ({jax.default_backend()})", flush=True)
    return right


if __name__ == "__main__":
    main()
