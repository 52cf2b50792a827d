"""Decoding and learning of a random Qwen2.5-3B on the accelerator at hand, beside what its data sheet promises.

    python benchmarks/accelerator.py [--json FILE] [--minutes 7] [--tiny]

First small shapes are computed in several ways that must agree; then come milliseconds of a decoding step and the share
of memory bandwidth it uses, and floating-point operations a second of a gradient step on adapters and their share of
the peak. A part that there is no more time for is left out and named. With --tiny the sizes are those of a test.
"""

import argparse
import dataclasses
import functools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxgrpo.model.attention import attend_causally, fused
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import LoRA
from jaxgrpo.model.trained import initial_adapters, join, split_trained
from jaxgrpo.model.transformer import Declaration, Transformer, declare
from jaxgrpo.token_statistics import over_vocabulary


class Peak(NamedTuple):
    """What a data sheet promises."""

    bandwidth: float
    """Bytes a second of the device's memory."""
    flops: float
    """Floating-point operations a second in bfloat16, dense."""


# By a pattern for the name that the driver gives; the first that matches counts.
PEAKS = {
    r"H200": Peak(4.8e12, 989e12),
    r"H100.*PCIe": Peak(2.0e12, 756e12),
    r"H100 NVL": Peak(3.9e12, 835e12),
    r"H100": Peak(3.35e12, 989e12),
    r"A100.*80GB PCIe": Peak(1.935e12, 312e12),
    r"A100.*80GB": Peak(2.039e12, 312e12),
    r"A100": Peak(1.555e12, 312e12),
    r"\bL4\b": Peak(300e9, 121e12),
}


class Sizes(NamedTuple):
    """What is measured."""

    config: ModelConfig
    prefix: int
    """Tokens of the shared prompt."""
    slots: int
    """Tokens of a row while decoding."""
    batches: tuple[int, ...]
    """Rows while decoding."""
    steps: tuple[int, int]
    """Decoding steps of a short and of a long run, whose difference is what is reported."""
    rows: int
    """Rows of a gradient step."""
    tokens: int
    """Tokens of each of them."""
    predicted: int
    """The last of those, which are replies."""


