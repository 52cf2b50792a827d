"""ETPO on worlds small enough to enumerate: 3 states, actions of 2 tokens, a vocabulary of 3."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgrpo.algorithms import etpo
from jaxgrpo.algorithms.backups import Steps
from jaxgrpo.optimizer import polyak
from jaxgrpo.token_statistics import Scores, over_vocabulary

STATES, WORDS = 3, 3
BETA, GAMMA = 0.3, 0.9


class World(NamedTuple):
    """A game: next state, reward and end of each action in each state, `[states, words, words]`."""

    onward: np.ndarray
    reward: np.ndarray
    over: np.ndarray


class Policy(NamedTuple):
    """Log-probabilities of the first token and of the second, which sees the first."""

    first: Any
    second: Any

    @property
    def of_actions(self) -> Any:
        return self.first[..., None] + self.second


def world() -> World:
    random = np.random.default_rng(0)
    shape = STATES, WORDS, WORDS
    return World(random.integers(0, STATES, shape), random.normal(size=shape), random.random(shape) < 0.2)


def policy(seed: int) -> Policy:
    keys = jax.random.split(jax.random.key(seed))
    first = jax.random.normal(keys[0], (STATES, WORDS))
    second = 2 * jax.random.normal(keys[1], (STATES, WORDS, WORDS))
    return Policy(jax.nn.log_softmax(first), jax.nn.log_softmax(second))


def divergence(log_pi: Any, log_rho: Any) -> Any:
    return (jnp.exp(log_pi) * (log_pi - log_rho)).sum(-1)


def token_values(q: Policy, pi: Policy, rho: Policy) -> tuple[jax.Array, jax.Array]:
    """Soft values before the first token `[states]` and before the second `[states, words]`."""
    first, second = (
        etpo.soft_value((jnp.exp(p) * x).sum(-1), divergence(p, r), BETA) for x, p, r in zip(q, pi, rho, strict=True)
    )
    return first, second


# Every action of every state, and as a second step what the game does next, with some action.
SEEN = np.array(list(itertools.product(range(STATES), range(WORDS), range(WORDS)))).T


def backed_up(q: Policy, pi: Policy, rho: Policy, game: World) -> Policy:
    """Token-level Q after one Bellman backup of the whole table, through `targets` on episodes of two steps."""
    first, second = token_values(q, pi, rho)
    state, one, two = SEEN
    onward, over = game.onward[state, one, two], game.over[state, one, two]
    now = jnp.stack([first[state], second[state, one]], axis=-1)
    then = jnp.stack([first[onward], second[onward, 0]], axis=-1)
    no = np.zeros_like(over)
    target = etpo.targets(
        jnp.stack([now, then], axis=1),
        jnp.asarray(np.stack([[~no, ~no], [~over, ~over]]).transpose(2, 0, 1)),
        Steps(
            jnp.asarray(np.stack([game.reward[state, one, two], no], axis=1), jnp.float32),
            jnp.asarray(np.stack([over, no], axis=1)),
            jnp.asarray(np.stack([no, ~over], axis=1)),
            jnp.full(over.shape, 7.0),
        ),
        GAMMA,
    )
    target = target[:, 0].reshape(STATES, WORDS, WORDS, 2)
    return Policy(target[:, :, 0, 0], target[..., 1])


def test_fixed_point_of_a_policy_is_the_soft_q_of_its_actions():
    game, pi, rho = world(), policy(1), policy(2)
    zeros = jax.tree.map(jnp.zeros_like, pi)
    q = jax.jit(lambda: jax.lax.fori_loop(0, 500, lambda _, q: backed_up(q, pi, rho, game), zeros))()

    actions = STATES * WORDS * WORDS
    log_pi, log_rho = (np.asarray(x.of_actions, np.float64).reshape(STATES, -1) for x in (pi, rho))
    probs = np.exp(log_pi)
    goes_on = GAMMA * ~game.over.reshape(-1)
    # Q = r + gamma (P (pi Q) - beta P KL), solved as one linear system over all (state, action).
    step = np.zeros((actions, STATES))
    step[np.arange(actions), game.onward.reshape(-1)] = goes_on
    spread = np.zeros((STATES, actions))
    for state in range(STATES):
        spread[state, state * WORDS**2 : (state + 1) * WORDS**2] = probs[state]
    cost = BETA * (probs * (log_pi - log_rho)).sum(-1)
    exact = np.linalg.solve(np.eye(actions) - step @ spread, game.reward.reshape(-1) - step @ cost)
    np.testing.assert_allclose(np.asarray(q.second).reshape(-1), exact, atol=1e-4)
    # Before the second token is drawn, it is worth what the second tokens are on average, less their price.
    second = (np.exp(pi.second) * exact.reshape(STATES, WORDS, WORDS)).sum(-1)
    np.testing.assert_allclose(q.first, second - BETA * divergence(pi.second, rho.second), atol=1e-4)


def test_fixed_point_with_the_best_policy_is_the_soft_optimum_of_actions():
    game, rho = world(), policy(2)

    def best(q: Policy) -> Policy:
        """What `policy_loss` is least for, token by token."""
        return Policy(*(jax.nn.log_softmax(r + x / BETA) for r, x in zip(rho, q, strict=True)))

    zeros = jax.tree.map(jnp.zeros_like, rho)
    q = jax.jit(lambda: jax.lax.fori_loop(0, 500, lambda _, q: backed_up(q, best(q), rho, game), zeros))()

    exact, chances = soft_optimum(game, rho)
    np.testing.assert_allclose(q.second, exact, atol=1e-4)
    np.testing.assert_allclose(np.exp(best(q).of_actions), chances, atol=1e-4)


def soft_optimum(game: World, rho: Policy) -> tuple[np.ndarray, np.ndarray]:
    """The best soft Q of actions by value iteration over whole actions, and the chances that belong to it."""
    exact = np.zeros((STATES, WORDS, WORDS))
    log_rho = np.asarray(rho.of_actions, np.float64)
    for _ in range(300):
        value = BETA * np.log(np.exp(log_rho + exact / BETA).sum((1, 2)))
        exact = game.reward + GAMMA * ~game.over * value[game.onward]
    action = log_rho + exact / BETA
    return exact, np.exp(action - np.log(np.exp(action).sum((1, 2), keepdims=True)))


def test_learning_goes_to_the_soft_optimum():
    """Both losses' gradient steps together, from Q = 0 and the policy at the reference, with a target that follows."""
    game, rho = world(), policy(2)
    nothing = jax.tree.map(jnp.zeros_like, rho)
    optimizer = optax.adam(0.02)

    def normalised(logits: Policy) -> Policy:
        return jax.tree.map(jax.nn.log_softmax, logits)

    def loss(networks: tuple[Policy, Policy], y: Policy) -> jax.Array:
        pi, q = normalised(networks[0]), networks[1]
        fixed_q = jax.lax.stop_gradient(q)
        expected = [(jnp.exp(p) * x).sum(-1) for p, x in zip(pi, fixed_q, strict=True)]
        of_policy = [etpo.policy_loss(e, divergence(p, r), BETA) for e, p, r in zip(expected, pi, rho, strict=True)]
        of_critic = [etpo.critic_loss(x, target) for x, target in zip(q, y, strict=True)]
        return sum((x.mean() for x in [*of_policy, *of_critic]), jnp.float32(0))

    def iteration(_: Any, now: Any) -> Any:
        networks, target, moments = now
        y = backed_up(target, normalised(networks[0]), rho, game)
        updates, moments = optimizer.update(jax.grad(loss)(networks, y), moments)
        networks: Any = optax.apply_updates(networks, updates)
        return networks, polyak(target, networks[1], 0.9), moments

    begin = (rho, nothing), nothing, optimizer.init((rho, nothing))
    (logits, q), _, _ = jax.jit(lambda: jax.lax.fori_loop(0, 4000, iteration, begin))()
    exact, chances = soft_optimum(game, rho)
    np.testing.assert_allclose(q.second, exact, atol=0.02)
    np.testing.assert_allclose(np.exp(normalised(logits).of_actions), chances, atol=0.02)


