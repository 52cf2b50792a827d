"""One iteration of reinforcement learning as one compiled function: play, targets, rows, gradients, optimiser."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from envs_jax.games import TokenizedGame
from jaxgrpo.algorithms.algorithm import Algorithm
from jaxgrpo.config import HyperParameters, TrainConfig
from jaxgrpo.episodes import CLOSED, CUT, ENDED, Episodes, Rows, build_rows
from jaxgrpo.loops import for_count
from jaxgrpo.model.cache import Prefix
from jaxgrpo.model.trained import join
from jaxgrpo.optimizer import learning_rate, make_optimizer
from jaxgrpo.policy import LanguageAgentPolicy, Sampling
from jaxgrpo.rollout import play

Metrics = dict[str, Float[Array, ""]]

_PLAY, _CHOOSE, _SHUFFLE = 0, 1, 2


# Not checked as it is built (`no_type_check`): JAX rebuilds pytrees around things that are not arrays.
@typing.no_type_check
class TrainState(struct.PyTreeNode):
    """All that changes from iteration to iteration, and so all that a checkpoint holds."""

    params: Any
    """The trained parameters of the model, as `nnx.split` gives them."""
    opt_state: Any
    """The optimiser's state."""
    algorithm_state: Any
    """What an algorithm carries from one iteration to the next; empty for MS-GRPO."""
    key: PRNGKeyArray
    """Key of the run; an iteration folds its number in."""
    iteration: Int[Array, ""]
    """Iterations done."""


class Fixed(NamedTuple):
    """What a run never changes, handed to every iteration beside the state."""

    params: Any
    """The parameters of the model that are not trained; an empty `nnx.State` where all are."""
    reference: Any
    """The trained parameters as they were at the start; None where the algorithm does not compare with them."""


def play_key(state: TrainState) -> PRNGKeyArray:
    """Key of the episodes that the next iteration plays."""
    return _key(state, _PLAY)


