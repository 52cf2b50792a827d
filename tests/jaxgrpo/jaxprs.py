"""Looking into traced and lowered functions: what they would hold and move."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs (loops, calls, conditionals) included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def selected_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of all arrays that are selected: by a `select`, or by a loop because its predicate has a batch axis.

    A `while` whose predicate is batched selects everything it carries at every turn, which shows only when lowered.
    """
    shapes = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "select_n":
            shapes.append(equation.outvars[0].aval.shape)
        if equation.primitive.name == "while" and equation.params["cond_jaxpr"].out_avals[0].shape:
            shapes += [variable.aval.shape for variable in equation.outvars]
    return shapes


def array_shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Shapes of all intermediate arrays."""
    return {var.aval.shape for equation in equations(jaxpr) for var in equation.outvars if hasattr(var.aval, "shape")}
