import inspect
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxgrpo.algorithms.episode_sampling import Importance, sample_episodes

DRAWS = 20_000
# The keys are fixed, so a sound test passes for good; the level says how surprising its statistics may be.
LEVEL = 1e-3


@partial(jax.jit, static_argnames=("count", "importance"))
def _draw_each(keys, advantages, mask, count, alpha, importance):
    return jax.vmap(lambda key: sample_episodes(key, advantages, mask, count, alpha, importance=importance))(keys)


def _draw_many(advantages, count, alpha, *, mask=None, importance: Importance = "none", seed=0, draws=DRAWS):
    advantages = jnp.asarray(advantages, jnp.float32)
    mask = jnp.ones(advantages.shape, bool) if mask is None else jnp.asarray(mask)
    keys = jax.random.split(jax.random.key(seed), draws)
    return jax.tree.map(np.asarray, _draw_each(keys, advantages, mask, count, alpha, importance))


def _plackett_luce(weights, count):
    """Probability of every ordered draw without replacement."""
    probabilities = {}
    for order in permutations(range(len(weights)), count):
        left, probability = sum(weights), 1.0
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        probabilities[order] = probability
    return probabilities


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_ordered_draws_follow_plackett_luce(alpha):
    advantages = [0.5, -2.0, 1.0, -0.25]
    expected = _plackett_luce(np.abs(advantages) ** alpha, 2)
    drawn = _draw_many(advantages, 2, alpha).indices
    observed = [np.sum(np.all(drawn == order, axis=1)) for order in expected]
    assert sum(observed) == DRAWS
    assert stats.chisquare(observed, np.array(list(expected.values())) * DRAWS).pvalue > LEVEL


@pytest.mark.parametrize(
    ("advantages", "alpha"), [([0.0, -5.0, 0.0, 1e-3, 2.0, 0.0], 0.0), ([0.0] * 6, 0.0), ([0.0] * 6, 1.0)]
)
def test_uniform_where_it_must_be(advantages, alpha):
    """alpha = 0 draws zero advantages like all others; with nothing but zeros every alpha is uniform."""
    drawn = _draw_many(advantages, 2, alpha, seed=1).indices
    observed = [np.sum(np.all(drawn == order, axis=1)) for order in permutations(range(6), 2)]
    assert sum(observed) == DRAWS
    assert stats.chisquare(observed).pvalue > LEVEL


@pytest.mark.parametrize("alpha", [1e-6, 1.0, 50.0])
def test_zero_advantages_then_masked_come_last(alpha):
    advantages = [0.0, 1e-6, 9.0, -3.0, 0.0, 1e6]
    mask = [True, True, False, True, True, True]
    sample = _draw_many(advantages, 6, alpha, mask=mask, draws=500)
    assert all(set(row) == {1, 3, 5} for row in sample.indices[:, :3])
    assert all(set(row) == {0, 4} for row in sample.indices[:, 3:5])
    assert (sample.indices[:, 5] == 2).all()
    assert (sample.weights == [1, 1, 1, 1, 1, 0]).all()
    # Uniform among the zeros as well.
    assert stats.binomtest(int(np.sum(sample.indices[:, 3] == 0)), 500).pvalue > LEVEL


def test_masked_come_last_at_alpha_zero():
    sample = _draw_many([5.0, 0.0, 1.0, 7.0], 3, 0.0, mask=[False, True, True, False], draws=200)
    assert all(set(row) == {1, 2} for row in sample.indices[:, :2])
    assert (sample.weights == [1, 1, 0]).all()


def test_everything_masked_weighs_nothing():
    for importance in ("none", "correct"):
        sample = _draw_many([1.0, jnp.nan, 2.0], 2, 1.0, mask=[False] * 3, importance=importance, draws=20)
        assert (sample.weights == 0).all()
        assert all(len(set(row)) == 2 for row in sample.indices)


def _assert_mean_is(estimates, truth):
    error = np.std(estimates, ddof=1) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - truth) < 4 * error


def _estimates(sample, values, unmasked):
    return np.sum(sample.weights.astype(np.float64) * values[sample.indices], axis=1) / unmasked


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_priority_weights_are_unbiased(count, alpha):
    advantages = np.array([0.5, -2.0, 1.0, -0.3, 1.5, 0.8])
    mask = np.array([True, True, True, True, True, False])
    values = np.array([0.5, 3.0, 2.0, 0.2, 4.0, 99.0])
    sample = _draw_many(advantages, count, alpha, mask=mask, importance="correct", seed=2)
    _assert_mean_is(_estimates(sample, values, 5), values[mask].mean())
    # The unweighted draws are biased, so the test above would notice weights that do nothing.
    plain = np.mean(values[sample.indices], axis=1)
    if alpha == 1.0 and count < 4:
        assert abs(plain.mean() - values[mask].mean()) > 10 * plain.std() / np.sqrt(DRAWS)