def test_expected_sum_of_token_divergences_is_the_divergence_of_actions():
    pi, rho = policy(1), policy(2)
    of_tokens = divergence(pi.first, rho.first) + (jnp.exp(pi.first) * divergence(pi.second, rho.second)).sum(-1)
    of_actions = divergence(pi.of_actions.reshape(STATES, -1), rho.of_actions.reshape(STATES, -1))
    np.testing.assert_allclose(of_tokens, of_actions, rtol=1e-5)


# Two episodes of three steps; the second ends after two. Tokens of a step: 2, 3, 1 and 1, 2.
VALUES = np.arange(1.0, 19.0, dtype=np.float32).reshape(2, 3, 3)
SAMPLED = np.arange(3) < np.array([[2, 3, 1], [1, 2, 0]])[..., None]
REWARD = np.array([[1.0, -2.0, 3.0], [0.5, 4.0, 0.0]], np.float32)
FINAL = np.array([100.0, 200.0], np.float32)


def targets_of(terminated: list[list[int]], truncated: list[list[int]], **changes: Any) -> np.ndarray:
    options = {"values": VALUES, "sampled": SAMPLED, "reward": REWARD, "final": FINAL} | changes
    values, sampled, reward, final = (jnp.asarray(options[name]) for name in ("values", "sampled", "reward", "final"))
    ended, cut = (jnp.asarray(np.array(x, bool)) for x in (terminated, truncated))
    return np.asarray(etpo.targets(values, sampled, Steps(reward, ended, cut, final), 0.5))


