"""The language-agent policy: what a language model and a prompt make of an observation, as an action.

The prompt of the current state goes in, tokens are sampled until the reply closes, and the reply is read as an action.
The same object gives, for replies that were sampled, the statistics a loss is made of. A reply is a row of `limit`
token slots; `sampled` marks the tokens that were chosen by the model. Tokens without an alternative have
log-probability 0 and are not trained, be it that the constraint leaves none at that point (a forced run, which costs no
draw) or none that still closes the reply in time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Key, Num, PyTree

from envs_jax.text.grammar import Constraint, Reader
from jaxgrpo import token_statistics as statistics
from jaxgrpo.episodes import CLOSED, CUT, ENDED, Reply
from jaxgrpo.loops import while_any
from jaxgrpo.model.cache import DecodeCache, Prefix
from jaxgrpo.model.sharding import constrain, constrain_rows, with_gradient
from jaxgrpo.model.transformer import LayerParams, Transformer
from jaxgrpo.sampling import draw
from jaxgrpo.token_statistics import Scores, TokenStatistics


class Sampling(NamedTuple):
    """Numbers that shape the distribution replies are drawn from."""

    temperature: Float[Array, ""]
    """0 is greedy."""
    top_p: Float[Array, ""]
    """Looked at only where the policy was made with `truncate_top_p`."""


class _Writing(NamedTuple):
    """A reply being written."""

    reply: Reply
    reader: Int[Array, " rows"]
    constraint: Int[Array, " rows"]
    done: Bool[Array, " rows"]
    fresh: Int[Array, " rows"]
    """Tokens at the end of the reply that the model has yet to see: the last choice and the run it forced."""


class _Batch(NamedTuple):
    """Rows that are decoded together, and what the model knows of them."""

    writing: _Writing
    cache: DecodeCache
    begin: Int[Array, " rows"]
    """Position of the reply's first token."""
    keys: Key[Array, " rows"]

    def take(self, index: Int[Array, " some"]) -> "_Batch":
        """Some of the rows, by number."""
        writing, begin, keys = jax.tree.map(lambda x: x[index], (self.writing, self.begin, self.keys))
        return _Batch(writing, self.cache.take(index), begin, keys)


class _Span(NamedTuple):
    """Slots of replies that can hold a sampled token."""

    token: Int[Array, "rows span"]
    state: Int[Array, "rows span"]
    """The constraint's, before the token."""


_Product = Callable[[Float[Array, "*tokens width"], Num[Array, "some width"]], Float[Array, "*tokens some"]]
"""The product of hidden states with rows of a head, in float32."""


class _Asked(NamedTuple):
    """What statistics are made of, and which; see `LanguageAgentPolicy.statistics`."""

    product: _Product
    span: _Span
    temperature: Float[Array, ""]
    actor: Scores
    reference: Scores | None
    critic: Scores | None
    critic_is_relative: bool
    unweighted: bool


