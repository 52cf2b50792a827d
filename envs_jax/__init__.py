"""Games in JAX: pure, jittable and vmappable environments, and their text."""

from envs_jax.environment import AutoReset, Environment, EnvironmentOptionError, EnvironmentState
from envs_jax.frozen_lake import FrozenLake, FrozenLakeParams, FrozenLakeState
from envs_jax.snake import Snake, SnakeParams, SnakeState

__all__ = [
    "AutoReset",
    "Environment",
    "EnvironmentOptionError",
    "EnvironmentState",
    "FrozenLake",
    "FrozenLakeParams",
    "FrozenLakeState",
    "Snake",
    "SnakeParams",
    "SnakeState",
]
