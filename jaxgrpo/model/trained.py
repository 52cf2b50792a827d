"""Which parameters are trained: all of them, or those of chosen layers.

What is trained is one pytree, with a gradient and an optimiser's state; the frozen rest is another, without. A model is
made of the two joined.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from flax import nnx
from jaxtyping import PyTree

from jaxgrpo.model.transformer import Stack, Transformer, declare


def parse_layers(text: str, layers: int) -> tuple[Stack, ...]:
    """The stacks of a model of which only the layers named in `text` are trained.

    Args:
        text: `all`, or numbers and ranges from 0 up, separated by commas: `29`, `24-29`, `24-` (to the last),
            `0,28-29`.
        layers: how many the model has.

    Returns:
        Runs of trained and of frozen layers, from the lowest up; one trained run for `all`.

    Raises:
        ValueError: `text` is none of these, or names a layer that the model does not have.
    """
    if text == "all":
        return (Stack(layers),)
    trained = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*))?\s*", part)
        if found is None:
            raise ValueError("give all, or numbers and ranges such as 24-29, 24- or 0,28-29")
        first = int(found[1])
        last = first if found[2] is None else int(found[3] or layers - 1)
        if not first <= last < layers:
            raise ValueError(f"the model's {layers} layers are 0-{layers - 1}")
        trained |= set(range(first, last + 1))
    runs = groupby(layer in trained for layer in range(layers))
    return tuple(Stack(len(list(run)), is_trained) for is_trained, run in runs)


def split_trained(params: PyTree, stacks: Sequence[Stack]) -> tuple[PyTree, PyTree]:
    """Trained and frozen parameters of a model with these stacks.

    Where any layer is frozen, so is all that stands outside of the layers: the embedding, the last norm, the head.
    """
    if all(stack.trained for stack in stacks):
        return params, nnx.State({})
    trained, frozen = params.split(lambda path, _: path[0] == "layers" and stacks[path[1]].trained, ...)
    return trained, frozen


def join(trained: PyTree, frozen: PyTree) -> PyTree:
    """All parameters of the model again."""
    return nnx.merge_state(trained, frozen)


def restack(model: Transformer, stacks: Sequence[Stack]) -> PyTree:
    """The parameters of a model, its layers divided into other stacks."""
    values = {name: model.parameter(name) for name in declare(model.config)}
    return nnx.split(Transformer(model.config, values, stacks))[1]
