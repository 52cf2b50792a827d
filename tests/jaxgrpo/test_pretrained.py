"""`jaxgrpo export`: transformers loads what a run has trained, and so does a further run."""

import dataclasses
import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peft import AutoPeftModelForCausalLM
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.beginning import restore_params
from jaxgrpo.build import Experiment, build
from jaxgrpo.checkpoints import Checkpoints, bytes_of
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError, resolve
from jaxgrpo.model import weights
from jaxgrpo.model.packed import PACKED, stored_as
from jaxgrpo.model.trained import join
from jaxgrpo.model.transformer import Transformer
from jaxgrpo.records import RunFolder, new_manifest, write_config, write_json
from jaxgrpo.stopping import Exit
from tests.jaxgrpo.model.checkpoints import assert_same, error_of


def make_run(folder, **options):
    """A run's folder with one checkpoint, of parameters that no seed draws; its experiment and parameters."""
    config = resolve({"groups": 2, "group_size": 2, "out": str(folder), **options})
    experiment, run = build(config), RunFolder(folder)
    folder.mkdir()
    write_config(run.config, config)
    state = experiment.init()
    state = state.replace(params=jax.tree.map(lambda x: 1.5 * x + 0.01, state.params))
    checkpoints = Checkpoints(run.checkpoints, keep=1)
    checkpoints.save(3, state)
    checkpoints.close()
    return experiment, state.params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder)
    return folder


def logits(experiment, params, ids):
    @jax.jit
    def compute(params, ids):
        model: Transformer = nnx.merge(experiment.policy.graphdef, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return model.logits(model.forward(ids, positions, jnp.ones_like(ids, bool), model.prefill(ids[0, :0])))

    return np.asarray(compute(join(params, experiment.fixed.params), jnp.asarray(ids)))


@pytest.mark.parametrize("layers", ["all", "1"])
def test_transformers_and_a_further_run_load_what_was_trained(tmp_path, capsys, layers):
    folder = tmp_path / "new" / "model"
    experiment, params = make_run(tmp_path / "run", train_layers=layers)
    assert main(["export", str(tmp_path / "run"), "--format", "hf", "--to", str(folder)]) == Exit.DONE
    assert capsys.readouterr().out == f"Model and tokenizer as Hugging Face files, 0.6 MB, in {folder}\n"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]

    tokenizer, text = experiment.game.tokenizer, "<|im_start|> P F\n F G\n<|im_end|><action>left</action>"
    theirs, their_tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = np.array([tokenizer.encode(text)], np.int32)
    assert their_tokenizer(text, add_special_tokens=False).input_ids == ids[0].tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits(experiment, params, ids), expected, atol=1e-4)
    assert theirs.generation_config.eos_token_id == list(experiment.policy.eos_ids)

    again = build(dataclasses.replace(experiment.config, model=str(folder)))
    np.testing.assert_array_equal(again.game.prefix_ids, experiment.game.prefix_ids)
    assert again.policy.eos_ids == experiment.policy.eos_ids
    np.testing.assert_array_equal(logits(again, again.init().params, ids), logits(experiment, params, ids))


# PEFT asks transformers in a way that newer ones deprecate.
PEFT_LOADS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LORA = {"lora.rank": 3, "lora.alpha": 6.0}
HALF = {"base_dtype": "bfloat16"}  # packed on a CPU


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folder of a run with adapters on one layer of a base in bfloat16, its experiment and its adapters."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    return folder, *make_run(folder, **LORA, **HALF, train_layers="1")


@PEFT_LOADS
def test_a_run_with_adapters_is_a_merged_model_and_an_adapter(adapted, tmp_path, capsys):
    """transformers loads the one, PEFT the other on the base beside it, both with the run's logits; a tied head."""
    folder, experiment, params = adapted
    assert main(["export", str(folder), "--to", str(tmp_path / "merged")]) == Exit.DONE
    assert main(["export", str(folder), "--format", "peft", "--to", str(tmp_path / "peft")]) == Exit.DONE
    assert "Adapters as PEFT files, their base model in base/, 0.6 MB" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "peft"]
    ids = np.arange(24)[None] * 7 % 500
    expected = logits(experiment, params, ids)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    beside = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    assert merged.config.tie_word_embeddings and merged.lm_head.weight is merged.model.embed_tokens.weight
    with torch.no_grad():
        for theirs in (merged, beside):
            np.testing.assert_allclose(theirs(torch.tensor(ids)).logits.numpy(), expected, atol=1e-4)
        with beside.disable_adapter():
            assert np.abs(beside(torch.tensor(ids)).logits.numpy() - expected).max() > 0.01
    assert beside.peft_config["default"].r == 3 and beside.peft_config["default"].lora_alpha == 6
    again = build(resolve({"model": str(tmp_path / "merged")}))
    np.testing.assert_allclose(logits(again, again.init().params, ids), expected, atol=1e-5)


