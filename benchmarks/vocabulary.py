"""What statistics over the whole vocabulary cost, of MS-GRPO and of ETPO, as the vocabulary grows.

    python benchmarks/vocabulary.py [--rounds 9] [--tokens 128] [--width 576]

MS-GRPO needs each token's log-probability and the entropy; ETPO the divergence from a reference and the expectation of
a critic as well, so it goes through three products where the other has one. Forward and backward to hidden states,
behind a frozen head, as with adapters. All sides run in turns, so that a busy machine slows them alike; medians are
reported, and the temporary memory of the compiled function.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo.token_statistics import Scores, over_vocabulary

SIZES = (49_152, 151_936)
"""Of SmolLM2 and Qwen2.5."""


def product(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return hidden @ head.T


def ms_grpo(policy: Scores, reference: Scores, critic: Scores) -> jax.Array:
    """Sum of log-probabilities and entropies."""
    del reference, critic
    found = over_vocabulary(*policy, _taken(policy), jnp.float32(1), vocab_size=len(policy.head), logits=product)
    return jnp.sum(found.log_prob + 0.01 * found.entropy)


def etpo(policy: Scores, reference: Scores, critic: Scores) -> jax.Array:
    """Sum of both losses' statistics; Q is the change of the critic's scores."""
    found = over_vocabulary(
        *policy,
        _taken(policy),
        jnp.float32(1),
        vocab_size=len(policy.head),
        logits=product,
        reference=reference,
        critic=jax.lax.stop_gradient(critic),
        critic_is_relative=True,
    )
    assert found.kl is not None and found.expected_q is not None
    return jnp.sum(0.01 * found.kl - found.expected_q + jnp.square(_taken(critic) - _taken(reference)))


def _taken(scores: Scores) -> jax.Array:
    """The score of one token at each place."""
    return jnp.sum(scores.hidden * scores.head[: scores.hidden.shape[0]], axis=-1)


def compiled(loss: Any, tokens: int, vocab: int, width: int) -> tuple[Any, int]:
    """A gradient ready to run, and the bytes of its temporary arrays."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = [jax.random.normal(key, (tokens, width)) for key in keys[:3]]
    head = jax.random.normal(keys[3], (vocab, width)) / width**0.5

    def gradient(hidden: list[jax.Array], head: jax.Array) -> Any:
        def of(policy: jax.Array, critic: jax.Array) -> jax.Array:
            return loss(Scores(policy, head), Scores(hidden[1], head), Scores(critic, head))

        return jax.grad(of, argnums=(0, 1))(hidden[0], hidden[2])

    program = jax.jit(gradient).lower(hidden, head).compile()
    memory: Any = program.memory_analysis()
    return lambda: jax.block_until_ready(program(hidden, head)), memory.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=576)
    given = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{given.tokens} tokens of width {given.width} on {jax.device_count()} {device}, {given.rounds} rounds")
    sides = {
        (loss.__name__, vocab): compiled(loss, given.tokens, vocab, given.width)
        for vocab in SIZES
        for loss in (ms_grpo, etpo)
    }
    seconds: dict[Any, list[float]] = {side: [] for side in sides}
    for turn in range(given.rounds + 1):
        for side, (run, _) in sides.items():
            began = time.perf_counter()
            run()
            if turn:  # the first warms up
                seconds[side].append(time.perf_counter() - began)
    for (name, vocab), (_, temporary) in sides.items():
        median = statistics.median(seconds[name, vocab])
        ratio = median / statistics.median(seconds["ms_grpo", vocab])
        print(f"{name:8} vocabulary {vocab:7,}: {median * 1e3:8.1f} ms, {ratio:4.2f} times, {temporary / 1e6:7.1f} MB")


if __name__ == "__main__":
    main()
