"""Players that need no model: what a policy is compared with.

Each is a pure function of an environment (static), a key, a state and parameters that gives an action; batch with
`vmap`. `uniform` plays anything, `safe` and `greedy` play Snake, `optimal` plays Frozen Lake; `players_of` lists those
that play a game.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from envs_jax.environment import Environment, EnvironmentState
from envs_jax.frozen_lake import FrozenLake, FrozenLakeParams, FrozenLakeState, optimal_action, optimal_values
from envs_jax.snake import MOVES, Snake, SnakeParams, SnakeState, choose

Player = Callable[[Any, PRNGKeyArray, Any, Any], Int32[Array, ""]]
"""`(environment, key, state, params) -> action`."""


def players_of(environment: Environment) -> Mapping[str, Player]:
    """The players that a game knows, by name, the weakest first; `random` plays every game."""
    own: dict[type[Environment], dict[str, Player]] = {
        FrozenLake: {"optimal": optimal},
        Snake: {"safe-random": safe, "greedy": greedy},
    }
    return {"random": uniform, **own.get(type(environment), {})}


@functools.partial(jax.jit, static_argnames=("environment", "games"))
def positions(
    environment: Environment, key: PRNGKeyArray, params: Any, games: int = 256
) -> tuple[Any, Int32[Array, " positions"]]:
    """Positions of the first half of randomly played games, step by step, and the strongest known player's actions.

    Returns:
      States, `positions` is steps times games; and an action in each, -1 where the game was over.
    """
    player = [*players_of(environment).values()][-1]

    def step(state: Any, key: PRNGKeyArray) -> tuple[Any, tuple[Any, Array]]:
        keys = jax.random.split(key, (3, games))
        chosen = jax.vmap(lambda k, s: player(environment, k, s, params))(keys[0], state)
        over = state.terminated | state.truncated
        moves = jax.vmap(lambda k, s: uniform(environment, k, s, params))(keys[1], state)
        after = jax.vmap(lambda k, s, a: environment.step(k, s, a, params)[1])(keys[2], state, moves)
        return after, (state, jnp.where(over, -1, chosen))

    begin, onward = jax.random.split(key)
    start = jax.vmap(lambda k: environment.reset(k, params)[1])(jax.random.split(begin, games))
    _, found = jax.lax.scan(step, start, jax.random.split(onward, max(1, environment.max_steps // 2)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def uniform(environment: Environment, key: PRNGKeyArray, state: EnvironmentState, params: object) -> Int32[Array, ""]:
    """Any action, all equally likely."""
    del state, params
    return jax.random.randint(key, (), 0, environment.num_actions, jnp.int32)


def safe(environment: Snake, key: PRNGKeyArray, state: SnakeState, params: SnakeParams) -> Int32[Array, ""]:
    """Any move that avoids walls and snakes, all equally likely; any move at all where none does."""
    del params
    _, allowed = environment.moves(state)
    return choose(allowed | ~allowed.any(), jax.random.uniform(key))


def greedy(environment: Snake, key: PRNGKeyArray, state: SnakeState, params: SnakeParams) -> Int32[Array, ""]:
    """A safe move towards the nearest object worth eating (one of positive reward); ties are drawn.

    Distances are counted in moves on an empty board. Objects of negative reward are avoided where another safe move
    exists, and where nothing is worth eating the move is any that is safe and avoids them.
    """
    entered, allowed = environment.moves(state)
    rewards = params.object_rewards[state.objects.astype(jnp.int32)]
    bad = jnp.any(entered & (rewards < 0), axis=(-2, -1))
    farther_than_any = environment.width + environment.height
    distances = _distances(state.heads[0] + MOVES, rewards > 0, farther_than_any)
    cost = distances + farther_than_any * (bad + 2 * ~allowed)
    return choose(cost == cost.min(), jax.random.uniform(key))


def optimal(
    environment: FrozenLake, key: PRNGKeyArray, state: FrozenLakeState, params: FrozenLakeParams
) -> Int32[Array, ""]:
    """An action of greatest expected return over the steps that are left, by value iteration on the board shown."""
    del key
    return optimal_action(optimal_values(state.board, params, environment.max_steps), state, params)


def _distances(
    places: Int32[Array, "places 2"], goals: Bool[Array, "height width"], without: int
) -> Int32[Array, " places"]:
    """Moves from each place (x, y) to the nearest goal on an empty board; `without` where there is no goal."""
    y, x = np.indices(goals.shape)
    away = jnp.abs(x - places[:, 0, None, None]) + jnp.abs(y - places[:, 1, None, None])
    return jnp.min(jnp.where(goals, away, without), axis=(-2, -1)).astype(jnp.int32)