@PEFT_LOADS
def test_adapters_of_a_folder_of_files_name_it_as_their_base(run, tmp_path):
    """All targets of an untied model, also through the base that the adapters name."""
    base = tmp_path / "base model"
    assert main(["export", str(run), "--to", str(base)]) == Exit.DONE
    config = dataclasses.replace(weights.read_config(base), tie_embeddings=False, qk_norm=True, architecture="qwen3",
                                 qkv_bias=False)  # fmt: skip
    weights.save_pretrained(base, config, weights.init(config, jax.random.key(3)))
    experiment, params = make_run(tmp_path / "run", model=str(base), preset="tiny", **LORA)
    words = ["export", str(tmp_path / "run"), "--format", "peft", "--to", str(tmp_path / "peft")]
    assert main(words) == Exit.DONE
    assert [path.name for path in sorted((tmp_path / "peft").iterdir())] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    beside = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    assert beside.peft_config["default"].base_model_name_or_path == str(base)
    ids = np.arange(24)[None] * 7 % 500
    with torch.no_grad():
        found = beside(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(found, logits(experiment, params, ids), atol=1e-4)


def test_the_base_is_kept_in_the_type_that_is_asked_for(tmp_path):
    """Read from files as when drawn from the seed: matrices rounded once, norms and biases as they are."""
    experiment = build(resolve({**LORA, **HALF}))
    drawn, full = experiment.fixed.params, build(resolve(LORA)).fixed.params
    experiment.save_pretrained(tmp_path, experiment.init().params)
    read = build(resolve({**LORA, **HALF, "model": str(tmp_path), "preset": "tiny"})).fixed.params
    assert_same(read, drawn)
    for path, leaf in jax.tree.leaves_with_path(drawn):
        vector = any(word in jax.tree_util.keystr(path) for word in ("norm", "bias"))
        assert leaf.dtype == (jnp.float32 if vector else PACKED)
    assert_same(drawn, jax.tree.map(lambda x, like: stored_as(x, like.dtype), full, drawn))
    assert {x.dtype.name for x in jax.tree.leaves(full)} == {"float32"}


def test_adapters_go_on_in_another_run_and_merge_into_a_full_one(adapted, tmp_path):
    folder, experiment, params = adapted
    same = {**LORA, **HALF, "train_layers": "1", "init_from": str(folder)}
    further = build(resolve({**same, "seed": 5, "kl_beta": 0.1}))
    assert_same(further.init().params, params)
    assert_same(further.fixed.params, experiment.fixed.params)
    assert_same(further.fixed.reference, params)
    full = build(resolve({**HALF, "init_from": str(folder)}))
    ids = np.arange(24)[None] * 7 % 500
    expected = logits(experiment, params, ids)
    np.testing.assert_allclose(logits(full, full.init().params, ids), expected, atol=1e-5)
    # Back again: a full run's parameters are the base of fresh adapters, which add nothing, and of what they export.
    _, whole = make_run(tmp_path / "full")
    based = build(resolve({**LORA, "init_from": str(tmp_path / "full")}))
    assert_same(based.fixed.params, whole)
    assert bytes_of(build(resolve({**LORA, "kl_beta": 0.1})).fixed.reference) == 0
    assert based.save_adapters(tmp_path / "x", based.init().params, place=tmp_path / "x")
    for options, given in [
        ("--lora.rank 3 --lora.alpha 6 --lora.targets query,up", {"lora.targets": "up,q_proj"}),
        ("--lora.rank 2 --lora.alpha 6 --lora.targets all-linear", {"lora.rank": 2}),
    ]:
        assert error_of(lambda given=given: build(resolve({**same, **given})), kind=ConfigError) == (
            f"--init-from {folder}: has adapters of --lora.rank 3 --lora.alpha 6 --lora.targets all-linear "
            f"--train-layers 1, and this run {options} --train-layers 1; give the same, or --lora.rank 0 to go on "
            "from the merged model."
        )


def test_a_checkpoint_holds_adapters_alone(adapted):
    folder, experiment, params = adapted
    stored, restored = restore_params(folder)
    assert_same(restored, params)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(restored)}
    assert len(names) == 14 and all("_lora_" in name for name in names)
    size = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    assert size < 0.6 * bytes_of(experiment.fixed.params)
    assert stored.lora.rank == 3
    other = build(resolve({**LORA, "lora.rank": 4, "train_layers": "1"}))
    checkpoints = Checkpoints(RunFolder(folder).checkpoints, keep=None)
    with pytest.raises(ConfigError, match=r"_lora_a\S* is float32\[1, 3, 192\], .* float32\[1, 4, 192\]; give"):
        checkpoints.restore_params(3, other.init().params)
    checkpoints.close()