_LONG_REPLY = 32
"""Passes through the model from which on rows that have finished may leave the batch; see `fewest_rows`."""


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageAgentPolicy:
    """A language model as a player of one game.

    Attributes:
        graphdef: the model without its parameters, from `nnx.split`.
        prefix_ids: tokens of the static prompt, the same for every observation.
        reader: reads the action out of a reply.
        constraint: what replies may be made of; None leaves them free.
        eos_ids: tokens that end the model's turn.
        vocab_size: real tokens; the model's head may be padded beyond them.
        reply_limit: most tokens in a reply, 1 or more.
        top_k: sample among the k likeliest tokens; 0 is off.
        truncate_top_p: whether `Sampling.top_p` applies.
        remat: recompute layers in the backward pass (less memory, more work).
        fewest_rows: where replies may be long, open rows go on in a batch of half the size once they fit into it, again
            and again down to this size. Results are the same; each size is compiled apart.

    Raises:
        ValueError: the constraint allows free text, and the limit leaves no time to close the shortest reply.
    """

    graphdef: nnx.GraphDef[Transformer]
    prefix_ids: np.ndarray
    reader: Reader
    constraint: Constraint | None
    eos_ids: tuple[int, ...]
    vocab_size: int
    reply_limit: int
    top_k: int = 0
    truncate_top_p: bool = False
    remat: bool = True
    fewest_rows: int = 8

    def __post_init__(self) -> None:
        """Refuse limits that no reply with free text can keep."""
        if self.constraint is None or not self._counts_down:
            return
        shortest = int(self.constraint.distance[self.constraint.start])
        if self.reply_limit < shortest:
            raise ValueError(
                f"reply limit {self.reply_limit}: a constrained reply needs up to {shortest}; give as many"
            )

    def model(self, params: PyTree[Array]) -> Transformer:
        """The model with its parameters."""
        return nnx.merge(self.graphdef, params)

    @jax.named_scope("prefix")
    def prefix(self, params: PyTree[Array]) -> Prefix:
        """Keys and values of the static prompt, without a batch axis."""
        return self.model(params).prefill(jnp.asarray(self.prefix_ids, jnp.int32), remat=self.remat)

    # Sampling

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
        """Samples a reply to each observation.

        A row's reply depends on its own observation and key alone, not on its neighbours or on how many they are. The
        loop ends when every row has closed its action, ended its turn or reached the limit.

        Args:
            params: of the model.
            prefix: from `prefix(params)`.
            observation: left-padded tokens.
            observation_length: tokens of each observation, in [1, tokens].
            keys: one a row; token j uses the key folded with j.
            sampling: temperature and nucleus.
            playing: rows whose reply is wanted; nobody waits for the others, whose replies are cut short.
        """
        model = self.model(params).for_decoding()
        layers, prefix = model.decode_params(), prefix.whole()
        rows, tokens = observation.shape
        opening = jnp.asarray(self.opening, jnp.int32)
        block = jnp.concatenate([observation, jnp.broadcast_to(opening, (rows, len(opening)))], axis=1)
        valid = _left_valid(observation_length, tokens, extra=len(opening))
        first, last = self.sampled_span
        slots = block.shape[1] + self._block_width * max(0, last - first - 1)
        hidden, cache = model.decode(
            block, _positions(valid, prefix), valid, prefix, model.init_cache(rows, slots), layers
        )
        blank = self._blank(rows)
        if playing is not None:
            blank = blank._replace(done=~playing)
        writing = self._choose(model, blank, hidden[:, -1], keys, sampling)
        if last - first <= 1:  # a second choice is impossible, whatever the first
            return writing.reply
        batch = _Batch(writing, cache, prefix.length + observation_length, keys)
        return self._write_on(model, layers, prefix, batch, sampling).reply

    def _write_on(
        self,
        model: Transformer,
        layers: Sequence[LayerParams],
        prefix: Prefix,
        batch: _Batch,
        sampling: Sampling,
    ) -> _Writing:
        """Writes replies to their ends, in ever smaller batches where that pays."""
        rows = batch.keys.shape[0]
        first, last = self.sampled_span
        smaller = rows // 2 if last - first > _LONG_REPLY and rows // 2 >= self.fewest_rows else 0

        def step(carry: tuple[_Writing, DecodeCache]) -> tuple[_Writing, DecodeCache]:
            writing, cache = carry
            offsets = jnp.arange(self._block_width)
            slot = (writing.reply.length - writing.fresh)[:, None] + offsets
            block = jnp.take_along_axis(writing.reply.ids, jnp.minimum(slot, self.reply_limit - 1), axis=1)
            valid = (offsets < writing.fresh[:, None]) & ~writing.done[:, None]
            hidden, cache = model.decode(block, batch.begin[:, None] + slot, valid, prefix, cache, layers)
            seen = jnp.minimum(writing.fresh, self._block_width)
            hidden = jnp.take_along_axis(hidden, jnp.maximum(seen - 1, 0)[:, None, None], axis=1)[:, 0]
            writing = writing._replace(fresh=writing.fresh - seen)
            return self._choose(model, writing, hidden, batch.keys, sampling), cache

        def too_many_open(carry: tuple[_Writing, DecodeCache]) -> Bool[Array, ""]:
            return jnp.sum(~carry[0].done) > smaller

        with jax.named_scope("reply"):
            writing, cache = while_any(too_many_open, step, (batch.writing, batch.cache))
        if smaller == 0:
            return writing
        # Open rows first; the rows that fill the smaller batch have finished, and nothing changes them.
        index = jnp.argsort(writing.done, stable=True)[:smaller]
        rest = batch._replace(writing=writing, cache=cache).take(index)
        rest = self._write_on(model, layers, prefix, rest, sampling)
        return jax.tree.map(lambda every, some: every.at[index].set(some), writing, rest)

    def _blank(self, rows: int) -> _Writing:
        """Replies that hold only what the constraint forces at the start."""
        opening = self.opening
        reader = jnp.int32(self.reader.start)
        for token in opening:
            reader = self.reader.step(reader, jnp.int32(token))
        constraint = 0 if self.constraint is None else self.constraint.forced_next[self.constraint.start]
        blank = Reply.blank(rows, self.reply_limit)
        return _Writing(
            blank._replace(
                ids=blank.ids.at[:, : len(opening)].set(jnp.asarray(opening, jnp.int32)),
                length=blank.length + len(opening),
                stop=blank.stop + CUT,
            ),
            reader=jnp.broadcast_to(reader, (rows,)),
            constraint=blank.length + int(constraint),
            done=jnp.zeros(rows, bool),
            fresh=blank.length,
        )

    def _choose(
        self,
        model: Transformer,
        writing: _Writing,
        hidden: Float[Array, "rows embed"],
        keys: Key[Array, " rows"],
        sampling: Sampling,
    ) -> _Writing:
        """Samples one token a row, adds the run of tokens it forces, and reads them.

        Rows that have finished, and those of which the model has not seen all, stay as they are.
        """
        reply, active = writing.reply, ~writing.done & (writing.fresh == 0)
        uniform = jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(keys, reply.length)
        remaining = self.reply_limit - reply.length
        drawn = self._draw(model, hidden, writing.constraint, remaining, uniform, sampling)
        token, log_prob, chosen = constrain_rows(drawn)
        here = (jnp.arange(self.reply_limit) == reply.length[:, None]) & active[:, None]
        ids = jnp.where(here, token[:, None], reply.ids)
        length = reply.length + 1
        reader = jnp.where(active, self.reader.step(writing.reader, token), writing.reader)
        constraint = writing.constraint
        if self.constraint is not None:
            constraint = jnp.where(active, self.constraint.next_state(constraint, token), constraint)
            ids, length, reader, constraint = self._force(ids, length, reader, constraint, active)

        ended = jnp.isin(token, jnp.asarray(self.eos_ids, jnp.int32)) if self.eos_ids else jnp.zeros_like(active)
        closed = self.reader.closed(reader)
        action = self.reader.action(reader)
        readable = closed & (action >= 0)
        stop = jnp.where(closed, CLOSED, jnp.where(ended, ENDED, CUT))
        new = Reply(
            ids=ids,
            length=jnp.where(active, length, reply.length),
            log_prob=jnp.where(here, log_prob[:, None], reply.log_prob),
            sampled=reply.sampled | (here & chosen[:, None]),
            action=jnp.where(active, jnp.where(readable, action, 0), reply.action),
            readable=jnp.where(active, readable, reply.readable),
            stop=jnp.where(active, stop, reply.stop),
        )
        done = writing.done | (active & (closed | ended | (length >= self.reply_limit)))
        return _Writing(new, reader, constraint, done, fresh=writing.fresh + new.length - reply.length)

    def _force(
        self,
        ids: Int[Array, "rows limit"],
        length: Int[Array, " rows"],
        reader: Int[Array, " rows"],
        constraint: Int[Array, " rows"],
        active: Bool[Array, " rows"],
    ) -> tuple[Array, Array, Array, Array]:
        """Appends the run of tokens that the constraint leaves no choice about, as far as the limit allows."""
        assert self.constraint is not None
        run = jnp.asarray(self.constraint.forced_ids, jnp.int32)[constraint]
        size = jnp.where(active, jnp.asarray(self.constraint.forced_length, jnp.int32)[constraint], 0)
        at = jnp.arange(self.reply_limit) - length[:, None]
        inside = (at >= 0) & (at < size[:, None])
        if run.shape[1] > 0:
            ids = jnp.where(inside, jnp.take_along_axis(run, jnp.clip(at, 0, run.shape[1] - 1), axis=1), ids)
        for column in range(run.shape[1]):
            written = (column < size) & (length + column < self.reply_limit)
            reader = jnp.where(written, self.reader.step(reader, run[:, column]), reader)
        after = jnp.asarray(self.constraint.forced_next, jnp.int32)[constraint]
        return (
            ids,
            jnp.minimum(length + size, self.reply_limit),
            reader,
            jnp.where(active, after, constraint),
        )

    def _draw(
        self,
        model: Transformer,
        hidden: Float[Array, "rows embed"],
        state: Int[Array, " rows"],
        remaining: Int[Array, " rows"],
        uniform: Float[Array, " rows"],
        sampling: Sampling,
    ) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Bool[Array, " rows"]]:
        """A token a row among those allowed, its log-probability, and whether there was another."""
        options = {
            "temperature": sampling.temperature,
            "top_k": self.top_k,
            "top_p": sampling.top_p if self.truncate_top_p else None,
        }
        if self.constraint is not None and self.constraint.choices is not None:
            choices = jnp.asarray(self.constraint.choices, jnp.int32)[state]
            # Finished rows have no choice left; their first column keeps the numbers finite and is never used.
            allowed = (choices >= 0).at[:, 0].set(True)
            logits = model.token_logits(hidden, jnp.maximum(choices, 0))
            index, log_prob = draw(uniform, jnp.where(allowed, logits, -jnp.inf), **options)
            # Forced runs are over: a row that goes on has a choice.
            return jnp.take_along_axis(choices, index[:, None], axis=1)[:, 0], log_prob, jnp.ones_like(state, bool)
        # Each device with its part of the head: else the whole head would travel to where the rows are drawn.
        logits = constrain(model.logits(hidden), "rows", "vocab")
        allowed = self._allowed(state, remaining, jnp.arange(logits.shape[-1], dtype=jnp.int32))
        # A finished row may have nothing left to choose; token 0 keeps its numbers finite and is never used.
        allowed = allowed.at[:, 0].set(allowed[:, 0] | ~jnp.any(allowed, axis=1))
        logits = constrain(jnp.where(allowed, logits, -jnp.inf), "draws", None)
        return *draw(uniform, logits, **options), jnp.sum(allowed, axis=1) > 1

    def _allowed(
        self, state: Int[Array, " rows"], remaining: Int[Array, " rows"], ids: Int[Array, " some"]
    ) -> Bool[Array, "rows some"]:
        """Which of the tokens `ids` each row may take with `remaining` tokens to go, this one included."""
        real = (ids < self.vocab_size)[None, :]
        if self.constraint is None:
            return jnp.broadcast_to(real, (state.shape[0], ids.shape[0]))
        return real & self.constraint.allows(state, ids, remaining=remaining)

    # Training

    def token_statistics(
        self,
        params: PyTree[Array],
        prefix: Prefix,
        observation: Int[Array, "rows tokens"],
        observation_length: Int[Array, " rows"],
        reply: Int[Array, "rows limit"],
        reply_length: Int[Array, " rows"],
        temperature: Float[Array, ""],
    ) -> TokenStatistics:
        """Statistics of replies that were sampled, `[rows, limit]`; 0 where no token can have been sampled.

        The distribution is the one `respond` drew from, before truncation: tempered once, over the real vocabulary,
        renormalised over what the constraint and the number of tokens left allowed. Logits are made only where a
        sampled token is predicted. Gradients flow into `params` and into `prefix`.
        """
        scores = self.scores(params, prefix, observation, observation_length, reply, reply_length)
        return self.statistics(params, scores, reply, temperature)

    def scores(
        self,
        params: PyTree[Array],
        prefix: Prefix,
        observation: Int[Array, "rows tokens"],
        observation_length: Int[Array, " rows"],
        reply: Int[Array, "rows limit"],
        reply_length: Int[Array, " rows"],
    ) -> Scores:
        """What a model makes of replies, `[rows, span, width]`: its states before each token of `sampled_span`.

        Gradients flow into `params` and into `prefix`.
        """
        model = self.model(params)
        tokens = observation.shape[1]
        first, last = self.sampled_span
        replied = jnp.arange(last - 1) < reply_length[:, None]
        valid = jnp.concatenate([_left_valid(observation_length, tokens), replied], axis=1)
        ids = jnp.concatenate([observation, reply[:, : last - 1]], axis=1)
        hidden = model.forward(ids, _positions(valid, prefix), valid, prefix, remat=self.remat)
        # The state at slot tokens - 1 + j has read the reply up to token j - 1 and predicts token j.
        return Scores(hidden[:, tokens - 1 + first : tokens - 1 + last], model.head())

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
        """Statistics of replies, `[rows, limit]`, from what networks make of them; see `token_statistics`.

        Args:
            params: of the policy's model, whose arithmetic multiplies scores out.
            actor: the policy's scores, which are its logits, from `scores`.
            reply: tokens of the replies.
            temperature: of sampling.
            reference: the reference's scores, for `kl`.
            critic: the critic's scores of any width, for `q` and `expected_q`.
            critic_is_relative: whether Q is the difference of the critic's scores to the reference's.
            unweighted: whether to make the unweighted means as well.
        """
        first, last = self.sampled_span
        span = _Span(reply[:, first:last], self._states(reply)[:, first:last])
        product = self.model(params).logits_of
        asked = _Asked(product, span, temperature, actor, reference, critic, critic_is_relative, unweighted)
        few = self.constraint is not None and self.constraint.choices is not None
        found = self._over_choices(asked) if few else self._over_vocabulary(asked)
        return jax.tree.map(self.at_slots, found)

    def at_slots(self, of_span: Float[Array, "rows span"]) -> Float[Array, "rows limit"]:
        """Numbers about the slots of `sampled_span` at their places in a reply; 0 elsewhere."""
        first, last = self.sampled_span
        return jnp.pad(of_span, ((0, 0), (first, self.reply_limit - last)))

    def _over_choices(self, asked: _Asked) -> TokenStatistics:
        assert self.constraint is not None
        choices = jnp.asarray(self.constraint.choices, jnp.int32)[asked.span.state]

        def of(scores: Scores) -> Float[Array, "rows span choices"]:
            return _scores_of(asked.product, scores, jnp.maximum(choices, 0))

        logits = None if asked.reference is None else of(asked.reference)
        q = None if asked.critic is None else of(asked.critic)
        if q is not None and logits is not None and asked.critic_is_relative:
            q = q - logits
        return statistics.over_choices(
            of(asked.actor),
            choices,
            asked.span.token,
            asked.temperature,
            reference_logits=logits,
            q=q,
            unweighted=asked.unweighted,
        )

    def _over_vocabulary(self, asked: _Asked) -> TokenStatistics:
        span, (first, last) = asked.span, self.sampled_span
        remaining = jnp.broadcast_to(self.reply_limit - jnp.arange(first, last), span.state.shape).reshape(-1)
        allowed = None if self.constraint is None else Partial(self._allowed, span.state.reshape(-1), remaining)

        def flat(scores: Scores | None) -> Scores | None:
            """The scores as constants, with one axis of tokens."""
            if scores is None:
                return None
            return jax.lax.stop_gradient(scores._replace(hidden=scores.hidden.reshape(-1, scores.hidden.shape[-1])))

        def of_token(scores: Scores) -> Float[Array, "rows span"]:
            return _scores_of(asked.product, scores, span.token[..., None])[..., 0]

        found = statistics.over_vocabulary(
            asked.actor.hidden.reshape(-1, asked.actor.hidden.shape[-1]),
            asked.actor.head,
            of_token(asked.actor).reshape(-1),
            asked.temperature,
            vocab_size=self.vocab_size,
            logits=asked.product,
            allowed=allowed,
            reference=flat(asked.reference),
            critic=flat(asked.critic),
            critic_is_relative=asked.critic_is_relative,
            unweighted=asked.unweighted,
        )
        found = jax.tree.map(lambda x: x.reshape(span.token.shape), found)
        if asked.critic is None:
            return found
        relative_to = of_token(asked.reference) if asked.critic_is_relative and asked.reference is not None else 0.0
        return found._replace(q=of_token(asked.critic) - relative_to)

    def _states(self, reply: Int[Array, "rows limit"]) -> Int[Array, "rows limit"]:
        """The constraint's state before each token of a reply; zeros where replies are free."""
        if self.constraint is None:
            return jnp.zeros_like(reply)
        constraint = self.constraint

        def step(state: Int[Array, " rows"], token: Int[Array, " rows"]) -> tuple[Array, Array]:
            # Beyond the end of a reply nothing is allowed: stay in some state, its statistics are not looked at.
            return jnp.maximum(constraint.next_state(state, token), 0), state

        start = jnp.full(reply.shape[0], constraint.start, jnp.int32)
        return jax.lax.scan(step, start, reply.T, unroll=min(self.reply_limit, 16))[1].T

    # What is known before any token is sampled

    @property
    def opening(self) -> tuple[int, ...]:
        """The run of tokens every reply begins with."""
        return () if self.constraint is None else tuple(self.constraint.start_run)

    @property
    def _counts_down(self) -> bool:
        """Whether replies have free text, which the number of tokens left must be able to end.

        A tokenizer has more tokens than are ever listed as `choices` (all of ASCII), and free text allows nearly all.
        """
        return self.constraint is not None and self.constraint.choices is None

    @functools.cached_property
    def _block_width(self) -> int:
        """Tokens a decoding step feeds to the model; results do not depend on it.

        Where every choice is between a few texts, a choice and the longest run it may force go in together. In free
        text runs are rare: there a row with a run takes some turns more, rather than all rows a wider block each turn.
        """
        return 1 if self.constraint is None or self._counts_down else 1 + self.constraint.max_middle_run

    @functools.cached_property
    def sampled_span(self) -> tuple[int, int]:
        """First slot of a reply that can hold a sampled token, and one past the last: what training must look at."""
        if self.constraint is None:
            return 0, self.reply_limit
        return _sampled_span(self.constraint, self.reply_limit, counts_down=self._counts_down)


