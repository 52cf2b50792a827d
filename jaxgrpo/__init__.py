"""Reinforcement learning of language agents in JAX: games, sampling, loss and optimiser in one compiled step.

    >>> import jaxgrpo
    >>> config = jaxgrpo.resolve({"groups": 8, "group_size": 4, "learning_rate": 1e-3})
    >>> experiment = jaxgrpo.make_train_step(config)
    >>> state = experiment.init()
    >>> for _ in range(2):
    ...     state, metrics = experiment.step(state, experiment.hyperparameters)
    >>> int(state.iteration), 0 <= float(metrics["success_rate"]) <= 1
    (2, True)

`resolve` makes the configuration that `jaxgrpo train` would use with these options: a preset and what is given in its
place. `step` is one `jax.jit`; the state it is given is donated. `train(config)` is the whole run with its folder,
checkpoints and evaluation, as the command `jaxgrpo train` does it, and `evaluate` plays named scenarios with a run or a
model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgrpo.build import build as make_train_step
    from jaxgrpo.config import LearnConfig, LoRAConfig, OptimizerConfig, PlayConfig, RunConfig, TrainConfig, resolve
    from jaxgrpo.evaluation import evaluate_scenarios as evaluate
    from jaxgrpo.trainer import Run, train

__all__ = [
    "LearnConfig",
    "LoRAConfig",
    "OptimizerConfig",
    "PlayConfig",
    "Run",
    "RunConfig",
    "TrainConfig",
    "evaluate",
    "make_train_step",
    "resolve",
    "train",
]

# Imported when first used, so that `jaxgrpo --help` need not wait for all of it.
_HOMES = {
    "LearnConfig": ("config", "LearnConfig"),
    "LoRAConfig": ("config", "LoRAConfig"),
    "OptimizerConfig": ("config", "OptimizerConfig"),
    "PlayConfig": ("config", "PlayConfig"),
    "Run": ("trainer", "Run"),
    "RunConfig": ("config", "RunConfig"),
    "TrainConfig": ("config", "TrainConfig"),
    "evaluate": ("evaluation", "evaluate_scenarios"),
    "make_train_step": ("build", "build"),
    "resolve": ("config", "resolve"),
    "train": ("trainer", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxgrpo' has no attribute {name!r}")
    module, original = _HOMES[name]
    value = getattr(importlib.import_module(f"jaxgrpo.{module}"), original)
    globals()[name] = value
    return value
