"""Where arrays lie on many devices: one table from logical axes to the axes of a mesh.

A mesh has three axes. Rows are divided among `data` and `fsdp` together. Parameters and what an optimiser keeps of them
are divided along `fsdp`, and gathered where a product needs them; heads, the feed-forward and the vocabulary are
divided along `tensor`. Arrays name their axes (`Declaration.axes`, or at a call of `constrain`); the table alone says
what that means. Without a mesh in the context (`jax.set_mesh`) nothing here does anything, and programs are those of
one device.
"""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, PyTree

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.packed import unpacked

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "draws": ("data", "fsdp", "tensor"),  # rows again, where every device is to draw for some of them
    "prefix": ("data", "fsdp"),  # tokens of the shared prefix, which has no rows
    "copies": ("data",),  # rows or such tokens, where another axis is divided along `fsdp`
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
}
"""Mesh axes that an array's logical axis is divided among; one that is not named here is whole on every device."""

Axes = tuple[str | None, ...]


def make_mesh(text: str, devices: Sequence[Any]) -> Mesh | None:
    """The mesh that a user's text describes; None for a single device.

    Args:
        text: `auto` (all devices on `fsdp`), or sizes such as `fsdp=8` or `data=2,fsdp=2,tensor=2`; an axis that is
            left out has size 1.
        devices: all that there are, of this process and of the others.

    Raises:
        ValueError: no such axis, no such size, or the sizes do not multiply to the number of devices.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    for part in [f"fsdp={len(devices)}"] if text == "auto" else text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"give auto, or sizes of {', '.join(MESH_AXES)} such as fsdp=8 or data=2,fsdp=4")
        sizes[name] = int(size)
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"a mesh of {math.prod(sizes.values())} devices, and there {'is' if len(devices) == 1 else 'are'} "
            f"{len(devices)}; give sizes whose product is {len(devices)}, or auto"
        )
    if len(devices) == 1:
        return None
    shape = tuple(sizes.values())
    if devices[0].platform == "cpu":
        grid = np.array(devices).reshape(shape)
    else:
        from jax.experimental.mesh_utils import create_device_mesh

        grid = create_device_mesh(shape, devices)  # neighbours in the mesh are neighbours in the network
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_fits(mesh: Mesh | AbstractMesh | None, config: ModelConfig) -> None:
    """Sees that the model can be divided as the mesh says; few key and value heads are copied instead.

    Raises:
        ValueError: it cannot.
    """
    if mesh is None:
        return
    for axis, sizes in {
        "tensor": {"heads": config.heads, "feed-forward": config.ffn, "vocabulary": config.vocab_size},
        "fsdp": {"width": config.width},
    }.items():
        for name, size in sizes.items():
            if size % mesh.shape[axis]:
                fitting = [n for n in range(1, mesh.size + 1) if all(s % n == 0 for s in sizes.values())]
                raise ValueError(
                    f"{axis}={mesh.shape[axis]} does not divide the model's {name} of {size}; for this model {axis} "
                    f"can be {', '.join(map(str, fitting))}"
                )


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which what is traced is laid out on a mesh; with None, nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of what every device has whole; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def everywhere(mesh: Mesh | None, tree: PyTree[Array]) -> PyTree[Array]:
    """Arrays that every process has, whole on every device of the mesh; as they are without one."""
    return tree if mesh is None else jax.device_put(tree, replicated(mesh))


def spec(mesh: Mesh | AbstractMesh, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
    """How an array with these logical axes is divided.

    An axis whose size the rule's mesh axes do not divide is divided among the first of them that do. So are key and
    value heads copied where there are fewer than tensor shards.
    """
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        names = [name for name in RULES.get(axis or "", ()) if mesh.shape[name] > 1]
        while names and size % math.prod(mesh.shape[name] for name in names):
            names.pop()
        entries.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*entries)


def _current() -> AbstractMesh | None:
    """The mesh of the context, unless there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: Array, *axes: str | None) -> Array:
    """The array, laid out by its logical axes, one for each of its axes; itself where there is no mesh."""
    mesh = _current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(mesh, axes, x.shape))


def constrain_rows(tree: PyTree[Array]) -> PyTree[Array]:
    """A pytree whose arrays all have rows in front, divided among the devices."""
    return jax.tree.map(lambda x: constrain(x, "rows", *[None] * (x.ndim - 1)), tree)


def constrain_whole(tree: PyTree[Array]) -> PyTree[Array]:
    """A pytree of arrays, whole on every device: so that every process can read them."""
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), tree)


def gathered(x: Array, *axes: str | None, dtype: DTypeLike | None = None) -> Array:
    """A parameter as products use it: whole along `fsdp`, still divided along `tensor`.

    Its gradient is summed over the devices and divided among them in one go (a reduce-scatter).

    Args:
        x: the parameter; itself where there is no mesh.
        axes: its logical axes.
        dtype: what products cast it to; on a mesh it is cast before it travels.
    """
    if _current() is None:
        return x
    return _gathered(x if dtype is None else unpacked(x).astype(dtype), axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: Array, axes: Axes) -> Array:
    return constrain(x, *_whole(axes))


def _gathered_forward(x: Array, axes: Axes) -> tuple[Array, None]:
    return _gathered(x, axes), None


def _gathered_backward(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def with_gradient(x: Array, *axes: str | None) -> Array:
    """The array itself; its gradient is laid out by these logical axes before it goes on."""
    return x if _current() is None else _with_gradient(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient(x: Array, axes: Axes) -> Array:
    return x


_with_gradient.defvjp(lambda x, axes: (x, None), lambda axes, _, gradient: (constrain(gradient, *axes),))


def _whole(axes: Axes) -> Axes:
    """Logical axes without those that are gathered for products."""
    return tuple(None if axis in ("embed", "prefix") else axis for axis in axes)


def kv_copies(config: ModelConfig) -> int:
    """How often each key and value head is held, so that every tensor shard has the ones of its queries."""
    mesh = _current()
    return 1 if mesh is None else math.lcm(config.kv_heads, mesh.shape["tensor"]) // config.kv_heads


def whole_rows(rows: int) -> int:
    """A number of rows, rounded up to what the devices can share evenly."""
    mesh = _current()
    shards = 1 if mesh is None else math.prod(mesh.shape[name] for name in RULES["rows"])
    return -(-rows // shards) * shards


def vocabulary_shards(vocab: int) -> int:
    """Among how many devices the rows of a head are divided."""
    mesh = _current()
    return 1 if mesh is None or vocab % mesh.shape["tensor"] else mesh.shape["tensor"]
