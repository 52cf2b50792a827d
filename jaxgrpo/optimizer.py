"""Optimiser steps, and what decides on them and follows them, whose numbers are traced: a sweep is one compilation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Real

from jaxgrpo.config import HyperParameters

Schedule = Literal["constant", "linear", "cosine"]
Rule = Literal["adamw", "lion"]


def scheduled(hp: HyperParameters, iteration: Int[Array, ""], schedule: Schedule) -> Float[Array, ""]:
    """Share of the peak learning rate.

    Linear warm-up to 1, then constant, or falling to 0 at the last iteration in a line or a half cosine.
    """
    done = iteration.astype(jnp.float32)
    warm = jnp.where(hp.warmup > 0, jnp.minimum((done + 1) / jnp.maximum(hp.warmup, 1), 1.0), 1.0)
    progress = jnp.clip((done - hp.warmup) / jnp.maximum(hp.iterations - hp.warmup, 1), 0.0, 1.0)
    if schedule == "linear":
        warm = warm * (1 - progress)
    elif schedule == "cosine":
        warm = warm * (0.5 + 0.5 * jnp.cos(jnp.pi * progress))
    return warm


def make_optimizer(
    hp: HyperParameters, rate: Float[Array, ""], *, clip: bool, rule: Rule = "adamw"
) -> optax.GradientTransformation:
    """Global-norm clipping and AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675), built from traced numbers.

    The state's structure depends on `clip` and `rule` alone, so that it can be initialised with any numbers.

    Args:
        hp: betas, epsilon, weight decay and the largest norm.
        rate: learning rate of this step.
        clip: whether to clip at all.
        rule: how moments become a step; Lion's is the sign of one, and takes no epsilon.
    """
    moments = {
        "adamw": lambda: optax.scale_by_adam(hp.adam_b1, hp.adam_b2, hp.adam_epsilon),
        "lion": lambda: optax.scale_by_lion(hp.adam_b1, hp.adam_b2),
    }
    return optax.chain(
        optax.clip_by_global_norm(hp.gradient_clip) if clip else optax.identity(),
        moments[rule](),
        optax.add_decayed_weights(hp.weight_decay, mask=decays),
        optax.scale(-rate),
    )


def decays(params: PyTree[Array]) -> PyTree[bool]:
    """Which parameters weight decay pulls at: all but norms and biases."""

    def one(path: tuple[Any, ...], _: Array) -> bool:
        name = jax.tree_util.keystr(path)
        return not ("norm" in name or "bias" in name)

    return jax.tree_util.tree_map_with_path(one, params)


def within_target_kl(
    allowed: Bool[ArrayLike, ""], distance: Float[Array, ""], target_kl: Real[ArrayLike, ""]
) -> Bool[Array, ""]:
    r"""Whether the policy may take a step: not once it is further than `target_kl` from the one that played.

    The distance of a decision is $\rho - 1 - \log \rho$ with $\rho = \pi / \pi_{old}$, which is
    `objectives.kl_k3(old_log_prob, log_prob)`; summed over micro-batches, it is known when the gradient is. The
    predicate is traced: a step that is refused has been computed, and is not taken.

    Args:
      allowed: whether the earlier steps of the iteration were: once one is refused, the rest are.
      distance: mean of the decisions' distances, under the policy before the step.
      target_kl: largest mean distance in nats, above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> distance = jnp.array(0.05)
      >>> print(within_target_kl(True, distance, 0.06), within_target_kl(True, distance, 0.04))
      True False
    """
    return jnp.asarray(allowed) & (distance <= jnp.asarray(target_kl))


def polyak(target: PyTree[Array], online: PyTree[Array], decay: Real[ArrayLike, ""]) -> PyTree[Array]:
    """The target critic after an update, `decay * target + (1 - decay) * online`, leaf by leaf.

    Leaves should be fp32: in bf16 a step of 1 - 0.995 is mostly lost to rounding.

    Args:
      target: parameters of the target critic.
      online: those of the critic.
      decay: 0.995 in the source; 0 copies the critic.

    Example:
      >>> import jax.numpy as jnp
      >>> print(polyak({"w": jnp.array([1.0])}, {"w": jnp.array([3.0])}, 0.75))
      {'w': Array([1.5], dtype=float32)}
    """
    return optax.incremental_update(online, target, 1 - jnp.asarray(decay))
