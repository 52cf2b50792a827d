"""GGUF files as llama.cpp's converter and quantiser write them, made from small models."""

import gguf
import numpy as np

from jaxgrpo.model.files import FILE_NAMES

Kind = gguf.GGMLQuantizationType

# Where a block of a K type keeps its half-precision scales, and values for them that give weights of about 0.1.
_SCALES = {Kind.Q4_K: {0: 2e-4, 2: 1.5e-3}, Kind.Q5_K: {0: 1e-4, 2: 1.5e-3}, Kind.Q6_K: {208: 2.5e-5}}


def gguf_tensors(config, tensors):
    """Hugging Face's tensors by name, under llama.cpp's names and in its order of rows."""
    names = {n.hf.format(i): n.gguf.format(i) for n in FILE_NAMES.values() for i in range(config.layers)}
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads} if config.architecture == "llama" else {}
    renamed = {names[name]: tensor for name, tensor in tensors.items()}
    return {
        name: _neighbours(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in renamed.items()
    }


def _neighbours(tensor, heads):
    """Row i of each head's first half before row i of its second half: the Llama family's q and k."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def write_gguf(path, config, tensors, kinds=None, architecture=None, also=None, **changes):
    """Writes `tensors` (by llama.cpp's name), matrices of the type that `kinds` says for their name, else float32.

    Args:
        kinds: name of a tensor -> type. What the gguf package cannot quantise are random blocks of that type.
        architecture: name in place of the configuration's.
        also: called with the writer, for fields that it has no method for.
        changes: method of the writer -> value, in place of the header's own; None leaves the field out.
    """
    writer = gguf.GGUFWriter(path, architecture or config.architecture)
    header = {
        "add_block_count": config.layers,
        "add_embedding_length": config.width,
        "add_head_count": config.heads,
        "add_head_count_kv": config.kv_heads,
        "add_key_length": config.head_dim,
        "add_value_length": config.head_dim,
        "add_rope_dimension_count": config.head_dim,
        "add_feed_forward_length": config.ffn,
        "add_rope_freq_base": config.rope_theta,
        "add_layer_norm_rms_eps": config.norm_epsilon,
        "add_context_length": config.max_positions,
        "add_eos_token_id": config.eos_ids[0],
    } | changes
    for method, value in header.items():
        if value is not None:
            getattr(writer, method)(value)
    if also is not None:
        also(writer)
    # transformers counts them to know the size of the vocabulary.
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for index, (name, tensor) in enumerate(tensors.items()):
        kind = (kinds or {}).get(name, Kind.F32)
        if tensor.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, tensor)
        elif kind in _SCALES:
            writer.add_tensor(name, random_blocks(tensor.shape, kind, seed=index), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(shape, kind, seed):
    """Bytes of a matrix of a K type: random but for the scales, which may not be infinite."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // values, size), np.uint8)
    for at, scale in _SCALES[kind].items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
