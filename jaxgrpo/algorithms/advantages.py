"""Group-relative advantages: how much better an episode did than the others that began in the same state.

The group is the only baseline here, so there is no value network, and nothing is shared between groups.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Real

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
    if normalise not in get_args(Normalisation):
        raise ValueError(f"normalise={normalise!r} is unknown; choose one of {', '.join(get_args(Normalisation))}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} is not possible; choose 0 (population deviation) or 1 (sample deviation)")

    returns = returns.astype(jnp.promote_types(returns.dtype, jnp.float32))
    count = jnp.sum(mask, axis=1, keepdims=True)
    deviation = _deviation_from_mean(returns, mask, count)
    if normalise == "mean":
        return deviation
    if normalise == "leave_one_out":
        return deviation * count / jnp.maximum(count - 1, 1)

    # Squares of deviations, never E[x^2] - E[x]^2: in fp32 that difference is 0 for returns 1 and 1 + 1e-5.
    variance = jnp.sum(jnp.square(deviation), axis=1, keepdims=True) / jnp.maximum(count - ddof, 1)
    scale = jnp.sqrt(variance) + epsilon
    # A scale of 0 takes epsilon = 0 and no spread, where the deviation is 0 already.
    return deviation / jnp.where(scale > 0, scale, 1.0)


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
