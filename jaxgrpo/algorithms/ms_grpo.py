"""MS-GRPO: group-relative policy optimisation for episodes of many steps (arXiv 2508.10839).

For a group g of N episodes that share a start state,

    R_i = sum_t r_{i,t}                        undiscounted, penalties for unreadable replies included
    A_i = (R_i - mean_g R) / (std_g R + eps)   one advantage an episode

and every token of every step of episode i is credited with A_i in

    J = min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i) - beta KL(pi || reference) + eta H(pi)

where rho is the ratio of the token's probability to the one it was sampled with. Of the episodes played, those with a
large |A_i| are trained on (absolute-advantage-weighted sampling, see `episode_sampling`).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxgrpo.algorithms.advantages import group_advantages
from jaxgrpo.algorithms.algorithm import RowLoss, Targets
from jaxgrpo.algorithms.episode_sampling import sample_episodes
from jaxgrpo.algorithms.objectives import clipped_surrogate, kl_k3, row_weights
from jaxgrpo.config import HyperParameters, Switches, TrainConfig
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics


@dataclasses.dataclass(frozen=True)
class MSGRPO:
    """MS-GRPO and what follows from its options: RLOO and Dr. GRPO advantages, DAPO's bounds, uniform sampling.

    Attributes:
        train_episodes: episodes trained on an iteration.
        normalise: see `group_advantages`.
        importance: see `sample_episodes`.
        aggregate: see `row_weights`.
        reply_limit: most tokens in a reply.
        switches: which terms the loss has.
    """

    train_episodes: int
    normalise: Literal["std", "mean", "leave_one_out"]
    importance: Literal["none", "correct"]
    aggregate: Literal["token", "sequence", "episode", "constant"]
    reply_limit: int
    switches: Switches

    @classmethod
    def from_config(cls, config: TrainConfig) -> "MSGRPO":
        """The algorithm a configuration asks for."""
        return cls(
            train_episodes=config.trained,
            normalise=config.learn.normalise,
            importance=config.learn.importance,
            aggregate=config.learn.aggregate,
            reply_limit=config.play.reply_limit,
            switches=Switches.from_config(config),
        )

    @property
    def uses_reference(self) -> bool:
        """Whether there is a KL term."""
        return self.switches.kl

    def targets(self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters) -> Targets:
        """Advantages of all episodes, then the draw of those to train on."""
        returns = episodes.returns
        advantage = group_advantages(returns, jnp.ones(returns.shape, bool), normalise=self.normalise).reshape(-1)
        sample = sample_episodes(
            key, advantage, jnp.ones(advantage.shape, bool), self.train_episodes, hp.alpha, importance=self.importance
        )
        counts = episodes.token_counts
        options = {"aggregate": self.aggregate, "reply_limit": self.reply_limit}
        if self.importance == "correct":
            of_all = sample.dense_weights(advantage.shape[0])
            weight, denominator = row_weights(counts, counts > 0, episode_weights=of_all, **options)
            weight = weight[sample.indices]
        else:
            chosen = counts[sample.indices]
            weight, denominator = row_weights(chosen, chosen > 0, **options)
        target = jnp.broadcast_to(advantage[sample.indices][:, None], weight.shape)
        # Without KL and entropy an episode of zero advantage has no gradient: it counts, and costs nothing.
        everything = self.switches.kl or self.switches.entropy
        return Targets(
            chosen=sample.indices,
            visit=(weight > 0) & ((target != 0) | everything),
            weight=weight,
            denominator=denominator,
            target=target,
            metrics={
                "advantage_abs_mean": jnp.abs(advantage).mean(),
                "trained_advantage_abs_mean": jnp.abs(advantage[sample.indices]).mean(),
            },
        )

    def loss(
        self,
        statistics: TokenStatistics,
        sampled: Bool[Array, " limit"],
        old_log_prob: Float[Array, " limit"],
        reference_log_prob: Float[Array, " limit"] | None,
        target: Float[Array, ""],
        hp: HyperParameters,
    ) -> RowLoss:
        """Minus the objective above, summed over the sampled tokens of one row of advantage `target`."""

        def over_tokens(x: Array) -> Float[Array, ""]:
            return jnp.sum(jnp.where(sampled, x, 0.0))

        log_prob = jnp.where(sampled, statistics.log_prob, 0.0)
        objective, clipped = clipped_surrogate(
            log_prob,
            old_log_prob,
            target,
            hp.clip_low,
            hp.clip_high,
            hp.dual_clip if self.switches.dual_clip else None,
        )
        total = -over_tokens(objective)
        gap = jax.lax.stop_gradient(log_prob - old_log_prob)
        sums = {
            "clip_fraction": over_tokens(clipped.astype(jnp.float32)),
            "entropy": over_tokens(jax.lax.stop_gradient(statistics.entropy)),
            "logprob_gap": over_tokens(jnp.abs(gap)),
        }
        if self.switches.entropy:
            total = total - hp.entropy_bonus * over_tokens(statistics.entropy)
        if reference_log_prob is not None:
            kl = over_tokens(kl_k3(log_prob, jnp.where(sampled, reference_log_prob, 0.0)))
            total = total + hp.kl_beta * kl
            sums["kl"] = jax.lax.stop_gradient(kl)
        ratio_max = jnp.max(jnp.where(sampled, jnp.exp(jnp.minimum(gap, 80.0)), 0.0))
        return RowLoss(total, sums, {"ratio_max": ratio_max})
