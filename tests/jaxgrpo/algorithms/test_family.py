"""The relatives of MS-GRPO, as arrays: advantages against slow plain versions, groups that count, and token weights."""

import dataclasses
import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algorithms.advantages import state_advantages
from jaxgrpo.algorithms.algorithm import RowRecord, Targets
from jaxgrpo.algorithms.gigpo import GiGPO
from jaxgrpo.algorithms.group_filter import groups_to_keep
from jaxgrpo.algorithms.ms_grpo import MSGRPO
from jaxgrpo.algorithms.step_grpo import StepGRPO
from jaxgrpo.config import HyperParameters, resolve
from jaxgrpo.episodes import Episodes, Reply
from jaxgrpo.token_statistics import TokenStatistics

FAMILY = [MSGRPO, GiGPO, StepGRPO]
LIMIT = 4


def played(reward: Any, alive: Any, states: Any = None, tokens: Any = 1) -> Episodes:
    """Episodes of these rewards `[groups, samples, steps]`, of which algorithms see nothing but what is given here."""
    reward, alive = jnp.asarray(reward, jnp.float32), jnp.asarray(alive, bool)
    inside = jnp.arange(LIMIT) < jnp.broadcast_to(jnp.asarray(tokens), alive.shape)[..., None]
    blank = jnp.zeros(alive.shape, jnp.int32)
    return Episodes(
        observation=jnp.zeros((*alive.shape[:2], alive.shape[2] + 1, 1), jnp.int32),
        observation_length=jnp.ones((*alive.shape[:2], alive.shape[2] + 1), jnp.int32),
        reply=Reply(
            ids=jnp.zeros(inside.shape, jnp.int32),
            length=inside.sum(-1),
            log_prob=jnp.zeros(inside.shape),
            sampled=inside & alive[..., None],
            action=blank,
            readable=alive,
            stop=blank,
        ),
        reward=jnp.where(alive, reward, 0.0),
        terminated=jnp.zeros(alive.shape, bool),
        truncated=jnp.zeros(alive.shape, bool),
        alive=alive,
        success=jnp.zeros(alive.shape[:2], bool),
        anchor=None if states is None else jnp.asarray(states, jnp.int32).reshape(*alive.shape, -1),
    )


def random_games(groups: int = 3, samples: int = 5, steps: int = 6, seed: int = 0, states: int = 4) -> Episodes:
    """Ragged episodes that revisit a handful of states."""
    rng = np.random.default_rng(seed)
    alive = np.arange(steps) < rng.integers(1, steps + 1, (groups, samples, 1))
    return played(
        rng.choice([-1.0, 0.0, 0.1, 1.0], alive.shape),
        alive,
        rng.integers(0, states, (*alive.shape, 2)),
        tokens=rng.integers(1, LIMIT + 1, alive.shape),
    )


def configured(kind: type[MSGRPO], groups: int = 3, group_size: int = 5, **options: Any) -> tuple[Any, HyperParameters]:
    name = {MSGRPO: "ms-grpo", GiGPO: "gigpo", StepGRPO: "step-grpo"}[kind]
    plain = {"algorithm": name, "train_fraction": 1.0, "entropy_bonus": 0.0, "reply_limit": LIMIT}
    config = resolve({**plain, "groups": groups, "group_size": group_size, **options})
    return kind.from_config(config), HyperParameters.from_config(config)


def advantages(kind: type[MSGRPO], episodes: Episodes, **options: Any) -> np.ndarray:
    groups, group_size, _ = episodes.alive.shape
    algorithm, hp = configured(kind, groups, group_size, **options)
    return np.asarray(jax.jit(algorithm.advantages)(episodes, hp))


def compare(values: list[Any], normalise: str) -> np.ndarray:
    """Each value against all of them, in plain numpy and double precision."""
    x = np.array(values, np.float64)
    difference = x - x.mean()
    if normalise == "leave_one_out":
        return difference * len(x) / max(len(x) - 1, 1)
    return difference / (x.std() + 1e-6) if normalise == "std" else difference


def slow_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    steps = range(rewards.shape[-1])
    return np.stack([sum(discount ** (k - t) * rewards[..., k] for k in steps if k >= t) for t in steps], axis=-1)