def test_bfloat16(run, tmp_path):
    words = ["export", "--run", str(run), "--dtype", "bfloat16"]
    assert main([*words, "--to", str(tmp_path)]) == Exit.DONE  # a folder that is there and empty will do
    assert {x.dtype.name for x in load_file(tmp_path / "model.safetensors").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def fails(words, line, capsys):
    assert main(words) == Exit.USER_ERROR
    assert capsys.readouterr() == ("", f"jaxgrpo: {line}\n")


def test_mistakes_take_one_line(run, tmp_path, capsys):
    export = ["export", str(run)]
    fails(["export", "--to", "x"], "export: give the folder of a run, and --to with a new folder.", capsys)
    fails(export, "export: give the folder of a run, and --to with a new folder.", capsys)
    fails([*export, "--format", "pft", "--to", "x"], "--format pft: allowed are hf, peft. Did you mean 'peft'?", capsys)
    line = "--format peft: the run trained the model itself, without adapters; give --format hf."
    fails([*export, "--format", "peft", "--to", str(tmp_path / "x")], line, capsys)
    line = f"--to {run}: is there already, and not empty; give a new folder."
    fails([*export, "--to", str(run)], line, capsys)
    line = "--run none: holds no run; give a folder that `jaxgrpo train` made."
    fails(["export", "none", "--to", str(tmp_path / "x")], line, capsys)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_of_a_model(run, tmp_path, capsys, monkeypatch):
    whole = Experiment.save_pretrained

    def full(self, folder, params, *, dtype):
        whole(self, folder, params, dtype=dtype)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Experiment, "save_pretrained", full)
    folder = tmp_path / "model"
    line = f"--to {folder}: cannot be written (No space left on device)."
    fails(["export", str(run), "--to", str(folder)], line, capsys)
    assert not list(tmp_path.iterdir())


def test_adapters_of_another_base_are_refused(tmp_path, capsys):
    """Whoever goes on with a run's adapters finds out that the weights beside them were exchanged."""
    model, run, further = tmp_path / "model", tmp_path / "run", tmp_path / "further"
    config = weights.read_config(weights.resolve_model("tiny"))
    weights.save_pretrained(model, config, weights.init(config, jax.random.key(1)))
    TextTokenizer.tiny().save_pretrained(model)
    options = {"model": str(model), "lora.rank": 2, "base_dtype": "bfloat16", "groups": 2, "group_size": 2}
    experiment, _ = make_run(run, **options)
    manifest = new_manifest(experiment.config, experiment.init(), None, experiment.frozen_digest())
    write_json(run / "manifest.json", manifest)
    # However it is kept, the base is the same.
    assert build(resolve({**options, "base_dtype": "float32"})).frozen_digest() == experiment.frozen_digest()
    weights.save_pretrained(model, config, weights.init(config, jax.random.key(2)))
    commands = {
        f"--run {run}": ["eval", "--run", str(run), "--episodes", "1"],
        f"export {run}": ["export", str(run), "--to", str(tmp_path / "to")],
        f"--out {run}": ["train", "--out", str(run), "--resume"],
        f"--init-from {run}": ["train", "--init-from", str(run), "--out", str(further), "--model", str(model)]
        + ["--lora.rank", "2"],
    }
    for begin, words in commands.items():
        assert main(words) == Exit.USER_ERROR
        line = capsys.readouterr().err
        assert line.startswith(f"jaxgrpo: {begin}: was trained on another base") and line.count("\n") == 1
    assert not (tmp_path / "to").exists() and not RunFolder(further).holds_run
