"""Advantages of tokens and replies against plain loops and worked chains; the value loss against hand values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algorithms import ppo
from jaxgrpo.algorithms.backups import Steps
from jaxgrpo.algorithms.objectives import clipped_surrogate, kl_k3
from jaxgrpo.optimizer import within_target_kl

EPISODES, STEPS, TOKENS = 7, 5, 4


def played(seed: int = 0) -> dict[str, Any]:
    """Ragged episodes that end at different times in either way, or neither; forced tokens; NaN where nobody chose."""
    random = np.random.default_rng(seed)
    steps = random.integers(1, STEPS + 1, EPISODES)
    alive = np.arange(STEPS) < steps[:, None]
    sampled = alive[..., None] & (random.random((EPISODES, STEPS, TOKENS)) < 0.7)
    sampled[..., 1] = alive  # every step has a choice
    last = np.arange(STEPS) == steps[:, None] - 1
    how = random.integers(0, 3, EPISODES)[:, None]
    # An episode that ends neither way was cut by the length of the recording.
    terminated, truncated = last & (how == 0), last & ((how == 1) | ((how == 2) & (steps[:, None] < STEPS)))
    return {
        "values": np.where(sampled, random.normal(size=sampled.shape), np.nan).astype(np.float32),
        "sampled": sampled,
        "reward": np.where(alive, random.normal(size=alive.shape), 0).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "final_value": random.normal(size=EPISODES).astype(np.float32),
    }


def given(arrays: dict[str, Any]) -> dict[str, Any]:
    """What was played, as `token_advantages` takes it."""
    arrays = jax.tree.map(jnp.asarray, arrays)
    steps = Steps(**{name: arrays.pop(name) for name in Steps._fields})
    return {**arrays, "steps": steps}


def by_loop(
    values: Any, sampled: Any, reward: Any, terminated: Any, truncated: Any, final_value: Any, **numbers: Any
) -> np.ndarray:
    """One token at a time, from the last to the first, in double precision."""
    gamma, decay, token_gamma = numbers["discount"], numbers["trace_decay"], numbers["token_discount"]
    found = np.zeros(sampled.shape)
    for i in range(len(sampled)):
        following, advantage = float(final_value[i]), 0.0
        for t in reversed(range(sampled.shape[1])):
            chosen = np.flatnonzero(sampled[i, t])
            for j in reversed(chosen):
                if j == chosen[-1]:
                    if truncated[i, t]:
                        following = float(final_value[i])
                    over = terminated[i, t] or truncated[i, t]
                    delta = reward[i, t] + gamma * following * (not terminated[i, t]) - values[i, t, j]
                    advantage = delta + gamma * decay * (not over) * advantage
                else:
                    delta = token_gamma * following - values[i, t, j]
                    advantage = delta + token_gamma * decay * advantage
                found[i, t, j], following = advantage, float(values[i, t, j])
    return found


@pytest.mark.parametrize("token_discount", [1.0, 0.9])
def test_token_advantages_equal_a_plain_loop(token_discount: float):
    arrays: Any
    arrays, numbers = played(), {"discount": 0.9, "trace_decay": 0.8, "token_discount": token_discount}
    found = jax.jit(ppo.token_advantages)(**given(arrays), **numbers)
    expected = by_loop(**arrays, **numbers)
    np.testing.assert_allclose(found.advantage, expected, atol=1e-5)
    values = np.where(arrays["sampled"], arrays["values"], 0)
    np.testing.assert_allclose(found.value_target, values + expected, atol=1e-5)


@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_nothing_is_carried_over_an_end(how: str):
    """Not even where a recording goes on with another episode behind it."""
    arrays = played(3)
    ends = np.zeros((EPISODES, STEPS), bool)
    ends[:, 2] = True
    arrays |= {"sampled": np.ones_like(arrays["sampled"]), "values": np.nan_to_num(arrays["values"])}
    arrays |= {"terminated": ends & (how == "terminated"), "truncated": ends & (how == "truncated")}
    found = ppo.token_advantages(**given(arrays), **GAE).advantage
    np.testing.assert_allclose(found, by_loop(**arrays, **GAE, token_discount=1.0), atol=1e-5)


def test_reply_advantages_equal_a_plain_loop():
    arrays = played(1)
    alive: Any = arrays["sampled"].any(-1)
    values = np.where(alive, arrays["values"][..., 1], np.nan)
    rest = {k: arrays[k] for k in ("reward", "terminated", "truncated", "final_value")}
    steps = Steps(**jax.tree.map(jnp.asarray, rest))
    found = ppo.reply_advantages(jnp.asarray(values), jnp.asarray(alive), steps, **GAE)
    expected = by_loop(values[..., None], alive[..., None], **rest, **GAE, token_discount=1.0)[..., 0]
    np.testing.assert_allclose(found.advantage, expected, atol=1e-5)


GAE: dict[str, Any] = {"discount": 0.9, "trace_decay": 0.95}

# A chain of three states, walked through by replies of 2, 3 and 1 tokens; 5 at its end.
CHAIN = jnp.arange(3) < jnp.array([2, 3, 1])[:, None]
CHAIN_STEPS = Steps(
    reward=jnp.array([0.0, 0.0, 5.0]),
    terminated=jnp.array([False, False, True]),
    truncated=jnp.zeros(3, bool),
    final_value=jnp.array(0.0),
)


def learned(token_discount: float) -> np.ndarray:
    """Values of the chain's tokens that are their own targets."""

    def once(_: int, values: jax.Array) -> jax.Array:
        found = ppo.token_advantages(values, CHAIN, CHAIN_STEPS, **GAE, token_discount=token_discount)
        return found.value_target

    return np.asarray(jax.jit(lambda: jax.lax.fori_loop(0, 30, once, jnp.zeros((3, 3))))())


