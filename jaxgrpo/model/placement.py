"""Where parameters lie on a mesh, and whatever has their shapes: gradients, an optimiser's moments, targets, copies."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.sharding import Axes, constrain, spec
from jaxgrpo.model.transformer import OUTSIDE_LAYERS, axes_of, declare


def axes_at(path: tuple[Any, ...], ndim: int) -> Axes:
    """Logical axes of what stands at a place of a pytree, known by the parameter's name in the path.

    What has no parameter's name (counts, keys, a small critic), or another number of axes, is whole everywhere.
    """
    names = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
    axes: Axes = ()
    if "layers" in names:
        axes = axes_of(f"layers.{names[names.index('layers') + 2]}")
    elif found := [name for name in names if name in OUTSIDE_LAYERS]:
        axes = axes_of(found[0])
    return axes if len(axes) == ndim else (None,) * ndim


def shardings(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """The sharding of every leaf, an array or an abstract one; None for each without a mesh."""

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        return mesh and NamedSharding(mesh, spec(mesh, axes_at(path, leaf.ndim), leaf.shape))

    return jax.tree.map_with_path(one, tree)


def placed(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Abstract arrays with their shardings, for what is restored or lowered."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings(mesh, tree))


def make_placed(mesh: Mesh | None, make: Callable[..., PyTree[Array]]) -> Callable[..., PyTree[Array]]:
    """A function that makes parameters and the like, compiled so that every one is made where it is to lie."""
    if mesh is None:
        return jax.jit(make)

    def call(*args: Any) -> PyTree[Array]:
        return jax.jit(make, out_shardings=shardings(mesh, jax.eval_shape(make, *args)))(*args)

    return call


def constrain_params(tree: PyTree[Array]) -> PyTree[Array]:
    """What has the shapes of parameters, laid out as they are; inside of a trace."""
    return jax.tree.map_with_path(lambda path, x: constrain(x, *axes_at(path, x.ndim)), tree)


def file_shardings(mesh: Mesh | None, config: ModelConfig) -> dict[str, NamedSharding] | None:
    """The shardings of a model's own parameters by their names in `declare`, for reading them from files."""
    if mesh is None:
        return None
    return {
        name: NamedSharding(mesh, spec(mesh, declaration.axes, declaration.shape))
        for name, declaration in declare(config).items()
    }
