import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algorithms.advantages import group_advantages

NORMALISATIONS = ["std", "mean", "leave_one_out"]


def _advantages(returns, mask=None, **options):
    returns = jnp.asarray(returns, jnp.float32)
    mask = jnp.ones(returns.shape, bool) if mask is None else jnp.asarray(mask)
    return np.asarray(group_advantages(returns, mask, **options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-0.57735, -0.57735, -0.57735, 1.73205]),
        ({"ddof": 1}, [-0.5, -0.5, -0.5, 1.5]),
        ({"normalise": "mean"}, [-0.25, -0.25, -0.25, 0.75]),
        ({"normalise": "leave_one_out"}, [-1 / 3, -1 / 3, -1 / 3, 1.0]),
    ],
)
def test_golden_values(options, expected):
    np.testing.assert_allclose(_advantages([[0, 0, 0, 1]], **options)[0], expected, atol=1e-5)


@pytest.mark.parametrize(("ddof", "expected"), [(0, 0.8335), (1, 0.6196)])
def test_close_returns_keep_their_variance(ddof, expected):
    """E[x^2] - E[x]^2 would be 0 in fp32, and the advantages 5."""
    np.testing.assert_allclose(_advantages([[1.0, 1.0 + 1e-5]], ddof=ddof)[0], [-expected, expected], atol=2e-3)


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_returns_give_exactly_zero(normalise, ddof, epsilon):
    """Also where the mean rounds, as that of three times 0.1 does, and for groups of one."""
    value = np.array([0.1, 0.1, -1234.567, 0.0, 0.3])[:, None]
    members = np.array([3, 7, 5, 4, 1])[:, None]
    mask = np.broadcast_to(np.arange(7) < members, (5, 7))
    values = _advantages(np.where(mask, value, 1e3), mask, normalise=normalise, ddof=ddof, epsilon=epsilon)
    assert np.array_equal(values, np.zeros((5, 7)))


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("ddof", [0, 1])
def test_masked_members_are_absent(normalise, ddof):
    returns = [[1.0, np.nan, 4.0, 2.0, np.inf], [3.0, 1e9, 5.0, 9.0, -7.0]]
    mask = np.array([[True, False, True, True, False]] * 2)
    values = _advantages(returns, mask, normalise=normalise, ddof=ddof)
    kept = np.asarray(returns)[:, [0, 2, 3]]
    np.testing.assert_allclose(values[:, [0, 2, 3]], _advantages(kept, normalise=normalise, ddof=ddof), rtol=1e-6)
    assert np.array_equal(values[:, [1, 4]], np.zeros((2, 2)))


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("members", [0, 1])
def test_group_of_none_or_one_is_zero(normalise, members):
    mask = np.arange(4)[None] < members
    values = _advantages([[5.0, 1.0, np.nan, 2.0]], mask, normalise=normalise, ddof=1, epsilon=0.0)
    assert np.array_equal(values, np.zeros((1, 4)))


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_groups_do_not_mix(normalise):
    random = np.random.default_rng(0)
    returns = random.normal(size=(5, 6)).astype(np.float32)
    mask = random.random((5, 6)) < 0.7
    together = _advantages(returns, mask, normalise=normalise)
    alone = [_advantages(returns[i : i + 1], mask[i : i + 1], normalise=normalise)[0] for i in range(5)]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_agrees_with_numpy_in_double_precision():
    random = np.random.default_rng(1)
    returns = 100.0 + random.normal(size=(4, 8)).astype(np.float32)
    wide = returns.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    np.testing.assert_allclose(_advantages(returns), centred / (wide.std(1, keepdims=True) + 1e-6), atol=1e-4)
    others = (wide.sum(1, keepdims=True) - wide) / 7
    np.testing.assert_allclose(_advantages(returns, normalise="leave_one_out"), wide - others, atol=1e-4)


def test_low_precision_returns_are_widened():
    values = group_advantages(jnp.array([[0.0, 0.0, 0.0, 1.0]], jnp.bfloat16), jnp.ones((1, 4), bool))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values[0, 3], 1.73205, atol=1e-5)


def test_one_trace_over_epsilon_and_under_vmap():
    traces = []

    @jax.jit
    def traced(returns, mask, epsilon):
        traces.append(1)
        return group_advantages(returns, mask, epsilon=epsilon)

    returns, mask = jnp.array([[0.0, 2.0]]), jnp.ones((1, 2), bool)
    assert [float(traced(returns, mask, e)[0, 1]) for e in (0.0, 1.0, 3.0)] == [1.0, 0.5, 0.25]
    assert len(traces) == 1
    stacked = jax.vmap(lambda r: group_advantages(r, mask))(jnp.stack([returns, 2 * returns]))
    np.testing.assert_allclose(stacked[:, 0], [[-1, 1], [-1, 1]], atol=1e-5)


def test_bad_options_are_named():
    # The run-time type check of the tests would refuse them first.
    unchecked = inspect.unwrap(group_advantages)
    returns, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="normalise='var' is unknown; choose one of std, mean, leave_one_out"):
        unchecked(returns, mask, normalise="var")
    with pytest.raises(ValueError, match="ddof=2"):
        unchecked(returns, mask, ddof=2)
