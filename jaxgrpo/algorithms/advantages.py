"""Group-relative advantages: how much better an episode did than the others that began in the same state.

The group is the only baseline here, so there is no value network, and nothing is shared between groups.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Real

Normalisation = Literal["std", "mean", "leave_one_out"]


def group_advantages(
    returns: Float[Array, "groups samples"],
    mask: Bool[Array, "groups samples"],
    *,
    normalise: Normalisation = "std",
    epsilon: Real[ArrayLike, ""] = 1e-6,
    ddof: int = 0,
) -> Float[Array, "groups samples"]:
    r"""Advantage of every episode over its own group.

    With $\bar R$ the mean and $\sigma$ the standard deviation of the $N$ unmasked returns of a group,

    $$A_i = \frac{R_i - \bar R}{\sigma + \epsilon} \;\text{(std)}, \qquad
      A_i = R_i - \bar R \;\text{(mean)}, \qquad
      A_i = R_i - \frac{1}{N-1} \sum_{j \ne i} R_j \;\text{(leave\_one\_out)}$$

    "std" is GRPO (Shao et al. 2024, arXiv 2402.03300; with one return per episode and the advantage given to every
    token of it, MS-GRPO, Dilkes et al. 2025, arXiv 2508.10839), "mean" is Dr. GRPO (Liu et al. 2025, arXiv
    2503.20783), "leave_one_out" is RLOO (Ahmadian et al. 2024, arXiv 2402.14740).

    A masked episode counts in no mean and no deviation and gets 0, whatever its return holds, NaN included. A group of
    one, one whose returns are all equal and one that is masked throughout get exactly 0 under every normalisation.

    Args:
      returns: undiscounted return of each episode; a row is one group. Finite where `mask` is set.
      mask: True for the episodes that count.
      normalise: what the difference to the group is divided by.
      epsilon: added to the deviation, in units of the return, not negative; only "std" reads it.
      ddof: 0 for the population deviation (divides by N), 1 for the sample deviation (divides by N - 1); only "std"
        reads it.

    Returns:
      The advantages, in fp32 or wider.

    Raises:
      ValueError: `normalise` or `ddof` is none of the above.

    Example:
      >>> import jax.numpy as jnp
      >>> returns = jnp.array([[0.0, 0.0, 0.0, 1.0]])
      >>> mask = jnp.ones_like(returns, dtype=bool)
      >>> print(group_advantages(returns, mask).round(2))
      [[-0.58 -0.58 -0.58  1.73]]
      >>> print(group_advantages(returns, mask, normalise="mean"))
      [[-0.25 -0.25 -0.25  0.75]]
    """
    _check(normalise, ddof)
    returns = returns.astype(jnp.promote_types(returns.dtype, jnp.float32))
    count = jnp.sum(mask, axis=1, keepdims=True)
    deviation = _deviation_from_mean(returns, mask, count)
    squares = jnp.sum(jnp.square(deviation), axis=1, keepdims=True)
    return _scaled(deviation, count, squares, normalise, epsilon, ddof)


def state_advantages(
    values: Float[Array, " steps"],
    states: Int[Array, "steps words"],
    mask: Bool[Array, " steps"],
    *,
    normalise: Normalisation = "std",
    epsilon: Real[ArrayLike, ""] = 1e-6,
) -> Float[Array, " steps"]:
    r"""Advantage of every step over the steps that stand in the same state.

    The steps whose rows of `states` are equal, word for word, are one group in the sense of `group_advantages`, with
    the same normalisations: the step-level groups of GiGPO (Feng et al. 2025, arXiv 2505.10978). A step whose state
    nobody else stood in gets exactly 0, as do masked steps, which count for nobody.

    Equality is decided by sorting the rows and comparing neighbours, not by a hash: no two states are ever confused,
    and memory grows with the number of steps, not with its square.

    Args:
      values: what the step led to, such as its discounted reward to go; finite where `mask` is set.
      states: the state each step was played in, as integers.
      mask: True for the steps that count.
      normalise: see `group_advantages`.
      epsilon: see `group_advantages`.

    Raises:
      ValueError: `normalise` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> values, states = jnp.array([1.0, 0.0, 5.0, 2.0]), jnp.array([[7], [7], [8], [7]])
      >>> print(state_advantages(values, states, jnp.ones(4, bool), normalise="mean"))
      [ 0. -1.  0.  1.]
    """
    _check(normalise, ddof=0)
    steps = values.shape[0]
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    group = _group_numbers(states)

    def total(x: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(mask, x, 0), group, steps)[group]

    count = total(mask.astype(jnp.int32))
    lowest = jax.ops.segment_min(jnp.where(mask, values, jnp.inf), group, steps)[group]
    shifted = jnp.where(mask, values - lowest, 0.0)
    deviation = jnp.where(mask, shifted - total(shifted) / jnp.maximum(count, 1), 0.0)
    return _scaled(deviation, count, total(jnp.square(deviation)), normalise, epsilon, ddof=0)


def rewards_to_go(
    rewards: Float[Array, "*episodes steps"], discount: Real[ArrayLike, ""]
) -> Float[Array, "*episodes steps"]:
    r"""Discounted sum of the rewards from each step on, $G_t = r_t + \gamma G_{t+1}$; nothing follows the last step.

    Args:
      rewards: of each step; 0 after an episode's end.
      discount: $\gamma$ in [0, 1]; may be traced.

    Example:
      >>> import jax.numpy as jnp
      >>> print(rewards_to_go(jnp.array([0.0, -1.0, 4.0]), 0.5))
      [0.5 1.  4. ]
    """

    def backward(after: Array, reward: Array) -> tuple[Array, Array]:
        to_go = reward + discount * after
        return to_go, to_go

    steps_first = jnp.moveaxis(rewards, -1, 0)
    _, to_go = jax.lax.scan(backward, jnp.zeros_like(steps_first[0]), steps_first, reverse=True)
    return jnp.moveaxis(to_go, 0, -1)


def _check(normalise: str, ddof: int) -> None:
    if normalise not in get_args(Normalisation):
        raise ValueError(f"normalise={normalise!r} is unknown; choose one of {', '.join(get_args(Normalisation))}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} is not possible; choose 0 (population deviation) or 1 (sample deviation)")


def _scaled(
    deviation: Float[Array, "*shape"],
    count: Int[Array, "*#shape"],
    squares: Float[Array, "*#shape"],
    normalise: Normalisation,
    epsilon: Real[ArrayLike, ""],
    ddof: int,
) -> Float[Array, "*shape"]:
    """Deviations from a group's mean, normalised by what is known of the group: members and sum of squares."""
    if normalise == "mean":
        return deviation
    if normalise == "leave_one_out":
        return deviation * count / jnp.maximum(count - 1, 1)

    # Squares of deviations, never E[x^2] - E[x]^2: in fp32 that difference is 0 for returns 1 and 1 + 1e-5.
    scale = jnp.sqrt(squares / jnp.maximum(count - ddof, 1)) + epsilon
    # A scale of 0 takes epsilon = 0 and no spread, where the deviation is 0 already.
    return deviation / jnp.where(scale > 0, scale, 1.0)