def _key(state: TrainState, purpose: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(state.key, state.iteration), purpose)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The step of a run: calling it plays and learns; `rollout` and `update` are its two halves, each jittable.

    It is handed a policy, a game and an algorithm and knows none by name.
    """

    policy: LanguageAgentPolicy
    game: TokenizedGame
    algorithm: Algorithm
    config: TrainConfig

    def __call__(self, state: TrainState, fixed: Fixed, hp: HyperParameters) -> tuple[TrainState, Metrics]:
        """One iteration.

        Args:
            state: where training stands; donate it.
            fixed: frozen parameters, and the reference where the algorithm uses one.
            hp: traced numbers.
        """
        return self.update(state, self.rollout(state, fixed, hp), fixed, hp)

    def init_optimizer(self, params: Any, hp: HyperParameters) -> optax.OptState:
        """The optimiser's state before the first iteration."""
        return self._optimizer(hp, jnp.int32(0)).init(params)

    @jax.named_scope("play")
    def rollout(self, state: TrainState, fixed: Fixed, hp: HyperParameters) -> Episodes:
        """Plays the iteration's episodes."""
        options, params = self.config.play, join(state.params, fixed.params)
        return play(
            self.policy,
            self.game,
            params,
            self.policy.prefix(params),
            play_key(state),
            groups=options.groups,
            samples=options.group_size,
            sampling=Sampling(hp.temperature, hp.top_p),
            penalty=hp.unreadable_penalty,
            share_chance=options.group_randomness == "all",
            rows=options.rollout_rows,
            record_anchor=self.algorithm.uses_anchor,
        )

    def update(
        self, state: TrainState, episodes: Episodes, fixed: Fixed, hp: HyperParameters
    ) -> tuple[TrainState, Metrics]:
        """Learns from episodes: `passes` times over their rows, in `minibatches` optimiser steps each."""
        with jax.named_scope("targets"):
            targets = self.algorithm.targets(_key(state, _CHOOSE), episodes, hp)
        with jax.named_scope("rows"):
            rows, count = build_rows(episodes, targets.chosen, targets.visit, targets.weight, targets.target)
        if self.config.learn.old_logprobs == "recompute":
            recomputed = self._log_prob(join(state.params, fixed.params), rows, count, hp)
            rows = rows._replace(old_log_prob=recomputed, rollout_log_prob=rows.old_log_prob)
        reference_log_prob = None
        if self.algorithm.uses_reference:
            reference_log_prob = self._log_prob(join(fixed.reference, fixed.params), rows, count, hp)
        minibatches = self.config.learn.minibatches
        shuffle = _key(state, _SHUFFLE)

        def learn(carry: tuple[Any, Any], number: Array) -> tuple[tuple[Any, Any], "_Learned"]:
            order = self._order(jax.random.fold_in(shuffle, number // minibatches), rows.weight.shape[0], count)
            part = number % minibatches
            span = part * count // minibatches, (part + 1) * count // minibatches
            # Every minibatch answers for its share of the whole loss, scaled up, so that their mean is the whole loss.
            denominator = targets.denominator / minibatches
            params, opt_state = carry
            grads, report = self._gradient(params, fixed.params, rows, order, span, reference_log_prob, denominator, hp)
            return self._apply(params, opt_state, grads, report, state.iteration, hp)

        numbers = jnp.arange(self.config.learn.passes * minibatches)
        (params, opt_state), learned = jax.lax.scan(learn, (state.params, state.opt_state), numbers)
        metrics = {
            **_episode_metrics(episodes),
            **targets.metrics,
            **_learned_metrics(learned),
            "trained_rows": count.astype(jnp.float32),
            "learning_rate": learning_rate(hp, state.iteration, self.config.optimizer.schedule),
            "iteration": (state.iteration + 1).astype(jnp.float32),
        }
        state = state.replace(params=params, opt_state=opt_state, iteration=state.iteration + 1)
        return state, metrics

    def _order(self, key: PRNGKeyArray, capacity: int, count: Int[Array, ""]) -> Int[Array, " capacity"]:
        """The order rows are visited in: as they stand, or shuffled where a pass has several optimiser steps."""
        if self.config.learn.minibatches == 1:
            return jnp.arange(capacity)
        draws = jax.random.uniform(key, (capacity,))
        return jnp.argsort(jnp.where(jnp.arange(capacity) < count, draws, 2.0))

    def _micro_batches(
        self, order: Int[Array, " capacity"], first: Int[Array, ""] | int, last: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Any]:
        """How many micro-batches positions `first` to `last` fill, and a function to the i-th's rows and mask."""
        size = min(self.config.learn.micro_batch, order.shape[0])
        padded = jnp.pad(order, (0, size))

        def at(i: Array) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
            begin = first + i * size
            return jax.lax.dynamic_slice_in_dim(padded, begin, size), begin + jnp.arange(size) < last

        return (last - first + size - 1) // size, at

    def _log_prob(
        self, params: Any, rows: Rows, count: Int[Array, ""], hp: HyperParameters
    ) -> Float[Array, "rows limit"]:
        """Log-probabilities under fixed parameters, without gradient, for the rows that are visited; 0 elsewhere."""
        prefix = self.policy.prefix(params)
        parts, at = self._micro_batches(jnp.arange(rows.weight.shape[0]), 0, count)

        def body(i: Array, found: Array) -> Array:
            index, present = at(i)
            batch = rows.take(index, present)
            log_prob = jnp.where(batch.sampled, self._statistics(params, prefix, batch, hp).log_prob, 0.0)
            return found.at[jnp.where(present, index, found.shape[0])].set(log_prob, mode="drop")

        return for_count(parts, body, jnp.zeros_like(rows.old_log_prob))

    def _statistics(self, params: Any, prefix: Prefix, rows: Rows, hp: HyperParameters) -> Any:
        return self.policy.token_statistics(
            params, prefix, rows.observation, rows.observation_length, rows.reply, rows.reply_length, hp.temperature
        )

    @jax.named_scope("gradient")
    def _gradient(
        self,
        params: Any,
        frozen: Any,
        rows: Rows,
        order: Int[Array, " capacity"],
        span: tuple[Array, Array],
        reference_log_prob: Float[Array, "rows limit"] | None,
        denominator: Float[Array, ""],
        hp: HyperParameters,
    ) -> tuple[Any, "_Report"]:
        """Gradient of the loss over a span of rows with respect to `params`, a micro-batch at a time.

        The shared prefix is computed once: the micro-batches' gradients with respect to its keys and values are
        summed, and go through it once at the end.
        """
        prefix, prefix_vjp = jax.vjp(lambda params: self.policy.prefix(join(params, frozen)), params)

        def loss(params: Any, prefix: Prefix, batch: Rows, reference: Any) -> tuple[Array, _Report]:
            statistics = self._statistics(join(params, frozen), prefix, batch, hp)
            per_row = jax.vmap(self.algorithm.loss, in_axes=(0, 0, 0, 0, 0, 0, None))(
                statistics, batch.sampled, batch.old_log_prob, batch.rollout_log_prob, reference, batch.target, hp
            )
            present = batch.weight > 0
            total = jnp.sum(jnp.where(present, per_row.total * batch.weight, 0.0)) / denominator
            return total, _Report(
                loss=total,
                tokens=jnp.sum(present[:, None] & batch.sampled, dtype=jnp.float32),
                sums={k: jnp.sum(jnp.where(present, v, 0.0)) for k, v in per_row.sums.items()},
                maxima={k: jnp.max(jnp.where(present, v, 0.0)) for k, v in per_row.maxima.items()},
            )

        def micro_batch(i: Array) -> tuple[tuple[Any, Any], _Report]:
            index, present = at(i)
            reference = None if reference_log_prob is None else reference_log_prob[index]
            gradients, report = jax.grad(loss, argnums=(0, 1), has_aux=True)(
                params, prefix, rows.take(index, present), reference
            )
            return gradients, report

        parts, at = self._micro_batches(order, *span)
        no_report = jax.eval_shape(lambda i: micro_batch(i)[1], jnp.int32(0))
        no_report = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), no_report)
        nothing = jax.tree.map(jnp.zeros_like, (params, prefix)), no_report

        def accumulate(i: Array, so_far: Any) -> Any:
            (grads, report), (more, another) = so_far, micro_batch(i)
            return jax.tree.map(jnp.add, grads, more), report.merge(another)

        (grads, prefix_grads), report = for_count(parts, accumulate, nothing)
        through_prefix = prefix_vjp(prefix_grads)[0]
        return jax.tree.map(jnp.add, grads, through_prefix), report

    def _optimizer(self, hp: HyperParameters, iteration: Int[Array, ""]) -> optax.GradientTransformation:
        options = self.config.optimizer
        return make_optimizer(hp, learning_rate(hp, iteration, options.schedule), clip=options.gradient_clip > 0)

    @jax.named_scope("optimiser")
    def _apply(
        self, params: Any, opt_state: Any, grads: Any, report: "_Report", iteration: Array, hp: HyperParameters
    ) -> tuple[tuple[Any, Any], "_Learned"]:
        """An optimiser step, or none where the gradient is not finite."""
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(report.loss)
        updates, new_opt_state = self._optimizer(hp, iteration).update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, opt_state))
        return kept, _Learned(report, norm, skipped=(~finite).astype(jnp.float32))


