"""The contract every environment keeps.

It is gymnax 1.0's (`reset` and a six-valued `step`, `info["final_observation"]`, a time limit is truncation) with one
difference: `step` does not start a new game by itself. A finished game is absorbing instead, so that a batch of games
of unequal length can be stepped to the end of the longest. `AutoReset` adds gymnax's automatic reset.
"""

import abc
import dataclasses
import functools
import typing
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray


class EnvironmentOptionError(ValueError):
    """An environment was given an option, a parameter or an action that it does not allow."""


# States and parameters are not checked as they are built (`no_type_check`): JAX rebuilds pytrees around things that are
# not arrays, such as the axis numbers of vmap. The signatures of the functions that take them are.
@typing.no_type_check
class EnvironmentState(struct.PyTreeNode):
    """What all states carry; an environment's own state extends it. Batched states have leading axes on every field.

    Attributes:
        time: steps taken since the reset.
        terminated: the rules ended the game.
        truncated: the time limit ended the game; never set together with `terminated`.
    """

    time: Int32[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]


StateT = TypeVar("StateT", bound=EnvironmentState)
ParamsT = TypeVar("ParamsT")

Transition = tuple[
    Float[Array, "..."], StateT, Float[Array, ""], Bool[Array, ""], Bool[Array, ""], dict[str, Float[Array, "..."]]
]


@dataclasses.dataclass(frozen=True)
class Environment(abc.ABC, Generic[StateT, ParamsT]):
    """A game: pure functions of a key, a state, an action and parameters.

    Subclasses are frozen dataclasses of static options (sizes, counts), compared and hashed by value, so that equal
    instances share one compilation. Numbers that may vary without recompiling are in `params`, a pytree of arrays
    that can be vmapped. Subclasses implement `reset_env`, `step_env` and `observe`; the time limit and the absorbing
    end are this class's.

    Attributes:
        max_steps: time limit; the step that reaches it without ending the game truncates it. At least 1.
    """

    max_steps: int = dataclasses.field(default=100, kw_only=True)

    def __post_init__(self):
        if self.max_steps < 1:
            raise EnvironmentOptionError(f"max_steps is {self.max_steps}: a game needs at least 1 step")

    @property
    @abc.abstractmethod
    def default_params(self) -> ParamsT:
        """Parameters used where none are given."""

    @property
    @abc.abstractmethod
    def num_actions(self) -> int:
        """Number of actions; an action is an integer from 0 to `num_actions - 1`."""

    @property
    @abc.abstractmethod
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation, a float32 array."""

    @abc.abstractmethod
    def reset_env(self, key: PRNGKeyArray, params: ParamsT) -> StateT:
        """Draw a start state (time 0, both flags down)."""

    @abc.abstractmethod
    def step_env(
        self, key: PRNGKeyArray, state: StateT, action: Int32[Array, ""], params: ParamsT
    ) -> tuple[StateT, Float[Array, ""]]:
        """Apply the rules to an unfinished `state`: the next state, with `terminated` set, and the reward.

        `time` and `truncated` are left to `step`. What is returned for a finished state is discarded.
        """

    @abc.abstractmethod
    def observe(self, state: StateT, params: ParamsT) -> Float[Array, "..."]:
        """Observation of a state, of shape `observation_shape`."""

    def reset(self, key: PRNGKeyArray, params: ParamsT | None = None) -> tuple[Float[Array, "..."], StateT]:
        """Start a game: `(observation, state)`."""
        return self._reset(key, self.default_params if params is None else params)

    def step(
        self, key: PRNGKeyArray, state: StateT, action: ArrayLike, params: ParamsT | None = None
    ) -> Transition[StateT]:
        """Play one step: `(observation, state, reward, terminated, truncated, info)`.

        A finished game is absorbing: its state and flags stay and the reward is 0. `info["final_observation"]` is the
        observation of the state the action led to, here and under `AutoReset` alike.

        Args:
            key: randomness of this step.
            state: where the game stands.
            action: an integer scalar of any kind (Python, numpy, jax); all kinds share one compilation. Values known
                on the host are checked against the range; traced ones must lie in it.
            params: the environment's parameters.

        Raises:
            EnvironmentOptionError: the action is not an integer, or out of range.
        """
        params = self.default_params if params is None else params
        return self._step(key, state, self._as_action(action), params)

    @functools.partial(jax.jit, static_argnums=0)
    def _reset(self, key: PRNGKeyArray, params: ParamsT) -> tuple[Float[Array, "..."], StateT]:
        state = self.reset_env(key, params)
        return self.observe(state, params), state

    @functools.partial(jax.jit, static_argnums=0)
    def _step(self, key: PRNGKeyArray, state: StateT, action: Int32[Array, ""], params: ParamsT) -> Transition[StateT]:
        over = state.terminated | state.truncated
        after, reward = self.step_env(key, state, action, params)
        time = state.time + 1
        after = after.replace(time=time, truncated=~after.terminated & (time >= self.max_steps))
        after = jax.tree.map(lambda old, new: jnp.where(over, old, new), state, after)
        reward = jnp.where(over, 0.0, reward)
        observation = self.observe(after, params)
        return observation, after, reward, after.terminated, after.truncated, {"final_observation": observation}

    def _as_action(self, action: ArrayLike) -> Int32[Array, ""]:
        """One dtype and no weak type for all kinds of integer, so that the jit below sees one signature."""
        if not jnp.issubdtype(jnp.result_type(action), jnp.integer):
            raise EnvironmentOptionError(f"action {action!r} is not an integer: give 0 to {self.num_actions - 1}")
        if isinstance(action, int | np.integer | np.ndarray) and not 0 <= int(action) < self.num_actions:
            raise EnvironmentOptionError(f"action {action} is out of range: give 0 to {self.num_actions - 1}")
        return jnp.asarray(action, jnp.int32)


@dataclasses.dataclass(frozen=True)
class AutoReset(Generic[StateT, ParamsT]):
    """An environment whose `step` starts the next game when one ends, as gymnax's does.

    The observation and the state returned are then those of the new game; reward, `terminated`, `truncated` and
    `info["final_observation"]` are those of the step that ended the old one. A new game is drawn at every step and
    thrown away at most of them, which costs what a reset costs.
    """

    environment: Environment[StateT, ParamsT]

    @property
    def default_params(self) -> ParamsT:
        """Parameters used where none are given."""
        return self.environment.default_params

    @property
    def num_actions(self) -> int:
        """Number of actions."""
        return self.environment.num_actions

    def reset(self, key: PRNGKeyArray, params: ParamsT | None = None) -> tuple[Float[Array, "..."], StateT]:
        """Start a game: `(observation, state)`."""
        return self.environment.reset(key, params)

    def step(
        self, key: PRNGKeyArray, state: StateT, action: ArrayLike, params: ParamsT | None = None
    ) -> Transition[StateT]:
        """Play one step, then reset if it ended the game."""
        key_step, key_reset = jax.random.split(key)
        last = self.environment.step(key_step, state, action, params)
        return _begin_anew(last, self.environment.reset(key_reset, params))


@jax.jit
def _begin_anew(last: Any, fresh: Any) -> Any:
    """Put the fresh observation and state into a transition that ended a game."""
    observation, state, reward, terminated, truncated, info = last
    over = terminated | truncated
    begun = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, (observation, state))
    return *begun, reward, terminated, truncated, info
