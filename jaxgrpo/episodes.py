"""What was played, as arrays: replies, episodes of replies, and the rows that losses are made of."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

CLOSED, ENDED, CUT = 0, 1, 2
"""Why a reply stopped: its action closed, the model ended its turn, or it reached the limit."""


class Reply(NamedTuple):
    """Replies of a batch of rows, as sampled: never decoded and encoded again."""

    ids: Int[Array, "*rows limit"]
    """Token ids; 0 beyond `length`."""
    length: Int[Array, "*rows"]
    """Tokens in the reply, in [1, limit]; 0 in a blank one."""
    log_prob: Float[Array, "*rows limit"]
    """Log-probability of each sampled token when it was sampled; 0 elsewhere."""
    sampled: Bool[Array, "*rows limit"]
    """Tokens the model chose, the only ones that are trained."""
    action: Int[Array, "*rows"]
    """Index of the action that is played: the one read, or 0 where none could be read."""
    readable: Bool[Array, "*rows"]
    """Whether an action was read."""
    stop: Int[Array, "*rows"]
    """`CLOSED`, `ENDED` or `CUT`."""

    @classmethod
    def blank(cls, rows: int, limit: int) -> "Reply":
        """Replies of `rows` rows without a token yet: all zeros and False."""
        row, slots = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, limit))
        return cls(
            ids=slots.astype(jnp.int32),
            length=row,
            log_prob=slots,
            sampled=slots.astype(bool),
            action=row,
            readable=row.astype(bool),
            stop=row,
        )


class Episodes(NamedTuple):
    """Played episodes. A *sample* is one episode of a group; all samples of a group share their start state."""

    observation: Int[Array, "groups samples steps_and_one tokens"]
    """Left-padded observation tokens; one more than there are steps, so that the last state is there too."""
    observation_length: Int[Array, "groups samples steps_and_one"]
    """Tokens of each observation."""
    reply: Reply
    """Replies, `[groups, samples, steps, ...]`."""
    reward: Float[Array, "groups samples steps"]
    """The game's reward, less the penalty where the reply was unreadable; 0 after the end."""
    terminated: Bool[Array, "groups samples steps"]
    """The step ended the game by its rules."""
    truncated: Bool[Array, "groups samples steps"]
    """The step ended the game by its time limit."""
    alive: Bool[Array, "groups samples steps"]
    """The step was played: the game was not over before it."""
    success: Bool[Array, "groups samples"]
    """The game was won, as the game itself defines it."""
    anchor: Int[Array, "groups samples steps words"] | None = None
    """State of the game before each step (`state_words`): equal words are equal states, whatever the time. None where
    the algorithm does not ask for it."""

    @property
    def returns(self) -> Float[Array, "groups samples"]:
        """Undiscounted return of each episode, penalties included."""
        return self.reward.sum(-1)

    def with_final(self, opening: Sequence[int]) -> tuple["Episodes", Bool[Array, "episodes steps_and_one"]]:
        """Episodes with a reply to every observation, the last one included, and which of these matter.

        What nobody replied to gets `opening`, the tokens that any reply begins with, none of them sampled. What matters
        are the steps that were played and the observation behind the last one, unless the game terminated there.
        """

        def one_more(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, 0), (0, 1), *[(0, 0)] * (x.ndim - 3)])

        reply, alive = jax.tree.map(one_more, (self.reply, self.alive))
        start = jnp.zeros(reply.ids.shape[-1], jnp.int32).at[: len(opening)].set(jnp.asarray(opening, jnp.int32))
        reply = reply._replace(
            ids=jnp.where(alive[..., None], reply.ids, start), length=jnp.where(alive, reply.length, len(opening))
        )
        behind = jnp.pad(self.alive & ~self.terminated, ((0, 0), (0, 0), (1, 0))) & ~alive
        return self._replace(reply=reply), (alive | behind).reshape(-1, alive.shape[-1])

    @property
    def sampled(self) -> Bool[Array, "groups samples steps limit"]:
        """Tokens that the model chose in steps that were played."""
        return self.reply.sampled & self.alive[..., None]

    @property
    def token_counts(self) -> Int[Array, "episodes steps"]:
        """Sampled tokens of each played step, groups and samples flattened: what there is to train on."""
        counts = jnp.where(self.alive, self.reply.sampled.sum(-1), 0)
        return counts.reshape(-1, counts.shape[-1])


class Rows(NamedTuple):
    """What losses consume: one row a reply, compacted to the front.

    A row is one step of one episode, played without memory. Nothing but its builder may assume so: a row is any
    context of tokens followed by a reply.
    """

    observation: Int[Array, "rows tokens"]
    observation_length: Int[Array, " rows"]
    reply: Int[Array, "rows limit"]
    reply_length: Int[Array, " rows"]
    sampled: Bool[Array, "rows limit"]
    old_log_prob: Float[Array, "rows limit"]
    weight: Float[Array, " rows"]
    """Weight of each token of the row in the loss; 0 in the padding behind the last row."""
    target: PyTree[Array]
    """What the algorithm's loss compares the row with; leading axis `rows`."""
    rollout_log_prob: Float[Array, "rows limit"] | None = None
    """Log-probabilities as they were when sampled, where `old_log_prob` was recomputed since; None where it was not."""
    reference_log_prob: Float[Array, "rows limit"] | None = None
    """Log-probabilities under the reference; None where the algorithm does not ask."""

    def take(self, index: Int[Array, " some"], present: Bool[Array, " some"]) -> "Rows":
        """The rows at `index`, with no weight where not `present`."""
        some = jax.tree.map(lambda x: x[index], self)
        return some._replace(weight=jnp.where(present, some.weight, 0.0))


def build_rows(
    episodes: Episodes,
    chosen: Int[Array, " chosen"],
    visit: Bool[Array, "chosen steps"],
    weight: Float[Array, "chosen steps"],
    target: PyTree[Array],
) -> tuple[Rows, Int[Array, ""]]:
    """The rows of some episodes, those to visit first, and how many these are.

    Args:
        episodes: all that were played.
        chosen: numbers of the episodes to train on, over groups and samples flattened.
        visit: which of their steps to visit.
        weight: weight of each token of a step.
        target: what the loss compares each step with; leading axes `[chosen, steps]`.
    """
    steps = visit.shape[1]
    order = jnp.argsort(~visit.reshape(-1), stable=True)
    source = chosen[order // steps], order % steps

    def gather(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[source]

    return Rows(
        observation=gather(episodes.observation),
        observation_length=gather(episodes.observation_length),
        reply=gather(episodes.reply.ids),
        reply_length=gather(episodes.reply.length),
        sampled=gather(episodes.reply.sampled),
        old_log_prob=gather(episodes.reply.log_prob),
        weight=jnp.where(visit, weight, 0.0).reshape(-1)[order],
        target=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order], target),
    ), visit.sum(dtype=jnp.int32)
