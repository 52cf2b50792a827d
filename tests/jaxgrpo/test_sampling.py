"""Drawing a token: the law, its truncations, and the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxgrpo.sampling import categorical, draw, tempered, truncate

ONE = jnp.float32(1)


def uniforms(count: int, seed: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), (count,))


@pytest.mark.parametrize("vocab", [7, 512, 2000])
def test_draws_follow_the_softmax(vocab: int):
    logits = 2 * jax.random.normal(jax.random.key(1), (vocab,))
    draws = 40_000
    tokens = np.asarray(categorical(uniforms(draws), jnp.broadcast_to(logits, (draws, vocab))))
    expected = np.asarray(jax.nn.softmax(logits), np.float64) * draws
    observed = np.bincount(tokens, minlength=vocab)
    # Rare tokens together, so that every cell of the chi-square expects enough.
    rare = expected < 20
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep] * draws / expected[keep].sum()).pvalue > 1e-4


@pytest.mark.parametrize("vocab", [5, 600])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_forbidden_token_is_never_drawn(vocab: int, uniform: float):
    logits = jnp.full((vocab, vocab), -jnp.inf).at[jnp.arange(vocab), jnp.arange(vocab)].set(-3.0)
    np.testing.assert_array_equal(categorical(jnp.full(vocab, uniform, jnp.float32), logits), np.arange(vocab))


def test_top_k_keeps_the_likeliest():
    logits = jnp.array([[0.0, 3.0, 1.0, 2.0]])
    np.testing.assert_array_equal(jnp.isfinite(truncate(logits, top_k=2, top_p=None))[0], [False, True, False, True])
    np.testing.assert_array_equal(truncate(logits, top_k=0, top_p=None), logits)
    np.testing.assert_array_equal(truncate(logits, top_k=9, top_p=None), logits)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-6, [1]), (0.49, [1]), (0.51, [1, 3]), (0.81, [1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_nucleus(top_p: float, kept: list[int]):
    logits = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))
    finite = np.flatnonzero(jnp.isfinite(truncate(logits, top_k=0, top_p=jnp.float32(top_p)))[0])
    np.testing.assert_array_equal(finite, kept)


def test_log_probability_is_that_of_the_tempered_untruncated_distribution():
    logits = jax.random.normal(jax.random.key(2), (64, 40))
    temperature = jnp.float32(0.6)
    token, log_prob = draw(uniforms(64), logits, temperature=temperature, top_k=3, top_p=jnp.float32(0.8))
    expected = jax.nn.log_softmax(logits / 0.6)[jnp.arange(64), token]
    np.testing.assert_allclose(log_prob, expected, atol=1e-5)
    rank = (logits > jnp.take_along_axis(logits, token[:, None], 1)).sum(1)
    assert int(rank.max()) < 3


def test_temperature_zero_is_greedy_and_finite():
    logits = jax.random.normal(jax.random.key(3), (32, 50)).at[:, 7].set(-jnp.inf)
    token, log_prob = draw(uniforms(32), logits, temperature=jnp.float32(0))
    np.testing.assert_array_equal(token, logits.argmax(-1))
    assert bool(jnp.isfinite(log_prob).all())


def test_a_row_does_not_depend_on_its_neighbours():
    logits = jax.random.normal(jax.random.key(4), (16, 700))
    together, _ = draw(uniforms(16), logits, temperature=ONE)
    alone = [int(draw(uniforms(16)[i : i + 1], logits[i : i + 1], temperature=ONE)[0][0]) for i in range(16)]
    np.testing.assert_array_equal(together, alone)


def test_temperature_divides_once():
    np.testing.assert_allclose(tempered(jnp.array([1.0, 2.0]), jnp.float32(0.5)), [2.0, 4.0])
