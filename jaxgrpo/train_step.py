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
from jaxgrpo.algorithms.algorithm import Algorithm, Network, Played, RowRecord, Statistic
from jaxgrpo.config import HyperParameters, TrainConfig
from jaxgrpo.critic import CriticNetwork
from jaxgrpo.episodes import CLOSED, CUT, ENDED, Episodes, Rows, build_rows
from jaxgrpo.loops import for_count
from jaxgrpo.model.cache import Prefix
from jaxgrpo.model.placement import constrain_params
from jaxgrpo.model.sharding import constrain_rows, whole_rows
from jaxgrpo.model.trained import join
from jaxgrpo.optimizer import make_optimizer, polyak, scheduled, within_target_kl
from jaxgrpo.policy import LanguageAgentPolicy, Sampling
from jaxgrpo.rollout import play
from jaxgrpo.token_statistics import Scores, TokenStatistics

Metrics = dict[str, Float[Array, ""]]

_PLAY, _CHOOSE, _SHUFFLE = 0, 1, 2


class Critic(NamedTuple):
    """What an algorithm with a critic carries from one iteration to the next."""

    params: Any
    """Parameters of the critic, see `CriticNetwork`."""
    opt_state: Any
    """Its optimiser's state."""
    target: Any
    """The target critic, parameters like the critic's that follow them slowly; None where there is none."""


# Not checked as it is built (`no_type_check`): JAX rebuilds pytrees around things that are not arrays.
@typing.no_type_check
class TrainState(struct.PyTreeNode):
    """All that changes from iteration to iteration, and so all that a checkpoint holds."""

    params: Any
    """The trained parameters of the model, as `nnx.split` gives them."""
    opt_state: Any
    """The optimiser's state."""
    algorithm_state: Any
    """A `Critic`; empty where the algorithm has none."""
    key: PRNGKeyArray
    """Key of the run; an iteration folds its number in."""
    iteration: Int[Array, ""]
    """Iterations done."""


class _Networks(NamedTuple):
    """One thing for each network that learns; that of the critic is None where there is no critic."""

    actor: Any
    critic: Any

    @classmethod
    def of(cls, state: TrainState) -> "_Networks":
        return cls(state.params, state.algorithm_state.params if state.algorithm_state else None)


class _Learning(NamedTuple):
    """What one optimiser step hands to the next."""

    networks: _Networks
    opt_states: _Networks
    target: Any
    going: Bool[Array, ""]
    """Whether the policy still takes steps: not once it is too far from the one that played."""


class Fixed(NamedTuple):
    """What a run never changes, handed to every iteration beside the state."""

    params: Any
    """The parameters of the model that are not trained; an empty `nnx.State` where all are."""
    reference: Any
    """The trained parameters as they were at the start; None where neither algorithm nor critic looks at them."""


