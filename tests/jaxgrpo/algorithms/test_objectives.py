import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algorithms.episode_sampling import sample_episodes
from jaxgrpo.algorithms.objectives import clipped_surrogate, kl_k3, row_weights

AGGREGATES = ["token", "sequence", "episode", "constant"]


def _surrogate_and_gradient(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=None):
    """Objective, its gradient by the new log-probability, and the clip flag of a single token."""
    old = jnp.array([-1.5])

    def objective(log_prob):
        value, clipped = clipped_surrogate(log_prob, old, advantage, clip_low, clip_high, dual_clip)
        return value[0], clipped[0]

    (value, clipped), gradient = jax.value_and_grad(objective, has_aux=True)(old + jnp.log(jnp.array([ratio])))
    return float(value), float(gradient[0]), bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "value", "gradient", "clipped"),
    [
        # Inside the bounds: rho A, and its gradient is rho A as well.
        (1.0, 2.0, None, 2.0, 2.0, False),
        (1.25, 2.0, None, 2.5, 2.5, False),
        (0.9, -2.0, None, -1.8, -1.8, False),
        # A > 0: clipped above 1.3, never below.
        (1.5, 2.0, None, 2.6, 0.0, True),
        (0.5, 2.0, None, 1.0, 1.0, False),
        # A < 0: clipped below 0.8, never above.
        (0.5, -2.0, None, -1.6, 0.0, True),
        (1.5, -2.0, None, -3.0, -3.0, False),
        (5.0, -2.0, None, -10.0, -10.0, False),
        # Dual clip: bounds A < 0 from above and leaves everything else alone.
        (5.0, -2.0, 3.0, -6.0, 0.0, True),
        (2.5, -2.0, 3.0, -5.0, -5.0, False),
        (0.5, -2.0, 3.0, -1.6, 0.0, True),
        (5.0, 2.0, 3.0, 2.6, 0.0, True),
        (0.5, 2.0, 3.0, 1.0, 1.0, False),
        # Nothing to gain, nothing to clip.
        (5.0, 0.0, 3.0, 0.0, 0.0, False),
        (0.1, 0.0, None, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(ratio, advantage, dual_clip, value, gradient, clipped):
    result = _surrogate_and_gradient(ratio, advantage, dual_clip=dual_clip)
    np.testing.assert_allclose(result[:2], (value, gradient), rtol=1e-5)
    assert result[2] is clipped


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_surrogate_is_the_min_form(dual_clip):
    random = np.random.default_rng(0)
    log_prob, old, advantage = (random.normal(size=(50, 7)).astype(np.float32) for _ in range(3))
    ratio = np.exp(log_prob - old)
    expected = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    if dual_clip is not None:
        expected = np.where(advantage < 0, np.maximum(expected, dual_clip * advantage), expected)

    def surrogate(new):
        return clipped_surrogate(new, jnp.asarray(old), jnp.asarray(advantage), 0.2, 0.28, dual_clip)

    value, clipped = surrogate(jnp.asarray(log_prob))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    gradient = jax.grad(lambda new: surrogate(new)[0].sum())(jnp.asarray(log_prob))
    np.testing.assert_allclose(gradient, np.where(clipped, 0.0, ratio * advantage), rtol=1e-5)
    assert 0 < np.mean(clipped) < 1


def test_zero_clip_still_learns_on_policy():
    """A ratio exactly on its bound keeps its whole gradient, where min() and clip() would halve it."""
    assert _surrogate_and_gradient(1.0, 2.0, clip_low=0.0, clip_high=0.0) == (2.0, 2.0, False)
    assert _surrogate_and_gradient(1.0, -2.0, clip_low=0.0, clip_high=0.0) == (-2.0, -2.0, False)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_surrogate_survives_any_gap(advantage, dual_clip):
    gaps = np.array([25.0, 90.0, 1000.0, 1e6], np.float32)

    def objective(log_prob):
        return clipped_surrogate(log_prob, jnp.zeros(8), advantage, 0.2, 0.2, dual_clip)[0].sum()

    value, gradient = jax.value_and_grad(objective)(jnp.asarray(np.append(gaps, -gaps)))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    # A bad token that became far too likely is still pushed down.
    assert (gradient[:4] < 0 if advantage < 0 and dual_clip is None else gradient[:4] == 0).all()


def test_only_the_new_policy_gets_a_gradient():
    arguments = (jnp.array([-1.0, -2.0]), jnp.array([-1.1, -1.9]), jnp.array([1.0, -1.0]))

    def surrogate(log_prob, old_log_prob, advantage):
        return clipped_surrogate(log_prob, old_log_prob, advantage, 0.2, 0.2)[0].sum()

    new, old, advantage = jax.grad(surrogate, argnums=(0, 1, 2))(*arguments)
    assert (new != 0).all() and (old == 0).all() and (advantage == 0).all()
    log_prob, reference = jax.grad(lambda x, y: kl_k3(x, y).sum(), argnums=(0, 1))(*arguments[:2])
    assert (log_prob != 0).all() and (reference == 0).all()


def test_advantage_broadcasts_from_episodes_to_tokens():
    log_prob = jnp.zeros((2, 3, 4))
    value, clipped = clipped_surrogate(log_prob, log_prob, jnp.array([1.0, -2.0])[:, None, None], 0.2, 0.2)
    np.testing.assert_array_equal(value, np.broadcast_to(np.array([1.0, -2.0])[:, None, None], (2, 3, 4)))
    assert clipped.shape == (2, 3, 4) and not clipped.any()


def test_one_trace_over_the_clip():
    traces = []

    @jax.jit
    def surrogate(log_prob, low, high, dual):
        traces.append(1)
        return clipped_surrogate(log_prob, jnp.zeros(1), 1.0, low, high, dual)[0]

    values = [float(surrogate(jnp.array([1.0]), 0.2, high, 3.0)[0]) for high in (0.2, 0.5, 1.0)]
    np.testing.assert_allclose(values, [1.2, 1.5, 2.0], rtol=1e-6)
    assert len(traces) == 1


def test_low_precision_is_widened():
    half = jnp.array([-1.0, -2.0], jnp.bfloat16)
    assert clipped_surrogate(half, half, 1.0, 0.2, 0.2)[0].dtype == jnp.float32
    assert kl_k3(half, half).dtype == jnp.float32


def test_dual_clip_of_one_is_refused():
    with pytest.raises(ValueError, match="dual_clip=1.0 .* choose more than 1"):
        clipped_surrogate(jnp.zeros(1), jnp.zeros(1), 1.0, 0.2, 0.2, 1.0)


def test_k3_by_hand():
    gaps = jnp.array([0.0, 1.0, -1.0, 0.5])
    zero = jnp.zeros(4)
    np.testing.assert_allclose(kl_k3(zero, gaps), np.exp(gaps) - 1 - gaps, rtol=1e-5)
    gradient = jax.grad(lambda x: kl_k3(x, gaps).sum())(zero)
    np.testing.assert_allclose(gradient, 1 - np.exp(gaps), rtol=1e-5, atol=1e-7)


def test_k3_keeps_small_gaps():
    """exp(r) - 1 - r, taken literally, is 0 or 1e-7 in fp32."""
    np.testing.assert_allclose(kl_k3(jnp.zeros(1), jnp.array([1e-3])), 0.5e-6, rtol=1e-3)


def test_k3_is_unbiased():
    policy, reference = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
    estimate = kl_k3(jnp.log(policy), jnp.log(reference))
    assert (estimate >= 0).all()
    np.testing.assert_allclose(policy @ estimate, policy @ jnp.log(policy / reference), rtol=1e-5)


def test_k3_survives_any_gap():
    gaps = jnp.array([19.0, 25.0, 100.0, 1e6])
    kl_and_gradient = jax.vmap(jax.value_and_grad(lambda log_prob: kl_k3(log_prob, jnp.zeros(()))))
    for sign in (-1.0, 1.0):
        values, gradients = kl_and_gradient(sign * gaps)
        assert np.isfinite(values).all() and (values > 0).all()
        # Gradient descent raises the token the policy has lost, and lowers the one it has too much of.
        assert np.isfinite(gradients).all() and (sign * gradients > 0).all()


# Two episodes of three steps. Rows that count: 4 and 2 tokens of the first episode, 3 of the second; the row with 9 is
# masked, one has no tokens.
COUNTS = np.array([[4, 2, 9], [3, 0, 5]], np.int32)
MASK = np.array([[True, True, False], [True, True, False]])


@pytest.mark.parametrize(
    ("aggregate", "weights", "denominator"),
    [
        ("token", [[1, 1, 0], [1, 0, 0]], 9),
        ("sequence", [[1 / 4, 1 / 2, 0], [1 / 3, 0, 0]], 3),
        ("episode", [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0]], 2),
        ("constant", [[1 / 10, 1 / 10, 0], [1 / 10, 0, 0]], 3),
    ],
)
def test_row_weights_by_hand(aggregate, weights, denominator):
    result = row_weights(jnp.asarray(COUNTS), jnp.asarray(MASK), aggregate=aggregate, reply_limit=10)
    np.testing.assert_allclose(result[0], weights, rtol=1e-6)
    assert result[1] == denominator
    halved = row_weights(
        jnp.asarray(COUNTS),
        jnp.asarray(MASK),
        aggregate=aggregate,
        reply_limit=10,
        episode_weights=jnp.array([0.5, 2.0]),
    )
    np.testing.assert_allclose(halved[0], np.array(weights) * [[0.5], [2.0]], rtol=1e-6)
    assert halved[1] == denominator


def _ragged_batch(seed=0, episodes=6, steps=5, limit=7):
    random = np.random.default_rng(seed)
    counts = random.integers(0, limit + 1, (episodes, steps)).astype(np.int32)
    mask = random.random((episodes, steps)) < 0.8
    mask[2] = False
    losses = random.normal(size=(episodes, steps, limit)).astype(np.float32)
    return counts, mask, losses


def _mean_loss(counts, mask, losses, aggregate, limit):
    """The loss from its definition, token by token and in double precision."""
    rows = [
        [losses[i, t, : counts[i, t]].astype(np.float64) for t in range(counts.shape[1]) if mask[i, t] and counts[i, t]]
        for i in range(counts.shape[0])
    ]
    flat = [row for episode in rows for row in episode]
    if aggregate == "token":
        return np.concatenate(flat).mean()
    if aggregate == "sequence":
        return np.mean([row.mean() for row in flat])
    if aggregate == "episode":
        return np.mean([np.concatenate(episode).mean() for episode in rows if episode])
    return np.mean([row.sum() / limit for row in flat])


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_add_up_to_the_full_batch(aggregate, chunk):
    counts, mask, losses = _ragged_batch()
    weights, denominator = row_weights(jnp.asarray(counts), jnp.asarray(mask), aggregate=aggregate, reply_limit=7)
    flat_weights = weights.reshape(-1)
    valid = jnp.asarray(np.arange(7) < counts.reshape(-1, 1))

    @jax.jit
    def chunk_loss(losses, rows):
        per_row = jnp.sum(jnp.where(valid[rows], losses[rows], 0.0), axis=1)
        return jnp.sum(flat_weights[rows] * per_row) / denominator

    flat_losses = jnp.asarray(losses.reshape(-1, 7))
    # Rows in another order than they stand in, as compaction leaves them.
    order = np.random.default_rng(1).permutation(30)
    parts = [
        jax.value_and_grad(chunk_loss)(flat_losses, jnp.asarray(order[i : i + chunk])) for i in range(0, 30, chunk)
    ]
    full = jax.value_and_grad(chunk_loss)(flat_losses, jnp.arange(30))
    np.testing.assert_allclose(sum(p[0] for p in parts), _mean_loss(counts, mask, losses, aggregate, 7), rtol=1e-5)
    np.testing.assert_allclose(sum(p[1] for p in parts), full[1], rtol=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("empty", ["masked", "no tokens"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_to_train_on_gives_zero(aggregate, empty, weighted):
    counts = jnp.full((2, 3), 0 if empty == "no tokens" else 4, jnp.int32)
    mask = jnp.full((2, 3), empty == "no tokens")
    episode_weights = jnp.array([0.0, 3.0]) if weighted else None
    weights, denominator = row_weights(
        counts, mask, aggregate=aggregate, reply_limit=5, episode_weights=episode_weights
    )
    assert (weights == 0).all() and denominator == 1


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masked_rows_hold_no_sway(aggregate):
    counts, mask, _ = _ragged_batch()
    other = np.where(mask, counts, 99).astype(np.int32)
    one, two = (
        row_weights(jnp.asarray(c), jnp.asarray(mask), aggregate=aggregate, reply_limit=7) for c in (counts, other)
    )
    np.testing.assert_array_equal(one[0], two[0])
    assert one[1] == two[1]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_priority_weights_estimate_the_full_batch_loss(aggregate):
    """The recipe of the docstring: drawn episodes alone, on average the loss of all."""
    counts, mask, losses = _ragged_batch(seed=3)
    episode_mask = mask.any(axis=1)
    advantages = jnp.asarray(np.where(episode_mask, [0.5, -2.0, 1.0, -0.3, 1.5, 0.8], 0.0), jnp.float32)
    token_sums = jnp.asarray(np.where(np.arange(7) < counts[..., None], losses, 0.0).sum(-1))

    @jax.jit
    @jax.vmap
    def estimate(key):
        sample = sample_episodes(key, advantages, jnp.asarray(episode_mask), 3, 1.0, importance="correct")
        weights, denominator = row_weights(
            jnp.asarray(counts),
            jnp.asarray(mask),
            aggregate=aggregate,
            reply_limit=7,
            episode_weights=sample.dense_weights(6),
        )
        return jnp.sum(weights[sample.indices] * token_sums[sample.indices]) / denominator

    draws = np.asarray(estimate(jax.random.split(jax.random.key(0), 20_000)), np.float64)
    error = draws.std() / np.sqrt(len(draws))
    assert abs(draws.mean() - _mean_loss(counts, mask, losses, aggregate, 7)) < 4 * error


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_uncorrected_draws_give_their_plain_mean(aggregate):
    counts, mask, losses = _ragged_batch(seed=4)
    episode_mask = jnp.asarray(mask.any(axis=1))
    # Five of six episodes are unmasked, so the last draw is void.
    sample = sample_episodes(jax.random.key(1), jnp.arange(6.0), episode_mask, 6, 1.0)
    drawn = jnp.asarray(mask)[sample.indices] & (sample.weights > 0)[:, None]
    weights, denominator = row_weights(jnp.asarray(counts)[sample.indices], drawn, aggregate=aggregate, reply_limit=7)
    token_sums = np.where(np.arange(7) < counts[..., None], losses, 0.0).sum(-1)[sample.indices]
    np.testing.assert_allclose(
        np.sum(weights * token_sums) / denominator, _mean_loss(counts, mask, losses, aggregate, 7), rtol=1e-5
    )


def test_bad_options_are_named():
    unchecked = inspect.unwrap(row_weights)
    counts, mask = jnp.asarray(COUNTS), jnp.asarray(MASK)
    with pytest.raises(ValueError, match="aggregate='mean' is unknown; choose one of token, sequence, episode, const"):
        unchecked(counts, mask, aggregate="mean", reply_limit=5)
    with pytest.raises(ValueError, match="reply_limit=0 leaves no token"):
        row_weights(counts, mask, aggregate="token", reply_limit=0)