def test_targets_by_hand():
    first, second = targets_of([[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]])
    # Inside a step the next value; then r + 0.5 * the value of the next step's first token; at its end r alone.
    np.testing.assert_allclose(first, [[2, 1 + 4 / 2, 0], [5, 6, -2 + 7 / 2], [3, 0, 0]])
    # The second is cut by the time limit: it bootstraps from what is behind its last step.
    np.testing.assert_allclose(second, [[0.5 + 13 / 2, 0, 0], [14, 4 + 200 / 2, 0], [0, 0, 0]])


def test_the_end_decides_the_last_target_alone():
    ended = targets_of([[0, 0, 1], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]])
    cut = targets_of([[0, 0, 0], [0, 0, 0]], [[0, 0, 1], [0, 1, 0]])
    np.testing.assert_allclose((cut - ended)[SAMPLED & (cut != ended)], FINAL / 2)


def test_padding_and_what_follows_the_end_change_nothing():
    ends = [[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]]
    plain = targets_of(*ends)
    np.testing.assert_array_equal(targets_of(*ends, values=np.where(SAMPLED, VALUES, np.nan)), plain)
    # The other episode's numbers are its own.
    other = targets_of(*ends, values=VALUES * [[[1]], [[-3]]], final=FINAL * [1, 5])
    np.testing.assert_array_equal(other[0], plain[0])
    assert not np.array_equal(other[1], plain[1])


def test_tokens_that_are_forced_are_passed_over():
    """As a constraint makes them: forced tokens before, between and behind the choices; a step without any choice."""
    ends = [[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]]
    slots = [[1, 3, 4], [0, 2, 3]]
    values, sampled = np.full((2, 3, 6), np.nan, np.float32), np.zeros((2, 3, 6), bool)
    for episode, where in enumerate(slots):
        values[episode][:, where], sampled[episode][:, where] = VALUES[episode], SAMPLED[episode]
    found = targets_of(*ends, values=values, sampled=sampled)
    for episode, where in enumerate(slots):
        np.testing.assert_array_equal(found[episode][:, where], targets_of(*ends)[episode])
    assert (found[~sampled] == 0).all()
    silent = targets_of(*ends, sampled=SAMPLED & (np.arange(3) != 1)[:, None])
    np.testing.assert_allclose(silent[0, 0, 1], 1 + (-2 + 7 / 2) / 2)


def test_huber_is_symmetric_and_the_released_one_is_not():
    errors = jnp.array([0.0, 3.0, 10.0, 25.0, -25.0])
    np.testing.assert_allclose(etpo.critic_loss(errors, jnp.zeros(5)), [0, 4.5, 50, 200, 200])
    np.testing.assert_allclose(etpo.released_critic_loss(errors, jnp.zeros(5)), [0, 4.5, 50, 0, 200])
    for loss, slope in (etpo.critic_loss, [0, 3, 10, 10, -10]), (etpo.released_critic_loss, [0, 3, 10, 0, -10]):
        of_q, of_target = jax.grad(lambda q, y, loss=loss: loss(q, y).sum(), argnums=(0, 1))(errors, jnp.zeros(5))
        np.testing.assert_allclose(of_q, slope)
        np.testing.assert_array_equal(of_target, 0)


