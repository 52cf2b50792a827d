"""The language-agent policy over whole actions, TWOSOME's: what a language model makes of the texts of a few actions.

All texts are scored in one pass behind the prompt, which they share, and one of them is chosen; nothing is written
token by token. See `algorithms.twosome` for the distribution. A reply has one sampled slot, that of the first token of
the action's word, and what is known there is about the whole action.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from envs_jax.text.grammar import CLOSE, OPEN
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo import token_statistics
from jaxgrpo.algorithms.twosome import action_log_probs
from jaxgrpo.episodes import CLOSED, Reply
from jaxgrpo.model.cache import Prefix
from jaxgrpo.policy import LanguageAgentPolicy, Sampling
from jaxgrpo.sampling import draw
from jaxgrpo.token_statistics import Scores, TokenStatistics

Length = Literal["tokens", "words", "none"]


class ActionTexts(NamedTuple):
    """The replies that play a game's actions, `<action>WORD</action>`, and which of their tokens are scored.

    The tags are not: all actions have the same ones. A token that holds a part of a word is scored whole.
    """

    replies: tuple[tuple[int, ...], ...]
    """Tokens of each reply."""
    opening: tuple[int, ...]
    """Tokens that all replies begin with, before any that is scored."""
    scored: tuple[tuple[int, ...], ...]
    """Tokens of each reply behind the opening, up to the end of its word; at least one."""
    words: tuple[int, ...]
    """Number of words of each action."""

    @classmethod
    def make(cls, actions: Sequence[str], tokenizer: TextTokenizer) -> "ActionTexts":
        """The texts of actions as the tokenizer writes them."""
        replies = [tuple(int(i) for i in tokenizer.encode(f"{OPEN}{action}{CLOSE}")) for action in actions]
        ends = [np.cumsum([len(tokenizer.token_bytes[i]) for i in reply]) for reply in replies]
        # Tokens that end before the word does, and the one in which it ends.
        last = [
            1 + int(np.searchsorted(end, len(OPEN) + len(action.encode())))
            for end, action in zip(ends, actions, strict=True)
        ]
        common = min(int(np.sum(end <= len(OPEN))) for end in ends)
        while len({reply[:common] for reply in replies}) > 1:
            common -= 1
        return cls(
            replies=tuple(replies),
            opening=replies[0][:common],
            scored=tuple(reply[common:end] for reply, end in zip(replies, last, strict=True)),
            words=tuple(len(action.split()) for action in actions),
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ActionPolicy(LanguageAgentPolicy):
    """A language model as a policy over the actions of one game; all of them can be taken in every state.

    Of the fields of its base, reader, constraint and truncation mean nothing to it: a reply is always one of the texts.

    Attributes:
        texts: of the actions, in the order of their numbers.
        length: what an action's log-probability is divided by: its tokens, its words, or nothing.

    Raises:
        ValueError: a text is longer than the reply limit.
    """

    texts: ActionTexts
    length: Length

    @classmethod
    def over(cls, texts: ActionTexts, length: Length, policy: LanguageAgentPolicy) -> "ActionPolicy":
        """The policy over actions of the model and prompt that another policy is made of."""
        shared = {f.name: getattr(policy, f.name) for f in dataclasses.fields(LanguageAgentPolicy)}
        return cls(**shared, texts=texts, length=length)

    def __post_init__(self) -> None:
        """Refuse texts that do not fit."""
        longest = max(map(len, self.texts.replies))
        if longest > self.reply_limit:
            raise ValueError(f"reply limit {self.reply_limit}: the longest action text has {longest} tokens; give them")

    def respond(
        self,
        params: PyTree[Array],
        prefix: Prefix,
        observation: Int[Array, "rows tokens"],
        observation_length: Int[Array, " rows"],
        keys: Key[Array, " rows"],
        sampling: Sampling,
        playing: Bool[Array, " rows"] | None = None,
    ) -> Reply:
        """Chooses an action's text for each observation, with one draw; see `LanguageAgentPolicy.respond`."""
        del playing  # all rows are chosen for in the same pass
        rows, first = observation.shape[0], len(self.opening)
        scores = self.scores(params, prefix, observation, observation_length)
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, first)))(keys)
        action, log_prob = draw(uniform, self._log_probs(params, scores), temperature=sampling.temperature)
        here = jnp.arange(self.reply_limit) == first
        return Reply(
            ids=jnp.asarray(self._replies)[action],
            length=jnp.asarray([len(reply) for reply in self.texts.replies], jnp.int32)[action],
            log_prob=jnp.where(here, log_prob[:, None], 0.0),
            sampled=jnp.broadcast_to(here, (rows, self.reply_limit)),
            action=action,
            readable=jnp.ones(rows, bool),
            stop=jnp.full(rows, CLOSED, jnp.int32),
        )

    def scores(
        self,
        params: PyTree[Array],
        prefix: Prefix,
        observation: Int[Array, "rows tokens"],
        observation_length: Int[Array, " rows"],
        reply: Int[Array, "rows limit"] | None = None,
        reply_length: Int[Array, " rows"] | None = None,
    ) -> Scores:
        """What a model makes of all texts, `[rows, states, width]`: the state that predicts the first tokens, then
        those that predict the others, text after text. Which reply was chosen does not matter.

        The texts stand side by side behind the observation; none sees another, and each begins at the same position.
        """
        del reply, reply_length
        rows, tokens = observation.shape
        layout = self._layout
        behind = jnp.broadcast_to(jnp.asarray(layout.ids), (rows, len(layout.ids)))
        place = jnp.arange(tokens) - tokens + observation_length[:, None]
        places = jnp.concatenate([jnp.maximum(place, 0), observation_length[:, None] + layout.depth], axis=1)
        valid = jnp.concatenate([place >= 0, jnp.ones_like(behind, bool)], axis=1)
        branch = np.concatenate([np.full(tokens, _TRUNK), layout.branch])
        sees = np.tril((branch[:, None] == branch) | (branch == _TRUNK))
        model = self.model(params)
        hidden = model.forward(
            jnp.concatenate([observation, behind], axis=1),
            prefix.length + places,
            valid,
            prefix,
            remat=self.remat,
            sees=jnp.asarray(sees),
        )
        return Scores(hidden[:, tokens + len(self.opening) - 1 :], model.head())

    def statistics(
        self,
        params: PyTree[Array],
        actor: Scores,
        reply: Int[Array, "rows limit"],
        temperature: Float[Array, ""],
        *,
        reference: Scores | None = None,
        critic: Scores | None = None,
        critic_is_relative: bool = False,
        unweighted: bool = False,
    ) -> TokenStatistics:
        """Statistics of the chosen actions, in the sampled slot; entropy and KL are those of the actions' distribution.

        Raises:
            ValueError: a critic of tokens is given, which says nothing about whole actions.
        """
        if critic is not None or critic_is_relative:
            raise ValueError("the scores of a critic are about tokens, and this policy chooses whole actions")
        chosen = jnp.argmax(jnp.all(reply[:, None] == jnp.asarray(self._replies), axis=-1), axis=-1)
        actions = jnp.broadcast_to(jnp.arange(len(self.texts.replies)), (reply.shape[0], 1, len(self.texts.replies)))
        found = token_statistics.over_choices(
            self._log_probs(params, actor)[:, None],
            actions,
            chosen[:, None],
            temperature,
            reference_logits=None if reference is None else self._log_probs(params, reference)[:, None],
            unweighted=unweighted,
        )
        return jax.tree.map(self.at_slots, found)

    def at_slots(self, of_span: Float[Array, "rows some"]) -> Float[Array, "rows limit"]:
        """Numbers about what `scores` gives at their place in a reply: the first is about the sampled slot."""
        return super().at_slots(of_span[:, :1])

    @property
    def opening(self) -> tuple[int, ...]:
        """The run of tokens every reply begins with."""
        return self.texts.opening

    @functools.cached_property
    def sampled_span(self) -> tuple[int, int]:
        """The one slot that counts as sampled."""
        return len(self.opening), len(self.opening) + 1

    def _log_probs(self, params: PyTree[Array], scores: Scores) -> Float[Array, "rows actions"]:
        """Log-probability of each action at temperature 1."""
        product, layout = self.model(params).logits_of, self._layout
        rows, states, width = scores.hidden.shape
        found = token_statistics.over_vocabulary(
            scores.hidden.reshape(-1, width),
            scores.head,
            jnp.zeros(rows * states),
            jnp.float32(1),
            vocab_size=self.vocab_size,
            logits=product,
        )
        # Of a token with logit 0 this is minus the log-normaliser.
        minus_log_z = found.log_prob.reshape(rows, states)
        by_state = scores.hidden[:, layout.source.reshape(-1)], scores.head[layout.scored.reshape(-1), None]
        logit = jax.vmap(product, in_axes=(1, 0), out_axes=1)(*by_state)[..., 0]
        log_prob = (logit + minus_log_z[:, layout.source.reshape(-1)]).reshape(rows, *layout.source.shape)
        count = np.array([len(text) for text in self.texts.scored], np.int32)
        by = {"tokens": count, "words": np.array(self.texts.words, np.int32), "none": np.ones_like(count)}
        return action_log_probs(log_prob, jnp.asarray(count), jnp.asarray(by[self.length]), jnp.ones(count.shape, bool))

    @functools.cached_property
    def _replies(self) -> Int[np.ndarray, "actions limit"]:
        return _padded(self.texts.replies, self.reply_limit)

    @functools.cached_property
    def _layout(self) -> "_Layout":
        """Where the texts' tokens stand in a row."""
        opening = len(self.opening)
        ids, depth, branch = [*self.opening], [*range(opening)], [_TRUNK] * opening
        source = []
        for number, text in enumerate(self.texts.scored):
            read = text[:-1]  # nothing is predicted behind the last
            source.append((0, *range(len(ids) - opening + 1, len(ids) - opening + 1 + len(read))))
            ids += read
            depth += range(opening, opening + len(read))
            branch += [number] * len(read)
        longest = max(map(len, self.texts.scored))
        return _Layout(
            ids=np.array(ids, np.int32),
            depth=np.array(depth, np.int32),
            branch=np.array(branch, np.int32),
            source=_padded(source, longest),
            scored=_padded(self.texts.scored, longest),
        )


_TRUNK = -1
"""Of a token that every text sees."""


class _Layout(NamedTuple):
    """What stands behind the observation: the opening, then of each text the tokens that predict others."""

    ids: Int[np.ndarray, " behind"]
    depth: Int[np.ndarray, " behind"]
    """How far behind the observation each token counts as standing."""
    branch: Int[np.ndarray, " behind"]
    """The text that each belongs to."""
    source: Int[np.ndarray, "actions longest"]
    """Which of the states of `scores` predicts each scored token."""
    scored: Int[np.ndarray, "actions longest"]
    """The scored tokens."""


def _padded(rows: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "rows width"]:
    """Rows of unequal length, filled up with zeros."""
    filled = np.zeros((len(rows), width), np.int32)
    for row, numbers in zip(filled, rows, strict=True):
        row[: len(numbers)] = numbers
    return filled
