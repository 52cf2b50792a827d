"""What an algorithm is to the train step: targets once an iteration, and a loss for one row."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxgrpo.algorithms.objectives import Aggregate, row_weights
from jaxgrpo.config import HyperParameters
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics

Network = Literal["actor", "critic"]


Statistic = Literal[
    "log_prob", "entropy", "kl", "expected_q", "q", "value", "mean_log_prob", "mean_q", "reference_log_prob"
]
"""A number about each token: a field of `TokenStatistics`, or log rho of the token under the reference."""


class Reads(NamedTuple):
    """What an algorithm asks the networks for; static, and what nobody reads is not computed."""

    loss: frozenset[Statistic]
    """In every micro-batch, with gradients."""
    play: frozenset[Statistic] = frozenset()
    """Once an iteration before `targets`, of all that was played, without gradient."""
    reference_log_prob: bool = False
    """Whether rows carry log rho of their tokens."""


class Played(NamedTuple):
    """What the networks make of the episodes as they were played, before anything is learned.

    The policy is the one that played, the critic its target network where there is one.
    """

    statistics: Mapping[Statistic, Float[Array, "groups samples steps_and_one limit"]]
    """Those of `Reads.play`. In the row behind an episode's last step only the slot `first_slot` means anything: it is
    about the first token in reply to the last observation. The row is 0 where the game terminated."""
    first_slot: int
    """Slot of a reply's first decision: what is known there is the observation alone."""

    def final(self, of_slots: Float[Array, "groups samples steps_and_one limit"], episodes: Episodes) -> Array:
        """Of a number about each slot, `[groups, samples]`: the one at the observation behind the last step."""
        steps_played = episodes.alive.sum(-1, keepdims=True)
        return jnp.take_along_axis(of_slots[..., self.first_slot], steps_played, axis=-1)[..., 0]


class Targets(NamedTuple):
    """What an iteration trains on, made once from its episodes, without gradient."""

    chosen: Int[Array, " chosen"]
    """Numbers of the episodes to train on, over groups and samples flattened."""
    visit: Bool[Array, "chosen steps"]
    """Steps that can have a gradient: the others are not computed at all."""
    weight: Float[Array, "chosen steps"]
    """Weight of each token of a step."""
    denominator: Float[Array, ""]
    """The loss is the weighted sum over all rows divided by this: the same for every micro-batch."""
    target: PyTree[Array]
    """What the loss compares a row with; leading axes `[chosen, steps]`, then any."""
    metrics: Mapping[str, Float[Array, ""]]
    """Numbers worth recording."""


def of_all_episodes(
    episodes: Episodes,
    target: PyTree[Array],
    metrics: Mapping[str, Float[Array, ""]],
    *,
    aggregate: Aggregate,
    reply_limit: int,
) -> Targets:
    """Targets that train on every step of every episode in which a token was sampled.

    Args:
        episodes: all that were played.
        target: what the loss compares each step with; leading axes `[groups, samples, steps]`.
        metrics: numbers worth recording.
        aggregate: what the loss is a mean over, see `row_weights`.
        reply_limit: see `row_weights`.
    """
    counts = episodes.token_counts
    weight, denominator = row_weights(counts, counts > 0, aggregate=aggregate, reply_limit=reply_limit)
    return Targets(
        chosen=jnp.arange(counts.shape[0]),
        visit=counts > 0,
        weight=weight,
        denominator=denominator,
        target=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), target),
        metrics=metrics,
    )


class RowRecord(NamedTuple):
    """What is known of ONE row from before it is learned from."""

    sampled: Bool[Array, " limit"]
    """Tokens that the policy chose."""
    old_log_prob: Float[Array, " limit"]
    """What the ratio compares with: under the parameters that played."""
    rollout_log_prob: Float[Array, " limit"] | None = None
    """What play recorded, where `old_log_prob` was recomputed since; else None."""
    reference_log_prob: Float[Array, " limit"] | None = None
    """Under the frozen starting model, where `Reads` asks for it."""


class RowLoss(NamedTuple):
    """The losses of one row, and numbers worth recording about its trained tokens."""

    totals: Mapping[Network, Float[Array, ""]]
    """Sum over the row's sampled tokens, for each network that learns. No total has a gradient in another's network."""
    sums: Mapping[str, Float[Array, ""]]
    """Recorded as means over all trained tokens."""
    maxima: Mapping[str, Float[Array, ""]]
    """Recorded as maxima over all trained tokens; 0 or more."""
    distance: Float[Array, ""] | None = None
    """Sum over the row's decisions of how far the policy is from the one that played, in nats; only for `target_kl`."""


@runtime_checkable
class Algorithm(Protocol):
    """A learning algorithm: pure functions of arrays; it knows no model and no game."""

    @property
    def reads(self) -> Reads:
        """What it asks the networks for."""
        ...

    @property
    def critic(self) -> Literal["none", "q", "value"]:
        """What its critic puts out, if it has one."""
        ...

    @property
    def uses_anchor(self) -> bool:
        """Whether the targets need the game's states, `Episodes.anchor`."""
        ...

    def targets(
        self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters, played: Played | None = None
    ) -> Targets:
        """What to train on; `played` is given where `reads.play` asks for anything."""
        ...

    def loss(
        self, statistics: TokenStatistics, record: RowRecord, target: PyTree[Array], hp: HyperParameters
    ) -> RowLoss:
        """The loss of ONE row; the train step vmaps it."""
        ...

    def target_decay(self, hp: HyperParameters) -> Float[Array, ""] | None:
        """Share of the target critic that stays when the critic has taken a step; None for no target critic."""
        ...


@runtime_checkable
class Advantages(Protocol):
    """An algorithm that credits each step with an advantage."""

    def advantages(self, episodes: Episodes, hp: HyperParameters) -> Float[Array, "groups samples steps"]:
        """What the tokens of each step are credited with."""
        ...
