"""ETPO: entropy-regularised token-level policy optimisation (arXiv 2402.06700).

A reply's tokens are decisions of one soft Markov decision process, in which a policy pays beta for every nat that it
differs from the frozen reference rho. With s_t the prompt of step t and w^1 .. w^n its tokens,

    j < n:  y_j = E_{v ~ pi}[Qbar(s_t, w^1..w^j, v)] - beta KL(pi || rho)(s_t, w^1..w^j)
    j = n:  y_n = r_t + gamma (E_{v ~ pi}[Qbar(s_{t+1}, v)] - beta KL(pi || rho)(s_{t+1}))

and y_n = r_t where the game terminated; where the time limit cut it, s_{t+1} is the observation after the last step.
No reward and no discount stand inside a reply, so the fixed point is the soft Q of whole replies, however they are cut
into tokens. The critic learns Q(s_t, w^1..w^{j-1}, w^j) -> y_j, the policy minimises

    L = sum_v pi(v) (beta (log pi(v) - log rho(v)) - Q(v)) = beta KL(pi || rho) - E_pi[Q]

at every token, with Q a constant: its optimum is rho exp(Q / beta) / Z. Expectations and KL are over the whole
vocabulary (`TokenStatistics`), so a token that was not drawn is taught as well.

**As released.** The published code departs from this in four ways. Three are here as functions, for an ablation:
`released_policy_loss`, `released_targets`, `released_critic_loss`. The fourth is its arithmetic: fp16 weights without
a master copy, so that steps below their resolution are lost.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Real

from jaxgrpo.algorithms.algorithm import Played, Reads, RowLoss, RowRecord, Statistic, Targets, of_all_episodes
from jaxgrpo.algorithms.backups import Steps, backup
from jaxgrpo.config import HyperParameters, TrainConfig
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics

HUBER_DELTA = 10.0


def soft_value(
    expected_q: Float[Array, "*tokens"], kl: Float[Array, "*tokens"], beta: Real[ArrayLike, ""]
) -> Float[Array, "*tokens"]:
    r"""Value before a token is drawn, $V = E_{v \sim \pi}[Q(v)] - \beta \, KL(\pi \| \rho)$.

    Args:
      expected_q: the critic's values averaged under the policy.
      kl: divergence of the policy from the reference, in nats.
      beta: price of a nat in units of the return, not negative.

    Example:
      >>> import jax.numpy as jnp
      >>> print(soft_value(jnp.array([1.0, 1.0]), jnp.array([0.0, 2.0]), 0.25))
      [1.  0.5]
    """
    return expected_q - jnp.asarray(beta) * kl


def targets(
    soft_values: Float[Array, "*episodes steps tokens"],
    sampled: Bool[Array, "*episodes steps tokens"],
    steps: Steps,
    discount: Real[ArrayLike, ""],
) -> Float[Array, "*episodes steps tokens"]:
    """Soft Bellman target of each sampled token's Q: y_j of the module's head; 0 elsewhere.

    Args:
      soft_values: `soft_value` before each token, with the target critic's Q.
      sampled: tokens that the policy chose. The first token of the next step is the first that it chose there.
      steps: what the steps led to; `final_value` is the soft value before the first token in reply to the observation
        after the last one.
      discount: gamma of a step, in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> values, yes, no = jnp.array([[5.0, 2.0]]), jnp.array([True]), jnp.array([False])
      >>> given, reward = (values, jnp.ones_like(values, bool)), jnp.array([1.0])
      >>> print(targets(*given, Steps(reward, yes, no, jnp.array(4.0)), 0.5))
      [[2. 1.]]
      >>> print(targets(*given, Steps(reward, no, yes, jnp.array(4.0)), 0.5))
      [[2. 3.]]
    """
    return backup(soft_values, sampled, steps, discount).target


def critic_loss(
    q: Float[Array, "*tokens"], target: Float[Array, "*tokens"], delta: Real[ArrayLike, ""] = HUBER_DELTA
) -> Float[Array, "*tokens"]:
    """Huber loss of each sampled token's Q: half the squared error, and linear beyond `delta` on either side.

    Args:
      q: the critic's Q of the token that was sampled.
      target: from `targets`; no gradient flows into it.
      delta: error from which on the loss is linear, in units of the return.

    Example:
      >>> import jax.numpy as jnp
      >>> print(critic_loss(jnp.array([0.0, 0.0, 0.0]), jnp.array([2.0, 20.0, -20.0])))
      [  2. 150. 150.]
    """
    return optax.losses.huber_loss(q, jax.lax.stop_gradient(target), delta=delta)


def policy_loss(
    expected_q: Float[Array, "*tokens"],
    divergence: Float[Array, "*tokens"],
    beta: Real[ArrayLike, ""],
) -> Float[Array, "*tokens"]:
    r"""Loss of the policy at each token, $\beta D - E_\pi[Q]$.

    With $D = KL(\pi \| \rho)$ this is $\sum_v \pi(v) (\beta (\log \pi(v) - \log \rho(v)) - Q(v))$, whose optimum is
    $\rho \exp(Q / \beta) / Z$. With $D = -H(\pi)$, minus the entropy, the reference drops out of it, and the optimum is
    $\mathrm{softmax}(Q / \beta)$.

    Args:
      expected_q: $E_\pi[Q]$, differentiable in the policy alone.
      divergence: $KL(\pi \| \rho)$ or $-H(\pi)$, differentiable in the policy.
      beta: price of a nat in units of the return, not negative.

    Example:
      >>> import jax.numpy as jnp
      >>> print(policy_loss(jnp.array([1.0]), jnp.array([2.0]), 0.25))
      [-0.5]
    """
    return jnp.asarray(beta) * divergence - expected_q


def released_targets(
    expected_q: Float[Array, "*episodes steps tokens"],
    kl: Float[Array, "*episodes steps tokens"],
    sampled: Bool[Array, "*episodes steps tokens"],
    steps: Steps,
    discount: Real[ArrayLike, ""],
    beta: Real[ArrayLike, ""],
) -> Float[Array, "*episodes steps tokens"]:
    """The targets as released: inside a reply, the KL is that of the *next step's* token of the same number.

    Where the next step has no such token, or there is no next step, nothing is subtracted. Between steps the right KL
    is read. (The released code knows no truncation; here it bootstraps, as in `targets`.)

    Args:
      expected_q: the target critic's values averaged under the policy.
      kl: divergence from the reference before each token.
      sampled: see `targets`, as the others.
      steps: what the steps led to; the KL in `final_value` is its own.
      discount: gamma of a step.
      beta: price of a nat.

    Example:
      >>> import jax.numpy as jnp
      >>> q, kl, flags = jnp.zeros((2, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.zeros(2, bool)
      >>> steps = Steps(jnp.zeros(2), flags.at[1].set(True), flags, jnp.array(0.0))
      >>> print(released_targets(q, kl, jnp.ones((2, 2), bool), steps, 0.5, 1.0))
      [[-4.  -1.5]
       [ 0.   0. ]]
    """
    kl = jnp.where(sampled, kl, 0.0)
    nothing = jnp.zeros_like(kl[..., :1, :])
    shifted = jnp.concatenate([kl[..., 1:, :], nothing], axis=-2)
    opens = sampled & (jnp.cumsum(sampled, axis=-1) == 1)
    # A reply's first value is read by the step before it, with its own KL; the others from inside the reply.
    read = jnp.where(opens, kl, shifted)
    return targets(soft_value(expected_q, read, beta), sampled, steps, discount)


def released_critic_loss(
    q: Float[Array, "*tokens"], target: Float[Array, "*tokens"], delta: Real[ArrayLike, ""] = HUBER_DELTA
) -> Float[Array, "*tokens"]:
    """The critic's loss as released: 0, with no gradient, where Q is more than `delta` *above* its target.

    Args:
      q: see `critic_loss`, as the others.
      target: from `released_targets`.
      delta: error from which on the loss is linear, or gone.

    Example:
      >>> import jax.numpy as jnp
      >>> print(released_critic_loss(jnp.array([0.0, 0.0, 0.0]), jnp.array([2.0, 20.0, -20.0])))
      [  2. 150.   0.]
    """
    return jnp.where(q - target > delta, 0.0, critic_loss(q, target, delta))


def released_policy_loss(
    mean_q: Float[Array, "*tokens"], mean_log_prob: Float[Array, "*tokens"], beta: Real[ArrayLike, ""]
) -> Float[Array, "*tokens"]:
    r"""The policy's loss as released, $\frac{1}{|V|} \sum_v (\beta \log \pi(v) - Q(v))$: all tokens weigh the same.

    Its gradient is that of $\beta \log \pi$ alone: what Q is does not matter.

    Args:
      mean_q: unweighted mean of Q over the vocabulary.
      mean_log_prob: unweighted mean of $\log \pi$, differentiable in the policy.
      beta: price of a nat.

    Example:
      >>> import jax.numpy as jnp
      >>> print(released_policy_loss(jnp.array([1.0]), jnp.array([-2.0]), 0.25))
      [-1.5]
    """
    return jnp.asarray(beta) * mean_log_prob - jax.lax.stop_gradient(mean_q)


@dataclasses.dataclass(frozen=True)
class ETPO:
    """ETPO as an algorithm of the train step.

    Attributes:
        reference_in_policy: whether the policy's loss knows the reference; without, it is beta times minus the entropy.
        as_released: losses and targets of the published code, see the module's head.
        reply_limit: most tokens in a reply.
    """

    reference_in_policy: bool
    as_released: bool
    reply_limit: int

    @classmethod
    def from_config(cls, config: TrainConfig) -> "ETPO":
        """The algorithm a configuration asks for."""
        learn = config.learn
        return cls(learn.reference_in_policy, learn.etpo_as_released, config.play.reply_limit)

    @property
    def reads(self) -> Reads:
        """Expectations over the vocabulary, before learning for the targets and then for the losses."""
        loss: set[Statistic] = {"log_prob", "entropy", "kl", "q"}
        loss |= {"mean_q", "mean_log_prob"} if self.as_released else {"expected_q"}
        return Reads(loss=frozenset(loss), play=frozenset({"expected_q", "kl", "q"}))

    @property
    def uses_anchor(self) -> bool:
        """States are not compared."""
        return False

    @property
    def critic(self) -> Literal["q"]:
        """Q of every token."""
        return "q"

    def target_decay(self, hp: HyperParameters) -> Float[Array, ""]:
        """Of the target critic's average."""
        return hp.polyak

    def targets(
        self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters, played: Played | None = None
    ) -> Targets:
        """Soft Bellman targets of all tokens that were sampled, in all episodes."""
        del key
        assert played is not None
        expected_q, kl, q = (played.statistics[name] for name in ("expected_q", "kl", "q"))
        soft = soft_value(expected_q, kl, hp.beta)
        sampled = episodes.sampled
        steps = Steps(episodes.reward, episodes.terminated, episodes.truncated, played.final(soft, episodes))
        if self.as_released:
            found = released_targets(expected_q[..., :-1, :], kl[..., :-1, :], sampled, steps, hp.discount, hp.beta)
        else:
            found = targets(soft[..., :-1, :], sampled, steps, hp.discount)
        q = q[..., :-1, :]
        metrics = {
            "target_mean": jnp.mean(found, where=sampled),
            "q_mean": jnp.mean(q, where=sampled),
            "q_std": jnp.std(q, where=sampled),
            "explained_variance": 1 - jnp.var(found - q, where=sampled) / jnp.var(found, where=sampled),
        }
        return of_all_episodes(episodes, found, metrics, aggregate="token", reply_limit=self.reply_limit)

    def loss(
        self, statistics: TokenStatistics, record: RowRecord, target: Float[Array, " limit"], hp: HyperParameters
    ) -> RowLoss:
        """Losses of policy and critic, each summed over the sampled tokens of one row."""

        def over_tokens(x: Array) -> Float[Array, ""]:
            return jnp.sum(jnp.where(record.sampled, x, 0.0))

        q, kl = statistics.q, statistics.kl
        assert q is not None and kl is not None
        if self.as_released:
            assert statistics.mean_q is not None and statistics.mean_log_prob is not None
            of_policy = released_policy_loss(statistics.mean_q, statistics.mean_log_prob, hp.beta)
            of_critic = released_critic_loss(q, target)
        else:
            assert statistics.expected_q is not None
            divergence = kl if self.reference_in_policy else -statistics.entropy
            of_policy = policy_loss(statistics.expected_q, divergence, hp.beta)
            of_critic = critic_loss(q, target)
        error, gap = jax.lax.stop_gradient((target - q, statistics.log_prob - record.old_log_prob))
        sums = {
            "kl": over_tokens(jax.lax.stop_gradient(kl)),
            "entropy": over_tokens(jax.lax.stop_gradient(statistics.entropy)),
            "bellman_error": over_tokens(jnp.abs(error)),
            "logprob_gap": over_tokens(jnp.abs(gap)),
        }
        return RowLoss({"actor": over_tokens(of_policy), "critic": over_tokens(of_critic)}, sums, {})
