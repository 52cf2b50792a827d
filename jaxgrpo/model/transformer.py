"""The language model: one flax nnx module for the Qwen2, Qwen3 and Llama families.

Parameters are stacked over layers. `nnx.split` a model at the jit boundary and merge it inside; every method is pure.
Three ways through the layers share one block: `prefill` for the prompt common to all rows, `forward` for training on
whole rows, `decode` for sampling token by token.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from jaxgrpo.model.attention import attend, attend_causally, rope_angles, rope_frequencies, rotate
from jaxgrpo.model.cache import DecodeCache, Prefix, empty_cache, write_slots
from jaxgrpo.model.chunks import cut, joined
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import A_SUFFIX, B_SUFFIX, LINEAR
from jaxgrpo.model.packed import is_packed, unpacked
from jaxgrpo.model.sharding import Axes, constrain, constrain_rows, gathered, kv_copies, whole_rows, with_gradient

# Scanning a layer stack keeps compilation short; below this many layers a CPU loses more to the loop than it gains.
UNROLLED_LAYERS = 4

LayerParams = Mapping[str, Array]

RowAxes = tuple[str | None, str | None]
"""Logical axes of the rows and of the tokens in them."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """All there is to say about one parameter before it has a value.

    Attributes:
        shape: sizes; the last axis of a matrix is the one that products contract over.
        axes: logical name of every axis, from which meshes derive shardings.
        init: `"normal"` (of `ModelConfig.init_std`), `"zeros"`, `"ones"`, or `"fan_in"` (uniform within
            1 / sqrt(inputs) of 0, for layers of matrices: what PEFT draws an adapter's A from).
        dtype: type of the master weights.
    """

    shape: tuple[int, ...]
    axes: Axes
    init: str = "normal"
    dtype: Any = jnp.float32

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and type, no value."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def initial(self, key: PRNGKeyArray, std: float) -> Array:
        """A value drawn from `key`."""
        if self.init == "normal":
            return std * jax.random.normal(key, self.shape, self.dtype)
        if self.init == "fan_in":
            bound = math.prod(self.shape[2:]) ** -0.5
            return jax.random.uniform(key, self.shape, self.dtype, -bound, bound)
        return jnp.full(self.shape, {"zeros": 0, "ones": 1}[self.init], self.dtype)


OUTSIDE_LAYERS: Mapping[str, Axes] = {
    "embedding": ("vocab", "embed"),
    "final_norm": ("stream",),
    "head_matrix": ("vocab", "embed"),
}
_OF_LAYERS: Mapping[str, Axes] = {
    "attention_norm": ("stream",),
    "query": ("heads", "head_dim", "embed"),
    "key": ("kv_heads", "head_dim", "embed"),
    "value": ("kv_heads", "head_dim", "embed"),
    "output": ("embed", "heads", "head_dim"),
    "ffn_norm": ("stream",),
    "gate": ("ffn", "embed"),
    "up": ("ffn", "embed"),
    "down": ("embed", "ffn"),
    "query_bias": ("heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "head_dim"),
    "output_bias": ("stream",),
    "query_norm": ("head_dim",),
    "key_norm": ("head_dim",),
}


def axes_of(name: str) -> Axes:
    """Logical axes of a parameter by its name in `declare` or `declare_adapters`, `layers` first where it is stacked.

    `embed` and `stream` are both the width of the residual stream: vectors along it are too small to be divided.
    """
    short = name.removeprefix("layers.")
    if short == name:
        return OUTSIDE_LAYERS[name]
    target = short.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)
    axes = _OF_LAYERS[target]
    if target == short:
        return ("layers", *axes)
    into = len(axes) - len(LINEAR[target].into)
    return ("layers", "rank", *axes[into:]) if short.endswith(A_SUFFIX) else ("layers", *axes[:into], "rank")


def declare(config: ModelConfig) -> dict[str, Declaration]:
    """Every parameter of the model by name; those of the layers start with `layers.` and are stacked on axis 0."""
    absent = {"head_matrix"} if config.tie_embeddings else set()
    if not config.qkv_bias:
        absent |= {"query_bias", "key_bias", "value_bias"}
    if not config.output_bias:
        absent |= {"output_bias"}
    if not config.qk_norm:
        absent |= {"query_norm", "key_norm"}
    names = [*OUTSIDE_LAYERS, *(f"layers.{name}" for name in _OF_LAYERS)]
    return {name: _declared(name, config) for name in names if name.removeprefix("layers.") not in absent}


def _declared(name: str, config: ModelConfig) -> Declaration:
    sizes = {
        "layers": config.layers,
        "vocab": config.vocab_size,
        "embed": config.width,
        "stream": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn,
        "rank": config.lora.rank if config.lora else 0,
    }
    kinds = {"norm": "ones", "bias": "zeros", A_SUFFIX: "fan_in", B_SUFFIX: "zeros"}
    init = next((init for end, init in kinds.items() if name.endswith(end)), "normal")
    axes = axes_of(name)
    return Declaration(tuple(sizes[str(axis)] for axis in axes), axes, init)


def declare_adapters(config: ModelConfig) -> dict[str, Declaration]:
    """The A and B of every adapter by name, stacked over all layers; none where `config.lora` is None."""
    targets = config.lora.targets if config.lora else ()
    names = [f"layers.{target}{suffix}" for target in targets for suffix in (A_SUFFIX, B_SUFFIX)]
    return {name: _declared(name, config) for name in names}


def draw(declarations: Mapping[str, Declaration], key: PRNGKeyArray, std: float) -> dict[str, Array]:
    """Initial values by name; each depends on `key` and its own name only."""
    return {
        name: declaration.initial(jax.random.fold_in(key, zlib.crc32(name.encode())), std)
        for name, declaration in declarations.items()
    }


class Stack(NamedTuple):
    """Consecutive layers whose parameters are kept, and trained or not, together."""

    layers: int
    trained: bool = True


class Transformer(nnx.Module):
    """A decoder-only transformer.

    Shapes: `batch` rows, `tokens` per row, `prefix` prompt tokens, `width` residual stream, `vocab` embedding rows.
    A row's i-th valid token has position `prefix + i`; padding may stand anywhere in a row, `valid` alone tells it.

    The layers are one stack where all are trained. Where only some are (`jaxgrpo.model.trained`), every run of trained
    or of frozen layers is a stack of its own, and no gradient is computed below the first trained one.
    """

    def __init__(self, config: ModelConfig, values: Mapping[str, Any], stacks: Sequence[Stack] = ()):
        """Wraps `values`, one array (or abstract value) for each name of `declare(config)`, adapters' included.

        Args:
            config: the architecture.
            values: parameters by name, those of the layers stacked over all of them.
            stacks: how the layers are divided, from the lowest up; none is a single, trained stack.
        """
        self.config = config
        self.stacks = tuple(stacks) or (Stack(config.layers),)
        self.embedding = nnx.Param(values["embedding"])
        self.final_norm = nnx.Param(values["final_norm"])
        if not config.tie_embeddings:
            self.head_matrix = nnx.Param(values["head_matrix"])
        stacked = [name for name in declare(config) if name.startswith("layers.")]
        adapters = list(declare_adapters(config))
        ends = np.cumsum([stack.layers for stack in self.stacks])
        self.layers = nnx.List(
            nnx.Dict(
                {
                    name.removeprefix("layers."): nnx.Param(_some_layers(values[name], end - stack.layers, end))
                    for name in stacked + (adapters if stack.trained else [])
                }
            )
            for stack, end in zip(self.stacks, ends.tolist(), strict=True)
        )

    @classmethod
    def initial(cls, config: ModelConfig, key: PRNGKeyArray) -> "Transformer":
        """A model with random weights; each parameter's depend on `key` and its own name only."""
        return cls(config, draw({**declare(config), **declare_adapters(config)}, key, config.init_std))

    @classmethod
    def abstract(cls, config: ModelConfig, stacks: Sequence[Stack] = ()) -> "Transformer":
        """A model of shapes and types only: for planning, for restoring checkpoints, for its graph definition."""
        declarations = {**declare(config), **declare_adapters(config)}
        return cls(config, {name: declaration.abstract() for name, declaration in declarations.items()}, stacks)

    def parameter(self, name: str) -> Array:
        """A parameter by its name in `declare(config)`, those of the layers stacked over all of them, none packed."""
        if not name.startswith("layers."):
            return unpacked(getattr(self, name)[...])
        parts = [unpacked(stack[name.removeprefix("layers.")][...]) for stack in self.layers]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def prefill(self, ids: Int[Array, " prefix"], *, remat: bool = True) -> Prefix:
        """Keys and values of the prompt shared by all rows; no tokens give an empty prefix.

        Args:
            ids: tokens of the prompt.
            remat: as in `forward`; where nothing is differentiated it makes no difference.
        """
        config = self.config
        length, kv_heads = ids.shape[0], config.kv_heads * kv_copies(config)
        if length == 0:
            shapes = [(stack.layers, 0, kv_heads, config.head_dim) for stack in self.stacks]
            empty = tuple(jnp.zeros(shape, config.dtype) for shape in shapes)
            return Prefix(empty, empty, 0)
        # No token looks at the filling, which stands behind them all.
        ids = jnp.pad(ids, (0, whole_rows(length) - length))
        angles = _rope(config, jnp.arange(ids.shape[0])[None])

        def attention(q: Array, k: Array, v: Array) -> Array:
            k, v = (gathered(x, None, "prefix", "kv_heads", None) for x in (k, v))
            return attend_causally(q[0], k[0], v[0], config.precision)[None]

        def body(hidden: Array, params: LayerParams) -> tuple[Array, tuple[Array, Array]]:
            hidden, keys, values = _block(config, params, hidden, angles, attention, (None, "prefix"))
            return hidden, (keys[0], values[0])

        body = jax.checkpoint(body) if remat else body
        _, made = self._scan(body, self._embed(ids[None], (None, "prefix")), self._stacked())
        keys, values = zip(*made, strict=True)
        return Prefix(keys, values, length)

    def forward(
        self,
        ids: Int[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"],
        valid: Bool[Array, "batch tokens"],
        prefix: Prefix,
        *,
        remat: bool = True,
        sees: Bool[Array, "tokens tokens"] | None = None,
    ) -> Float[Array, "batch tokens width"]:
        """Final-normed hidden states of whole rows: each token sees the prefix and the valid tokens up to itself.

        Args:
            ids: tokens; any id at padding.
            positions: rotary positions; a row's i-th valid token has `prefix.length + i`.
            valid: which tokens belong to the row; hidden states elsewhere are finite and meaningless.
            prefix: from `prefill`; gradients flow into it, but for the layers below the first trained one.
            remat: recompute each layer in the backward pass instead of keeping its activations.
            sees: which slots each slot sees, of those that are valid, itself among them; None is all up to itself.
        """
        config = self.config
        tokens = ids.shape[1]
        sees = jnp.tril(jnp.ones((tokens, tokens), bool)) if sees is None else sees
        mask = constrain_rows(sees & valid[:, None, :])
        angles = constrain_rows(_rope(config, positions))

        def body(hidden: Array, layer: tuple[LayerParams, Array, Array]) -> tuple[Array, None]:
            params, *shared = layer
            shared_k, shared_v = (gathered(x, "prefix", "kv_heads", None) for x in shared)

            def attention(q: Array, k: Array, v: Array) -> Array:
                return attend(q, k, v, mask, shared_k, shared_v, prefix.length, config.precision)

            return _block(config, params, hidden, angles, attention)[0], None

        body = jax.checkpoint(body) if remat else body
        layers = list(zip(self._stacked(), prefix.keys, prefix.values, strict=True))
        frozen = next((i for i, stack in enumerate(self.stacks) if stack.trained), len(self.stacks))
        layers[:frozen] = jax.lax.stop_gradient(layers[:frozen])
        hidden, _ = self._scan(body, self._embed(ids), layers)
        # As in `decode`: what becomes of them must not lay out the hidden states of all layers.
        return constrain_rows(_rms_norm(hidden, self.final_norm[...], config))

    def init_cache(self, batch: int, slots: int) -> DecodeCache:
        """An empty cache of `slots` tokens for each of `batch` rows."""
        stacks = [stack.layers for stack in self.stacks] if self._scans_decoding else []
        return empty_cache(self.config, batch, slots, stacks)

    def for_decoding(self) -> "Transformer":
        """The same model, what its head and its embedding are divided into gathered once, outside a decoding loop."""
        values = {name: self._table(name) for name in OUTSIDE_LAYERS if name in declare(self.config)}
        graphdef, params = nnx.split(self)
        return nnx.merge(graphdef, nnx.merge_state(params, nnx.State({k: nnx.Param(x) for k, x in values.items()})))

    @property
    def _scans_decoding(self) -> bool:
        """Whether decoding goes through the layers in a loop."""
        return self.config.scan_decode or self._is_packed

    def decode_params(self) -> tuple[LayerParams, ...]:
        """Parameters as decoding takes them, matrices in the compute type; make them outside a decoding loop.

        One tree a layer; or one a stack where decoding goes through the layers in a loop, be it that the configuration
        says so or that matrices are packed: these stay so, and no more than one layer is expanded at any time.
        """
        dtype = self.config.dtype
        layers = []
        for stack, params in zip(self.stacks, self._stacked(), strict=True):
            cast = {name: x if name.endswith("norm") or is_packed(x) else x.astype(dtype) for name, x in params.items()}
            if self._scans_decoding:
                layers.append({name: gathered(x, *axes_of(f"layers.{name}")) for name, x in cast.items()})
                continue
            for index in range(stack.layers):
                layers.append({name: gathered(x[index], *axes_of(f"layers.{name}")[1:]) for name, x in cast.items()})
        return tuple(layers)

    def decode(
        self,
        ids: Int[Array, "batch block"],
        positions: Int[Array, "batch block"],
        valid: Bool[Array, "batch block"],
        prefix: Prefix,
        cache: DecodeCache,
        layers: Sequence[LayerParams] | None = None,
    ) -> tuple[Float[Array, "batch block width"], DecodeCache]:
        """Appends `block` tokens to every row: an observation on an empty cache, or one step of a reply.

        The block goes into slots `cache.cursor` onwards, the same for all rows, and `cursor` advances by `block`.
        The caller keeps `cursor + block` within `cache.slots`; beyond it the last slots would be overwritten.

        Args:
            ids: tokens; any id at padding.
            positions: rotary positions, as in `forward`.
            valid: which tokens belong to the row; others are written but never attended to.
            prefix: from `prefill`.
            cache: what the rows hold so far.
            layers: `decode_params()`, when made outside a loop.

        Returns:
            Final-normed hidden states of the block, and the longer cache.
        """
        layers = self.decode_params() if layers is None else layers
        slot_valid = write_slots(cache.valid, valid, cache.cursor)
        reach = cache.cursor + jnp.arange(ids.shape[1])
        mask = constrain_rows((jnp.arange(cache.slots) <= reach[:, None]) & slot_valid[:, None, :])
        angles = constrain_rows(_rope(self.config, positions))
        through = self._decode_scanned if self._scans_decoding else self._decode_unrolled
        hidden, keys, values = through(self._embed(ids), angles, mask, layers, prefix, cache)
        cache = DecodeCache(keys, values, slot_valid, cache.cursor + ids.shape[1])
        # However its readers lie: else their layout would be that of every layer's hidden states.
        return constrain_rows(_rms_norm(hidden, self.final_norm[...], self.config)), cache

    def _decode_unrolled(
        self,
        hidden: Float[Array, "batch block width"],
        angles: tuple[Array, Array],
        mask: Bool[Array, "batch block slots"],
        layers: Sequence[LayerParams],
        prefix: Prefix,
        cache: DecodeCache,
    ) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
        """Through the layers one by one; hidden states, and the keys and values of each layer with the block's."""
        config = self.config
        all_keys, all_values = [], []

        for index, (params, shared) in enumerate(zip(layers, prefix.by_layer(), strict=True)):

            def attention(
                q: Array, k: Array, v: Array, index: int = index, shared: tuple[Array, Array] = shared
            ) -> Array:
                all_keys.append(write_slots(cache.keys[index], k, cache.cursor))
                all_values.append(write_slots(cache.values[index], v, cache.cursor))
                return attend(q, all_keys[-1], all_values[-1], mask, *shared, prefix.length, config.precision)

            hidden = _block(config, params, hidden, angles, attention)[0]
        return hidden, tuple(all_keys), tuple(all_values)

    def _decode_scanned(
        self,
        hidden: Float[Array, "batch block width"],
        angles: tuple[Array, Array],
        mask: Bool[Array, "batch block slots"],
        stacks: Sequence[LayerParams],
        prefix: Prefix,
        cache: DecodeCache,
    ) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
        """Through the layers in a loop a stack, whose carry holds the stack's keys and values, updated in place."""
        config = self.config

        def body(carry: tuple[Array, Array, Array], layer: Any) -> tuple[tuple[Array, Array, Array], None]:
            hidden, all_keys, all_values = carry
            number, params, shared_keys, shared_values = layer

            def attention(q: Array, k: Array, v: Array) -> Array:
                nonlocal all_keys, all_values
                place = (number, 0, cache.cursor, 0, 0)
                all_keys = jax.lax.dynamic_update_slice(all_keys, k[None], place)
                all_values = jax.lax.dynamic_update_slice(all_values, v[None], place)
                own_keys, own_values = all_keys[number], all_values[number]
                return attend(
                    q, own_keys, own_values, mask, shared_keys, shared_values, prefix.length, config.precision
                )

            hidden = _block(config, params, hidden, angles, attention)[0]
            return (hidden, all_keys, all_values), None

        keys, values = list(cache.keys), list(cache.values)
        for index, (params, *shared) in enumerate(zip(stacks, prefix.keys, prefix.values, strict=True)):
            layers = jnp.arange(keys[index].shape[0]), params, *shared
            (hidden, keys[index], values[index]), _ = jax.lax.scan(body, (hidden, keys[index], values[index]), layers)
        return hidden, tuple(keys), tuple(values)

    def head(self) -> Num[Array, "vocab width"]:
        """The matrix whose rows score the vocabulary: the embedding where they are tied; packed where that is."""
        return self._table("embedding" if self.config.tie_embeddings else "head_matrix")

    def logits(self, hidden: Float[Array, "*rows width"]) -> Float[Array, "*rows vocab"]:
        """Scores of the whole vocabulary, float32."""
        head = self.head()
        if not is_packed(head):
            return self.logits_of(hidden, head)
        # A chunk at a time, for no more than that is to be expanded.
        scores = jax.lax.map(lambda rows: self.logits_of(hidden, rows), cut(head))
        return jnp.moveaxis(joined(jnp.moveaxis(scores, -1, 1), head.shape[0]), 0, -1)

    def logits_of(
        self, hidden: Float[Array, "*rows width"], head: Num[Array, "some width"]
    ) -> Float[Array, "*rows some"]:
        """Scores of some rows of the head, float32: for those who go through the vocabulary a chunk at a time."""
        return _product("...d,vd->...v", hidden, head, self.config, jnp.float32)

    def token_logits(
        self, hidden: Float[Array, "*rows width"], tokens: Int[Array, "*rows choices"]
    ) -> Float[Array, "*rows choices"]:
        """Scores of the given tokens only, float32: `logits` gathered at `tokens` without computing the rest."""
        return _product("...d,...ad->...a", hidden, self.head()[tokens], self.config, jnp.float32)

    def _stacked(self) -> list[dict[str, Array]]:
        return [{name: parameter[...] for name, parameter in stack.items()} for stack in self.layers]

    @property
    def _is_packed(self) -> bool:
        return any(is_packed(parameter[...]) for stack in self.layers for parameter in stack.values())

    def _table(self, name: str) -> Array:
        """A parameter outside of the layers, whole but for what is divided along the vocabulary."""
        return gathered(getattr(self, name)[...], *axes_of(name), dtype=self.config.dtype)

    def _embed(
        self, ids: Int[Array, "batch tokens"], axes: RowAxes = ("rows", None)
    ) -> Float[Array, "batch tokens width"]:
        rows = unpacked(self._table("embedding")[ids]).astype(self.config.dtype)
        # Added up where it is to lie: else each device would add to a whole table, to be summed and divided after that.
        rows = with_gradient(rows, *(axis and "copies" for axis in axes), "embed")
        return constrain(rows, *axes, None)

    def _scan(self, body: Callable, carry: Array, stacks: Sequence[Any]) -> tuple[Array, list[Any]]:
        """Goes up through the layers, a scan a stack; also what `body` gave, stacked, for each stack."""
        made = []
        for stacked in stacks:
            carry, out = jax.lax.scan(body, carry, stacked, unroll=self.config.layers <= UNROLLED_LAYERS)
            made.append(out)
        return carry, made


def _some_layers(value: Any, first: int, end: int) -> Any:
    """Layers `first` to `end - 1` of a stacked parameter, the value itself where that is all of them."""
    if (first, end) == (0, value.shape[0]):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((end - first, *value.shape[1:]), value.dtype)
    return value[first:end]


def _block(
    config: ModelConfig,
    params: LayerParams,
    hidden: Float[Array, "batch tokens width"],
    angles: tuple[Array, Array],
    attention: Callable[[Array, Array, Array], Array],
    axes: RowAxes = ("rows", None),
) -> tuple[Float[Array, "batch tokens width"], Array, Array]:
    """One transformer block, and its new keys and values.

    `attention(queries, keys, values)` decides what the rows attend to; `axes` are those of batch and tokens.
    """
    normed = _rms_norm(hidden, params["attention_norm"], config)
    queries, keys, values = (_project(config, params, name, normed) for name in ("query", "key", "value"))
    if config.qk_norm:
        queries = _rms_norm(queries, params["query_norm"], config)
        keys = _rms_norm(keys, params["key_norm"], config)
    queries = constrain(rotate(queries, *angles), *axes, "heads", None)
    keys, values = (_copied(config, x, axes) for x in (rotate(keys, *angles), values))
    mixed = _linear(config, params, "output", attention(queries, keys, values))
    if config.output_bias:
        mixed = mixed + params["output_bias"].astype(mixed.dtype)
    hidden = constrain(hidden + mixed, *axes, None)
    normed = _rms_norm(hidden, params["ffn_norm"], config)
    gate, up = (constrain(_linear(config, params, name, normed), *axes, "ffn") for name in ("gate", "up"))
    hidden = hidden + _linear(config, params, "down", jax.nn.silu(gate) * up)
    return constrain(hidden, *axes, None), keys, values


def _copied(config: ModelConfig, x: Array, axes: RowAxes) -> Array:
    """Keys or values with every head as often as there are tensor shards that have queries for it."""
    copies = kv_copies(config)
    return constrain(jnp.repeat(x, copies, axis=2) if copies > 1 else x, *axes, "kv_heads", None)


def _rope(config: ModelConfig, positions: Int[Array, "*rows"]) -> tuple[Array, Array]:
    return rope_angles(positions, rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))


def _project(config: ModelConfig, params: LayerParams, name: str, normed: Array) -> Array:
    projected = _linear(config, params, name, normed)
    return projected + params[f"{name}_bias"].astype(projected.dtype) if config.qkv_bias else projected


def _linear(config: ModelConfig, params: LayerParams, name: str, x: Array) -> Array:
    """W x and, where the matrix has an adapter, alpha / rank * B (A x) added; one of rank 0 is switched off."""
    into, out = LINEAR[name]

    def matrix(name: str) -> Array:
        return gathered(params[name], *axes_of(f"layers.{name}")[1:], dtype=config.dtype)

    product = _product(f"bt{into},{out}{into}->bt{out}", x, matrix(name), config)
    down = params.get(name + A_SUFFIX)
    if config.lora is None or down is None or down.shape[0] == 0:
        return product
    low = config.lora.scale * _product(f"bt{into},r{into}->btr", x, matrix(name + A_SUFFIX), config)
    return product + _product(f"btr,{out}r->bt{out}", low, matrix(name + B_SUFFIX), config)


def _product(equation: str, x: Array, matrix: Array, config: ModelConfig, result: Any = None) -> Array:
    """An einsum in the compute type at the configuration's precision."""
    x, matrix = x.astype(config.dtype), unpacked(matrix).astype(config.dtype)
    return jnp.einsum(equation, x, matrix, precision=config.precision, preferred_element_type=result or config.dtype)


def _rms_norm(x: Array, scale: Array, config: ModelConfig) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_epsilon)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)