class _Report(NamedTuple):
    """Numbers about the tokens of some micro-batches."""

    loss: Float[Array, "..."]
    tokens: Float[Array, "..."]
    sums: Mapping[str, Float[Array, "..."]]
    maxima: Mapping[str, Float[Array, "..."]]

    def merge(self, other: "_Report") -> "_Report":
        return _Report(
            loss=self.loss + other.loss,
            tokens=self.tokens + other.tokens,
            sums=jax.tree.map(jnp.add, self.sums, other.sums),
            maxima=jax.tree.map(jnp.maximum, self.maxima, other.maxima),
        )


class _Learned(NamedTuple):
    """What one optimiser step reports."""

    report: _Report
    grad_norm: Float[Array, "..."]
    skipped: Float[Array, "..."]


def _learned_metrics(learned: _Learned) -> Metrics:
    """Over the optimiser steps of an iteration: means over tokens, maxima, and the mean loss and gradient norm.

    Where no token was trained there is no mean, and it is not a number.
    """
    report = learned.report
    tokens = report.tokens.sum()
    return {
        "loss": report.loss.mean(),
        "grad_norm": learned.grad_norm.mean(),
        "skipped_updates": learned.skipped.sum(),
        "trained_tokens": tokens,
        **{name: value.sum() / tokens for name, value in report.sums.items()},
        **{name: value.max() for name, value in report.maxima.items()},
    }


def _episode_metrics(episodes: Episodes) -> Metrics:
    """What was played, over all episodes of the iteration."""
    alive = episodes.alive
    steps = alive.sum(dtype=jnp.float32)

    def per_step(x: Array) -> Float[Array, ""]:
        return jnp.sum(jnp.where(alive, x, 0), dtype=jnp.float32) / steps

    reply = episodes.reply
    tokens = episodes.observation_length[..., :-1] + reply.length
    return {
        "return_mean": episodes.returns.mean(),
        "return_std": episodes.returns.std(),
        "success_rate": episodes.success.mean(dtype=jnp.float32),
        "episode_length": steps / episodes.success.size,
        "unreadable_rate": per_step(~reply.readable),
        "reply_closed_rate": per_step(reply.stop == CLOSED),
        "reply_ended_rate": per_step(reply.stop == ENDED),
        "reply_cut_rate": per_step(reply.stop == CUT),
        "reply_tokens": per_step(reply.length),
        "played_tokens": jnp.sum(jnp.where(alive, tokens, 0), dtype=jnp.float32),
        "played_steps": steps,
    }
