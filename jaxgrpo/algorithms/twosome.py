"""TWOSOME: a language model as a policy over a game's few actions (Tan et al. 2024, arXiv 2401.14151).

The words of every action are scored after the prompt, and the valid actions share the probability:

    pi(a | s) = softmax over the valid actions of log p(a | s) / length(a)

A sum of log-probabilities would punish actions of many tokens. The length is that in tokens or in words; the paper has
both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def action_log_probs(
    token_log_prob: Float[Array, "*rows actions tokens"],
    token_count: Int[Array, "*#rows actions"],
    length: Int[Array, "*#rows actions"],
    valid: Bool[Array, "*#rows actions"],
) -> Float[Array, "*rows actions"]:
    r"""Log-probability of each action, normalised over the valid ones.

    Args:
      token_log_prob: log-probability of each token of each action's text, given the prompt and the tokens before it;
        anything beyond `token_count`.
      token_count: tokens of each action's text.
      length: what the sum is divided by, 1 or more: `token_count`, or the number of words; ones leave the sum as it is.
      valid: actions that can be taken, at least one in each row.

    Returns:
      Log-probabilities in fp32 or wider; minus infinity for actions that are not valid. Through `jnp.where(valid, ...)`
      gradients are finite.

    Example:
      >>> import jax.numpy as jnp
      >>> half = jnp.log(jnp.full((2, 2), 0.5))
      >>> counts, yes = jnp.array([1, 2]), jnp.array([True, True])
      >>> jnp.exp(action_log_probs(half, counts, counts, yes)).tolist()
      [0.5, 0.5]
      >>> print(*(f"{p:.3f}" for p in jnp.exp(action_log_probs(half, counts, jnp.ones(2, int), yes))))
      0.667 0.333
    """
    wide = token_log_prob.astype(jnp.promote_types(token_log_prob.dtype, jnp.float32))
    counted = jnp.arange(wide.shape[-1]) < token_count[..., None]
    score = jnp.sum(jnp.where(counted, wide, 0.0), axis=-1) / length
    return jax.nn.log_softmax(score, axis=-1, where=valid)
