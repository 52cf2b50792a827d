"""Which of the generated episodes are trained on: absolute-advantage-weighted (AAW) sampling without replacement.

Generating an episode is cheap next to a gradient through it, so more are generated than trained on; an episode with a
large advantage, good or bad, teaches more than one that did as its group did.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Real

Importance = Literal["none", "correct"]

# Tiers of the draw: a later tier is touched only when the earlier ones are used up.
_WEIGHTED, _ZERO_ADVANTAGE, _MASKED = 0, 1, 2


class EpisodeSample(NamedTuple):
    """Episodes drawn for training, in the order they were drawn.

    Attributes:
      indices: where each drawn episode stands among all; no index occurs twice.
      weights: weight of each drawn episode's loss; 0 marks a masked episode, drawn only because no other was left.
    """

    indices: Int[Array, " count"]
    weights: Float[Array, " count"]

    def dense_weights(self, episodes: int) -> Float[Array, " episodes"]:
        """Weight of each of all `episodes` episodes: 0 for those that were not drawn.

        Example:
          >>> import jax.numpy as jnp
          >>> print(EpisodeSample(jnp.array([3, 0]), jnp.array([1.5, 2.0])).dense_weights(4))
          [2.  0.  0.  1.5]
        """
        return jnp.zeros(episodes, self.weights.dtype).at[self.indices].set(self.weights)


def sample_episodes(
    key: PRNGKeyArray,
    advantages: Float[Array, " episodes"],
    mask: Bool[Array, " episodes"],
    count: int,
    alpha: Real[ArrayLike, ""],
    *,
    importance: Importance = "none",
) -> EpisodeSample:
    r"""Draws `count` episodes without replacement, each next one with probability proportional to $|A_i|^\alpha$.

    The draw is the Gumbel top-K trick: with $\phi_i = \alpha \log |A_i|$ and $G_i$ standard Gumbel noise, the K
    largest of the keys $\phi_i + G_i$, largest first, are K draws without replacement from
    $p_i = |A_i|^\alpha / \sum_j |A_j|^\alpha$ (Vieira 2014; Kool, van Hoof and Welling 2019, arXiv 1903.06059).

    * alpha = 0 draws uniformly, episodes of zero advantage included.
    * For alpha > 0 an episode of zero advantage is drawn only after all others, uniformly among its kind; if every
      advantage is 0, the whole draw is uniform.
    * A masked episode is drawn only after every unmasked one, and weighs 0.

    importance="none" trains on what was drawn as it is: every unmasked draw weighs 1, and the expected loss is that of
    the AAW distribution, not of the batch. Give the drawn rows alone to `objectives.row_weights`.

    importance="correct" weighs a drawn episode by the inverse of the probability to be drawn given $\kappa$, the
    (K+1)-th largest key (priority sampling: Duffield, Lund and Thorup 2007, JACM 54(6); with Gumbel noise Kool et al.):

    $$w_i = \frac{1}{P(\phi_i + G_i > \kappa)} = \frac{1}{1 - \exp(-\exp(\phi_i - \kappa))}, \qquad
      \mathbb{E} \Big[ \frac{1}{M} \sum_{i \in S} w_i f_i \Big] = \frac{1}{M} \sum_{i=1}^{M} f_i$$

    for M unmasked episodes, if $f_i = 0$ wherever $A_i = 0$, as in the policy gradient. Entropy and KL terms do not
    vanish there: for them the mean lacks the zero-advantage episodes unless these can be drawn as well, which is so
    at alpha = 0 and where `count` exceeds the number of nonzero advantages. An episode that is drawn for certain
    weighs 1, so count == M gives 1 throughout. The M of the formula is that of all unmasked episodes and not `count`:
    pass `dense_weights` to `objectives.row_weights` together with the rows of all M.

    The noise of episode i comes from `key` folded with i alone, so padding the batch with masked episodes changes
    no draw.

    Args:
      key: random key.
      advantages: one per episode, finite where `mask` is set; computed over the full batch before any is dropped.
      mask: True for the episodes that count.
      count: K, how many to draw, from 1 to the number of episodes.
      alpha: sharpness of the draw, not negative; may be traced.
      importance: whether weights undo the preference of the draw.

    Raises:
      ValueError: `count` or `importance` is out of range, or `alpha` is a negative Python number.

    Example:
      >>> import jax
      >>> advantages = jnp.array([0.0, -3.0, 0.5, 0.0])
      >>> mask = jnp.array([True, True, True, False])
      >>> sample = sample_episodes(jax.random.key(0), advantages, mask, 4, alpha=1.0)
      >>> print(sorted(sample.indices[:2].tolist()), sample.indices[2:], sample.weights)
      [1, 2] [0 3] [1. 1. 1. 0.]
    """
    episodes = advantages.shape[0]
    if importance not in get_args(Importance):
        raise ValueError(f"importance={importance!r} is unknown; choose one of {', '.join(get_args(Importance))}")
    if not 1 <= count <= episodes:
        raise ValueError(f"cannot draw count={count} of {episodes} episodes; choose 1 to {episodes}")
    if isinstance(alpha, int | float) and alpha < 0:
        raise ValueError(f"alpha={alpha} would prefer small advantages; choose 0 (uniform) or more")

    tier, log_weight = _tier_and_log_weight(advantages, mask, alpha)
    keys = log_weight + _episode_gumbel(key, episodes)
    # Two sort keys rather than one with a large offset per tier, which would round the noise away.
    order = jnp.lexsort((-keys, tier))
    indices = order[:count]
    weights = jnp.ones(count, keys.dtype)
    if importance == "correct" and count < episodes:
        threshold = order[count]
        probability = -jnp.expm1(-jnp.exp(log_weight[indices] - keys[threshold]))
        certain = tier[indices] < tier[threshold]
        weights = jnp.where(certain, 1.0, 1.0 / jnp.where(certain, 1.0, probability))
    return EpisodeSample(indices, jnp.where(mask[indices], weights, 0.0))


def _tier_and_log_weight(
    advantages: Float[Array, " episodes"], mask: Bool[Array, " episodes"], alpha: Real[ArrayLike, ""]
) -> tuple[Int[Array, " episodes"], Float[Array, " episodes"]]:
    """Tier of each episode, and `alpha * log |A|` within it; 0 where the advantage is 0, so alpha = 0 gives no NaN."""
    magnitude = jnp.abs(advantages.astype(jnp.promote_types(advantages.dtype, jnp.float32)))
    # Subnormal counts as zero: accelerators flush it to zero inside the logarithm.
    nonzero = mask & (magnitude >= jnp.finfo(magnitude.dtype).tiny)
    alpha = jnp.asarray(alpha, magnitude.dtype)
    log_weight = alpha * jnp.log(jnp.where(nonzero, magnitude, 1.0))
    unmasked_tier = jnp.where(nonzero | (alpha == 0), _WEIGHTED, _ZERO_ADVANTAGE)
    return jnp.where(mask, unmasked_tier, _MASKED), log_weight


def _episode_gumbel(key: PRNGKeyArray, episodes: int) -> Float[Array, " episodes"]:
    """Standard Gumbel noise in fp32, entry i from `key` folded with i."""
    episode_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(episodes))
    return jax.vmap(lambda episode_key: jax.random.gumbel(episode_key, dtype=jnp.float32))(episode_keys)
