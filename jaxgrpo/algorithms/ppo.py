"""PPO with a value network, of whole replies or of tokens: the baselines that ETPO and POAD are compared with.

| name   | a decision is | its value is read           | discount                     | source           |
|--------|---------------|-----------------------------|------------------------------|------------------|
| PPO-KL | a reply       | at the last prompt token    | gamma a step                 | arXiv 2402.06700 |
| POAD   | a token       | before every token          | gamma a step, 1 in a reply   | arXiv 2405.15821 |
| NTPO   | a token       | before every token          | gamma a token                | its ablation     |

TWOSOME (arXiv 2401.14151) is PPO-KL over a policy whose replies are the texts of actions, `ActionPolicy`.

Advantages are those of generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438). The value of a reply
is read before its first token: behind it, it would be a baseline that knows the action, and the gradient biased. POAD
decomposes the reply's Bellman backup exactly, so its value before a reply is that of PPO over replies; NTPO's discount
makes a reward worth less for the length of the replies before it.

The policy's objective is `objectives.clipped_surrogate`, of tokens, or of whole replies through `reply_log_prob`.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Real

from jaxgrpo.algorithms.advantages import group_advantages
from jaxgrpo.algorithms.algorithm import Played, Reads, RowLoss, RowRecord, Statistic, Targets, of_all_episodes
from jaxgrpo.algorithms.backups import Steps, backup
from jaxgrpo.algorithms.objectives import clipped_surrogate, kl_k3
from jaxgrpo.config import HyperParameters, Switches, TrainConfig
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics


class Estimates(NamedTuple):
    """What a value network makes of episodes, for each decision; 0 where there is none."""

    advantage: Float[Array, "*decisions"]
    """How much better than expected it went on."""
    value_target: Float[Array, "*decisions"]
    """What the value before the decision should have been: value + advantage, the lambda-return."""


def token_advantages(
    values: Float[Array, "*episodes steps tokens"],
    sampled: Bool[Array, "*episodes steps tokens"],
    steps: Steps,
    discount: Real[ArrayLike, ""],
    trace_decay: Real[ArrayLike, ""],
    *,
    token_discount: Real[ArrayLike, ""] = 1.0,
) -> Estimates:
    r"""Advantages of single tokens: POAD, or with $\gamma$ on every token NTPO.

    $$A_j = V_{j+1} - V_j + \lambda A_{j+1} \;(j < n)$$

    $$A_n = r_t + \gamma V' [\text{not terminated}] - V_n
      + \gamma \lambda A' [\text{neither terminated nor truncated}]$$

    with $V'$, $A'$ of the next step's first token. A truncated episode bootstraps from `final_value` and carries no
    advantage over. See `backups.backup` for tokens that nobody chose.

    Args:
      values: V before each token.
      sampled: tokens that the policy chose.
      steps: what the steps led to; `final_value` is V of the observation after the last one.
      discount: gamma of a step, in [0, 1].
      trace_decay: lambda of a decision, in [0, 1].
      token_discount: 1 for POAD; `discount` for NTPO, where $V_{j+1}$ and $\lambda A_{j+1}$ are multiplied by it.

    Example:
      >>> import jax.numpy as jnp
      >>> values, yes, no = jnp.array([[0.5, 1.0]]), jnp.array([True]), jnp.array([False])
      >>> steps = Steps(jnp.array([3.0]), yes, no, jnp.array(9.0))
      >>> print(token_advantages(values, jnp.ones_like(values, bool), steps, 1.0, 0.5).advantage)
      [[1.5 2. ]]
    """
    values = jnp.where(sampled, values.astype(jnp.promote_types(values.dtype, jnp.float32)), 0.0)
    behind = backup(values, sampled, steps, discount, trace_decay=trace_decay, token_discount=token_discount)
    advantage = behind.target - values + behind.trace
    return Estimates(advantage, values + advantage)


def reply_advantages(
    values: Float[Array, "*episodes steps"],
    alive: Bool[Array, "*episodes steps"],
    steps: Steps,
    discount: Real[ArrayLike, ""],
    trace_decay: Real[ArrayLike, ""],
) -> Estimates:
    r"""Advantages of whole replies: PPO's own, a reply being one decision.

    $$A_t = r_t + \gamma V_{t+1} [\text{not terminated}] - V_t
      + \gamma \lambda A_{t+1} [\text{neither terminated nor truncated}]$$

    Args:
      values: V of each step's observation, read at the last token of the prompt.
      alive: steps that were played.
      steps: what the steps led to, rewards less `kl_penalty` where there is one.
      discount: gamma of a step, in [0, 1].
      trace_decay: lambda of a step, in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> values, yes, end = jnp.array([0.5, 1.0]), jnp.array([True, True]), jnp.array([False, True])
      >>> steps = Steps(jnp.array([0.0, 3.0]), end, ~yes, jnp.array(9.0))
      >>> print(reply_advantages(values, yes, steps, 0.5, 1.0).advantage)
      [1. 2.]
    """
    found = token_advantages(values[..., None], alive[..., None], steps, discount, trace_decay)
    return Estimates(found.advantage[..., 0], found.value_target[..., 0])


def normalised(
    advantage: Float[Array, "*decisions"], mask: Bool[Array, "*decisions"], *, epsilon: Real[ArrayLike, ""] = 1e-8
) -> Float[Array, "*decisions"]:
    """Advantages less their mean, over their population standard deviation; 0 where masked.

    Mean and deviation are those of all decisions of an iteration. (The sources take them minibatch by minibatch, which
    would make a gradient depend on how rows are cut up.)

    Args:
      advantage: of each decision.
      mask: True for the decisions that count.
      epsilon: added to the deviation, above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> print(normalised(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])))
      [-1.  1.  0.]
    """
    of_one_group = group_advantages(advantage.reshape(1, -1), mask.reshape(1, -1), epsilon=epsilon)
    return of_one_group.reshape(advantage.shape)


def kl_penalty(
    log_prob: Float[Array, "*rows tokens"],
    reference_log_prob: Float[Array, "*rows tokens"],
    sampled: Bool[Array, "*rows tokens"],
    beta: Real[ArrayLike, ""],
) -> Float[Array, "*rows"]:
    r"""What a reply costs for differing from the reference, $\beta \sum_k \log \pi(w_k) - \log \rho(w_k)$.

    Taken off the reward of the step. Over replies drawn from $\pi$ its mean is $\beta$ times the divergence of whole
    replies, which is the expected sum of the tokens' divergences; a single reply's may be negative.

    Args:
      log_prob: of each token under the policy that played.
      reference_log_prob: under the reference.
      sampled: tokens that the policy chose.
      beta: price of a nat in units of the reward, not negative.

    Example:
      >>> import jax.numpy as jnp
      >>> print(kl_penalty(jnp.array([-1.0, -5.0]), jnp.array([-3.0, 0.0]), jnp.array([True, False]), 0.5))
      1.0
    """
    return jnp.asarray(beta) * jnp.sum(jnp.where(sampled, log_prob - reference_log_prob, 0.0), axis=-1)


def reply_log_prob(
    log_prob: Float[Array, "*rows tokens"], sampled: Bool[Array, "*rows tokens"]
) -> Float[Array, "*rows 1"]:
    """Log-probability of a whole reply, the sum of its tokens', as if it were one token.

    Given to `clipped_surrogate` in place of the tokens', it clips the ratio of replies, as PPO over replies does.

    Args:
      log_prob: of each token.
      sampled: tokens that the policy chose.

    Example:
      >>> import jax.numpy as jnp
      >>> print(reply_log_prob(jnp.array([-1.0, -2.0, -9.0]), jnp.array([True, True, False])))
      [-3.]
    """
    return jnp.sum(jnp.where(sampled, log_prob, 0.0), axis=-1, keepdims=True)


def clipped_value_loss(
    value: Float[Array, "*decisions"],
    old_value: Float[Array, "*decisions"],
    value_target: Float[Array, "*decisions"],
    clip: Real[ArrayLike, ""],
) -> Float[Array, "*decisions"]:
    r"""Value loss of each decision, $\frac{1}{2} \max((V - \hat V)^2, (\mathrm{clip}(V) - \hat V)^2)$.

    where $\mathrm{clip}(V)$ is V kept within `clip` of the value that play had. What has moved further than that
    towards the target has no gradient; what has moved away from it keeps its own.

    Args:
      value: of the network being trained.
      old_value: of the network that the targets were made with; no gradient flows into it.
      value_target: from `Estimates`; no gradient flows into it.
      clip: largest move that counts, in units of the return, above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> value = jnp.array([0.5, 0.0, -0.5])
      >>> print(clipped_value_loss(value, jnp.zeros(3), jnp.ones(3), 0.25))
      [0.28125 0.5     1.125  ]
    """
    old_value, value_target = jax.lax.stop_gradient((old_value, value_target))
    error = jnp.square(value - value_target)
    beyond = jnp.abs(value - old_value) > clip
    clip = jnp.asarray(clip)
    clipped = jnp.square(old_value + jnp.clip(value - old_value, -clip, clip) - value_target)
    # Within the clip both errors are one, and their maximum would halve the gradient between the two.
    return 0.5 * jnp.where(beyond, jnp.maximum(error, clipped), error)


@dataclasses.dataclass(frozen=True)
class PPO:
    """PPO-KL, POAD, NTPO or TWOSOME as an algorithm of the train step, see the module's head.

    Attributes:
        level: what a decision is, a whole reply or a token.
        discounts_tokens: whether the discount is that of a token.
        normalise: whether advantages are normalised over the iteration.
        reply_limit: most tokens in a reply.
        switches: which terms the loss has.
    """

    level: Literal["reply", "token"]
    discounts_tokens: bool
    normalise: bool
    reply_limit: int
    switches: Switches

    @classmethod
    def from_config(cls, config: TrainConfig) -> "PPO":
        """The algorithm a configuration asks for: ppo-kl, poad, ntpo or twosome."""
        return cls(
            level="reply" if config.algorithm in ("ppo-kl", "twosome") else "token",
            discounts_tokens=config.algorithm == "ntpo",
            normalise=config.learn.normalise_advantages,
            reply_limit=config.play.reply_limit,
            switches=Switches.from_config(config),
        )

    @property
    def reads(self) -> Reads:
        """Values of all that was played, and the reference's chances where differing from it has a price."""
        play: set[Statistic] = {"value", "reference_log_prob"} if self.switches.kl else {"value"}
        return Reads(loss=frozenset({"log_prob", "entropy", "value"}), play=frozenset(play))

    @property
    def uses_anchor(self) -> bool:
        """States are not compared."""
        return False

    @property
    def critic(self) -> Literal["value"]:
        """The value before a token is drawn."""
        return "value"

    def target_decay(self, hp: HyperParameters) -> None:
        """There is no target critic: values are those of the network that is trained, from before it is."""

    def targets(
        self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters, played: Played | None = None
    ) -> Targets:
        """Advantages and value targets of all decisions, in all episodes."""
        del key
        assert played is not None
        values, sampled = played.statistics["value"], episodes.sampled
        reward, metrics = episodes.reward, {}
        if self.switches.kl:
            reference = played.statistics["reference_log_prob"][..., :-1, :]
            price = kl_penalty(episodes.reply.log_prob, reference, sampled, hp.kl_beta)
            gap = jnp.mean(episodes.reply.log_prob - reference, where=sampled)
            reward, metrics = reward - price, {"kl": gap, "kl_price": jnp.mean(price, where=episodes.alive)}
        steps = Steps(reward, episodes.terminated, episodes.truncated, played.final(values, episodes))
        values = values[..., :-1, :]
        if self.level == "token":
            decides = sampled
            token_discount = hp.discount if self.discounts_tokens else 1.0
            found = token_advantages(values, sampled, steps, hp.discount, hp.trace_decay, token_discount=token_discount)
        else:
            decides = episodes.alive[..., None] & (jnp.arange(self.reply_limit) == played.first_slot)
            of_replies = values[..., played.first_slot]
            found = reply_advantages(of_replies, episodes.alive, steps, hp.discount, hp.trace_decay)
            found = jax.tree.map(lambda x: jnp.where(decides, x[..., None], 0.0), found)
        advantage = normalised(found.advantage, decides, epsilon=1e-6) if self.normalise else found.advantage
        target = _Target(decides, advantage, values, found.value_target)
        spread = jnp.var(found.value_target, where=decides)
        metrics |= {
            "advantage_abs_mean": jnp.mean(jnp.abs(found.advantage), where=decides),
            "value_mean": jnp.mean(values, where=decides),
            "target_mean": jnp.mean(found.value_target, where=decides),
            "explained_variance": 1 - jnp.var(found.advantage, where=decides) / spread,
        }
        # With replies as decisions every reply weighs the same: 1, over their number.
        aggregate, limit = ("token", self.reply_limit) if self.level == "token" else ("constant", 1)
        return of_all_episodes(episodes, target, metrics, aggregate=aggregate, reply_limit=limit)

    def loss(self, statistics: TokenStatistics, record: RowRecord, target: "_Target", hp: HyperParameters) -> RowLoss:
        """Losses of policy and critic, each summed over the decisions of one row."""
        sampled = record.sampled

        def over_tokens(x: Array) -> Float[Array, ""]:
            return jnp.sum(jnp.where(sampled, x, 0.0))

        assert statistics.value is not None
        log_prob, old = (jnp.where(sampled, x, 0.0) for x in (statistics.log_prob, record.old_log_prob))
        advantage = target.advantage
        log_ratio = jax.lax.stop_gradient(log_prob - old)
        if self.level == "reply":
            log_prob, old = (reply_log_prob(x, sampled) for x in (log_prob, old))
            advantage = jnp.sum(advantage, keepdims=True)
        dual_clip = hp.dual_clip if self.switches.dual_clip else None
        objective, clipped = clipped_surrogate(log_prob, old, advantage, hp.clip_low, hp.clip_high, dual_clip)
        value_loss = clipped_value_loss(statistics.value, target.old_value, target.value_target, hp.value_clip)
        total = -jnp.sum(objective)
        if self.switches.entropy:
            total = total - hp.entropy_bonus * over_tokens(statistics.entropy)
        gap = log_ratio if record.rollout_log_prob is None else record.old_log_prob - record.rollout_log_prob
        sums = {
            "clip_fraction": over_tokens(clipped.astype(jnp.float32)),
            "entropy": over_tokens(jax.lax.stop_gradient(statistics.entropy)),
            "logprob_gap": over_tokens(jnp.abs(gap)),
        }
        ratio = jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_prob - old), 80.0))
        distance = jnp.sum(kl_k3(old, jax.lax.stop_gradient(log_prob))) if self.switches.target_kl else None
        return RowLoss(
            {"actor": total, "critic": jnp.sum(jnp.where(target.decides, value_loss, 0.0))},
            sums,
            {"ratio_max": jnp.where(jnp.any(sampled), jnp.max(ratio), 0.0)},
            distance,
        )


class _Target(NamedTuple):
    """What decisions are trained on; at the slots of tokens, or for whole replies at the first that can be sampled."""

    decides: Bool[Array, "*rows limit"]
    advantage: Float[Array, "*rows limit"]
    old_value: Float[Array, "*rows limit"]
    value_target: Float[Array, "*rows limit"]