@pytest.mark.parametrize("count", [2, 3])
def test_terms_at_zero_advantage_need_draws_beyond_the_others(count):
    """Up to the number of nonzero advantages such terms are missed, as documented; beyond it they are estimated."""
    advantages, values = np.array([0.0, 1.0, -2.0, 0.0]), np.array([3.0, 1.0, -2.0, 5.0])
    sample = _draw_many(advantages, count, 1.0, importance="correct", seed=3)
    if count == 2:
        np.testing.assert_allclose(_estimates(sample, values, 4), (1.0 - 2.0) / 4)
    else:
        _assert_mean_is(_estimates(sample, values, 4), values.mean())


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_draws_that_are_certain_weigh_one(alpha):
    full = _draw_many([0.0, 1.0, -2.0, 0.1], 4, alpha, importance="correct", draws=50)
    assert (full.weights == 1).all()
    # All three unmasked ones are drawn, the fourth draw is void.
    mask = [True, True, False, True, False]
    padded = _draw_many([0.0, 1.0, -2.0, 0.1, 4.0], 4, alpha, mask=mask, importance="correct", draws=50)
    assert (padded.weights == [1, 1, 1, 0]).all()
    exact = _draw_many([0.0, 1.0, -2.0, 0.1, 4.0], 3, alpha, mask=mask, importance="correct", draws=50)
    assert (exact.weights == 1).all()


def test_dominant_episode_weighs_one():
    sample = _draw_many([1e6, 1.0, 1.0, 1.0], 2, 10.0, importance="correct", draws=50)
    assert (sample.indices[:, 0] == 0).all()
    np.testing.assert_allclose(sample.weights[:, 0], 1.0)
    assert np.isfinite(sample.weights).all()


@pytest.mark.parametrize("importance", ["none", "correct"])
def test_padding_changes_no_draw(importance):
    advantages = np.array([0.5, -2.0, 0.0, 1.0, -0.25, 3.0])
    padded, mask = np.append(advantages, [7.0] * 5), np.arange(11) < 6
    short = _draw_many(advantages, 3, 1.0, importance=importance, draws=200)
    long = _draw_many(padded, 3, 1.0, mask=mask, importance=importance, draws=200)
    np.testing.assert_array_equal(short.indices, long.indices)
    np.testing.assert_allclose(short.weights, long.weights, rtol=1e-6)


def test_one_trace_over_alpha_and_same_result_under_vmap():
    advantages, mask = jnp.array([0.0, -2.0, 1.0, 0.3, 0.0]), jnp.ones(5, bool)
    traces = []

    @jax.jit
    def draw(key, alpha):
        traces.append(1)
        return sample_episodes(key, advantages, mask, 3, alpha, importance="correct")

    key, alphas = jax.random.key(5), jnp.array([0.0, 0.5, 1.0, 4.0])
    alone = [draw(key, alpha) for alpha in alphas]
    assert len(traces) == 1
    stacked = jax.vmap(draw, in_axes=(None, 0))(key, alphas)
    eager = [sample_episodes(key, advantages, mask, 3, float(alpha), importance="correct") for alpha in alphas]
    for i in range(4):
        for other in (alone[i], eager[i]):
            np.testing.assert_array_equal(stacked.indices[i], other.indices)
            np.testing.assert_allclose(stacked.weights[i], other.weights, rtol=1e-5)


def test_same_key_same_draw():
    one, two = (_draw_many(np.arange(8.0), 4, 1.0, seed=9, draws=30) for _ in range(2))
    np.testing.assert_array_equal(one.indices, two.indices)
    assert len({tuple(row) for row in one.indices}) > 5


def test_bad_options_are_named():
    unchecked = inspect.unwrap(sample_episodes)
    key, advantages, mask = jax.random.key(0), jnp.ones(3), jnp.ones(3, bool)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count={count} of 3 episodes; choose 1 to 3"):
            unchecked(key, advantages, mask, count, 1.0)
    with pytest.raises(ValueError, match="alpha=-1"):
        unchecked(key, advantages, mask, 2, -1)
    with pytest.raises(ValueError, match="importance='full' is unknown; choose one of none, correct"):
        unchecked(key, advantages, mask, 2, 1.0, importance="full")
