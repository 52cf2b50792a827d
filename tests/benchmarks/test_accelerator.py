"""The benchmark for accelerators, at the sizes of a test on the CPU: it runs, and it counts what it says it counts."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import accelerator
from benchmarks.accelerator import TINY_SIZES, forward_flops, main, matrices, peak_of
from jaxgrpo.model.transformer import Transformer


def test_tiny(tmp_path, capsys):
    assert main(["--tiny", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["parity"]) == 5
    assert [row["batch"] for row in found["decode"]] == list(TINY_SIZES.batches)
    assert found["update"]["tflop_per_s"] > 0
    assert found["left_out"] == []
    # What a CPU promises is in no table.
    assert found["update"]["share_of_peak"] is None and found["decode"][0]["share_of_bandwidth"] is None
    assert "'cpu' is not in the table of peaks: no shares are given" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_named(monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "parity", dict)
    assert main(["--tiny", "--minutes", "0"]) == 0
    assert "left out for want of time: decode 2, update" in capsys.readouterr().out


def test_operations_are_those_that_the_compiler_counts():
    """Of prompt and rows through the layers and the head, lowered; norms, softmax and rotation add a little."""
    sizes = TINY_SIZES._replace(
        config=dataclasses.replace(TINY_SIZES.config, width=256, ffn=512, heads=8, head_dim=32), prefix=32, tokens=32
    )
    model = Transformer.abstract(sizes.config)
    graph, params = nnx.split(model)
    ids = jax.ShapeDtypeStruct((sizes.rows, sizes.tokens), jnp.int32)

    def forward(params, ids):
        model = nnx.merge(graph, params)
        prefix = model.prefill(jnp.arange(sizes.prefix))
        hidden = model.forward(ids, ids, ids >= 0, prefix)
        return model.logits(hidden[:, -sizes.predicted :])

    counted: Any = jax.jit(forward).lower(params, ids).cost_analysis()
    assert forward_flops(sizes) == pytest.approx(counted["flops"], rel=0.04)
    assert (
        sum(matrices(sizes.config)) < sum(x.size for x in jax.tree.leaves(params)) < 1.02 * sum(matrices(sizes.config))
    )


@pytest.mark.parametrize(
    ("kind", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA L4", 300e9),
        ("NVIDIA L40S", None),
    ],
)
def test_peaks(kind, bandwidth):
    peak = peak_of(kind)
    assert (peak and peak.bandwidth) == bandwidth