def test_poad_values_a_reply_as_ppo_does_and_ntpo_does_not():
    def once(_: int, values: jax.Array) -> jax.Array:
        return ppo.reply_advantages(values, CHAIN.any(-1), CHAIN_STEPS, **GAE).value_target

    of_replies = jax.lax.fori_loop(0, 30, once, jnp.zeros(3))
    np.testing.assert_allclose(of_replies, 5 * 0.9 ** np.array([2, 1, 0]), rtol=1e-5)
    poad, ntpo = learned(1.0), learned(0.9)
    # The value before the first token, and before every other: nothing is lost inside a reply.
    np.testing.assert_allclose(poad, np.where(CHAIN, np.asarray(of_replies)[:, None], 0), rtol=1e-5)
    # One gamma for every token that is still to come, this one left out: 5 and 4, 3, 2 and 1, and 0.
    np.testing.assert_allclose(
        ntpo, 5 * np.where(CHAIN, 0.9 ** np.array([[5, 4, 0], [3, 2, 1], [0, 0, 0]]), 0), rtol=1e-5
    )


def test_what_a_mask_hides_changes_nothing():
    arrays = played(2)
    found = ppo.token_advantages(**given(arrays), **GAE)
    hidden = np.where(arrays["sampled"], arrays["values"], np.float32(1e30))
    other = ppo.token_advantages(**given({**arrays, "values": hidden}), **GAE)
    for one, two in zip(found, other, strict=True):
        np.testing.assert_array_equal(one, two)
        assert (np.asarray(one)[~arrays["sampled"]] == 0).all()


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        # Old value 0, target 1, clip 0.2.
        (0.1, 0.405, -0.9),  # within the clip: half the squared error
        (0.2, 0.32, -0.8),  # on it
        (0.5, 0.32, 0.0),  # too far towards the target: the clipped error, and no gradient
        (-0.5, 1.125, -1.5),  # too far away from it: its own error
        (3.0, 2.0, 2.0),  # beyond it, and further off than the clipped value
    ],
)
def test_clipped_value_loss_by_hand(value: float, loss: float, slope: float):
    def total(value: jax.Array) -> jax.Array:
        return ppo.clipped_value_loss(value, jnp.zeros(1), jnp.ones(1), 0.2)[0]

    found = jax.value_and_grad(total)(jnp.array([value]))
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    np.testing.assert_allclose(found[1], [slope], rtol=1e-5, atol=1e-7)


def test_kl_penalty_is_on_average_the_divergence_of_replies():
    """Over both replies of a tree: one token that ends, or one that a second follows."""
    pi, rho = (
        jnp.log(jnp.array(x)) for x in ([[0.3, 1.0], [0.7, 0.4], [0.7, 0.6]], [[0.5, 1.0], [0.5, 0.2], [0.5, 0.8]])
    )
    sampled = jnp.array([[True, False], [True, True], [True, True]])
    chance = np.exp(np.where(sampled, pi, 0).sum(-1))
    penalty = ppo.kl_penalty(pi, jnp.where(sampled, rho, jnp.nan), sampled, 2.0)
    others = np.exp(np.where(sampled, rho, 0).sum(-1))
    np.testing.assert_allclose(chance @ penalty, 2 * chance @ np.log(chance / others), rtol=1e-5)


def test_ratio_of_a_reply_is_the_product_of_its_tokens():
    log_prob, old = jnp.log(jnp.array([0.5, 0.6, 0.1])), jnp.log(jnp.array([0.4, 0.3, 0.9]))
    sampled = jnp.array([True, True, False])
    ratio = (0.5 / 0.4) * (0.6 / 0.3)
    new, old = (ppo.reply_log_prob(x, sampled) for x in (log_prob, old))
    np.testing.assert_allclose(clipped_surrogate(new, old, 3.0, 0.2, 5.0)[0], [3 * ratio], rtol=1e-5)


def test_normalised_counts_what_is_not_masked():
    advantage = jnp.array([1.0, 5.0, 3.0, jnp.nan])
    found = ppo.normalised(advantage, jnp.array([True, True, True, False]))
    np.testing.assert_allclose(found, [-np.sqrt(1.5), np.sqrt(1.5), 0, 0], rtol=1e-5)
    np.testing.assert_array_equal(ppo.normalised(advantage, jnp.zeros(4, bool)), 0)
    np.testing.assert_array_equal(ppo.normalised(jnp.full(4, 0.1), jnp.array([True, True, True, False])), 0)


def test_steps_stop_at_the_target_and_stay_stopped():
    old = jnp.log(jnp.array([0.5, 0.5]))
    moved = jnp.log(jnp.array([0.6, 0.5]))

    @jax.jit
    def steps(log_probs: jax.Array, target: jax.Array) -> jax.Array:
        def step(allowed: jax.Array, log_prob: jax.Array) -> tuple[jax.Array, jax.Array]:
            allowed = within_target_kl(allowed, kl_k3(old, log_prob).mean(), target)
            return allowed, allowed

        return jax.lax.scan(step, jnp.bool_(True), log_probs)[1]

    distance = float((0.2 - np.log(1.2)) / 2)
    course = jnp.stack([old, moved, old])
    np.testing.assert_array_equal(steps(course, 1.01 * distance), [True, True, True])
    np.testing.assert_array_equal(steps(course, 0.99 * distance), [True, False, False])
    assert not bool(within_target_kl(True, jnp.float32(jnp.nan), 0.1))
