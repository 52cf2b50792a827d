"""What the design's main choices for speed are worth, each against doing without it, on the machine at hand.

    python benchmarks/design_choices.py [--rounds 15] [--model tiny]

The two sides of a comparison run in turns, so that a busy machine slows both; the ratio of their medians is reported.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.build import Experiment, build
from jaxgrpo.config import resolve
from jaxgrpo.episodes import Episodes
from jaxgrpo.policy import LanguageAgentPolicy


def compare(name: str, ours: Callable[[], Any], without: Callable[[], Any], rounds: int) -> None:
    for run in (ours, without):
        jax.block_until_ready(run())
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, times in zip((ours, without), seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - began)
    a, b = map(statistics.median, seconds)
    print(f"{name:58} {a * 1e3:9.1f} ms   without {b * 1e3:9.1f} ms   {b / a:5.2f} times", flush=True)


def played(experiment: Experiment) -> tuple[Any, Episodes]:
    state = experiment.init()
    return state, jax.jit(experiment.train_step.rollout)(state, experiment.fixed, experiment.hyperparameters)


def gradient(policy: LanguageAgentPolicy, params: Any, episodes: Episodes, observation: jax.Array, extra: int) -> Any:
    """Gradient of the sampled tokens' log-probabilities, over the first step of every episode."""

    @jax.jit
    def run(params: Any, ids: jax.Array, length: jax.Array, reply: Any) -> Any:
        def total(params: Any) -> jax.Array:
            found = policy.token_statistics(
                params, policy.prefix(params), ids, length, reply.ids, reply.length, jnp.float32(1)
            )
            return jnp.sum(jnp.where(reply.sampled, found.log_prob, 0.0))

        return jax.grad(total)(params)

    first = jax.tree.map(lambda x: x[:, :, 0].reshape(-1, *x.shape[3:]), episodes.reply)
    length = episodes.observation_length[:, :, 0].reshape(-1) + extra
    return lambda: run(params, observation, length, first)


def shared_prefix(options: dict[str, Any], rounds: int) -> None:
    experiment = build(resolve({**options, "style": "full", "groups": 4, "group_size": 8}))
    state, episodes = played(experiment)
    policy = experiment.policy
    observation = episodes.observation[:, :, 0].reshape(-1, episodes.observation.shape[-1])
    # Rows of equal length have no padding, so the prompt can stand right before the observation.
    assert bool(jnp.all(episodes.observation_length == observation.shape[1]))
    prompt = jnp.asarray(policy.prefix_ids, jnp.int32)
    whole = jnp.concatenate([jnp.broadcast_to(prompt, (observation.shape[0], len(prompt))), observation], axis=1)
    alone = dataclasses.replace(policy, prefix_ids=np.zeros(0, np.int32))
    compare(
        f"gradient, {observation.shape[0]} rows of {observation.shape[1]} tokens, {len(prompt)} shared",
        gradient(policy, state.params, episodes, observation, 0),
        gradient(alone, state.params, episodes, whole, len(prompt)),
        rounds,
    )


def play_in_parts(options: dict[str, Any], rounds: int) -> None:
    parts, whole = (build(resolve({**options, "rollout_rows": rows})) for rows in (128, 0))
    given = parts.init(), parts.fixed, parts.hyperparameters
    ours, without = (jax.jit(e.train_step.rollout) for e in (parts, whole))
    compare(
        "512 episodes played 128 rows at a time",
        lambda: ours(*given),
        lambda: without(*given),
        rounds,
    )


def small_micro_batches(options: dict[str, Any], rounds: int) -> None:
    small, large = (build(resolve({**options, "train_fraction": 1.0, "micro_batch": size})) for size in (64, 1024))
    state, episodes = played(small)
    ours, without = (jax.jit(e.train_step.update) for e in (small, large))
    compare(
        "learning from 512 episodes, 64 rows at a time (or 1,024)",
        lambda: ours(state, episodes, small.fixed, small.hyperparameters),
        lambda: without(state, episodes, small.fixed, small.hyperparameters),
        rounds,
    )


def allowed_logits(options: dict[str, Any], rounds: int) -> None:
    experiment = build(resolve(options))
    given = experiment.init(), experiment.fixed, experiment.hyperparameters
    constraint = experiment.policy.constraint
    assert constraint is not None
    dense = dataclasses.replace(experiment.policy, constraint=dataclasses.replace(constraint, choices=None))
    ours = jax.jit(experiment.train_step)
    without = jax.jit(dataclasses.replace(experiment.train_step, policy=dense))
    compare(
        "step with logits of the allowed tokens alone",
        lambda: ours(*given),
        lambda: without(*given),
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args()
    options = {"model": given.model}
    print(f"{given.model} on {jax.device_count()} {jax.devices()[0].device_kind}, {given.rounds} rounds")
    shared_prefix(options, given.rounds)
    if given.model == "tiny":
        play_in_parts(options, given.rounds)
        small_micro_batches(options, given.rounds)
        allowed_logits(options, given.rounds)


if __name__ == "__main__":
    main()
