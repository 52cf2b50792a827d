"""Algorithms with a critic in the train step, against plain computations of everything at once."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algorithms.algorithm import RowRecord
from jaxgrpo.algorithms.etpo import ETPO
from jaxgrpo.beginning import restore_params
from jaxgrpo.build import Experiment
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.config import ConfigError, HyperParameters, resolve
from jaxgrpo.episodes import Episodes
from jaxgrpo.records import RunFolder, write_config
from jaxgrpo.token_statistics import TokenStatistics
from jaxgrpo.train_step import Critic
from tests.jaxgrpo.experiments import compiled, replayed, small, updated
from tests.jaxgrpo.jaxprs import selected_shapes

FREE = {"constrain": False, "reply_limit": 3, "groups": 2, "group_size": 3, "temperature": 0.7}
FEW = {"groups": 2, "group_size": 3, "temperature": 0.7}
PLAIN = {"gradient_clip": 0.0, "entropy_bonus": 0.0, "micro_batch": 7, "minibatches": 1}


def moved(tree: Any, seed: int) -> Any:
    """The parameters with noise, so that no two networks are alike."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [x + 0.05 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return structure.unflatten(noisy)


def apart(experiment: Experiment, play: dict[str, Any]) -> tuple[Any, Episodes]:
    """A state in which all networks differ; episodes that the rules end and some that the clock ends."""
    _, episodes = replayed(small(**play), ragged="constrain" in play)
    assert np.all(np.asarray(episodes.observation_length) == episodes.observation.shape[-1]), "rows have padding"
    # Of each group the first sample ends after two steps by the rules, the second after three by the clock.
    steps = np.arange(episodes.alive.shape[-1])
    last = np.array([1, 2, len(steps)])[:, None]
    alive = episodes.alive & jnp.asarray(steps <= last)

    def played(x: jax.Array) -> jax.Array:
        return jnp.where(alive.reshape(*alive.shape, *[1] * (x.ndim - 3)), x, jnp.zeros_like(x))

    ends = [jnp.asarray((steps == last) & (last == number)) for number in (1, 2)]
    episodes = episodes._replace(
        alive=alive,
        reward=played(episodes.reward),
        terminated=played(episodes.terminated) | ends[0],
        truncated=played(episodes.truncated) | ends[1],
        reply=jax.tree.map(played, episodes.reply),
    )
    state = experiment.init()
    critic = state.algorithm_state
    target = None if critic.target is None else moved(critic.target, 3)
    critic = critic._replace(params=moved(critic.params, 2), target=target)
    return state.replace(params=moved(state.params, 1), algorithm_state=critic), episodes


class Dense(NamedTuple):
    """What a model makes of every slot behind every observation: `[groups, samples, steps_and_one, limit, ...]`."""

    hidden: jax.Array
    logits: jax.Array


def dense(experiment: Experiment, params: Any, episodes: Episodes) -> Dense:
    """Whole rows, the prompt written out in each, through the model without any cache."""
    policy = experiment.policy
    opening = np.zeros(policy.reply_limit, np.int32)
    opening[: len(policy.opening)] = policy.opening
    replies = jnp.pad(episodes.reply.ids, ((0, 0), (0, 0), (0, 1), (0, 0)))
    replies = jnp.where(jnp.pad(episodes.alive, ((0, 0), (0, 0), (0, 1)))[..., None], replies, opening)
    shape, observation = replies.shape[:3], episodes.observation
    prompt = jnp.broadcast_to(jnp.asarray(policy.prefix_ids, jnp.int32), (*shape, len(policy.prefix_ids)))
    ids = jnp.concatenate([prompt, observation, replies[..., :-1]], axis=-1)
    ids = ids.reshape(-1, ids.shape[-1])
    model = policy.model(params)
    empty = model.prefill(jnp.zeros(0, jnp.int32))
    places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = model.forward(ids, places, jnp.ones_like(ids, bool), empty)[:, -policy.reply_limit :]
    hidden = hidden.reshape(*shape, policy.reply_limit, -1)
    return Dense(hidden, model.logits(hidden))


def allowed(experiment: Experiment) -> np.ndarray:
    """Tokens that may be drawn at a decision: all real ones, or the choice that constrained replies have."""
    policy = experiment.policy
    mask = np.arange(policy.model(experiment.init().params).config.vocab_size) < policy.vocab_size
    if policy.constraint is None or policy.constraint.choices is None:
        return mask
    choices = policy.constraint.choices[policy.constraint.forced_next[policy.constraint.start]]
    return mask & np.isin(np.arange(len(mask)), choices[choices >= 0])