def _group_numbers(rows: Int[Array, "rows words"]) -> Int[Array, " rows"]:
    """A number for each row, below the number of rows, equal exactly where rows are equal."""

    def by_word(order: Array, word: Array) -> tuple[Array, None]:
        return order[jnp.argsort(word[order], stable=True)], None

    # One stable sort a word, the last word first: equal rows end up side by side.
    order, _ = jax.lax.scan(by_word, jnp.arange(rows.shape[0]), rows.T, reverse=True)
    ordered = rows[order]
    is_new = jnp.any(ordered[1:] != ordered[:-1], axis=1)
    numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_new, dtype=jnp.int32)])
    return jnp.zeros_like(numbers).at[order].set(numbers)


def _deviation_from_mean(
    returns: Float[Array, "groups samples"], mask: Bool[Array, "groups samples"], count: Real[Array, "groups 1"]
) -> Float[Array, "groups samples"]:
    """`R - mean_g R`, 0 where masked.

    The lowest return of the group is taken off first. The mean of equal returns may round (three times 0.1), and what
    rounding leaves would be blown up by the division with the deviation; the mean of equal zeros cannot.
    """
    lowest = jnp.min(returns, axis=1, keepdims=True, where=mask, initial=jnp.inf)
    shifted = jnp.where(mask, returns - lowest, 0.0)
    mean = jnp.sum(shifted, axis=1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(mask, shifted - mean, 0.0)