QWEN = ModelConfig(
    "qwen2",
    vocab_size=151_936,
    width=2048,
    layers=36,
    heads=16,
    kv_heads=2,
    head_dim=128,
    ffn=11_008,
    rope_theta=1e6,
    qkv_bias=True,
    compute_dtype="bfloat16",
)
SMALL = dataclasses.replace(QWEN, vocab_size=512, width=64, layers=2, heads=4, head_dim=16, ffn=96)
FULL_SIZES = Sizes(
    QWEN, prefix=400, slots=512, batches=(32, 128, 256), steps=(8, 40), rows=32, tokens=256, predicted=128
)
TINY_SIZES = Sizes(SMALL, prefix=8, slots=16, batches=(2,), steps=(1, 3), rows=2, tokens=8, predicted=4)
ADAPTERS = LoRA(rank=16, alpha=32.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing more after this time")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    sizes, device = TINY_SIZES if options.tiny else FULL_SIZES, jax.devices()[0]
    peak = peak_of(device.device_kind)
    print(f"{device.device_kind}, jax {jax.__version__}, {sizes.config.layers} layers of width {sizes.config.width}")
    if peak is None:
        print(f"{device.device_kind!r} is not in the table of peaks: no shares are given")
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "parity": parity()}
    for name, difference in results["parity"].items():
        print(f"largest difference, {name}: {difference:.1e}", flush=True)
    params = random_params(sizes.config)
    results |= {"decode": [], "update": None, "left_out": []}
    for batch in sizes.batches:
        if time.monotonic() > deadline:
            results["left_out"].append(f"decode {batch}")
            continue
        results["decode"].append(measure_decoding(sizes, params, batch, peak))
        print(results["decode"][-1], flush=True)
    if time.monotonic() > deadline:
        results["left_out"].append("update")
    else:
        results["update"] = measure_update(sizes, params, peak)
        print(results["update"])
    if results["left_out"]:
        print(f"left out for want of time: {', '.join(results['left_out'])}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def peak_of(kind: str) -> Peak | None:
    """What the device of this name promises; None where it is not known."""
    return next((peak for pattern, peak in PEAKS.items() if re.search(pattern, kind)), None)


# Parity


def parity() -> dict[str, float]:
    """Largest differences between ways to compute the same at small shapes.

    Raises:
        AssertionError: one is larger than rounding explains.
    """
    exact = dataclasses.replace(SMALL, compute_dtype="float32")
    wide, narrow = _log_probs(exact), _log_probs(SMALL)
    found = {
        "float32, forward here and on the CPU": (wide - _log_probs(exact, device="cpu"), 1e-4),
        "float32, decoding and forward": (wide - _log_probs(exact, decoding=True), 1e-4),
        "bfloat16, decoding and forward": (narrow - _log_probs(SMALL, decoding=True), 0.1),
        "bfloat16, forward and in float32": (narrow - wide, 0.1),
        "bfloat16, attention in the prompt, fused and not": (_attention(), 0.03),
    }
    for name, (difference, tolerance) in found.items():
        assert np.max(np.abs(difference)) <= tolerance, f"{name}: {np.max(np.abs(difference))}, not {tolerance}"
    return {name: float(np.max(np.abs(difference))) for name, (difference, _) in found.items()}


def _log_probs(config: ModelConfig, *, decoding: bool = False, device: str | None = None) -> np.ndarray:
    """Log-probabilities of a small model behind each of some tokens, as float32."""
    prefix, tokens, batch = 24, 4, 4

    @jax.jit
    def compute() -> jax.Array:
        model = Transformer.initial(dataclasses.replace(config, init_std=0.1), jax.random.key(0))
        ids = jax.random.randint(jax.random.key(1), (batch, tokens), 0, config.vocab_size)
        positions = jnp.broadcast_to(prefix + jnp.arange(tokens), ids.shape)
        valid, shared = jnp.ones_like(ids, bool), model.prefill(jnp.arange(prefix) * 7 % config.vocab_size)
        if not decoding:
            return jax.nn.log_softmax(model.logits(model.forward(ids, positions, valid, shared)))
        cache, layers, parts = model.init_cache(batch, tokens), model.decode_params(), []
        for at in range(tokens):
            one = slice(at, at + 1)
            hidden, cache = model.decode(ids[:, one], positions[:, one], valid[:, one], shared, cache, layers)
            parts.append(hidden)
        return jax.nn.log_softmax(model.logits(jnp.concatenate(parts, axis=1)))

    with jax.default_device(jax.devices(device)[0] if device else None):
        return np.asarray(compute(), np.float32)


def _attention() -> np.ndarray:
    """Differences of the fused attention to our own products, values and gradients, over the largest of these.

    The fused kernel is cuDNN's on a GPU, else XLA's.
    """
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = [(33, heads, 64) for heads in (8, 2, 2)]
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    kernel: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def all_of(attend: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> np.ndarray:
        def total(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attend(*arrays).astype(jnp.float32)))

        parts = [jax.jit(attend)(*arrays), *jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays)]
        return np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])

    # In float32 our own products are taken on every device.
    plain = functools.partial(attend_causally, precision=jax.lax.Precision.HIGHEST)
    exact = all_of(plain, [x.astype(jnp.float32) for x in arrays])
    return (all_of(functools.partial(fused, implementation=kernel), arrays) - exact) / np.max(np.abs(exact))


# Decoding


def random_params(config: ModelConfig) -> nnx.State:
    """Matrices in the compute type, norms and biases in float32; drawn one by one, as all in float32 might not fit."""

    @functools.partial(jax.jit, static_argnums=0)
    def one(declaration: Declaration, key: jax.Array) -> jax.Array:
        kind = config.dtype if declaration.init == "normal" else jnp.float32
        return declaration.initial(key, config.init_std).astype(kind)

    keys = jax.random.split(jax.random.key(0), len(declare(config)))
    values = {name: one(each, key) for (name, each), key in zip(declare(config).items(), keys, strict=True)}
    return nnx.split(Transformer(config, values))[1]