def _sampled_span(constraint: Constraint, limit: int, *, counts_down: bool) -> tuple[int, int]:
    """Walks all replies the constraint allows at once, forced runs in one stride, noting the slots that are drawn."""
    first = last = min(len(constraint.start_run), limit - 1)
    steps = {(state, int(onward)) for state, row in enumerate(constraint.table) for onward in row if onward >= 0}
    source, onward = np.array(sorted(steps)).T
    reached = np.zeros((limit, len(constraint.table)), bool)
    reached[first, constraint.forced_next[constraint.start]] = True
    reached[:, constraint.finished] = False
    for slot in range(first, limit):
        taken = reached[slot, source]
        if counts_down:
            taken &= constraint.distance[onward] < limit - slot
        last = slot + 1 if taken.any() else last
        after = slot + 1 + constraint.forced_length[onward]
        taken &= (after < limit) & (constraint.forced_next[onward] != constraint.finished)
        reached[after[taken], constraint.forced_next[onward[taken]]] = True
    return first, max(last, first + 1)


def _scores_of(product: _Product, scores: Scores, ids: Int[Array, "rows span some"]) -> Float[Array, "rows span some"]:
    """Scores of a few tokens at each place, the rest of the vocabulary not computed."""
    few = with_gradient(scores.head[ids], "copies", None, None, "embed")
    return jax.vmap(jax.vmap(product))(scores.hidden, few)


def _left_valid(length: Int[Array, " rows"], tokens: int, extra: int = 0) -> Bool[Array, "rows both"]:
    """Which slots of left-padded rows hold a token, with `extra` slots behind that always do."""
    return jnp.arange(tokens + extra) >= tokens - length[:, None]


def _positions(valid: Bool[Array, "rows slots"], prefix: Prefix) -> Int[Array, "rows slots"]:
    """Rotary positions: the i-th token of a row stands i behind the prefix, whatever padding is around it."""
    return prefix.length + jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
