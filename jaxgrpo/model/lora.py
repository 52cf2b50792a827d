"""Low-rank adapters (LoRA, arXiv 2106.09685): which matrices have one, how it starts, and how it is merged.

Beside a frozen matrix W an adapter computes alpha / rank * B A x. A and B are plain leaves among those of the layers,
stacked like them: A is `[layers, rank, in...]`, B is `[layers, out..., rank]`.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgrpo.model.packed import unpacked


class LinearAxes(NamedTuple):
    """Axes of one linear layer as letters of an einsum: e width, h heads, d head_dim, f ffn."""

    into: str
    """What the product contracts over: the last axes of the matrix."""
    out: str
    """What it gives: the axes before."""


LINEAR = {
    "query": LinearAxes("e", "hd"),
    "key": LinearAxes("e", "hd"),
    "value": LinearAxes("e", "hd"),
    "output": LinearAxes("hd", "e"),
    "gate": LinearAxes("e", "f"),
    "up": LinearAxes("e", "f"),
    "down": LinearAxes("f", "e"),
}
"""The linear layers of a block, by the name of their matrix."""

PEFT_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""What PEFT and transformers call them."""

ALL_LINEAR = "all-linear"
A_SUFFIX, B_SUFFIX = "_lora_a", "_lora_b"


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The adapters of a model. Hashable, so it is a static part of compiled functions.

    Attributes:
        rank: inner size of every adapter, 1 or more.
        alpha: an adapter's product is scaled by alpha / rank.
        targets: matrices that have one, keys of `LINEAR` in its order.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(LINEAR)

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
        return self.alpha / self.rank


def parse_targets(text: str) -> tuple[str, ...]:
    """The matrices that a user's list names, in the order of `LINEAR`.

    Args:
        text: `all-linear` (all in the blocks, not the head), or names separated by commas, ours or PEFT's.

    Raises:
        ValueError: no such matrix; the message names the nearest.
    """
    if text == ALL_LINEAR:
        return tuple(LINEAR)
    ours = dict(zip(LINEAR, LINEAR, strict=True)) | {theirs: name for name, theirs in PEFT_NAMES.items()}
    given = [part.strip() for part in text.split(",")]
    for name in given:
        if name not in ours:
            near = difflib.get_close_matches(name, [ALL_LINEAR, *ours], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{name!r} is no linear layer; give {ALL_LINEAR}, or {', '.join(LINEAR)} separated by commas "
                f"({', '.join(PEFT_NAMES.values())} will do){hint}"
            )
    chosen = {ours[name] for name in given}
    return tuple(name for name in LINEAR if name in chosen)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is the A or the B of an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def merged(params: Mapping[str, Array], name: str, lora: LoRA | None) -> Float[Array, " layers *matrix"]:
    """A matrix with its adapter added, W + alpha / rank * B A, in float32; a parameter without one as it is, unpacked.

    Args:
        params: of some layers, stacked, by name within the layer.
        name: of the matrix, or of any other parameter.
        lora: of the model; None where it has no adapters.
    """
    if lora is None or name + A_SUFFIX not in params:
        return unpacked(params[name])
    down, up = (params[name + suffix].astype(jnp.float32) for suffix in (A_SUFFIX, B_SUFFIX))
    product = jax.vmap(lambda b, a: jnp.tensordot(b, a, axes=1, precision=jax.lax.Precision.HIGHEST))(up, down)
    return unpacked(params[name]).astype(jnp.float32) + lora.scale * product
