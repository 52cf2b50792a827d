"""The compiled step: the same gradient however it is cut up, one trace, members under vmap, and faults survived."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from jaxgrpo.build import build
from jaxgrpo.config import HyperParameters, resolve
from jaxgrpo.train_step import Fixed
from tests.jaxgrpo.experiments import compiled, replayed, small, updated
from tests.jaxgrpo.jaxprs import array_shapes, selected_shapes

FREE = {"constrain": False, "reply_limit": 6, "groups": 3, "group_size": 4}


def first_moment(state: Any) -> list[np.ndarray]:
    """Adam's first moment after one step from zero: the gradient, times 0.1."""
    return [np.asarray(x) for x in jax.tree.leaves(state.opt_state[1].mu)]


RECOMPUTE = {"old_logprobs": "recompute", "tis_cap": 2.0}
STEPWISE = {**FREE, "temperature": 0.6, "algorithm": "step-grpo", **RECOMPUTE}


@pytest.mark.parametrize(
    ("aggregate", "algorithm"),
    [
        ("token", {}),
        ("sequence", {"algorithm": "step-grpo", "group_filter": 0.67}),
        ("episode", {"algorithm": "gigpo"}),
        ("constant", RECOMPUTE),
    ],
)
def test_micro_batches_add_up_to_the_full_batch(aggregate: str, algorithm: dict[str, Any]):
    state, episodes = replayed(small(**FREE, algorithm="gigpo"), ragged=True)
    options = {**FREE, **algorithm, "aggregate": aggregate, "gradient_clip": 0.0, "kl_beta": 0.1, "entropy_bonus": 0.01}
    full, report = updated(small(**options, micro_batch=96), state, episodes)
    parts, other = updated(small(**options, micro_batch=7), state, episodes)
    kept = episodes.token_counts.sum(-1).reshape(3, 4).sum(-1)
    if algorithm.get("group_filter"):
        kept = kept[jnp.argsort(-episodes.returns.std(-1))[:2]]
    assert other["trained_tokens"] == report["trained_tokens"] == int(kept.sum())
    for name in ("loss", "grad_norm", "entropy", "kl", "ratio_max", "clip_fraction"):
        assert other[name] == pytest.approx(report[name], rel=1e-4, abs=1e-6), name
    for a, b in zip(first_moment(full), first_moment(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())


THINK = {"reply": "think", "reply_limit": 16, "groups": 2, "group_size": 2, "temperature": 0.8}


@pytest.mark.parametrize(
    "options",
    [{}, {**FREE, "temperature": 0.6}, STEPWISE, {**FREE, "top_k": 7, "algorithm": "gigpo"}, THINK],
)
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(options: dict[str, Any]):
    experiment = small(**options)
    _, metrics = updated(experiment, *replayed(experiment))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0
    assert metrics["logprob_gap"] < 1e-4
    assert metrics["trained_rows"] > 0 and metrics["grad_norm"] > 0


def test_recomputed_probabilities_are_those_of_the_parameters_that_played():
    """Play that was mistaken about its probabilities shows in the gap alone, and its weights scale the loss."""
    experiment = small(**STEPWISE)
    state, episodes = replayed(experiment)
    _, right = updated(experiment, state, episodes)
    # Recorded as twice as likely as they were: weights of a half, cut at a quarter.
    mistaken = episodes._replace(reply=episodes.reply._replace(log_prob=episodes.reply.log_prob + np.log(2)))
    _, half = updated(experiment, state, mistaken)
    _, quarter = updated(experiment, state, mistaken, tis_cap=0.25)
    assert right["logprob_gap"] < 1e-4
    for metrics, share in ((half, 0.5), (quarter, 0.25)):
        assert metrics["logprob_gap"] == pytest.approx(np.log(2), rel=1e-3)
        assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(share * right["grad_norm"], rel=1e-3)


def test_equal_returns_train_nothing():
    experiment = small()
    state, episodes = replayed(experiment)
    episodes = episodes._replace(reward=jnp.zeros_like(episodes.reward))
    after, metrics = updated(experiment, state, episodes)
    assert metrics["loss"] == 0 and metrics["trained_rows"] == 0 and metrics["grad_norm"] == 0
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_probability_of_better_actions_rises():
    """Only going right in the first step pays; fresh episodes each time."""
    experiment = small(groups=4, group_size=8, learning_rate=3e-3)
    state, shares = experiment.init(), []
    for _ in range(4):
        episodes = compiled(experiment, "rollout")(state, experiment.fixed, experiment.hyperparameters)
        went_right = episodes.reply.action[..., 0] == 2
        shares.append(float(went_right.mean()))
        reward = jnp.zeros_like(episodes.reward).at[..., 0].set(went_right)
        state, _ = updated(experiment, state, episodes._replace(reward=reward))
    assert shares[-1] > shares[0] + 0.2


def test_drawing_episodes_prefers_large_advantages_and_counts_only_those_drawn():
    experiment = small(groups=4, group_size=8, train_fraction=0.25)
    state, episodes = replayed(experiment)
    _, metrics = updated(experiment, state, episodes, alpha=4.0)
    _, uniform = updated(experiment, state, episodes, alpha=0.0)
    assert metrics["trained_advantage_abs_mean"] > uniform["trained_advantage_abs_mean"]
    assert metrics["advantage_abs_mean"] == uniform["advantage_abs_mean"]
    assert metrics["trained_rows"] <= 8 * episodes.alive.shape[-1]


def test_passes_and_minibatches_step_the_optimiser_that_often():
    experiment = small(passes=2, minibatches=3, micro_batch=8)
    state, episodes = replayed(experiment)
    after, metrics = updated(experiment, state, episodes)
    assert int(after.opt_state[1].count) == 6
    # The second pass is off-policy.
    assert metrics["ratio_max"] > 1.0001
    visited = metrics["trained_tokens"]
    assert visited == 2 * int(episodes.token_counts.sum())


def test_minibatches_of_a_pass_average_to_the_whole_gradient():
    """With a learning rate of 0 nothing moves, so that the minibatches' losses are parts of the same loss."""
    options = {**FREE, "gradient_clip": 0.0}
    state, episodes = replayed(small(**options), ragged=True)
    _, one = updated(small(**options), state, episodes, learning_rate=0.0)
    _, four = updated(small(**options, minibatches=4, micro_batch=5), state, episodes, learning_rate=0.0)
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert four["trained_tokens"] == one["trained_tokens"]


def test_a_kl_term_pulls_back_to_the_start():
    experiment = small(kl_beta=10.0, learning_rate=1e-3)
    state, episodes = replayed(experiment)
    moved = state.replace(params=jax.tree.map(lambda x: x * 1.3, state.params))
    nothing = episodes._replace(reward=jnp.zeros_like(episodes.reward))
    _, before = updated(experiment, moved, nothing)
    pulled = moved
    for _ in range(5):
        pulled, metrics = updated(experiment, pulled, nothing)
    assert before["kl"] > 0 and metrics["kl"] < before["kl"]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    experiment = small()
    state, episodes = replayed(experiment)
    broken = episodes._replace(reward=episodes.reward.at[0, 0, 0].set(jnp.nan))
    after, metrics = updated(experiment, state, broken)
    assert metrics["skipped_updates"] == 1
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((after.params, after.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert int(after.iteration) == 1


def test_changing_numbers_never_recompiles():
    options = {"entropy_bonus": 0.01, "dual_clip": 3.0, "kl_beta": 0.1, "train_fraction": 0.5, **RECOMPUTE}
    experiment = small(algorithm="gigpo", **options)
    traces = 0

    def step(state: Any, fixed: Fixed, hp: HyperParameters) -> Any:
        nonlocal traces
        traces += 1
        return experiment.train_step(state, fixed, hp)

    compiled, state, hp = jax.jit(step), experiment.init(), experiment.hyperparameters
    for name in (
        "learning_rate",
        "temperature",
        "clip_low",
        "clip_high",
        "dual_clip",
        "step_weight",
        "step_discount",
        "tis_cap",
        "kl_beta",
        "alpha",
        "entropy_bonus",
        "unreadable_penalty",
        "weight_decay",
        "adam_b1",
        "gradient_clip",
    ):
        hp = dataclasses.replace(hp, **{name: getattr(hp, name) * 0.5})
        state, metrics = compiled(state, experiment.fixed, hp)
        assert all(np.isfinite(float(value)) for value in metrics.values()), name
    assert traces == 1


@pytest.mark.parametrize("options", [{}, {**FREE}, {"algorithm": "gigpo", **RECOMPUTE}])
def test_members_under_vmap_are_the_solo_runs(options: dict[str, Any]):
    """Two seeds as one vmapped step: each is what it is alone, and no cache or parameter goes through a select."""
    experiment = small(**{**options, "rollout_rows": 5, "micro_batch": 8, "train_fraction": 0.6})
    hp = experiment.hyperparameters
    states = [experiment.init().replace(key=jax.random.key(seed)) for seed in (3, 4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    rates = jnp.array([1e-3, 3e-3])

    def step(state: Any, rate: Any) -> Any:
        return experiment.train_step(state, experiment.fixed, dataclasses.replace(hp, learning_rate=rate))

    together = jax.jit(jax.vmap(step))
    solo = jax.jit(step)
    for _ in range(2):
        stacked, metrics = together(stacked, rates)
        alone = [solo(state, rate) for state, rate in zip(states, rates, strict=True)]
        states = [state for state, _ in alone]
        for member, (_, expected) in enumerate(alone):
            for name in ("return_mean", "episode_length", "trained_tokens", "loss", "grad_norm"):
                assert float(metrics[name][member]) == pytest.approx(float(expected[name]), abs=1e-4, rel=1e-3), name


MEMBERS = 2


def test_no_cache_is_selected_when_members_play():
    experiment = small(constrain=False, reply_limit=40, rollout_rows=4, micro_batch=2, groups=2, group_size=3)
    state, hp = experiment.init(), experiment.hyperparameters
    states = jax.tree.map(lambda x: jnp.stack([x] * MEMBERS), state)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda state: experiment.train_step.rollout(state, experiment.fixed, hp)))(states)
    config = experiment.policy.model(state.params).config
    cache = (MEMBERS, 4, experiment.game.max_tokens + 39, config.kv_heads, config.head_dim)
    assert cache in array_shapes(jaxpr), "the cache is not where the test looks for it"
    assert cache not in selected_shapes(jaxpr)


def test_no_gradient_is_selected_when_members_learn():
    """Members fill unequal numbers of micro-batches; the sums of gradients must not be selected for it.

    What is selected once a parameter: itself and its two moments, because an update may be skipped.
    """
    experiment = small(micro_batch=4, gradient_clip=0.0)  # clipping selects the gradient once, too
    state, episodes = replayed(experiment)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * MEMBERS), (state, episodes))
    hp = experiment.hyperparameters
    update = jax.vmap(lambda state, episodes: experiment.train_step.update(state, episodes, experiment.fixed, hp))
    embedding = (MEMBERS, *state.params["embedding"].shape)
    assert selected_shapes(jax.make_jaxpr(update)(*stacked)).count(embedding) == 3


def test_what_an_experiment_keeps_may_first_be_asked_for_inside_a_trace():
    """The frozen parameters, the reference and the numbers are made once; no value of the trace may stay in them."""
    experiment = build(resolve({"kl_beta": 0.1, "train_layers": "1", "groups": 2, "group_size": 2}))
    kept = jax.jit(lambda: jax.tree.map(jnp.sum, (experiment.fixed, experiment.hyperparameters)))()
    again = jax.tree.map(jnp.sum, (experiment.fixed, experiment.hyperparameters))
    assert not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), kept, again)


def test_an_experiment_on_another_game_begins_with_the_same_parameters():
    experiment = build(resolve({"train_layers": "1", "seed": 3}))
    other = experiment.on("frozen-lake-slippery")
    assert (other.config.game, other.game.game.name) == ("frozen-lake-slippery",) * 2
    assert jax.tree.leaves(other.fixed) and all(
        a is b for a, b in zip(jax.tree.leaves(other.fixed), jax.tree.leaves(experiment.fixed), strict=True)
    )
    jax.tree.map(np.testing.assert_array_equal, other.initial_params(), experiment.init().params)
    template, state = experiment.template(), experiment.init()
    assert jax.tree.map(jnp.shape, template) == jax.tree.map(jnp.shape, state)
    assert jax.tree.structure(template) == jax.tree.structure(state)