def measure_decoding(sizes: Sizes, params: nnx.State, batch: int, peak: Peak | None) -> dict[str, Any]:
    """Milliseconds of one step of so many rows, from the difference of a long and a short run."""
    config, graph = sizes.config, nnx.split(Transformer.abstract(sizes.config))[0]

    @jax.jit
    def run(params: nnx.State, steps: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params).for_decoding()
        prefix, layers = model.prefill(jnp.arange(sizes.prefix) % config.vocab_size).whole(), model.decode_params()

        def step(i: jax.Array, carry: Any) -> Any:
            ids, cache = carry
            where = jnp.full((batch, 1), sizes.prefix) + i
            hidden, cache = model.decode(ids[:, None], where, jnp.ones((batch, 1), bool), prefix, cache, layers)
            return jnp.argmax(model.logits(hidden[:, 0]), axis=-1).astype(jnp.int32), cache

        begin = jnp.arange(batch, dtype=jnp.int32), model.init_cache(batch, sizes.slots)
        return jax.lax.fori_loop(0, steps, step, begin)[0]

    short, long = (median_seconds(lambda n=n: run(params, jnp.int32(n))) for n in sizes.steps)
    seconds, moved = (long - short) / (sizes.steps[1] - sizes.steps[0]), decode_bytes(sizes, batch)
    return {
        "batch": batch,
        "ms_per_step": 1e3 * seconds,
        "tokens_per_s": batch / seconds,
        "gb_per_step": moved / 1e9,
        "share_of_bandwidth": peak and moved / seconds / peak.bandwidth,
    }


def decode_bytes(sizes: Sizes, batch: int) -> float:
    """Bytes that a decoding step must read: all matrices once, the prefix once, and the slots of every row."""
    config = sizes.config
    a_token = 2 * config.layers * config.kv_heads * config.head_dim
    return config.dtype.itemsize * (sum(matrices(config)) + a_token * (sizes.prefix + batch * sizes.slots))


def matrices(config: ModelConfig) -> tuple[int, int]:
    """Numbers in the matrices of all blocks, and in the head."""
    sizes = {name: int(np.prod(each.shape)) for name, each in declare(config).items() if each.init == "normal"}
    return sum(n for name, n in sizes.items() if name.startswith("layers.")), sizes["embedding"]


# Learning


def measure_update(sizes: Sizes, params: nnx.State, peak: Peak | None) -> dict[str, Any]:
    """A gradient step on adapters: prompt, rows behind it, log-probabilities over the whole vocabulary, and back."""
    config = dataclasses.replace(sizes.config, lora=ADAPTERS)
    graph, whole = nnx.split(Transformer.abstract(config))
    stacks = nnx.merge(graph, whole).stacks
    assert jax.tree.structure(split_trained(whole, stacks)[1]) == jax.tree.structure(params)
    adapters = initial_adapters(config, stacks, jax.random.key(1))
    shape = (sizes.rows, sizes.tokens)
    ids = jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size)

    @jax.jit
    def run(adapters: nnx.State, params: nnx.State) -> nnx.State:
        def loss(adapters: nnx.State) -> jax.Array:
            model = nnx.merge(graph, join(adapters, params))
            prefix = model.prefill(jnp.arange(sizes.prefix) % config.vocab_size)
            positions = jnp.broadcast_to(sizes.prefix + jnp.arange(sizes.tokens), shape)
            hidden = model.forward(ids, positions, jnp.ones(shape, bool), prefix)[:, -sizes.predicted - 1 : -1]
            hidden, token = hidden.reshape(-1, config.width), ids[:, -sizes.predicted :].reshape(-1, 1)
            found = over_vocabulary(
                hidden,
                model.head(),
                model.token_logits(hidden, token)[:, 0],
                jnp.float32(1),
                vocab_size=config.vocab_size,
                logits=model.logits_of,
            )
            return found.log_prob.mean()

        return jax.grad(loss)(adapters)

    seconds, work = median_seconds(lambda: run(adapters, params)), 2 * forward_flops(sizes)
    return {
        "rows": sizes.rows,
        "tokens": sizes.tokens,
        "predicted": sizes.predicted,
        "seconds": seconds,
        "tflop_per_s": work / seconds / 1e12,
        "share_of_peak": peak and work / seconds / peak.flops,
    }


def forward_flops(sizes: Sizes) -> float:
    """Floating-point operations of prompt and rows forward, the adapters' and what is no product left out.

    The way back to frozen matrices' inputs costs the same again. What is computed a second time to spare memory (layers
    and chunks of the vocabulary) is not counted. Attention is counted as computed: rows see all of their own tokens.
    """
    config, (blocks, head) = sizes.config, matrices(sizes.config)
    rows, tokens = sizes.rows, sizes.tokens
    seen = rows * tokens * (sizes.prefix + tokens) + sizes.prefix**2
    attention = 4 * config.layers * config.heads * config.head_dim * seen
    return 2 * blocks * (sizes.prefix + rows * tokens) + 2 * head * rows * sizes.predicted + attention


def median_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of a call, its compilation and a first run apart."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
