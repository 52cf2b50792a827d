"""MS-GRPO: group-relative policy optimisation for episodes of many steps (arXiv 2508.10839).

For a group g of N episodes that share a start state,

    R_i = sum_t r_{i,t}                        undiscounted, penalties for unreadable replies included
    A_i = (R_i - mean_g R) / (std_g R + eps)   one advantage an episode

and every token of every step of episode i is credited with A_i in

    J = min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i) - beta KL(pi || reference) + eta H(pi)

where rho is the ratio of the token's probability to the one it was sampled with. Of the episodes played, those with a
large |A_i| are trained on (absolute-advantage-weighted sampling, see `episode_sampling`).

Relatives that differ in who is credited with what override `MSGRPO.advantages` and share everything else.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxgrpo.algorithms.advantages import group_advantages
from jaxgrpo.algorithms.algorithm import Played, Reads, RowLoss, RowRecord, Targets
from jaxgrpo.algorithms.episode_sampling import sample_episodes
from jaxgrpo.algorithms.group_filter import groups_to_keep
from jaxgrpo.algorithms.objectives import clipped_surrogate, kl_k3, row_weights, truncated_weight
from jaxgrpo.config import HyperParameters, Switches, TrainConfig
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics


@dataclasses.dataclass(frozen=True)
class MSGRPO:
    """MS-GRPO and what follows from its options: RLOO and Dr. GRPO advantages, DAPO, StarPO-S, uniform sampling.

    Attributes:
        train_episodes: episodes trained on an iteration.
        kept_groups: groups trained on an iteration, see `groups_to_keep`.
        drop_equal_groups: see `groups_to_keep`.
        normalise: see `group_advantages`.
        importance: see `sample_episodes`.
        aggregate: see `row_weights`.
        reply_limit: most tokens in a reply.
        switches: which terms the loss has.
    """

    train_episodes: int
    kept_groups: int
    drop_equal_groups: bool
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
            kept_groups=config.kept_groups,
            drop_equal_groups=config.learn.drop_equal_groups,
            normalise=config.learn.normalise,
            importance=config.learn.importance,
            aggregate=config.learn.aggregate,
            reply_limit=config.play.reply_limit,
            switches=Switches.from_config(config),
        )

    @property
    def reads(self) -> Reads:
        """Chances and entropy of the tokens, and the reference's chances where there is a KL term."""
        return Reads(loss=frozenset({"log_prob", "entropy"}), reference_log_prob=self.switches.kl)

    @property
    def critic(self) -> Literal["none"]:
        """There is none: episodes are compared with each other."""
        return "none"

    def target_decay(self, hp: HyperParameters) -> None:
        """There is no target critic either."""

    @property
    def uses_anchor(self) -> bool:
        """Whether the advantages compare states of the game."""
        return False

    def advantages(self, episodes: Episodes, hp: HyperParameters) -> Float[Array, "groups samples steps"]:
        """What the tokens of each step are credited with: here, at every step, how the episode compares."""
        del hp
        return jnp.broadcast_to(self._of_episodes(episodes)[..., None], episodes.alive.shape)

    def _of_episodes(self, episodes: Episodes) -> Float[Array, "groups samples"]:
        returns = episodes.returns
        return group_advantages(returns, jnp.ones(returns.shape, bool), normalise=self.normalise)

    def targets(
        self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters, played: Played | None = None
    ) -> Targets:
        """Advantages of all steps, the groups that count, then the draw of the episodes to train on."""
        del played
        advantage = self.advantages(episodes, hp)
        magnitude = _mean_magnitude(advantage, episodes.alive).reshape(-1)
        kept = groups_to_keep(episodes.returns, self.kept_groups, drop_equal=self.drop_equal_groups)
        counts = episodes.token_counts
        mask = jnp.repeat(kept, episodes.returns.shape[1])
        sample = sample_episodes(key, magnitude, mask, self.train_episodes, hp.alpha, importance=self.importance)
        present = sample.weights > 0
        options = {"aggregate": self.aggregate, "reply_limit": self.reply_limit}
        if self.importance == "correct":
            of_all = sample.dense_weights(magnitude.shape[0])
            trained = (counts > 0) & mask[:, None]
            weight, denominator = row_weights(counts, trained, episode_weights=of_all, **options)
            weight = weight[sample.indices]
        else:
            chosen = counts[sample.indices]
            weight, denominator = row_weights(chosen, (chosen > 0) & present[:, None], **options)
        target = advantage.reshape(counts.shape)[sample.indices]
        # Without KL and entropy a step of zero advantage has no gradient: it counts, and costs nothing.
        everything = self.switches.kl or self.switches.entropy
        drawn = jnp.where(present, magnitude[sample.indices], 0.0)
        return Targets(
            chosen=sample.indices,
            visit=(weight > 0) & ((target != 0) | everything),
            weight=weight,
            denominator=denominator,
            target=target,
            metrics={
                "advantage_abs_mean": magnitude.mean(),
                "trained_advantage_abs_mean": drawn.sum() / jnp.maximum(present.sum(), 1),
                "kept_groups": kept.sum(dtype=jnp.float32),
            },
        )

    def loss(
        self, statistics: TokenStatistics, record: RowRecord, target: Float[Array, ""], hp: HyperParameters
    ) -> RowLoss:
        """Minus the objective above, summed over the sampled tokens of one row of advantage `target`."""
        sampled, old_log_prob, rollout_log_prob, reference_log_prob = record

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
        if self.switches.tis and rollout_log_prob is not None:
            objective = objective * truncated_weight(old_log_prob, rollout_log_prob, hp.tis_cap)
        total = -over_tokens(objective)
        log_ratio = jax.lax.stop_gradient(log_prob - old_log_prob)
        # How far training's and play's arithmetic are apart; without recomputation, passes after the first move it too.
        gap = log_ratio if rollout_log_prob is None else old_log_prob - rollout_log_prob
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
        ratio_max = jnp.max(jnp.where(sampled, jnp.exp(jnp.minimum(log_ratio, 80.0)), 0.0))
        return RowLoss({"actor": total}, sums, {"ratio_max": ratio_max})


def _mean_magnitude(
    advantage: Float[Array, "groups samples steps"], alive: Bool[Array, "groups samples steps"]
) -> Float[Array, "groups samples"]:
    """Mean of |A| over the steps an episode played.

    The smallest is taken off first, so that the mean of equal magnitudes is exactly that magnitude.
    """
    magnitude = jnp.abs(advantage)
    smallest = jnp.min(magnitude, axis=-1, where=alive, initial=jnp.inf, keepdims=True)
    excess = jnp.sum(jnp.where(alive, magnitude - smallest, 0.0), axis=-1)
    return smallest[..., 0] + excess / alive.sum(-1)