def log_policy(experiment: Experiment, found: Dense) -> jax.Array:
    return jax.nn.log_softmax(jnp.where(allowed(experiment), found.logits / 0.7, -1e30), axis=-1)


def expectation(log_probs: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_probs) * x, axis=-1)


def of_taken(x: jax.Array, episodes: Episodes) -> jax.Array:
    return jnp.take_along_axis(x[:, :, :-1], episodes.reply.ids[..., None], axis=-1)[..., 0]


def small_network(params: Any, hidden: jax.Array) -> jax.Array:
    return jax.nn.silu(jax.nn.silu(hidden @ params["first"]) @ params["second"])


def dense_q(experiment: Experiment, params: Any, start: Dense, episodes: Episodes) -> jax.Array:
    if "model" in params:
        return dense(experiment, params["model"], episodes).logits - start.logits
    return small_network(params, start.hidden) @ params["rows"].T


def dense_value(experiment: Experiment, params: Any, start: Dense, episodes: Episodes) -> jax.Array:
    if "model" in params:
        return dense(experiment, params["model"], episodes).hidden @ params["value"]
    return small_network(params, start.hidden) @ params["value"]


def decisions(episodes: Episodes) -> list[tuple[int, int, list[list[int]], str]]:
    """Of each episode: group, sample, the sampled slots of each step, and how it ended."""
    found = []
    for group, sample in np.ndindex(episodes.alive.shape[:2]):
        steps = int(episodes.alive[group, sample].sum())
        slots = [np.flatnonzero(episodes.sampled[group, sample, step]).tolist() for step in range(steps)]
        assert all(slots)
        ended = "terminated" if bool(episodes.terminated[group, sample].any()) else "truncated"
        found.append((group, sample, slots, ended))
    return found


def slow_targets(soft: np.ndarray, episodes: Episodes, discount: float, first: int) -> np.ndarray:
    """Soft Bellman targets as they are written down."""
    target = np.zeros(episodes.sampled.shape)
    reward = np.asarray(episodes.reward)
    for g, n, steps, ended in decisions(episodes):
        for t, slots in enumerate(steps):
            for this, following in zip(slots, slots[1:], strict=False):
                target[g, n, t, this] = soft[g, n, t, following]
            after = soft[g, n, t + 1, steps[t + 1][0] if t + 1 < len(steps) else first]
            over = t + 1 == len(steps) and ended == "terminated"
            target[g, n, t, slots[-1]] = reward[g, n, t] + (0.0 if over else discount * after)
    return target


