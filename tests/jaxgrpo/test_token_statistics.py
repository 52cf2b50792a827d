"""Log-probability and entropy in chunks of the vocabulary, against the plain computation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo import token_statistics as statistics
from tests.jaxgrpo.jaxprs import array_shapes

TOKENS, WIDTH = 6, 8
T = jnp.float32(0.7)


def problem(vocab: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH))
    head = jax.random.normal(keys[1], (vocab, WIDTH))
    return hidden, head, jax.random.randint(keys[2], (TOKENS,), 0, vocab - 5)


def chunked(hidden: jax.Array, head: jax.Array, token: jax.Array, real: int, allowed: Any = None) -> Any:
    taken = jnp.einsum("te,te->t", hidden, head[token])
    return statistics.over_vocabulary(
        hidden, head, taken, T, vocab_size=real, logits=lambda h, rows: h @ rows.T, allowed=allowed
    )


def plain(hidden: jax.Array, head: jax.Array, token: jax.Array, real: int, allowed: Any = None) -> Any:
    ids = jnp.arange(head.shape[0])
    mask = (ids < real) & (True if allowed is None else allowed(ids))
    log_probs = jax.nn.log_softmax(jnp.where(mask, hidden @ head.T / T, -jnp.inf))
    log_prob = log_probs[jnp.arange(TOKENS), token]
    safe = jnp.where(jnp.isfinite(log_probs), log_probs, 0.0)
    return statistics.TokenStatistics(
        log_prob, -jnp.sum(jnp.where(jnp.isfinite(log_probs), jnp.exp(safe) * safe, 0), -1)
    )


@pytest.mark.parametrize("chunk", [16, 37, 1000])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch, chunk: int, masked: bool):
    monkeypatch.setattr(statistics, "_LARGEST_CHUNK", chunk)
    vocab, real = 96, 91
    hidden, head, token = problem(vocab)
    allowed = (lambda ids: ids[None] % 3 == token[:, None] % 3) if masked else None

    def total(compute: Any, hidden: jax.Array, head: jax.Array) -> jax.Array:
        found = compute(hidden, head, token, real, allowed)
        return jnp.sum(found.log_prob * jnp.arange(TOKENS)) + jnp.sum(found.entropy**2)

    for ours, theirs in zip(
        chunked(hidden, head, token, real, allowed), plain(hidden, head, token, real, allowed), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    ours = jax.grad(lambda *x: total(chunked, *x), argnums=(0, 1))(hidden, head)
    theirs = jax.grad(lambda *x: total(plain, *x), argnums=(0, 1))(hidden, head)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    np.testing.assert_array_equal(ours[1][real:], 0)


def test_no_array_of_tokens_by_vocabulary_forward_or_backward():
    hidden, head, token = problem(3 * 16_384)
    gradient = jax.grad(lambda h, e: chunked(h, e, token, head.shape[0]).log_prob.sum(), argnums=(0, 1))
    shapes = array_shapes(jax.make_jaxpr(gradient)(hidden, head))
    assert (TOKENS, 16_384) in shapes
    assert not any(TOKENS in shape and head.shape[0] in shape for shape in shapes)


@pytest.mark.parametrize(("vocab", "size"), [(512, 512), (49_152, 16_384), (151_936, 9_496), (32_003, 16_384)])
def test_chunks_divide_the_published_vocabularies(vocab: int, size: int):
    assert statistics.chunk_size(vocab) == size


def test_few_choices_equal_the_masked_vocabulary():
    hidden, head, _ = problem(96)
    choices = jnp.array([[3, 50, 7, -1]] * TOKENS)
    token = jnp.array([3, 50, 7, 3, 50, 7])

    def few(hidden: jax.Array) -> Any:
        logits = jnp.einsum("te,tae->ta", hidden, head[jnp.maximum(choices, 0)])
        return statistics.over_choices(logits, choices, token, T)

    def full(hidden: jax.Array) -> Any:
        return plain(hidden, head, token, 96, lambda ids: jnp.isin(ids, jnp.array([3, 50, 7])))

    for ours, theirs in zip(few(hidden), full(hidden), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    ours, theirs = (jax.grad(lambda h, f=f: f(h).log_prob.sum() + f(h).entropy.sum())(hidden) for f in (few, full))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_position_without_choices_stays_finite_in_value_and_gradient():
    choices = jnp.full((2, 3), -1)

    def total(logits: jax.Array) -> jax.Array:
        found = statistics.over_choices(logits, choices, jnp.zeros(2, jnp.int32), T)
        return found.log_prob.sum() + found.entropy.sum()

    value, gradient = jax.value_and_grad(total)(jnp.ones((2, 3)))
    assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(gradient).all())