class _Reference(NamedTuple):
    """The starting model, ready to be asked."""

    params: Any
    prefix: Prefix


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
    critic: CriticNetwork | None = None

    def __call__(self, state: TrainState, fixed: Fixed, hp: HyperParameters) -> tuple[TrainState, Metrics]:
        """One iteration.

        Args:
            state: where training stands; donate it.
            fixed: frozen parameters, and the reference where the algorithm uses one.
            hp: traced numbers.
        """
        return self.update(state, self.rollout(state, fixed, hp), fixed, hp)

    @property
    def uses_reference(self) -> bool:
        """Whether the starting model is looked at, by the algorithm or by its critic."""
        reads = self.algorithm.reads
        return (
            reads.reference_log_prob
            or bool((reads.play | reads.loss) & {"kl", "reference_log_prob"})
            or (self.critic is not None and self.critic.uses_reference)
        )

    def init_optimizer(self, params: Any, hp: HyperParameters) -> optax.OptState:
        """The optimiser's state of a network before the first iteration."""
        return self._optimizer(hp, hp.learning_rate).init(params)

    def init_critic(self, key: PRNGKeyArray, trained: Any, hp: HyperParameters) -> Critic | tuple[()]:
        """What the algorithm carries, before the first iteration; `trained` are the model's trained parameters."""
        if self.critic is None:
            return ()
        params = self.critic.init(key, trained)
        target = None if self.algorithm.target_decay(hp) is None else jax.tree.map(jnp.copy, params)
        return Critic(params, self.init_optimizer(params, hp), target)

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
        networks, reference = _Networks.of(state), self._reference(fixed)
        with jax.named_scope("targets"):
            played = self._played(state, episodes, fixed, reference, hp)
            targets = self.algorithm.targets(_key(state, _CHOOSE), episodes, hp, played)
        with jax.named_scope("rows"):
            rows, count = build_rows(episodes, targets.chosen, targets.visit, targets.weight, targets.target)
        rows = self._with_chances(rows, count, networks, fixed, reference, hp)
        minibatches = self.config.learn.minibatches
        shuffle = _key(state, _SHUFFLE)

        def learn(now: _Learning, number: Array) -> tuple[_Learning, "_Learned"]:
            order = self._order(jax.random.fold_in(shuffle, number // minibatches), rows.weight.shape[0], count)
            part = number % minibatches
            span = part * count // minibatches, (part + 1) * count // minibatches
            # Every minibatch answers for its share of the whole loss, scaled up, so that their mean is the whole loss.
            denominator = targets.denominator / minibatches
            grads, report = self._gradient(now.networks, fixed, reference, rows, order, span, denominator, hp)
            return self._apply(now, grads, report, state.iteration, hp)

        numbers = jnp.arange(self.config.learn.passes * minibatches)
        critic = state.algorithm_state
        opt_states = _Networks(state.opt_state, critic.opt_state if critic else None)
        begin = _Learning(networks, opt_states, critic.target if critic else None, jnp.bool_(True))
        end, learned = jax.lax.scan(learn, begin, numbers)
        metrics = {
            **_episode_metrics(episodes),
            **targets.metrics,
            **_learned_metrics(learned),
            "trained_rows": count.astype(jnp.float32),
            "learning_rate": self._scheduled(hp, state.iteration) * hp.learning_rate,
            "iteration": (state.iteration + 1).astype(jnp.float32),
        }
        state = state.replace(
            params=end.networks.actor,
            opt_state=end.opt_states.actor,
            algorithm_state=Critic(end.networks.critic, end.opt_states.critic, end.target) if critic else (),
            iteration=state.iteration + 1,
        )
        return state, metrics

    def _reference(self, fixed: Fixed) -> _Reference | None:
        if not self.uses_reference:
            return None
        params = join(fixed.reference, fixed.params)
        return _Reference(params, self.policy.prefix(params))

    def _played(
        self, state: TrainState, episodes: Episodes, fixed: Fixed, reference: _Reference | None, hp: HyperParameters
    ) -> Played | None:
        """What the networks make of all that was played; None where the algorithm does not ask."""
        reads = self.algorithm.reads.play
        if not reads:
            return None
        critic = state.algorithm_state
        networks = _Networks(state.params, None if not critic else critic.params)
        if critic and critic.target is not None:
            networks = networks._replace(critic=critic.target)
        shape = episodes.observation.shape[:3]
        with_final, visit = episodes.with_final(self.policy.opening)
        number = jnp.arange(visit.size).reshape(visit.shape)
        every = jnp.arange(visit.shape[0])
        rows, count = build_rows(with_final, every, visit, jnp.ones(visit.shape), number)
        found = self._measure(reads, networks, fixed, reference, rows, count, hp)
        in_place: dict[Statistic, Array] = {
            name: jnp.zeros_like(x).at[rows.target].set(x).reshape(*shape, -1) for name, x in found.items()
        }
        return Played(in_place, self.policy.sampled_span[0])

    def _with_chances(
        self,
        rows: Rows,
        count: Int[Array, ""],
        networks: _Networks,
        fixed: Fixed,
        reference: _Reference | None,
        hp: HyperParameters,
    ) -> Rows:
        """Rows with chances that play did not record, as far as they are asked for."""
        reads: set[Statistic] = {"log_prob"} if self.config.learn.old_logprobs == "recompute" else set()
        if self.algorithm.reads.reference_log_prob:
            reads.add("reference_log_prob")
        if not reads:
            return rows
        found = self._measure(frozenset(reads), networks, fixed, reference, rows, count, hp)
        found = {name: jnp.where(rows.sampled, x, 0.0) for name, x in found.items()}
        if "log_prob" in found:
            rows = rows._replace(old_log_prob=found["log_prob"], rollout_log_prob=rows.old_log_prob)
        return rows._replace(reference_log_prob=found.get("reference_log_prob"))

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
        micro_batch = self.config.learn.micro_batch
        assert micro_batch != "auto", "`build` puts a number in its place"
        size = whole_rows(min(micro_batch, order.shape[0]))
        padded = jnp.pad(order, (0, size))

        def at(i: Array) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
            begin = first + i * size
            return jax.lax.dynamic_slice_in_dim(padded, begin, size), begin + jnp.arange(size) < last

        return (last - first + size - 1) // size, at

    def _measure(
        self,
        reads: frozenset[Statistic],
        networks: _Networks,
        fixed: Fixed,
        reference: _Reference | None,
        rows: Rows,
        count: Int[Array, ""],
        hp: HyperParameters,
    ) -> dict[Statistic, Float[Array, "rows limit"]]:
        """Statistics of the rows that are visited, without gradient; 0 in the others."""
        prefixes = self._prefixes(networks, fixed)
        parts, at = self._micro_batches(jnp.arange(rows.weight.shape[0]), 0, count)

        def body(i: Array, found: dict[Statistic, Array]) -> dict[Statistic, Array]:
            index, present = at(i)
            batch = constrain_rows(rows.take(index, present))
            some = self._statistics(reads, networks, prefixes, fixed, reference, batch, hp)
            place = jnp.where(present, index, rows.weight.shape[0])
            return {name: x.at[place].set(some[name], mode="drop") for name, x in found.items()}

        with jax.named_scope("micro_batches"):
            return for_count(parts, body, {name: jnp.zeros(rows.reply.shape) for name in sorted(reads)})

    def _prefixes(self, networks: _Networks, fixed: Fixed) -> _Networks:
        """The shared prefix as each network reads it; None for a critic that reads none of its own."""

        def of(trained: Any) -> Prefix:
            return self.policy.prefix(join(trained, fixed.params))

        copy = None if self.critic is None else self.critic.copy(networks.critic)
        return _Networks(of(networks.actor), None if copy is None else of(copy))

    def _statistics(
        self,
        reads: frozenset[Statistic],
        networks: _Networks,
        prefixes: _Networks,
        fixed: Fixed,
        reference: _Reference | None,
        rows: Rows,
        hp: HyperParameters,
    ) -> dict[Statistic, Float[Array, "rows limit"]]:
        """What is read about the tokens of rows; gradients flow into networks and prefixes."""

        def scores(params: Any, prefix: Prefix) -> Scores:
            return self.policy.scores(
                params, prefix, rows.observation, rows.observation_length, rows.reply, rows.reply_length
            )

        params, critic = join(networks.actor, fixed.params), None
        found: dict[Statistic, Array] = {}
        start = scores(*reference) if reference is not None and self._reads_reference(reads) else None
        if self.critic is not None and reads & _OF_CRITIC:
            copy = self.critic.copy(networks.critic)
            read = start if copy is None else scores(join(copy, fixed.params), prefixes.critic)
            assert read is not None
            if self.critic.output == "value":
                found["value"] = self.policy.at_slots(self.critic.value(networks.critic, read))
            else:
                critic = self.critic.scores(networks.critic, read)
        if "reference_log_prob" in reads:
            assert start is not None
            found["reference_log_prob"] = self.policy.statistics(params, start, rows.reply, hp.temperature).log_prob
        if not reads - _WITHOUT_POLICY:
            return found
        statistics = self.policy.statistics(
            params,
            scores(params, prefixes.actor),
            rows.reply,
            hp.temperature,
            reference=start if "kl" in reads or critic is not None else None,
            critic=critic,
            critic_is_relative=self.critic is not None and self.critic.is_relative,
            unweighted=bool(reads & _UNWEIGHTED),
        )
        return {**{name: x for name, x in statistics._asdict().items() if name in reads and x is not None}, **found}

    def _reads_reference(self, reads: frozenset[Statistic]) -> bool:
        """Whether the starting model has to be asked for these statistics."""
        through_critic = self.critic is not None and self.critic.uses_reference and bool(reads & _OF_CRITIC)
        return through_critic or bool(reads & {"kl", "reference_log_prob"})

    @jax.named_scope("gradient")
    def _gradient(
        self,
        networks: _Networks,
        fixed: Fixed,
        reference: _Reference | None,
        rows: Rows,
        order: Int[Array, " capacity"],
        span: tuple[Array, Array],
        denominator: Float[Array, ""],
        hp: HyperParameters,
    ) -> tuple[_Networks, "_Report"]:
        """Gradient of each network's loss over a span of rows with respect to the network, a micro-batch at a time.

        No loss has a gradient in another's network, so the gradient of their sum is each one's own. The shared prefix
        is computed once: the micro-batches' gradients with respect to its keys and values are summed, and go through it
        once at the end.
        """
        prefixes, prefix_vjp = jax.vjp(lambda networks: self._prefixes(networks, fixed), networks)
        reads = self.algorithm.reads.loss

        def loss(networks: _Networks, prefixes: _Networks, batch: Rows) -> tuple[Array, _Report]:
            found = self._statistics(reads, networks, prefixes, fixed, reference, batch, hp)
            statistics = TokenStatistics(**found)  # pyright: ignore[reportCallIssue]
            record = RowRecord(batch.sampled, batch.old_log_prob, batch.rollout_log_prob, batch.reference_log_prob)
            per_row = jax.vmap(self.algorithm.loss, in_axes=(0, 0, 0, None))(statistics, record, batch.target, hp)
            present = batch.weight > 0

            def mean(x: Array) -> Float[Array, ""]:
                return jnp.sum(jnp.where(present, x * batch.weight, 0.0)) / denominator

            losses: dict[Network, Array] = {name: mean(total) for name, total in per_row.totals.items()}
            return sum(losses.values(), jnp.float32(0)), _Report(
                losses=losses,
                tokens=jnp.sum(present[:, None] & batch.sampled, dtype=jnp.float32),
                sums={k: jnp.sum(jnp.where(present, v, 0.0)) for k, v in per_row.sums.items()},
                maxima={k: jnp.max(jnp.where(present, v, 0.0)) for k, v in per_row.maxima.items()},
                distance=None if per_row.distance is None else mean(per_row.distance),
            )

        def micro_batch(i: Array) -> tuple[tuple[Any, Any], _Report]:
            index, present = at(i)
            batch = constrain_rows(rows.take(index, present))
            return jax.grad(loss, argnums=(0, 1), has_aux=True)(networks, prefixes, batch)

        parts, at = self._micro_batches(order, *span)
        no_report = jax.eval_shape(lambda i: micro_batch(i)[1], jnp.int32(0))
        no_report = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), no_report)
        # Summed in float32, whatever type the prefix is computed in.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (networks, prefixes))

        def accumulate(i: Array, so_far: Any) -> Any:
            ((grads, through), report), ((more, and_through), another) = so_far, micro_batch(i)
            grads = constrain_params(jax.tree.map(jnp.add, grads, more))
            return (grads, jax.tree.map(jnp.add, through, and_through)), report.merge(another)

        with jax.named_scope("micro_batches"):
            (grads, through), report = for_count(parts, accumulate, (nothing, no_report))
        through = jax.tree.map(lambda g, x: g.astype(x.dtype), through, prefixes)
        return constrain_params(jax.tree.map(jnp.add, grads, prefix_vjp(through)[0])), report

    def _scheduled(self, hp: HyperParameters, iteration: Int[Array, ""]) -> Float[Array, ""]:
        return scheduled(hp, iteration, self.config.optimizer.schedule)

    def _optimizer(self, hp: HyperParameters, rate: Float[Array, ""]) -> optax.GradientTransformation:
        options = self.config.optimizer
        return make_optimizer(hp, rate, clip=options.gradient_clip > 0, rule=options.update_rule)

    @jax.named_scope("optimiser")
    def _apply(
        self, now: _Learning, grads: _Networks, report: "_Report", iteration: Int[Array, ""], hp: HyperParameters
    ) -> tuple[_Learning, "_Learned"]:
        """An optimiser step of each network; none if its gradient is not finite, or the policy has gone too far."""
        going = now.going
        if report.distance is not None:
            going = within_target_kl(going, report.distance, hp.target_kl)
        share = self._scheduled(hp, iteration)

        def step(name: Network, rate: Float[Array, ""], may: Bool[Array, ""]) -> tuple[Any, Any, _Step]:
            old = params, opt_state = getattr(now.networks, name), getattr(now.opt_states, name)
            gradient = getattr(grads, name)
            norm = optax.tree.norm(gradient)
            finite = jnp.isfinite(norm) & jnp.isfinite(report.losses[name])
            updates, new_opt_state = self._optimizer(hp, rate * share).update(gradient, opt_state, params)
            new = optax.apply_updates(params, updates), new_opt_state
            kept = jax.tree.map(lambda new, old: jnp.where(finite & may, new, old), new, old)
            return *kept, _Step(report.losses[name], norm, (~finite).astype(jnp.float32))

        actor, actor_opt_state, actor_step = step("actor", hp.learning_rate, going)
        steps: dict[Network, _Step] = {"actor": actor_step}
        critic = critic_opt_state = target = None
        if self.critic is not None:
            critic, critic_opt_state, steps["critic"] = step("critic", hp.critic_learning_rate, jnp.bool_(True))
            decay = self.algorithm.target_decay(hp)
            target = None if decay is None else polyak(now.target, critic, decay)
        after = _Learning(_Networks(actor, critic), _Networks(actor_opt_state, critic_opt_state), target, going)
        return after, _Learned(report, steps, stopped=(~going).astype(jnp.float32))