def assert_gradient(moments: Any, gradient: Any) -> None:
    """Adam's first moment after a step from zero is a tenth of the gradient."""
    for a, b in zip(jax.tree.leaves(moments), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(10 * np.asarray(a), b, rtol=1e-3, atol=2e-4 * float(jnp.abs(b).max()) + 1e-7)


@pytest.mark.parametrize(("play", "kind"), [(FREE, "model"), (FEW, "head")])
def test_etpo_is_the_plain_computation(play: dict[str, Any], kind: str):
    """Targets, losses, both gradients and the target critic, from all logits at once and a loop over decisions."""
    numbers = {"beta": 0.3, "discount": 0.9, "polyak": 0.75, "reference_in_policy": True}
    experiment = small(algorithm="etpo", critic=kind, **play, **PLAIN, **numbers)
    state, episodes = apart(experiment, play)
    start = dense(experiment, experiment.fixed.reference, episodes)
    log_rho = log_policy(experiment, start)

    @jax.jit
    def soft(actor: Any, critic: Any) -> Any:
        log_pi = log_policy(experiment, dense(experiment, actor, episodes))
        q = dense_q(experiment, critic, start, episodes)
        return expectation(log_pi, q - 0.3 * (log_pi - log_rho)), of_taken(q, episodes)

    values, q = soft(state.params, state.algorithm_state.target)
    y = slow_targets(np.asarray(values), episodes, 0.9, experiment.policy.sampled_span[0])

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def losses(actor: Any, critic: Any) -> Any:
        log_pi = log_policy(experiment, dense(experiment, actor, episodes))[:, :, :-1]
        q = dense_q(experiment, critic, start, episodes)
        cost = expectation(log_pi, 0.3 * (log_pi - log_rho[:, :, :-1]) - jax.lax.stop_gradient(q[:, :, :-1]))
        error = of_taken(q, episodes) - y
        of_actor, of_critic = (jnp.mean(x, where=episodes.sampled) for x in (cost, 0.5 * error**2))
        return of_actor + of_critic, (of_actor, of_critic)

    (_, (of_actor, of_critic)), gradients = losses(state.params, state.algorithm_state.params)
    after, metrics = updated(experiment, state, episodes)
    sampled = np.asarray(episodes.sampled)
    assert metrics["loss"] == pytest.approx(float(of_actor), rel=1e-4)
    assert metrics["critic_loss"] == pytest.approx(float(of_critic), rel=1e-4)
    assert metrics["target_mean"] == pytest.approx(y[sampled].mean(), rel=1e-3, abs=1e-5)
    assert metrics["q_std"] == pytest.approx(np.asarray(q)[sampled].std(), rel=1e-3)
    assert_gradient(after.opt_state[1].mu, gradients[0])
    assert_gradient(after.algorithm_state.opt_state[1].mu, gradients[1])
    mean = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, state.algorithm_state.target, after.algorithm_state.params)
    for a, b in zip(jax.tree.leaves(after.algorithm_state.target), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def slow_advantages(values: np.ndarray, reward: np.ndarray, episodes: Episodes, level: str, first: int) -> np.ndarray:
    """Generalised advantage estimation over the decisions of each episode, from the last to the first."""
    found = np.zeros(episodes.sampled.shape)
    for g, n, steps, ended in decisions(episodes):
        steps = steps if level == "token" else [[first]] * len(steps)
        final = 0.0 if ended == "terminated" else values[g, n, len(steps), first]
        following, carried = final, 0.0
        for t in reversed(range(len(steps))):
            ahead, gain = reward[g, n, t] + 0.9 * following, 0.9 * 0.8 * carried
            for slot in reversed(steps[t]):
                value = values[g, n, t, slot]
                found[g, n, t, slot] = carried = ahead - value + gain
                ahead, gain, following = value, 0.8 * carried, value
    return found


@pytest.mark.parametrize(("algorithm", "play", "kind"), [("poad", FREE, "model"), ("ppo-kl", FREE, "head")])
def test_ppo_is_the_plain_computation(algorithm: str, play: dict[str, Any], kind: str):
    """Two passes that stand still, so that both have the same gradient; then the policy stops when it is too far."""
    numbers = {"kl_beta": 0.2, "discount": 0.9, "trace_decay": 0.8, "passes": 2, "target_kl": 1e6}
    experiment = small(algorithm=algorithm, critic=kind, **play, **PLAIN, **numbers)
    state, episodes = apart(experiment, play)
    sampled, old = episodes.sampled, episodes.reply.log_prob
    start = dense(experiment, experiment.fixed.reference, episodes)
    first = experiment.policy.sampled_span[0]
    level = "reply" if algorithm == "ppo-kl" else "token"
    decides = episodes.alive[..., None] & (jnp.arange(sampled.shape[-1]) == first) if level == "reply" else sampled

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(sampled, x, 0.0), axis=-1)

    reward = episodes.reward - 0.2 * total(old - of_taken(log_policy(experiment, start), episodes))
    values = np.asarray(dense_value(experiment, state.algorithm_state.params, start, episodes))
    advantage = slow_advantages(values, np.asarray(reward), episodes, level, first)
    spread = advantage[np.asarray(decides)]
    normalised = jnp.asarray((advantage - spread.mean()) / (spread.std() + 1e-6))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def losses(actor: Any, critic: Any) -> Any:
        log_pi = of_taken(log_policy(experiment, dense(experiment, actor, episodes)), episodes)
        log_ratio = log_pi - old
        if level == "reply":
            log_ratio = jnp.broadcast_to(total(log_ratio)[..., None], old.shape)
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised)
        value = dense_value(experiment, critic, start, episodes)[:, :, :-1]
        error = value - (values[:, :, :-1] + advantage)
        of_actor, of_critic = (jnp.mean(x, where=decides) for x in (-gain, 0.5 * error**2))
        return of_actor + of_critic, (of_actor, of_critic)

    (_, (of_actor, of_critic)), gradients = losses(state.params, state.algorithm_state.params)
    still, metrics = updated(experiment, state, episodes, learning_rate=0.0, critic_learning_rate=0.0)
    assert metrics["loss"] == pytest.approx(float(of_actor), rel=1e-3, abs=1e-5)
    assert metrics["critic_loss"] == pytest.approx(float(of_critic), rel=1e-3)
    both = jax.tree.map(lambda g: 1.9 * g, gradients)  # 0.9 of the first pass's and the second's
    assert_gradient(still.opt_state[1].mu, both[0])
    assert_gradient(still.algorithm_state.opt_state[1].mu, both[1])
    spread = 1 - np.var(advantage[np.asarray(decides)]) / np.var((values[:, :, :-1] + advantage)[np.asarray(decides)])
    assert metrics["explained_variance"] == pytest.approx(spread, rel=1e-3, abs=1e-4)

    # The policy that played is further away than this already, so the first step is refused as well.
    far, metrics = updated(experiment, state, episodes, target_kl=1e-6)
    assert metrics["stopped_updates"] == 2 and metrics["policy_distance"] > 1e-3
    assert_same(far.params, state.params)
    assert int(far.algorithm_state.opt_state[1].count) == 2
    # Changing numbers has compiled nothing again.
    updated(experiment, state, episodes, trace_decay=0.5, discount=0.3, value_clip=0.1, kl_beta=0.4, clip_low=0.1)
    assert compiled(experiment, "update")._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


