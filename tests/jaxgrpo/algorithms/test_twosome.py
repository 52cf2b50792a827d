"""Action probabilities against enumeration over the actions' texts."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.algorithms.twosome import action_log_probs

# Three actions of 1, 3 and 2 tokens and of 1, 2 and 2 words, after two prompts; what is behind a text is junk.
TOKENS, WORDS = jnp.array([1, 3, 2]), jnp.array([1, 2, 2])
LOG_PROBS = jnp.where(
    jnp.arange(3) < TOKENS[:, None], jnp.log(jax.random.uniform(jax.random.key(0), (2, 3, 3))), jnp.nan
)
VALID = jnp.array([[True, True, True], [True, False, True]])


def enumerated(length: jax.Array) -> np.ndarray:
    """p(a) to the power 1 / length(a), each over the sum of the valid ones."""
    found = np.zeros((2, 3))
    for row in range(2):
        for action in range(3):
            text = np.asarray(LOG_PROBS, np.float64)[row, action, : int(TOKENS[action])]
            found[row, action] = np.exp(text).prod() ** (1 / int(length[action])) * bool(VALID[row, action])
    return found / found.sum(1, keepdims=True)


def test_probabilities_equal_enumeration_for_every_length():
    for length in (TOKENS, WORDS, jnp.ones(3, jnp.int32)):
        found = np.exp(action_log_probs(LOG_PROBS, TOKENS, length, VALID))
        np.testing.assert_allclose(found, enumerated(length), rtol=1e-5)
        assert found[1, 1] == 0


def test_gradient_is_that_of_the_valid_actions_tokens():
    def total(log_probs: jax.Array) -> jax.Array:
        return action_log_probs(log_probs, TOKENS, TOKENS, VALID)[:, 0].sum()

    gradient = np.asarray(jax.grad(total)(LOG_PROBS))
    share = enumerated(TOKENS)
    # d log pi(0) / d log p(token) = ([action is 0] - pi(action)) / length, and 0 beyond a text and for invalid actions.
    expected = (np.array([1, 0, 0]) - share)[..., None] / np.asarray(TOKENS)[:, None]
    np.testing.assert_allclose(gradient, np.where(np.arange(3) < np.asarray(TOKENS)[:, None], expected, 0), atol=1e-6)
