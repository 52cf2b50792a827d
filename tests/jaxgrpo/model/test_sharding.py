import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxgrpo.cli import main
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.files import read_json
from jaxgrpo.model.lora import LoRA
from jaxgrpo.model.placement import axes_at
from jaxgrpo.model.sharding import check_fits, constrain, gathered, kv_copies, make_mesh, spec, whole_rows
from jaxgrpo.model.transformer import Transformer, axes_of, declare, declare_adapters

CPUS = [SimpleNamespace(platform="cpu", id=i) for i in range(8)]


def mesh_of(**sizes: int) -> AbstractMesh:
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture
def config() -> ModelConfig:
    raw = read_json(Path(weights.__file__).with_name("tiny.json"))
    raw |= {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8}
    return ModelConfig.from_hf(raw, "float32")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("fsdp=3", "a mesh of 3 devices, and there are 8"),
        ("data=2,fsdp=2", "a mesh of 4 devices, and there are 8"),
        ("model=8", "sizes of data, fsdp, tensor"),
        ("fsdp=8x", "sizes of data, fsdp, tensor"),
        ("fsdp=0", "sizes of data, fsdp, tensor"),
        ("fsdp", "sizes of data, fsdp, tensor"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make_mesh(text, CPUS)


def test_one_device_has_no_mesh() -> None:
    assert make_mesh("auto", CPUS[:1]) is None
    assert make_mesh("fsdp=1,tensor=1", CPUS[:1]) is None


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tensor": 8}, "tensor=8 does not divide the model's heads of 12; for this model tensor can be 1, 2, 4"),
        ({"fsdp": 5}, "fsdp=5 does not divide the model's width of 64; for this model fsdp can be 1, 2, 4"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(config: ModelConfig, sizes: dict[str, int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        check_fits(mesh_of(**sizes), config)
    check_fits(mesh_of(fsdp=4, tensor=4), config)


def test_a_mesh_of_other_devices_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--mesh", "fsdp=3"]) == 2
    assert capsys.readouterr().err == (
        "jaxgrpo: --mesh fsdp=3: a mesh of 3 devices, and there is 1; give sizes whose product is 1, or auto.\n"
    )


def test_what_the_mesh_does_not_divide_is_whole() -> None:
    mesh = mesh_of(data=2, fsdp=4, tensor=2)
    assert spec(mesh, ("rows", None), (16, 3)) == PartitionSpec(("data", "fsdp"), None)
    assert spec(mesh, ("rows", None), (6, 3)) == PartitionSpec("data", None)
    assert spec(mesh, ("rows",), (1,)) == PartitionSpec(None)
    assert spec(mesh, ("kv_heads", "embed"), (1, 64)) == PartitionSpec(None, "fsdp")
    assert spec(mesh_of(tensor=4), ("kv_heads", "embed"), (4, 64)) == PartitionSpec("tensor", None)


def test_key_and_value_heads_are_copied_where_they_are_few(config: ModelConfig) -> None:
    assert kv_copies(config) == 1
    for tensor, copies in ((1, 1), (2, 1), (4, 2), (12, 6)):
        with jax.sharding.use_abstract_mesh(mesh_of(tensor=tensor, data=2)):
            assert kv_copies(config) == copies
    with jax.sharding.use_abstract_mesh(mesh_of(tensor=4)):
        assert kv_copies(dataclasses.replace(config, kv_heads=3)) == 4  # 12 in all: a multiple of both


def test_without_a_mesh_nothing_happens() -> None:
    x = jnp.ones((3, 2))
    assert constrain(x, "rows", None) is x
    assert gathered(x, "vocab", "embed", dtype=jnp.bfloat16) is x
    assert whole_rows(13) == 13
    with jax.sharding.use_abstract_mesh(mesh_of(data=2, fsdp=4)):
        assert whole_rows(13) == 16


def test_every_parameter_and_its_moments_have_their_axes(config: ModelConfig) -> None:
    config = dataclasses.replace(config, lora=LoRA(4, 8.0), qk_norm=True)
    declared = declare(config) | declare_adapters(config)
    params = nnx.split(Transformer.abstract(config))[1]
    state: Any = {"params": params, "opt_state": ({"mu": params, "count": jax.ShapeDtypeStruct((), jnp.int32)},)}
    known = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        axes = axes_at(path, leaf.ndim)
        if axes:
            name = jax.tree_util.keystr(path, simple=True, separator=".").split("params.")[-1].split("mu.")[-1]
            name = name.removesuffix(".value").replace("layers.0.", "layers.")
            assert declared[name].axes == axes == axes_of(name)
            assert declared[name].shape == leaf.shape
            known += 1
    assert known == 2 * len(declared)