def slow(episodes: Episodes, discount: float, normalise: str, same: Any) -> np.ndarray:
    """Reward to go over the steps of the group for which `same(group, sample, step)` is the same."""
    to_go, found = slow_to_go(np.asarray(episodes.reward, np.float64), discount), np.zeros(episodes.alive.shape)
    members = defaultdict(list)
    for at in np.argwhere(np.asarray(episodes.alive)):
        members[same(*at)].append(tuple(at))
    for group in members.values():
        for at, value in zip(group, compare([to_go[at] for at in group], normalise), strict=True):
            found[at] = value
    return found


# One group. The first episode stands in state 5, then 6, then 5 again; the second in 5, then 7, where it ends. With
# discount 1/2 the rewards to go are 0.25, 0.5, 1 and -0.5, -1, so that state 5 compares 0.25, 1 and -0.5.
BY_HAND = {
    "reward": [[[0, 0, 1], [0, -1, 0]]],
    "alive": [[[True, True, True], [True, True, False]]],
    "states": [[[5, 6, 5], [5, 7, 5]]],
}


@pytest.mark.parametrize(("normalise", "unit"), [("std", 1 / 0.6123724), ("mean", 1.0), ("leave_one_out", 1.5)])
def test_gigpo_by_hand(normalise: str, unit: float):
    found = advantages(GiGPO, played(**BY_HAND), normalise=normalise, step_weight=2.0, step_discount=0.5)
    episode = 2.0 if normalise == "leave_one_out" else 1.0
    step = 2.0 * 0.75 * unit
    np.testing.assert_allclose(found[0, 0], [episode, episode, episode + step], atol=1e-5)
    np.testing.assert_allclose(found[0, 1, :2], [-episode - step, -episode], atol=1e-5)


def test_step_grpo_by_hand():
    found = advantages(StepGRPO, played(**BY_HAND), step_discount=0.5)
    # Steps 0 and 1 are played by both, so that two values stand one deviation apart; step 2 by the first alone.
    np.testing.assert_allclose(found[0], [[1, 1, 0], [-1, -1, 0]], atol=1e-5)


