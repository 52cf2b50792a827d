"""Which parameters are trained: all of them, those of chosen layers, or low-rank adapters.

What is trained is one pytree, with a gradient and an optimiser's state; the frozen rest is another, without. A model is
made of the two joined.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, PRNGKeyArray, PyTree

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import A_SUFFIX, B_SUFFIX, is_adapter, merged
from jaxgrpo.model.packed import stored_as
from jaxgrpo.model.transformer import Stack, Transformer, declare, declare_adapters, draw


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

    Of a model with adapters, they alone are trained. Else, where any layer is frozen, so is all that stands outside of
    the layers: the embedding, the last norm, the head.
    """
    adapters, base = params.split(lambda path, _: is_adapter(str(path[-1])), ...)
    if jax.tree.leaves(adapters):
        return adapters, base
    if all(stack.trained for stack in stacks):
        return params, nnx.State({})
    trained, frozen = params.split(lambda path, _: path[0] == "layers" and stacks[path[1]].trained, ...)
    return trained, frozen


def join(trained: PyTree, frozen: PyTree) -> PyTree:
    """All parameters of the model again."""
    return nnx.merge_state(trained, frozen)


def restack(model: Transformer, stacks: Sequence[Stack]) -> PyTree:
    """The parameters of a model, its layers divided into other stacks; adapters are left out."""
    config = dataclasses.replace(model.config, lora=None)
    values = {name: model.parameter(name) for name in declare(config)}
    return nnx.split(Transformer(config, values, stacks))[1]


# Adapters


def initial_adapters(config: ModelConfig, stacks: Sequence[Stack], key: PRNGKeyArray) -> PyTree:
    """Adapters as PEFT begins them: A uniform within 1 / sqrt(inputs) of 0, B zero, so that they change nothing yet."""
    base = {name: declaration.abstract() for name, declaration in declare(config).items()}
    model = Transformer(config, base | draw(declare_adapters(config), key, config.init_std), stacks)
    return split_trained(nnx.split(model)[1], stacks)[0]


def switched_off(adapters: PyTree) -> PyTree:
    """Adapters of rank 0: arrays without a value, with which the model computes what its base does, at no cost."""

    def empty(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf[:, :0] if A_SUFFIX in jax.tree_util.keystr(path) else leaf[..., :0]

    return jax.tree.map_with_path(empty, adapters)


def add_nothing(adapters: PyTree) -> bool:
    """Whether every B is still zero."""
    return not any(
        jnp.any(leaf) for path, leaf in jax.tree.leaves_with_path(adapters) if B_SUFFIX in jax.tree_util.keystr(path)
    )


def merge_adapters(model: Transformer) -> PyTree:
    """The parameters of a model without adapters that computes the same: float32, its layers in one stack."""
    config, values = dataclasses.replace(model.config, lora=None), {}
    stacks = [{name: parameter[...] for name, parameter in stack.items()} for stack in model.layers]
    for name in declare(config):
        short = name.removeprefix("layers.")
        parts = [model.parameter(name)] if short == name else [merged(s, short, model.config.lora) for s in stacks]
        values[name] = jnp.concatenate([part.astype(jnp.float32) for part in parts])
    return nnx.split(Transformer(config, values))[1]


def base_types(config: ModelConfig, matrices: DTypeLike) -> dict[str, DTypeLike]:
    """Types that the base of adapters is kept in, by parameter; norms and biases, which are small, stay float32.

    Args:
        config: of the model.
        matrices: type of the matrices, `packed.PACKED` among others.
    """
    return {name: jnp.float32 if name.endswith(("norm", "bias")) else matrices for name in declare(config)}


def cast_base(params: PyTree, types: Mapping[str, DTypeLike]) -> PyTree:
    """The parameters of a base in the types of `base_types`."""
    flat = nnx.to_flat_state(params)
    cast = [(place, p.replace(stored_as(p[...], jnp.dtype(types[_name(place)])))) for place, p in flat]
    return nnx.from_flat_state(cast)


def _name(place: tuple[Any, ...]) -> str:
    """The name in `declare` of what stands at a place of a model's state."""
    return str(place[0]) if len(place) == 1 else f"layers.{place[-1]}"
