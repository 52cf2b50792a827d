"""States as words: equal exactly where the states are, whatever the clock and the flags say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.environment import EnvironmentState
from envs_jax.frozen_lake import FrozenLake
from envs_jax.snake import Snake
from jaxgrpo.anchors import state_words


class Mixed(EnvironmentState):
    """A state of several types."""

    flag: Any
    small: Any
    real: Any


def mixed(flag: bool = True, small: int = -3, real: float = 1.5, time: int = 0, over: bool = False) -> Mixed:
    clock = {"time": jnp.int32(time), "terminated": jnp.bool_(over), "truncated": jnp.bool_(over)}
    return Mixed(flag=jnp.bool_(flag), small=jnp.int8(small), real=jnp.array([real, 2.0]), **clock)


def words(state: Any) -> tuple[int, ...]:
    return tuple(state_words(state).tolist())


def test_words_of_mixed_types():
    assert words(mixed()) == words(mixed(time=7, over=True))
    assert words(mixed(real=0.0)) == words(mixed(real=-0.0))
    others = [mixed(flag=False), mixed(small=3), mixed(real=np.nextafter(np.float32(1.5), 2)), mixed(real=-1.5)]
    assert len({words(state) for state in [mixed(), *others]}) == 5


@pytest.mark.parametrize("environment", [FrozenLake(size=4), Snake()])
def test_every_entry_of_a_state_counts_and_the_clock_does_not(environment: Any):
    state = environment.reset(jax.random.key(0))[1]
    encode, base = jax.jit(state_words), words(state)
    for name, value in vars(state).items():
        for index in np.ndindex(value.shape):
            changed = value.at[index].set(~value[index] if value.dtype == bool else value[index] + 1)
            same = tuple(encode(state.replace(**{name: changed})).tolist()) == base
            assert same == (name in ("time", "terminated", "truncated")), (name, index)


def test_what_holds_no_numbers_is_refused():
    class Keyed(EnvironmentState):
        key: Any

    clock = {"time": jnp.int32(0), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
    with pytest.raises(TypeError, match=r"a state holds key<.+>, which has no canonical bytes"):
        state_words(Keyed(key=jax.random.key(0), **clock))