START = {"algorithm": "etpo", "critic": "model", "polyak": 0.995, "reference_in_policy": True, **PLAIN}


def test_etpo_begins_where_the_policy_has_nothing_to_learn():
    """Q is exactly 0 and pi is rho: the first update moves the critic alone. All numbers are traced."""
    experiment = small(**START)
    state, episodes = experiment.init(), replayed(small())[1]
    # An epsilon above the rounding of pi - rho, which Adam would else take for a gradient.
    after, metrics = updated(experiment, state, episodes, adam_epsilon=1e-4)
    assert metrics["q_mean"] == metrics["q_std"] == 0
    assert metrics["grad_norm"] < 1e-7 and abs(metrics["kl"]) < 1e-6
    assert metrics["critic_grad_norm"] > 1e-3 and metrics["logprob_gap"] < 1e-4
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # What is rewarded reaches the policy only through Q.
    _, metrics = updated(experiment, after, episodes)
    assert metrics["grad_norm"] > 0
    for name in ("beta", "discount", "polyak", "learning_rate", "critic_learning_rate", "temperature", "adam_b1"):
        updated(experiment, after, episodes, **{name: 0.5 * float(getattr(experiment.hyperparameters, name))})
    assert compiled(experiment, "update")._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    no_price, _ = updated(experiment, after, episodes, polyak=0.0)
    assert_same(no_price.algorithm_state.target, no_price.algorithm_state.params)


@pytest.mark.parametrize(
    ("options", "of_policy", "of_critic"),
    [
        ({"reference_in_policy": True}, 0.5 * (1 + 2) - (3 + 4), 0.5 * 1 + (10 * 20 - 50)),
        ({"reference_in_policy": False}, -0.5 * (5 + 6) - (3 + 4), 0.5 * 1 + (10 * 20 - 50)),
        ({"etpo_as_released": True}, 0.5 * (-7 - 8) - (9 + 1), 0.5 * 1),
    ],
)
def test_losses_of_etpo_and_of_its_ablations(options: dict[str, Any], of_policy: float, of_critic: float):
    """By hand; the third token was not sampled, and the second's Q is 20 above its target."""

    def tokens(first: float, second: float) -> jax.Array:
        return jnp.array([first, second, jnp.nan])

    config = resolve({"algorithm": "etpo", "beta": 0.5, **options})
    statistics = TokenStatistics(
        log_prob=tokens(-1, -2),
        entropy=tokens(5, 6),
        kl=tokens(1, 2),
        expected_q=tokens(3, 4),
        mean_log_prob=tokens(-7, -8),
        mean_q=tokens(9, 1),
        q=tokens(1, 25),
    )
    record = RowRecord(jnp.array([True, True, False]), tokens(-1, -2))
    found = ETPO.from_config(config).loss(statistics, record, tokens(2, 5), HyperParameters.from_config(config))
    assert found.totals["actor"] == pytest.approx(of_policy)
    assert found.totals["critic"] == pytest.approx(of_critic)
    assert found.sums["bellman_error"] == 21


MEMBERS = 2


