"""A toy experiment for the host loop: a real jitted, donating step over a train state, without a model or a game."""

import dataclasses
import functools
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxgrpo.config import TrainConfig
from jaxgrpo.evaluation import Outcome


class State(struct.PyTreeNode):
    params: Any
    opt_state: Any
    algorithm_state: Any
    key: jax.Array
    iteration: jax.Array


_OPTIMIZER = optax.adam(0.1)


def _play(state: State) -> jax.Array:
    """Noise in eighths: their products and sums are exact, so that the two halves give the bits of the whole step."""
    return jnp.round(8 * jax.random.normal(jax.random.fold_in(state.key, state.iteration), (16, 4))) / 8


def _learn(state: State, noise: jax.Array, fails: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["w"] - 1 + 0.125 * noise) ** 2))(state.params)
    updates, opt_state = _OPTIMIZER.update(grads, state.opt_state)
    metrics = {
        "loss": jnp.where(fails, jnp.nan, loss),
        "grad_norm": optax.tree.norm(grads),
        "return_mean": -loss,
        "return_std": noise.std(),
        "success_rate": jnp.exp(-loss),
        "episode_length": jnp.float32(5),
        "unreadable_rate": jnp.float32(0),
        "reply_tokens": jnp.float32(2),
        "entropy": loss,
        "played_tokens": jnp.float32(640),
        "skipped_updates": fails.astype(jnp.float32),
    }
    params = optax.apply_updates(state.params, updates)
    return state.replace(params=params, opt_state=opt_state, iteration=state.iteration + 1), metrics


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: State, fails: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    return _learn(state, _play(state), fails)


_rollout = jax.jit(_play)
_update = jax.jit(_learn, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Toy:
    """`signals` are sent to this process while the iteration of that number runs."""

    config: TrainConfig
    signals: Mapping[int, signal.Signals] = dataclasses.field(default_factory=dict)
    fails: bool = False
    hyperparameters: Any = None
    origin: None = None

    def frozen_digest(self) -> None:
        return None

    def init(self) -> State:
        params = {"w": jax.random.normal(jax.random.key(self.config.seed), (16, 4))}
        return State(
            params=params,
            opt_state=_OPTIMIZER.init(params),
            algorithm_state=(),
            key=jax.random.key(self.config.seed),
            iteration=jnp.int32(0),
        )

    def template(self) -> State:
        return self.init()

    def step(self, state: State, hyperparameters: Any, /) -> tuple[State, dict[str, jax.Array]]:
        self._signal(state)
        return _step(state, jnp.bool_(self.fails))

    def rollout(self, state: State, hyperparameters: Any, /) -> jax.Array:
        self._signal(state)
        return _rollout(state)

    def update(self, state: State, episodes: jax.Array, hyperparameters: Any, /) -> tuple[State, dict[str, jax.Array]]:
        return _update(state, episodes, jnp.bool_(self.fails))

    def transcript(self, episodes: jax.Array, iteration: int, /) -> Iterator[dict[str, Any]]:
        """A row for every other row of the noise."""
        for sample, noise in enumerate(episodes[::2].tolist()):
            yield {"iteration": iteration, "sample": sample, "log_probs": noise}

    def _signal(self, state: State) -> None:
        number = int(state.iteration) + 1
        if number in self.signals:
            signal.raise_signal(self.signals[number])

    def evaluate(self, params: Any, *, episodes: int, temperature: float) -> Outcome:
        threshold = float(jnp.mean((params["w"] - 1) ** 2)) + temperature
        success = np.arange(episodes) % 10 > threshold
        lengths, unreadable = np.full(episodes, 5), np.zeros(episodes)
        return Outcome(returns=success.astype(float), success=success, lengths=lengths, unreadable=unreadable)
