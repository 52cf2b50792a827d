"""The contract, for every environment: add a new one to `ENVIRONMENTS`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import AutoReset, EnvironmentOptionError, FrozenLake
from envs_jax.snake import Snake

ENVIRONMENTS = [
    pytest.param(FrozenLake(max_steps=6), id="frozen-lake"),
    pytest.param(FrozenLake(fixed_map="8x8", random_start=True, random_goal=True, max_steps=6), id="frozen-lake-8x8"),
    pytest.param(Snake(max_steps=6), id="snake"),
]
GAMES = 256

pytestmark = pytest.mark.parametrize("environment", ENVIRONMENTS)


def play_randomly(environment, steps, games=GAMES):
    """Start states `[games]`, and transitions of uniformly random actions `[steps, games]`."""

    def play(key):
        key_reset, key_actions, key_steps = jax.random.split(key, 3)
        first = environment.reset(key_reset)
        actions = jax.random.randint(key_actions, (steps,), 0, environment.num_actions)

        def step(state, inputs):
            transition = environment.step(inputs[0], state, inputs[1])
            return transition[1], transition

        return first, jax.lax.scan(step, first[1], (jax.random.split(key_steps, steps), actions))[1]

    keys = jax.random.split(jax.random.key(7), games)
    return jax.jit(jax.vmap(play, out_axes=(0, 1)))(keys)


def counting(environment):
    """A maker of equal instances of a subclass of the environment's, and a list that grows as its rules are traced."""
    traces = []
    rules = type(environment)

    def step_env(self, *args):
        traces.append("step")
        return rules.step_env(self, *args)

    def reset_env(self, *args):
        traces.append("reset")
        return rules.reset_env(self, *args)

    counted = type("Counted", (rules,), {"step_env": step_env, "reset_env": reset_env})
    options = {field.name: getattr(environment, field.name) for field in dataclasses.fields(environment)}
    return lambda: counted(**options), traces


def test_a_step_keeps_structure_shapes_and_types(environment):
    observation, state = environment.reset(jax.random.key(0))
    next_observation, next_state, reward, terminated, truncated, info = environment.step(jax.random.key(1), state, 0)

    def kind(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)

    assert kind(state) == kind(next_state)
    for seen in (observation, next_observation, info["final_observation"]):
        assert seen.shape == environment.observation_shape and seen.dtype == jnp.float32
    assert (reward.shape, reward.dtype) == ((), jnp.float32)
    assert (terminated.shape, terminated.dtype) == (truncated.shape, truncated.dtype) == ((), jnp.bool_)
    assert state.time == 0 and not state.terminated and not state.truncated


def test_a_game_ends_once_and_then_absorbs(environment):
    steps = environment.max_steps + 3
    first, (observations, states, rewards, terminated, truncated, info) = play_randomly(environment, steps)
    over = np.asarray(terminated | truncated)
    assert over[environment.max_steps - 1 :].all()
    assert terminated[-1].any() and truncated[-1].any(), "the trial must see both kinds of end"
    assert not (terminated & truncated).any()
    lengths = np.argmax(over, axis=0) + 1
    np.testing.assert_array_equal(states.time, np.minimum(np.arange(1, steps + 1)[:, None], lengths))
    np.testing.assert_array_equal(np.asarray(truncated[-1]) <= (lengths == environment.max_steps), True)
    assert (lengths[np.asarray(terminated[-1])] <= environment.max_steps).all()
    np.testing.assert_array_equal(states.terminated, terminated)
    np.testing.assert_array_equal(states.truncated, truncated)

    was_over = over[:-1]
    np.testing.assert_array_equal(np.asarray(rewards)[1:][was_over], 0)
    for leaf in jax.tree.leaves((observations, states, info["final_observation"])):
        leaf = np.asarray(leaf)
        np.testing.assert_array_equal(leaf[1:][was_over], leaf[:-1][was_over])
    np.testing.assert_array_equal(observations, info["final_observation"])


