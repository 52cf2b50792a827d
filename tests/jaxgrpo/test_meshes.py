"""Gates 11 and 18: eight devices give what one gives, however they are arranged. In a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.files import read_json

# Two key and value heads: more tensor shards than that in the third, as many in the fourth.
MESHES = ["data=8", "fsdp=8", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("meshes")
    raw = read_json(Path(weights.__file__).with_name("tiny.json"))
    raw |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    config = ModelConfig.from_hf(raw, "float32")
    weights.save_pretrained(folder / "model", config, weights.init(config, jax.random.key(1)))
    TextTokenizer.tiny().save_pretrained(folder / "model")
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("meshes.py"), folder / "model", folder / "checkpoints", *MESHES],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Nothing has to be laid out anew where no cheap way leads from one layout to the next.
    assert "rematerialization" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", MESHES)
def test_many_devices_give_what_one_gives(found: dict[str, Any], mesh: str) -> None:
    of = found[mesh]
    assert of["same_tokens"] == [True, True]
    assert of["losses"][1] == pytest.approx(of["losses"][0], abs=1e-5)
    assert of["given_loss"] == pytest.approx(of["losses"][0][0], abs=1e-5)
    assert of["gradient_error"] < 1e-5


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_goes_from_one_mesh_to_another(found: dict[str, Any], mesh: str) -> None:
    assert found[mesh]["restored"] and found[mesh]["back"]
    assert found[mesh]["placed"]


def test_an_evaluation_on_a_mesh_is_that_on_one_device(found: dict[str, Any]) -> None:
    assert found["lengths"] == found["lengths_alone"]


def test_parameters_and_moments_are_divided(found: dict[str, Any]) -> None:
    held = {mesh: found[mesh]["held"] for mesh in MESHES}
    assert held["data=8"] == 1
    # All but norms and biases; keys and values have no more than two shards along tensor.
    assert 1 / 8 <= held["fsdp=8"] < 1 / 7
    assert 1 / 8 <= held["fsdp=2,tensor=4"] < 1 / 6
    assert 1 / 4 <= held["data=2,fsdp=2,tensor=2"] < 1 / 3.5
