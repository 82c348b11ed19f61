"""
A small character-level language model (a GRU), its batches, and one training step, independent of hosts.

XLA compiles the model in about a second: on a new node, compilation takes most of the time to the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

EMBEDDING, WIDTH, CONTEXT = 32, 128, 48
LEARNING_RATE, WARMUP_STEPS = 1e-2, 10

# {"step", "params", "optimizer", "loss"}: the input and output of a step, and the content of a checkpoint.
State = dict[str, Any]


class Corpus:
    """A text as numbers: each character's index in the sorted alphabet of the text."""

    def __init__(self, text: str) -> None:
        alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(alphabet)}
        self.alphabet_size = len(alphabet)
        self.tokens = np.array([number[character] for character in text], np.int32)

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """
        The training windows of *step*, shape (size, CONTEXT + 1).

        They depend on seed and step alone: a resumed run sees exactly the data of an undisturbed one.
        """
        starts = np.random.default_rng([seed, step]).integers(0, len(self.tokens) - CONTEXT, size)
        return self.tokens[starts[:, None] + np.arange(CONTEXT + 1)]


def initial_state(seed: int, alphabet_size: int) -> State:
    """The state before the first step, drawn with numpy because its generators need no compilation."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(scale=rows**-0.5, size=(rows, columns)), jnp.float32)

    params = {
        "embedding": normal(alphabet_size, EMBEDDING),
        "input": normal(EMBEDDING, 3 * WIDTH),
        "hidden": normal(WIDTH, 3 * WIDTH),
        "output": normal(WIDTH, alphabet_size),
    }
    return {
        "step": jnp.int32(0),
        "params": params,
        "optimizer": _optimizer().init(params),
        "loss": jnp.float32(jnp.inf),
    }


def train_step(state: State, windows: jax.Array, average: Callable[[Any], Any]) -> State:
    """One step of AdamW on this device's *windows*; *average* takes the mean over all devices."""
    loss, gradients = average(jax.value_and_grad(_loss)(state["params"], windows))
    updates, optimizer_state = _optimizer().update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state, "loss": loss}


def _optimizer() -> optax.GradientTransformation:
    rate = optax.linear_schedule(LEARNING_RATE / WARMUP_STEPS, LEARNING_RATE, WARMUP_STEPS)
    # Flattened, one update covers all parameters: less to compile, fewer arrays to save.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-3)))


def _loss(params: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per character."""
    chances = jax.nn.log_softmax(_logits(params, windows[:, :-1]))
    return -jnp.mean(jnp.sum(chances * jax.nn.one_hot(windows[:, 1:], chances.shape[-1]), axis=-1))


def _logits(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Shapes: (batch, CONTEXT) -> (batch, CONTEXT, alphabet)."""

    def cell(state: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset_in, update_in, new_in = jnp.split(inputs, 3, axis=-1)
        reset_by, update_by, new_by = jnp.split(state @ params["hidden"], 3, axis=-1)
        update = jax.nn.sigmoid(update_in + update_by)
        new = jnp.tanh(new_in + jax.nn.sigmoid(reset_in + reset_by) * new_by)
        state = update * state + (1 - update) * new
        return state, state

    inputs = params["embedding"][tokens.T] @ params["input"]
    _, states = jax.lax.scan(cell, jnp.zeros((tokens.shape[0], WIDTH)), inputs)
    return states.swapaxes(0, 1) @ params["output"]
