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
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxgrpo.build import Experiment, build
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.cli import main
from jaxgrpo.config import resolve
from jaxgrpo.model.trained import join
from jaxgrpo.model.transformer import Transformer
from jaxgrpo.records import RunFolder, write_config
from jaxgrpo.stopping import Exit


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
    fails([*export, "--format", "peft", "--to", "x"], "--format peft: allowed are hf.", capsys)
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
