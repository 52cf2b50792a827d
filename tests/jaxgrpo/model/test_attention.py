"""Attention within one sequence: by our own products, by a fused kernel, and which of the two a program gets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.model import attention
from jaxgrpo.model.attention import attend_causally, fused

PLAIN = functools.partial(attend_causally, precision=jax.lax.Precision.HIGHEST)


def sequence(dtype=jnp.float32, tokens=7) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (tokens, heads, 8), dtype) for key, heads in zip(keys, (6, 2, 2), strict=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
def test_the_fused_kernel_computes_the_same(dtype, tolerance):
    """What is asked of `jax.nn.dot_product_attention`, computed by XLA here: values and gradients."""
    arrays = sequence(dtype)

    def weighted(out):
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    def other(*arrays):
        return fused(*arrays, implementation="xla")

    np.testing.assert_allclose(PLAIN(*arrays), other(*arrays), atol=tolerance, rtol=tolerance)
    gradients = (jax.grad(lambda *a, f=f: weighted(f(*a)), argnums=(0, 1, 2))(*arrays) for f in (PLAIN, other))
    for one, two in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, two, atol=tolerance, rtol=tolerance)


class Device:
    """As much of a GPU as is looked at."""

    platform = "gpu"

    def __init__(self, version, capability):
        self.client = type("Client", (), {"platform_version": version})
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("version", "capability", "count", "dtype", "applies"),
    [
        ("cuda 13000", "9.0", 1, jnp.bfloat16, True),
        ("cuda 13000", "9.0", 1, jnp.float32, False),
        ("cuda 13000", "7.5", 1, jnp.bfloat16, False),
        ("cuda 13000", "9.0", 8, jnp.bfloat16, False),
        ("rocm 60000", "9.0", 1, jnp.bfloat16, False),
    ],
)
def test_where_cudnn_applies(monkeypatch, version, capability, count, dtype, applies):
    monkeypatch.setattr(jax, "devices", lambda: [Device(version, capability)] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    assert attention._cudnn_applies(sequence(dtype)[0]) is applies


def test_a_program_gets_what_its_own_platform_has(monkeypatch):
    """On a machine with a GPU: the fused kernel in programs for it, not in those lowered for a CPU or a TPU."""
    monkeypatch.setattr(attention, "_cudnn_applies", lambda queries: True)
    # A mark in place of cuDNN, which cannot be traced without it.
    monkeypatch.setattr(attention, "fused", lambda q, k, v: jnp.sin(q))
    traced = jax.jit(PLAIN).trace(*sequence(jnp.bfloat16))
    marked = {p: "stablehlo.sine" in traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu", "cuda")}
    assert marked == {"cpu": False, "tpu": False, "cuda": True}