TEMPERATURE = jnp.float32(0.7)
Q = jnp.array([[0.3, -0.2, 0.5, 0.1], [1.0, 0.0, -1.0, 0.5]])
RHO = jnp.array([[0.0, 1.0, -1.0, 0.5], [0.3, 0.3, 2.0, 0.0]])


def statistics(logits: jax.Array, q: jax.Array = Q) -> Any:
    """Of two tokens whose hidden states are their logits."""
    eye = jnp.eye(4)
    return over_vocabulary(
        logits,
        eye,
        logits[:, 0],
        TEMPERATURE,
        vocab_size=4,
        logits=lambda hidden, rows: hidden @ rows.T,
        reference=Scores(RHO, eye),
        critic=Scores(q, eye),
        unweighted=True,
    )


def policy_loss(logits: jax.Array, with_reference: bool, q: jax.Array = Q) -> jax.Array:
    found = statistics(logits, q)
    return etpo.policy_loss(found.expected_q, found.kl if with_reference else -found.entropy, BETA).sum()


@pytest.mark.parametrize("with_reference", [True, False])
def test_policy_loss_has_its_minimum_where_the_mathematics_says(with_reference: bool):
    """For the distribution that is sampled from, whatever the temperature makes it of."""
    slope = jax.grad(policy_loss)

    @jax.jit
    def learn() -> jax.Array:
        return jax.lax.fori_loop(0, 600, lambda _, x: x - 2.0 * slope(x, with_reference), jnp.zeros((2, 4)))

    expected = jax.nn.softmax(Q / BETA + (RHO / TEMPERATURE if with_reference else 0.0))
    np.testing.assert_allclose(jax.nn.softmax(learn() / TEMPERATURE), expected, atol=1e-3)


def test_gradient_depends_on_q_and_as_released_it_does_not():
    logits = jax.random.normal(jax.random.key(3), (2, 4))

    def released(logits: jax.Array, q: jax.Array) -> jax.Array:
        found = statistics(logits, q)
        return etpo.released_policy_loss(found.mean_q, found.mean_log_prob, BETA).sum()

    @jax.jit
    def slopes(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x: policy_loss(x, True, q))(logits), jax.grad(released)(logits, q)

    ours, theirs = zip(slopes(Q), slopes(-Q), strict=True)
    assert np.abs(ours[0] - ours[1]).max() > 0.1
    np.testing.assert_array_equal(*theirs)
    dense = jax.grad(lambda x: BETA * jax.nn.log_softmax(x / TEMPERATURE).mean(-1).sum())(logits)
    np.testing.assert_allclose(theirs[0], dense, atol=1e-6)


def test_loss_and_gradient_of_one_token_know_nothing_of_another():
    logits = jax.random.normal(jax.random.key(3), (2, 4))
    slope = jax.jit(jax.grad(lambda x: policy_loss(x, True)))
    np.testing.assert_array_equal(slope(logits.at[1].add(5 * Q[0]))[0], slope(logits)[0])


def test_released_targets_read_the_next_steps_divergence():
    kl = np.arange(0.1, 1.9, 0.1, dtype=np.float32).reshape(2, 3, 3)
    ended = np.array([[0, 0, 1], [0, 1, 0]], bool)
    values, divergences, sampled = map(jnp.asarray, (VALUES, kl, SAMPLED))
    steps = Steps(*map(jnp.asarray, (REWARD, ended, np.zeros_like(ended), FINAL)))
    found = np.asarray(etpo.released_targets(values, divergences, sampled, steps, discount=0.5, beta=1.0))
    # Step 0: token 1 reads step 1's token 1; the last token reads step 1's first, rightly.
    np.testing.assert_allclose(found[0, 0, :2], [2 - kl[0, 1, 1], 1 + (4 - kl[0, 1, 0]) / 2], rtol=1e-6)
    # Step 1: the next step has no second and third token to read.
    np.testing.assert_allclose(found[0, 1], [5, 6, -2 + (7 - kl[0, 2, 0]) / 2], rtol=1e-6)
    np.testing.assert_allclose(found[1, 1, :2], [14, 4], rtol=1e-6)


def test_polyak_moves_a_little():
    target = {"a": jnp.zeros(2), "b": [jnp.ones(1)]}
    moved = polyak(target, jax.tree.map(lambda x: x + 1, target), 0.995)
    for old, new in zip(jax.tree.leaves(target), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(new - old, 0.005, rtol=1e-4)