def test_auto_reset_keeps_the_terminal_observation_and_the_flags(environment):
    games = AutoReset(environment)

    @jax.jit
    @jax.vmap
    def play_on(key):
        def step(state, key):
            action = jax.random.randint(key, (), 0, games.num_actions)
            plain, reset = environment.step(jax.random.split(key)[0], state, action), games.step(key, state, action)
            return reset[1], (plain, reset)

        return jax.lax.scan(step, games.reset(key)[1], jax.random.split(key, 3 * environment.max_steps))[1]

    plain, reset = play_on(jax.random.split(jax.random.key(3), 64))
    over = np.asarray(plain[3] | plain[4])
    assert 0 < over.mean() < 1 and np.asarray(plain[4]).any()
    for kept_plain, kept_reset in zip(plain[2:], reset[2:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, kept_plain, kept_reset)
    np.testing.assert_array_equal(np.asarray(reset[1].time)[over], 0)
    assert not np.asarray(reset[1].terminated | reset[1].truncated).any()
    np.testing.assert_array_equal(np.asarray(reset[0])[~over], np.asarray(plain[0])[~over])
    first_observation = jax.vmap(jax.vmap(environment.observe, (0, None)), (0, None))
    np.testing.assert_array_equal(reset[0], first_observation(reset[1], environment.default_params))
    assert (np.asarray(reset[0])[over] != np.asarray(plain[0])[over]).any()


def test_one_trace_for_all_kinds_of_action_equal_instances_and_new_params(environment):
    make, traces = counting(environment)
    key, params = jax.random.key(0), environment.default_params
    _, state = make().reset(key)
    other_params = jax.tree.map(lambda leaf: leaf * 0.5, params)
    make().reset(jax.random.key(1), other_params)
    assert traces == ["reset"]
    results = [
        make().step(key, state, action, params)
        for action in (1, np.int32(1), np.int64(1), np.uint8(1), np.array(1), jnp.int32(1), jnp.uint8(1), jnp.array(1))
    ]
    make().step(jax.random.key(1), state, 2, other_params)
    assert traces == ["reset", "step"]
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])


def test_equal_options_make_equal_environments(environment):
    copy = dataclasses.replace(environment)
    assert copy == environment and hash(copy) == hash(environment)
    longer = dataclasses.replace(environment, max_steps=environment.max_steps + 1)
    assert longer != environment


def test_a_key_decides_everything_whatever_the_batch(environment):
    keys = jax.random.split(jax.random.key(11), 8)
    batched = jax.vmap(environment.reset)(keys)
    alone = [environment.reset(key) for key in keys]
    jax.tree.map(np.testing.assert_array_equal, batched, jax.tree.map(lambda *rows: jnp.stack(rows), *alone))
    legacy = environment.reset(jax.random.PRNGKey(5))
    jax.tree.map(np.testing.assert_array_equal, legacy, environment.reset(jax.random.key(5)))


@pytest.mark.parametrize("action", [-1, 99, np.int64(4), np.array(-1)])
def test_an_action_out_of_range_is_refused(environment, action):
    _, state = environment.reset(jax.random.key(0))
    with pytest.raises(EnvironmentOptionError, match=r"out of range: give 0 to \d"):
        environment.step(jax.random.key(0), state, action)


@pytest.mark.parametrize("action", [1.0, np.float32(1), True, jnp.float32(1)])
def test_an_action_that_is_no_integer_is_refused(environment, action):
    _, state = environment.reset(jax.random.key(0))
    with pytest.raises(EnvironmentOptionError, match="not an integer"):
        environment.step(jax.random.key(0), state, action)


def test_a_game_of_no_steps_is_refused(environment):
    with pytest.raises(EnvironmentOptionError, match="max_steps is 0"):
        dataclasses.replace(environment, max_steps=0)


def test_gymnax_wrappers_take_it(environment):
    from gymnax.wrappers import purerl as wrappers

    logged = wrappers.LogWrapper(wrappers.FlattenObservationWrapper(AutoReset(environment)))
    observation, state = logged.reset(jax.random.key(0))
    assert observation.shape == (np.prod(environment.observation_shape),)
    finished = 0
    for i in range(3 * environment.max_steps):
        observation, state, _, terminated, truncated, info = logged.step(jax.random.key(i), state, i % 2 + 1)
        assert info["returned_episode"] == (terminated | truncated)
        finished += int(info["returned_episode"])
    assert finished >= 3 and 1 <= state.returned_episode_lengths <= environment.max_steps
