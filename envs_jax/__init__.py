"""Games in JAX: pure, jittable and vmappable environments, and their text."""

from envs_jax.environment import AutoReset, Environment, EnvironmentOptionError, EnvironmentState
from envs_jax.frozen_lake import FrozenLake, FrozenLakeParams, FrozenLakeState

__all__ = [
    "AutoReset",
    "Environment",
    "EnvironmentOptionError",
    "EnvironmentState",
    "FrozenLake",
    "FrozenLakeParams",
    "FrozenLakeState",
]
