"""What a token contributes to the loss, and how tokens, replies and episodes are averaged.

A row is one reply: one step of one episode. The trained loss is

    loss = sum over rows of weight_row * (sum over its tokens of loss_token) / denominator

with weights and denominator of the whole batch, so that micro-batches of any shape add up to the full-batch gradient.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Real

Aggregate = Literal["token", "sequence", "episode", "constant"]

# Exponentials of log-ratios are followed up to e^20, about 5e8, and by their tangent from there on. A ratio that large
# is a fault of the run; the bound keeps values and gradients finite and pointing the right way until it is noticed.
_LOG_RATIO_BOUND = 20.0


def clipped_surrogate(
    log_prob: Float[Array, "*t"],
    old_log_prob: Float[Array, "*t"],
    advantage: Float[ArrayLike, "*#t"],
    clip_low: Real[ArrayLike, ""],
    clip_high: Real[ArrayLike, ""],
    dual_clip: Real[ArrayLike, ""] | None = None,
) -> tuple[Float[Array, "*t"], Bool[Array, "*t"]]:
    r"""Clipped policy objective of each token, to be maximised.

    With the ratio $\rho = \exp(\log \pi(w) - \log \pi_{old}(w))$,

    $$J = \min\big(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) \, A\big), \qquad
      J_{dual} = \max(J, c A) \;\text{ where } A < 0$$

    (PPO, Schulman et al. 2017, arXiv 1707.06347; two bounds as in DAPO, Yu et al. 2025, arXiv 2503.14476; dual clip, Ye
    et al. 2020, arXiv 1912.09729). The gradient is $\rho A \nabla \log \pi(w)$ where the ratio is inside or on its
    bounds, and 0 where it was clipped. A ratio beyond $e^{20}$ is continued by its tangent, so value and gradient
    stay finite.

    Args:
      log_prob: log-probability of the sampled token under the policy being trained; finite.
      old_log_prob: the same under the policy that sampled it; finite, no gradient flows into it.
      advantage: advantage of each token, or anything that broadcasts to the tokens; no gradient flows into it.
      clip_low: largest decrease of the ratio that is still rewarded, in [0, 1].
      clip_high: largest increase of the ratio that is still rewarded, not negative.
      dual_clip: c > 1, largest ratio that still counts against a token of negative advantage; None for no bound.

    Returns:
      The objective in fp32 or wider, and whether the clip took the token's gradient away.

    Raises:
      ValueError: `dual_clip` is a Python number of 1 or less: it would clip the policy that has not moved yet.

    Example:
      >>> import jax.numpy as jnp
      >>> log_ratio = jnp.log(jnp.array([1.1, 1.5, 0.5]))
      >>> objective, clipped = clipped_surrogate(log_ratio, jnp.zeros(3), 2.0, 0.2, 0.2)
      >>> print(objective.round(3), clipped)
      [2.2 2.4 1. ] [False  True False]
    """
    if isinstance(dual_clip, int | float) and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} clips an unchanged policy; choose more than 1 (3 is usual) or None")

    log_ratio = _float32(log_prob) - jax.lax.stop_gradient(_float32(old_log_prob))
    advantage = jax.lax.stop_gradient(_float32(jnp.asarray(advantage)))
    bounded, beyond = _exponent(log_ratio)
    ratio = jnp.exp(bounded) + beyond

    # The bound that applies, chosen by the sign: min() and clip() say the same but split the gradient of a ratio that
    # stands exactly on its bound.
    above = (advantage > 0) & (ratio > 1.0 + clip_high)
    below = (advantage < 0) & (ratio < 1.0 - clip_low)
    objective = advantage * jnp.where(above, 1.0 + clip_high, jnp.where(below, 1.0 - clip_low, ratio))
    clipped = above | below
    if dual_clip is not None:
        runaway = (advantage < 0) & (ratio > dual_clip)
        objective = jnp.where(runaway, dual_clip * advantage, objective)
        clipped = clipped | runaway
    return objective, clipped


def kl_k3(log_prob: Float[Array, "*t"], reference_log_prob: Float[Array, "*t"]) -> Float[Array, "*t"]:
    r"""Estimate of $KL(\pi \| \pi_{ref})$ from each token that $\pi$ sampled.

    $$k_3 = e^{r} - 1 - r, \qquad r = \log \pi_{ref}(w) - \log \pi(w)$$

    (Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html). Unbiased over tokens sampled from
    $\pi$, and never negative but for rounding. Beyond $r = 20$ the exponential is continued by its tangent: value and
    gradient stay finite and still pull the policy back to the reference.

    Args:
      log_prob: log-probability of the sampled token under the policy being trained; finite.
      reference_log_prob: the same under the frozen reference; finite, no gradient flows into it.

    Returns:
      The estimate in nats, in fp32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> print(kl_k3(jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.5, 0.5]))).round(3))
      [0.    0.307]
    """
    log_ratio = jax.lax.stop_gradient(_float32(reference_log_prob)) - _float32(log_prob)
    bounded, beyond = _exponent(log_ratio)
    return jnp.expm1(bounded) + beyond - log_ratio


def truncated_weight(
    log_prob: Float[Array, "*t"], rollout_log_prob: Float[Array, "*t"], cap: Real[ArrayLike, ""]
) -> Float[Array, "*t"]:
    r"""Truncated importance weight of each token, for play and training that compute with different arithmetic.

    $$w = \min\big(\exp(\log \pi_{old}(w) - \log \mu(w)), \; C\big)$$

    with $\pi_{old}$ the policy that played as the training computation sees it, and $\mu$ as play itself saw it (Yao et
    al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; truncation as in Ionides 2008).
    It multiplies the policy term of the token. No gradient flows through it.

    Args:
      log_prob: recomputed log-probability of the sampled token; finite.
      rollout_log_prob: the one recorded when it was sampled; finite.
      cap: C, above 0; 1 never raises a weight.

    Example:
      >>> import jax.numpy as jnp
      >>> print(truncated_weight(jnp.log(jnp.array([0.25, 0.9])), jnp.log(jnp.array([0.5, 0.3])), 2.0))
      [0.5 2. ]
    """
    log_ratio = _float32(log_prob) - _float32(rollout_log_prob)
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, jnp.log(jnp.asarray(cap, log_ratio.dtype)))))


def row_weights(
    token_counts: Int[Array, "episodes steps"],
    mask: Bool[Array, "episodes steps"],
    *,
    aggregate: Aggregate,
    reply_limit: int,
    episode_weights: Float[Array, " episodes"] | None = None,
) -> tuple[Float[Array, "episodes steps"], Float[Array, ""]]:
    r"""Weight of each token of a row, and the denominator of the whole batch.

    $$loss = \frac{1}{D} \sum_{i,t} w_{i,t} \sum_{k=1}^{n_{i,t}} loss_{i,t,k}$$

    with $n_{i,t}$ the tokens that step t of episode i trains on, a row counting if it is unmasked and has tokens:

    | aggregate  | $w_{i,t}$             | $D$                   | every ... weighs the same                       |
    |------------|-----------------------|-----------------------|-------------------------------------------------|
    | "token"    | 1                     | tokens                | token (DAPO, arXiv 2503.14476)                  |
    | "sequence" | $1 / n_{i,t}$         | rows                  | reply (GRPO, arXiv 2402.03300)                  |
    | "episode"  | $1 / \sum_t n_{i,t}$  | episodes with tokens  | episode                                         |
    | "constant" | 1 / reply_limit       | rows                  | token, however long (Dr. GRPO, arXiv 2503.20783) |

    Rows that do not count weigh 0 and are absent from D. If none counts, all weights are 0 and D is 1: the loss is 0.

    `episode_weights` multiply the weights and leave D alone. Priority weights make the numerator an unbiased estimate
    of the full batch's numerator. The full batch's D is known exactly, because every episode was generated, so their
    quotient is an unbiased estimate of the full-batch loss under every aggregate; a D made of the drawn rows, weighted
    or not, would be random and the quotient biased. So give the rows of *all* episodes together with the weights of
    all, and keep the drawn ones afterwards:

        sample = sample_episodes(key, advantages, episode_mask, count, alpha, importance="correct")
        weights, denominator = row_weights(token_counts, mask, ..., episode_weights=sample.dense_weights(episodes))
        weights = weights[sample.indices]

    Without correction give the drawn rows alone, and the loss is their plain mean:

        drawn = mask[sample.indices] & (sample.weights > 0)[:, None]
        weights, denominator = row_weights(token_counts[sample.indices], drawn, ...)

    Args:
      token_counts: tokens of each row's reply that are trained on, not negative.
      mask: True for the rows that count.
      aggregate: what the loss is a mean of.
      reply_limit: most tokens a reply can have; "constant" divides by it.
      episode_weights: importance weight of each episode, finite; None for 1.

    Returns:
      The weights, and the denominator, which is 1 or more. Both fp32.

    Raises:
      ValueError: `aggregate` is none of the above, or `reply_limit` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> counts, mask = jnp.array([[4, 2], [2, 8]]), jnp.array([[True, True], [True, False]])
      >>> weights, denominator = row_weights(counts, mask, aggregate="sequence", reply_limit=8)
      >>> print(weights.tolist(), denominator)
      [[0.25, 0.5], [0.5, 0.0]] 3.0
    """
    if aggregate not in get_args(Aggregate):
        raise ValueError(f"aggregate={aggregate!r} is unknown; choose one of {', '.join(get_args(Aggregate))}")
    if reply_limit < 1:
        raise ValueError(f"reply_limit={reply_limit} leaves no token to train on; choose 1 or more")

    counts = jnp.where(mask, token_counts, 0)
    present = counts > 0
    episode_counts = jnp.sum(counts, axis=1, keepdims=True)
    if aggregate == "token":
        share, denominator = jnp.ones(counts.shape, jnp.float32), jnp.sum(counts)
    elif aggregate == "sequence":
        share, denominator = 1.0 / jnp.maximum(counts, 1), jnp.sum(present)
    elif aggregate == "episode":
        share, denominator = 1.0 / jnp.maximum(episode_counts, 1), jnp.sum(episode_counts > 0)
    else:
        share, denominator = 1.0 / reply_limit, jnp.sum(present)
    weights = jnp.where(present, share, 0.0).astype(jnp.float32)
    if episode_weights is not None:
        weights = weights * episode_weights[:, None].astype(jnp.float32)
    return weights, jnp.maximum(denominator, 1).astype(jnp.float32)


def _exponent(log_ratio: Float[Array, "*t"]) -> tuple[Float[Array, "*t"], Float[Array, "*t"]]:
    """Exponent cut at the bound, and what the tangent of the exponential at the bound adds beyond it."""
    bounded = jnp.minimum(log_ratio, _LOG_RATIO_BOUND)
    beyond = math.exp(_LOG_RATIO_BOUND) * jnp.maximum(log_ratio - _LOG_RATIO_BOUND, 0.0)
    return bounded, beyond


def _float32(x: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """`x` in fp32, or in its own type where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