@pytest.mark.parametrize("normalise", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_are_those_of_slow_versions(normalise: str, seed: int):
    episodes = random_games(seed=seed)
    options: dict[Any, dict[str, float]] = {
        MSGRPO: {},
        GiGPO: {"step_discount": 0.87, "step_weight": 0.5},
        StepGRPO: {"step_discount": 0.87},
    }
    alive, states = np.asarray(episodes.alive), np.asarray(episodes.anchor)
    of_episode = np.stack([compare(group, normalise) for group in np.asarray(episodes.returns).tolist()])[..., None]
    in_state = slow(episodes, 0.87, normalise, lambda g, n, t: (g, *states[g, n, t]))
    at_step = slow(episodes, 0.87, normalise, lambda g, _, t: (g, t))
    assert np.count_nonzero(in_state) > 20
    for kind, expected in ((MSGRPO, of_episode), (GiGPO, of_episode + 0.5 * in_state), (StepGRPO, at_step)):
        found = np.where(alive, advantages(kind, episodes, normalise=normalise, **options[kind]), 0)
        np.testing.assert_allclose(found, np.where(alive, expected, 0), atol=2e-5, err_msg=kind.__name__)


def test_gigpo_without_step_weight_is_ms_grpo():
    episodes = random_games()
    np.testing.assert_array_equal(advantages(GiGPO, episodes, step_weight=0), advantages(MSGRPO, episodes))


def test_gigpo_needs_the_states():
    with pytest.raises(ValueError, match="record_anchor=True"):
        advantages(GiGPO, random_games()._replace(anchor=None))


def test_states_are_told_apart_exactly():
    """Rows that a sum, an order-blind or a truncated hash confuses: one bit apart in any word, or permuted."""
    base = np.array([3, -7, 11, 0, 2**31 - 1], np.int32)
    one_bit = [base ^ (np.eye(5, dtype=np.int32)[word] << bit) for word in range(5) for bit in (0, 16, 30)]
    sign = [np.where(np.arange(5) == word, ~base, base) for word in range(5)]
    rows = np.stack([base, base[::-1], np.roll(base, 1), *one_bit, *sign, base, base[::-1]])
    values = jnp.arange(len(rows), dtype=jnp.float32)
    found = np.asarray(state_advantages(values, jnp.asarray(rows), jnp.ones(len(rows), bool), normalise="mean"))
    twice = {0: len(rows) - 2, 1: len(rows) - 1}
    for first, second in twice.items():
        half = (second - first) / 2
        assert (found[first], found[second]) == (-half, half)
    assert not np.any(np.delete(found, [*twice, *twice.values()]))


def test_masked_steps_count_for_nobody():
    values, states = jnp.array([1.0, 3.0, jnp.nan, 7.0]), jnp.array([[1], [1], [1], [2]])
    found = state_advantages(values, states, jnp.array([True, True, False, True]))
    np.testing.assert_allclose(found, [-1, 1, 0, 0], atol=1e-5)
    assert not np.any(state_advantages(values, states, jnp.zeros(4, bool)))


@pytest.mark.parametrize("kind", FAMILY)
def test_nothing_is_trained_where_nothing_differs(kind: type[MSGRPO]):
    """Rewards that are all equal (three times 0.1 does not sum to 0.3), and groups of one without a second visit."""
    episodes = random_games()
    steady = played(jnp.full(episodes.alive.shape, 0.1), jnp.ones(episodes.alive.shape), jnp.arange(90))
    alone = jax.tree.map(lambda x: x[:, :1], steady)
    for some in (steady, alone):
        algorithm, hp = configured(kind, some.alive.shape[0], some.alive.shape[1])
        targets = jax.jit(algorithm.targets)(jax.random.key(0), some, hp)
        assert not targets.visit.any() and not np.any(targets.target)
        assert targets.denominator == some.token_counts.sum()


@pytest.mark.parametrize("kind", FAMILY)
def test_groups_do_not_see_each_other(kind: type[MSGRPO]):
    episodes = random_games()
    alone = jax.tree.map(lambda x: x[1:2], episodes)
    np.testing.assert_allclose(advantages(kind, episodes)[1:2], advantages(kind, alone), atol=1e-6)
    wild = episodes._replace(reward=episodes.reward.at[0].multiply(100.0))
    np.testing.assert_array_equal(advantages(kind, wild)[1:], advantages(kind, episodes)[1:])


SPREAD = {"reward": [[[3], [3]], [[0], [5]], [[0], [1]], [[0], [9]]], "alive": np.ones((4, 2, 1), bool)}


def test_the_groups_kept_are_those_that_spread_most():
    returns = played(**SPREAD).returns
    assert groups_to_keep(returns, 2).tolist() == [False, True, False, True]
    assert groups_to_keep(returns, 4).all()
    assert groups_to_keep(returns, 4, drop_equal=True).tolist() == [False, True, True, True]
    # Equal returns whose mean rounds are equal still, ties go to the first, and a broken group is not hidden.
    tenths = jnp.full((3, 3), 0.1)
    assert groups_to_keep(tenths, 1).tolist() == [True, False, False]
    assert not groups_to_keep(tenths, 3, drop_equal=True).any()
    assert groups_to_keep(returns.at[0, 0].set(jnp.nan), 1, drop_equal=True).tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="cannot keep keep=5 of 4 groups; choose 1 to 4"):
        groups_to_keep(returns, 5)


FILTERS = [
    (MSGRPO, {"group_filter": 0.75, "drop_equal_groups": True, "aggregate": "episode"}),
    (GiGPO, {"drop_equal_groups": True, "aggregate": "sequence"}),
    (StepGRPO, {"group_filter": 0.5, "aggregate": "token"}),
]


@pytest.mark.parametrize(("kind", "options"), FILTERS)
def test_groups_left_out_are_absent_from_numerator_and_denominator(kind: type[MSGRPO], options: dict[str, Any]):
    """What is trained is what would be if only the groups kept had been played; the entropy term visits all steps."""
    episodes = random_games(groups=4, seed=3)
    equal = jnp.zeros_like(episodes.reward[0])
    episodes = episodes._replace(reward=episodes.reward.at[2].set(equal).at[0].multiply(0.1))
    kept = {0.5: [1, 3], 0.75: [0, 1, 3], 1.0: [0, 1, 3]}[options.get("group_filter", 1.0)]
    rest = jax.tree.map(lambda x: x[jnp.array(kept)], episodes)
    shared = {"aggregate": options["aggregate"], "entropy_bonus": 0.1}
    found, weight, weighted = by_episode(_targets(kind, episodes, **{**shared, **options}), episodes)
    alone, weight_alone, weighted_alone = by_episode(_targets(kind, rest, **shared), rest)
    numbers = [5 * group + sample for group in kept for sample in range(5)]
    assert found.denominator == alone.denominator
    assert weight.sum() == pytest.approx(weight[numbers].sum()) != 0
    np.testing.assert_allclose(weight[numbers], weight_alone)
    np.testing.assert_allclose(weighted[numbers], weighted_alone, atol=1e-6)
    assert found.metrics["kept_groups"] == len(kept)