_OF_CRITIC: frozenset[Statistic] = frozenset({"q", "expected_q", "mean_q", "value"})
_WITHOUT_POLICY: frozenset[Statistic] = frozenset({"value", "reference_log_prob"})
_UNWEIGHTED: frozenset[Statistic] = frozenset({"mean_q", "mean_log_prob"})


class _Report(NamedTuple):
    """Numbers about the tokens of some micro-batches."""

    losses: Mapping[Network, Float[Array, "..."]]
    tokens: Float[Array, "..."]
    sums: Mapping[str, Float[Array, "..."]]
    maxima: Mapping[str, Float[Array, "..."]]
    distance: Float[Array, "..."] | None
    """Mean distance of the policy from the one that played, weighed as the loss is."""

    def merge(self, other: "_Report") -> "_Report":
        summed = jax.tree.map(jnp.add, self, other)
        return summed._replace(maxima=jax.tree.map(jnp.maximum, self.maxima, other.maxima))


class _Step(NamedTuple):
    """What the optimiser step of a network reports."""

    loss: Float[Array, "..."]
    grad_norm: Float[Array, "..."]
    skipped: Float[Array, "..."]


class _Learned(NamedTuple):
    """What one optimiser step reports."""

    report: _Report
    steps: Mapping[Network, _Step]
    stopped: Float[Array, "..."]


def _learned_metrics(learned: _Learned) -> Metrics:
    """Over the optimiser steps of an iteration: means over tokens, maxima, and each network's mean loss and norm.

    Where no token was trained there is no mean, and it is not a number.
    """
    report, actor, critic = learned.report, learned.steps["actor"], learned.steps.get("critic")
    tokens = report.tokens.sum()
    metrics = {
        "loss": actor.loss.mean(),
        "grad_norm": actor.grad_norm.mean(),
        "skipped_updates": sum(step.skipped.sum() for step in learned.steps.values()),
        "trained_tokens": tokens,
        **{name: value.sum() / tokens for name, value in report.sums.items()},
        **{name: value.max() for name, value in report.maxima.items()},
    }
    if critic is not None:
        metrics |= {"critic_loss": critic.loss.mean(), "critic_grad_norm": critic.grad_norm.mean()}
    if report.distance is not None:
        metrics |= {"policy_distance": report.distance.mean(), "stopped_updates": learned.stopped.sum()}
    return metrics


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