def test_members_under_vmap_learn_as_alone():
    """Two members of unequal work: each is what it is alone, and no gradient of either network is selected."""
    experiment = small(**START)
    state, episodes = experiment.init(), replayed(small())[1]
    other = episodes._replace(
        alive=episodes.alive.at[1:].set(False),
        reply=jax.tree.map(lambda x: x.at[1:].set(jnp.zeros_like(x[1:])), episodes.reply),
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), (state, episodes), (state, other))
    hp, step = experiment.hyperparameters, experiment.train_step
    update = jax.vmap(lambda state, episodes: step.update(state, episodes, experiment.fixed, hp))
    embedding = (MEMBERS, *state.params["embedding"].shape)
    # Of each network itself and its two moments, once each, because an update may be skipped.
    assert selected_shapes(jax.make_jaxpr(update)(*stacked)).count(embedding) == 6
    together, metrics = jax.jit(update)(*stacked)
    for member, played in enumerate((episodes, other)):
        alone, expected = updated(experiment, state, played)
        for name in ("critic_loss", "critic_grad_norm", "target_mean", "trained_tokens", "entropy"):
            assert float(metrics[name][member]) == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
        mine = jax.tree.map(lambda x, member=member: x[member], together.algorithm_state.opt_state[1].mu)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(alone.algorithm_state.opt_state[1].mu), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()) + 1e-9)


@pytest.mark.parametrize(
    "options",
    [{"train_layers": "1", "etpo_as_released": True, "critic": "raw"}, {"lora.rank": 2, "critic": "model"}],
)
def test_a_critic_beside_frozen_parameters_copies_what_is_trained_and_no_more(options: dict[str, Any]):
    experiment = small(algorithm="etpo", minibatches=12, **options)
    state = experiment.init()
    critic = state.algorithm_state
    trained = jax.tree.map(jnp.shape, state.params)
    assert jax.tree.map(jnp.shape, critic.params["model"]) == jax.tree.map(jnp.shape, critic.target["model"]) == trained
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, critic))]
    assert len(set(buffers)) == len(buffers), "a state whose arrays share memory cannot be donated"
    episodes = jax.eval_shape(experiment.train_step.rollout, state, experiment.fixed, experiment.hyperparameters)
    after, metrics = jax.eval_shape(
        experiment.train_step.update, state, episodes, experiment.fixed, experiment.hyperparameters
    )
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert {"bellman_error", "kl", "q_std", "critic_loss"} <= metrics.keys()


def test_a_run_with_a_critic_is_resumed_bitwise_and_evaluated(tmp_path: Path):
    experiment = small(algorithm="etpo", **FEW, minibatches=1, out=str(tmp_path / "run"))
    state = experiment.init()
    critic = state.algorithm_state
    state = state.replace(
        algorithm_state=critic._replace(params=moved(critic.params, 1), target=moved(critic.target, 2))
    )
    folder = RunFolder.of(experiment.config)
    folder.claim(experiment.config)
    write_config(folder.config, experiment.config)
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    checkpoints.save(3, state)
    checkpoints.wait()
    restored = checkpoints.restore(3, experiment.template())
    checkpoints.close()
    assert isinstance(restored.algorithm_state, Critic)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same(dataclasses.replace(restored, key=jnp.zeros(1)), dataclasses.replace(state, key=jnp.zeros(1)))
    config, params = restore_params(str(tmp_path / "run"))
    assert config.algorithm == "etpo"
    assert_same(params, state.params)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"algorithm": "etpo", "temperature": 0}, "--temperature 0: --algorithm etpo needs chances"),
        ({"algorithm": "etpo", "top_k": 5}, "--top-k, --top-p: --algorithm etpo learns the distribution that plays"),
        ({"algorithm": "etpo", "train_fraction": 0.5}, r"--train-fraction 0.5: means nothing to --algorithm etpo"),
        ({"algorithm": "etpo", "kl_beta": 0.1}, r"--kl-beta 0.1: means nothing to --algorithm etpo; leave it out"),
        ({"algorithm": "poad", "critic": "raw"}, "--critic raw: logits are a Q of tokens"),
        ({"algorithm": "poad", "etpo_as_released": True}, "--etpo-as-released True: means nothing to --algorithm poad"),
        ({"algorithm": "ntpo", "trace_decay": 1.5}, r"--trace-decay 1.5: must be at most 1\."),
        ({"beta": -1.0}, "--beta -1.0: must be 0 or more"),
        ({"algorithm": "etpo", "critic_width": 0}, "--critic-width 0: must be at least 1"),
    ],
)
def test_options_that_an_algorithm_does_not_know_are_refused(options: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=f"^{line}"):
        resolve(options)


def test_presets_of_model_and_algorithm_meet_and_a_resumed_run_keeps_its_own():
    config = resolve({"algorithm": "poad"})
    assert config.learn.train_fraction == 1 and config.learn.micro_batch == resolve({}).learn.micro_batch
    kept = resolve({"algorithm": "poad", "train_fraction": 1.0, "trace_decay": 0.5})
    assert resolve({"iterations": 7}, resumed=kept).learn == kept.learn
