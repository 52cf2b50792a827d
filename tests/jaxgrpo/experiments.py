"""Small experiments that several tests share."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxgrpo.build import Experiment, build
from jaxgrpo.config import resolve

SMALL = {
    "groups": 3,
    "group_size": 4,
    "train_fraction": 1.0,
    "rollout_rows": 0,
    "micro_batch": 16,
    "entropy_bonus": 0.0,
}


@functools.cache
def _build(options: tuple[tuple[str, Any], ...]) -> Experiment:
    return build(resolve({**SMALL, **dict(options)}))


def small(**options: Any) -> Experiment:
    """An experiment with the embedded model and few episodes; the same object for the same options."""
    return _build(tuple(sorted(options.items())))


@functools.cache
def compiled(experiment: Experiment, half: str) -> Callable[..., Any]:
    """The jitted `rollout` or `update` of an experiment, one for all calls."""
    return jax.jit(getattr(experiment.train_step, half))
