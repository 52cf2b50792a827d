"""bfloat16 matrices kept as their bits, in uint16, for CPUs.

XLA:CPU has no bfloat16 arithmetic and expands a stack of bfloat16 matrices to float32 as a whole, for as long as any of
them is used. Bits it leaves as they are: what is made bfloat16 again where it is used is expanded there alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, Shaped

PACKED = jnp.dtype(jnp.uint16)
"""Type of a packed matrix; no other parameter is of whole numbers."""


def is_packed(x: Num[Array, "..."]) -> bool:
    """Whether an array holds the bits of bfloat16 numbers."""
    return x.dtype == PACKED


def unpacked(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """The bfloat16 numbers of a packed array; any other array as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if is_packed(x) else x


def stored_as(x: Shaped[Array | np.ndarray, "..."], dtype: np.dtype) -> Shaped[Array | np.ndarray, "..."]:
    """Numbers in another type; rounded to bfloat16 and packed where that is `PACKED`."""
    if dtype != PACKED or x.dtype == PACKED:
        return x.astype(dtype)
    rounded = x.astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(rounded, PACKED) if isinstance(x, jax.Array) else rounded.view(PACKED)
