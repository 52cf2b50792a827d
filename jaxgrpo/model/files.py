"""Files of model weights, read a slice at a time: Hugging Face folders of safetensors, and GGUF files.

Both say which configuration they hold and give slices of their tensors by the tensor's name in the file. Opening one
reads headers only, and checks that what the headers promise is there.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgrpo.model.attention import rope_frequencies
from jaxgrpo.model.config import ModelConfig, RopeScaling, UnsupportedModelError

Index = tuple[slice, ...]
"""One slice for each axis, start and stop given."""


class WeightsError(ValueError):
    """Weights are absent, damaged or do not fit the model; the message is one line that says which and what to do."""


class FileNames(NamedTuple):
    """Names of one parameter's tensor; `{}` stands for the layer."""

    hf: str
    gguf: str


# Our name -> the names in files. Every tensor has our axis order up to a reshape.
FILE_NAMES = {
    "embedding": FileNames("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": FileNames("model.norm.weight", "output_norm.weight"),
    "head_matrix": FileNames("lm_head.weight", "output.weight"),
    "layers.attention_norm": FileNames("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "layers.query": FileNames("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "layers.query_bias": FileNames("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    "layers.query_norm": FileNames("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "layers.key": FileNames("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "layers.key_bias": FileNames("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    "layers.key_norm": FileNames("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    "layers.value": FileNames("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "layers.value_bias": FileNames("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    "layers.output": FileNames("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    "layers.output_bias": FileNames("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias"),
    "layers.ffn_norm": FileNames("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "layers.gate": FileNames("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "layers.up": FileNames("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "layers.down": FileNames("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}


@runtime_checkable
class WeightsFile(Protocol):
    """What a loader needs of a file of weights."""

    path: Path

    def config(self, compute_dtype: str) -> ModelConfig:
        """The configuration that the file holds or stands beside."""
        ...

    def names(self) -> set[str]:
        """All tensors."""
        ...

    def name_of(self, parameter: str) -> str:
        """Name of a parameter's tensor, with `{}` for the layer."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as the header says."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, of any floating type."""
        ...


def open_weights(path: Path) -> WeightsFile:
    """The folder of Hugging Face files or the GGUF file at `path`.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".gguf" and path.is_file():
        return GGUFFile(path)
    raise WeightsError(f"no weights at {path}; give a directory with config.json and safetensors, or a .gguf file")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        WeightsError: no file, no JSON, or JSON that is not an object.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} cannot be read as JSON with named values: it holds a {type(values).__name__}")
    return values


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, not longer than a reader follows."""
    return " ".join(str(error).split())[:160] or type(error).__name__


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")


class SafetensorsFolder:
    """A folder with `config.json` and `model.safetensors`, or shards listed in `model.safetensors.index.json`.

    A file is mapped into memory only while one slice of it is read, so that what has been read does not stay.
    """

    def __init__(self, path: Path) -> None:
        """Reads the headers of all shards.

        Raises:
            WeightsError: a shard is missing or cut short, the index and the shards contradict each other, or a tensor
                is not of a floating type.
        """
        self.path = path
        self._homes = _indexed(path) if (path / _INDEX).is_file() else _single(path)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._homes.values())):
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        names = [name for name, home in self._homes.items() if home == file]
        with _opened(file) as handle:
            if absent := sorted(set(names) - set(handle.keys())):
                raise WeightsError(f"{self.path / _INDEX} puts {some(absent)} into {file.name}, which lacks it")
            for name in names:
                tensor = handle.get_slice(name)
                if tensor.get_dtype() not in _DTYPES:
                    raise WeightsError(
                        f"{file}: tensor {name} is of type {tensor.get_dtype()}; allowed are {', '.join(_DTYPES)}"
                    )
                self._shapes[name] = tuple(tensor.get_shape())

    def config(self, compute_dtype: str) -> ModelConfig:
        """The configuration in `config.json`."""
        return ModelConfig.from_hf(read_json(self.path / "config.json"), compute_dtype)

    def names(self) -> set[str]:
        """All tensors of all shards; where there is an index, those that it lists."""
        return set(self._homes)

    def name_of(self, parameter: str) -> str:
        """Hugging Face's name."""
        return FILE_NAMES[parameter].hf

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, in the file's own type."""
        with _opened(self._homes[name]) as handle:
            return handle.get_slice(name)[index]


def _single(path: Path) -> dict[str, Path]:
    file = path / _SINGLE
    if not file.is_file():
        raise WeightsError(f"{path} has no {_SINGLE} and no {_INDEX}")
    with _opened(file) as handle:
        return dict.fromkeys(handle.keys(), file)


def _indexed(path: Path) -> dict[str, Path]:
    """The shard of every tensor."""
    weight_map = read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{path / _INDEX} has no weight_map from tensors to files; fetch it again")
    files = sorted(set(weight_map.values()))
    if outside := [file for file in files if Path(file).name != file]:
        raise WeightsError(f"{path / _INDEX} names {outside[0]!r}, which is no file of its own folder")
    if missing := [file for file in files if not (path / file).is_file()]:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"{path} lacks shard {missing[0]}{rest}, which {_INDEX} names; fetch it again")
    return {name: path / file for name, file in weight_map.items()}


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is not a complete safetensors file ({one_line(error)})") from error


def some(names: list[str]) -> str:
    """Some tensors for a message: the first one's name and how many more there are."""
    rest = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"tensor {names[0]}{rest}"


_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A GGUF file; quantised tensors are expanded by the `gguf` package, only the rows that are asked for."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            WeightsError: the package is missing, the file is damaged or cut short, or is one part of several.
        """
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
        if (parts := self._field("split.count", 1)) > 1:
            raise WeightsError(f"{path} is one of {parts} parts; join them with llama.cpp's gguf-split --merge")

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        try:
            return default if field is None else field.contents()
        except ValueError as error:  # text that is not UTF-8
            raise WeightsError(f"{self.path}: the header's {name} is damaged ({one_line(error)})") from error

    def config(self, compute_dtype: str) -> ModelConfig:
        """The configuration in the header, and what the presence of tensors says about it.

        Raises:
            UnsupportedModelError: a feature that is not computed here.
            WeightsError: a size is missing.
        """
        family = self._field("general.architecture")
        size = self._sizes(family)
        heads = size("attention.head_count")
        width = size("embedding_length")
        head_dim = size("attention.key_length", width // heads)
        theta = float(self._field(f"{family}.rope.freq_base", 10_000.0))
        self._refuse_unsupported(family, head_dim)
        return ModelConfig(
            architecture=family,
            vocab_size=self._rows("token_embd.weight"),
            width=width,
            layers=size("block_count"),
            heads=heads,
            kv_heads=size("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=size("feed_forward_length"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(head_dim, theta),
            norm_epsilon=self._epsilon(family),
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            max_positions=size("context_length", 32_768),
            eos_ids=self._eos_ids(),
            compute_dtype=compute_dtype,
        )

    def _refuse_unsupported(self, family: str, head_dim: int) -> None:
        scaling = self._field(f"{family}.rope.scaling.type", "none")
        window = self._field(f"{family}.attention.sliding_window", 0)
        refused = {
            f"rope scaling {scaling!r}": scaling != "none",
            "partial rotary embedding": self._field(f"{family}.rope.dimension_count", head_dim) != head_dim,
            "value heads of another size than key heads": self._field(f"{family}.attention.value_length", head_dim)
            != head_dim,
            f"sliding-window attention (of {window})": window != 0,
            "mixture of experts": self._field(f"{family}.expert_count", 0) != 0,
        }
        for feature, found in refused.items():
            if found:
                raise UnsupportedModelError(f"{self.path}: model {feature} is not supported")

    def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
        """Llama 3's scaling, of which a GGUF file holds only what it divides each frequency by.

        All published Llama 3.1 and 3.2 models differ in the factor alone, which is the largest divisor. Any other
        divisors are refused.
        """
        if _ROPE_FACTORS not in self._tensors:
            return None
        divisors = self.read(_ROPE_FACTORS, (slice(0, head_dim // 2),))
        scaling = RopeScaling(factor=float(divisors.max()))
        expected = rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, scaling)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
            raise UnsupportedModelError(
                f"{self.path}: model rope scaling by {_ROPE_FACTORS} is not Llama 3's "
                f"({scaling.low_freq_factor:g}, {scaling.high_freq_factor:g}, {scaling.original_positions} positions); "
                "give the Hugging Face files"
            )
        return scaling

    def _sizes(self, family: Any) -> Callable[..., int]:
        def size(name: str, default: int | None = None) -> int:
            value = self._field(f"{family}.{name}", default)
            if not isinstance(value, int):
                raise WeightsError(f"{self.path}: the header's {family}.{name} is {value!r}, not one whole number")
            return value

        return size

    def _rows(self, name: str) -> int:
        if name not in self._tensors:
            raise WeightsError(f"{self.path} lacks tensor {name}; the file is incomplete or of another model")
        return self.shape(name)[0]

    def _epsilon(self, family: str) -> float:
        # Stored as float32; the shortest decimal that gives the same float32 is what the checkpoint's author wrote.
        value = self._field(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
        return float(str(np.float32(value)))

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._field("tokenizer.ggml.eos_token_id")
        return () if eos is None else (int(eos),)

    def names(self) -> set[str]:
        """All tensors that are parameters."""
        return set(self._tensors) - {_ROPE_FACTORS}

    def name_of(self, parameter: str) -> str:
        """llama.cpp's name."""
        return FILE_NAMES[parameter].gguf

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, in our order of axes."""
        return tuple(int(size) for size in self._tensors[name].shape[::-1])

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor as float32, in Hugging Face's order of rows."""
        tensor = self._tensors[name]
        rows, *rest = index
        order = self._row_order(name)
        # Blocks of quantised values lie along the last axis; of the others, rows can be taken as they are stored.
        stored = tensor.data if tensor.data.ndim == 1 else tensor.data[rows if order is None else order[rows]]
        try:
            values = self._dequantize(stored, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise WeightsError(
                f"{self.path}: tensor {name} is quantised as {kind}, which gguf cannot expand"
            ) from error
        if tensor.data.ndim == 1:
            return values[rows if order is None else order[rows]]
        return values[(slice(None), *rest)]

    def _row_order(self, name: str) -> np.ndarray | None:
        """Where llama.cpp keeps the rows of Llama's queries and keys: (i, i + head_dim / 2) are neighbours there."""
        part = name.split(".")[-2]
        if self._field("general.architecture") != "llama" or part not in ("attn_q", "attn_k"):
            return None
        heads = self._field("llama.attention.head_count")
        if part == "attn_k":
            heads = self._field("llama.attention.head_count_kv", heads)
        pairs = np.arange(self.shape(name)[0]).reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)
