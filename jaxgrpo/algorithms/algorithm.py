"""What an algorithm is to the train step: targets once an iteration, and a loss for one row."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxgrpo.config import HyperParameters
from jaxgrpo.episodes import Episodes
from jaxgrpo.token_statistics import TokenStatistics


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
    """What the loss compares a row with; leading axes `[chosen, steps]`."""
    metrics: Mapping[str, Float[Array, ""]]
    """Numbers worth recording."""


class RowLoss(NamedTuple):
    """The loss of one row, and numbers worth recording about its trained tokens."""

    total: Float[Array, ""]
    """Sum over the row's sampled tokens."""
    sums: Mapping[str, Float[Array, ""]]
    """Recorded as means over all trained tokens."""
    maxima: Mapping[str, Float[Array, ""]]
    """Recorded as maxima over all trained tokens; 0 or more."""


@runtime_checkable
class Algorithm(Protocol):
    """A learning algorithm: pure functions of arrays; it knows no model and no game."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of the frozen starting model."""
        ...

    @property
    def uses_anchor(self) -> bool:
        """Whether the targets need the game's states, `Episodes.anchor`."""
        ...

    def targets(self, key: PRNGKeyArray, episodes: Episodes, hp: HyperParameters) -> Targets:
        """What to train on."""
        ...

    def loss(
        self,
        statistics: TokenStatistics,
        sampled: Bool[Array, " limit"],
        old_log_prob: Float[Array, " limit"],
        rollout_log_prob: Float[Array, " limit"] | None,
        reference_log_prob: Float[Array, " limit"] | None,
        target: PyTree[Array],
        hp: HyperParameters,
    ) -> RowLoss:
        """The loss of ONE row; the train step vmaps it.

        `old_log_prob` is what the ratio compares with, under the parameters that played. Where it was recomputed,
        `rollout_log_prob` is what play recorded; else that is None.
        """
        ...


@runtime_checkable
class Advantages(Protocol):
    """An algorithm that credits each step with an advantage."""

    def advantages(self, episodes: Episodes, hp: HyperParameters) -> Float[Array, "groups samples steps"]:
        """What the tokens of each step are credited with."""
        ...
