"""Which groups are trained on: those whose episodes differ tell more about what to do."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def groups_to_keep(
    returns: Float[Array, "groups samples"], keep: int, *, drop_equal: bool = False
) -> Bool[Array, " groups"]:
    """True for the groups that are trained on; the others are absent from the loss and from its denominator.

    Those with the largest standard deviation of returns are kept (StarPO-S of RAGEN, Wang et al. 2025, arXiv
    2504.20073); of groups that tie, the first ones. `drop_equal` drops of these the ones whose returns are all equal
    (the dynamic sampling of DAPO, Yu et al. 2025, arXiv 2503.14476, which plays on until enough groups are left; here
    nothing is played for those dropped). A group with a return that is not a number is kept, so that the fault shows.

    Args:
      returns: undiscounted return of each episode; a row is one group.
      keep: how many groups to keep, from 1 to the number of groups.
      drop_equal: whether groups of equal returns are dropped even if fewer than `keep` are left.

    Raises:
      ValueError: `keep` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> returns = jnp.array([[0.0, 1.0], [2.0, 2.0], [-3.0, 3.0]])
      >>> print(groups_to_keep(returns, 1), groups_to_keep(returns, 3, drop_equal=True))
      [False False  True] [ True False  True]
    """
    groups = returns.shape[0]
    if not 1 <= keep <= groups:
        raise ValueError(f"cannot keep keep={keep} of {groups} groups; choose 1 to {groups}")
    _, largest = jax.lax.top_k(_spread(returns), keep)
    kept = jnp.zeros(groups, bool).at[largest].set(True)
    if drop_equal:
        kept = kept & (returns.max(axis=1) != returns.min(axis=1))
    return kept


def _spread(returns: Float[Array, "groups samples"]) -> Float[Array, " groups"]:
    """Standard deviation of each group, exactly 0 where its returns are equal."""
    return jnp.std(returns - returns.min(axis=1, keepdims=True), axis=1)