def _targets(kind: type[MSGRPO], episodes: Episodes, **options: Any) -> Targets:
    algorithm, hp = configured(kind, *episodes.alive.shape[:2], **options)
    return jax.jit(algorithm.targets)(jax.random.key(1), episodes, hp)


def by_episode(targets: Targets, episodes: Episodes) -> tuple[Targets, np.ndarray, np.ndarray]:
    """Targets, and their weights alone and times advantages at the episodes they belong to."""
    weight, weighted = np.zeros(episodes.token_counts.shape), np.zeros(episodes.token_counts.shape)
    visited = np.where(targets.visit, targets.weight, 0.0)
    weight[targets.chosen], weighted[targets.chosen] = visited, visited * targets.target
    return targets, weight, weighted


def test_no_group_is_left():
    episodes = random_games(groups=4)
    episodes = episodes._replace(reward=jnp.zeros_like(episodes.reward))
    options = {"group_filter": 0.75, "drop_equal_groups": True, "aggregate": "episode", "entropy_bonus": 0.1}
    targets = _targets(MSGRPO, episodes, **options)
    assert not targets.visit.any() and targets.denominator == 1
    assert all(np.isfinite(value) for value in targets.metrics.values())


@pytest.mark.parametrize("kind", FAMILY)
def test_corrected_draws_estimate_all_episodes_of_the_groups_kept(kind: type[MSGRPO]):
    """The policy term, mean over tokens of A, drawn by half the episodes 4,000 times."""
    episodes = random_games(groups=4, seed=3)
    options = {"group_filter": 0.5, "importance": "correct"}
    whole, _, everything = by_episode(_targets(kind, episodes, group_filter=0.5), episodes)
    algorithm, hp = configured(kind, 4, 5, **options, train_fraction=0.5)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def estimate(key: Any, weight: Any) -> Any:
        targets = algorithm.targets(key, episodes, hp)
        terms = jnp.where(targets.visit, targets.weight * targets.target * weight[targets.chosen], 0.0)
        return jnp.sum(terms) / targets.denominator

    # A weighting of its own for each step: without it the sum of all advantages would be near 0 anyway.
    weighting = np.random.default_rng(0).random(episodes.token_counts.shape)
    found = np.asarray(estimate(jax.random.split(jax.random.key(2), 4000), jnp.asarray(weighting, jnp.float32)))
    expected = np.sum(everything * weighting) / whole.denominator
    assert abs(found.mean() - expected) < 4 * found.std() / np.sqrt(len(found))


def test_weight_and_discount_are_traced():
    algorithm, hp = configured(GiGPO)
    episodes, traces, seen = random_games(), 0, set()

    @jax.jit
    def run(hp: HyperParameters) -> Any:
        nonlocal traces
        traces += 1
        return algorithm.advantages(episodes, hp)

    for weight, discount in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5), (2.0, 0.5)):
        hp = dataclasses.replace(hp, step_weight=jnp.float32(weight), step_discount=jnp.float32(discount))
        seen.add(np.asarray(run(hp)).tobytes())
    assert (traces, len(seen)) == (1, 4)


def test_truncated_weights_multiply_the_policy_term_and_carry_no_gradient():
    algorithm, hp = configured(MSGRPO, old_logprobs="recompute", tis_cap=2.0, entropy_bonus=0.5)
    sampled = jnp.array([True, True, False])
    now, old = jnp.log(jnp.array([0.55, 0.9, 0.5])), jnp.log(jnp.array([0.5, 0.9, 0.5]))
    # Play saw 1.0 (weight a half) and 0.3 (three, cut to two); what stands at a token nobody sampled is not read.
    rollout = jnp.log(jnp.array([1.0, 0.3, jnp.nan]))
    entropy = jnp.array([0.2, 0.4, jnp.nan])

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def loss(now: Any, old: Any, rollout: Any) -> Any:
        record = RowRecord(sampled, old, rollout)
        found = algorithm.loss(TokenStatistics(now, entropy), record, jnp.float32(1.0), hp)
        return found.totals["actor"], found.sums

    (total, sums), gradients = loss(now, old, rollout)
    assert total == pytest.approx(-(0.5 * 1.1 + 2.0 * 1.0) - 0.5 * 0.6)
    np.testing.assert_allclose(gradients[0], [-0.55, -2.0, 0.0], rtol=1e-6)
    assert not np.any(gradients[1]) and not np.any(gradients[2])
    assert sums["logprob_gap"] == pytest.approx(np.log(2) + np.log(3), rel=1e-6)
