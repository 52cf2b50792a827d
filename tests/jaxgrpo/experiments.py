"""Small experiments that several tests share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo.build import Experiment, build
from jaxgrpo.config import resolve
from jaxgrpo.episodes import Episodes

SMALL = {
    "groups": 3,
    "group_size": 4,
    "train_fraction": 1.0,
    "rollout_rows": 0,
    "micro_batch": 16,
    "entropy_bonus": 0.0,
}


@functools.cache
def _build(options: tuple[tuple[str, Any], ...]) -> Experiment:
    return build(resolve({**SMALL, **dict(options)}))


def small(**options: Any) -> Experiment:
    """An experiment with the embedded model and few episodes; the same object for the same options."""
    return _build(tuple(sorted(options.items())))


@functools.cache
def compiled(experiment: Experiment, half: str) -> Callable[..., Any]:
    """The jitted `rollout` or `update` of an experiment, one for all calls."""
    return jax.jit(getattr(experiment.train_step, half))


def replayed(experiment: Experiment, seed: int = 0, ragged: bool = False) -> tuple[Any, Episodes]:
    """A state and episodes played from it, with returns that differ within every group."""
    state = experiment.init()
    episodes = compiled(experiment, "rollout")(state, experiment.fixed, experiment.hyperparameters)
    noise = jax.random.normal(jax.random.key(seed), episodes.reward.shape)
    episodes = episodes._replace(reward=jnp.where(episodes.alive, noise, 0.0))
    if ragged:
        # Replies of unequal length: cut some, as the end of a turn would have.
        length = jax.random.randint(
            jax.random.key(1), episodes.reply.length.shape, 1, 1 + experiment.policy.reply_limit
        )
        inside = jnp.arange(experiment.policy.reply_limit) < length[..., None]
        reply = episodes.reply._replace(
            length=jnp.where(episodes.alive, length, 0),
            ids=jnp.where(inside, episodes.reply.ids, 0),
            sampled=episodes.reply.sampled & inside,
            log_prob=jnp.where(inside, episodes.reply.log_prob, 0.0),
        )
        episodes = episodes._replace(reply=reply)
    return state, episodes


def updated(experiment: Experiment, state: Any, episodes: Episodes, **changes: Any) -> tuple[Any, dict[str, float]]:
    hp = dataclasses.replace(experiment.hyperparameters, **{k: jnp.float32(v) for k, v in changes.items()})
    state, metrics = compiled(experiment, "update")(state, episodes, experiment.fixed, hp)
    return state, {name: float(value) for name, value in metrics.items()}
