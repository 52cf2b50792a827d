"""Run as a process of its own, with four devices: how much memory a checkpoint takes to be loaded and saved again.

Prints, in bytes: the parameters, what was read of the file, and how far resident memory rose above what was there
before, loading onto four devices, loading onto one, and saving. Everything is done once before it is measured, so that
code and compiled programs do not count.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgrpo.model import weights
from jaxgrpo.model.files import SafetensorsFolder
from jaxgrpo.model.transformer import declare


def resident(*, peak: bool) -> int:
    """Resident memory in bytes, or its peak since the last reset (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def measured(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the second of two calls returns, and how far resident memory rose in it."""
    call()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident(peak=False)
    result = call()
    return result, resident(peak=True) - before


def count_reads() -> list[int]:
    """From now on, the bytes of every slice that is read."""
    read, sizes = SafetensorsFolder.read, []

    def counting(self, name, index):
        part = read(self, name, index)
        sizes.append(part.nbytes)
        return part

    SafetensorsFolder.read = counting
    return sizes


def four_devices(folder: Path) -> dict[str, NamedSharding]:
    """A sharding for every parameter over a mesh of two by two devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    axes = {"embed": "fsdp", "heads": "tensor", "ffn": "tensor", "vocab": "tensor"}
    declared = declare(weights.read_config(folder))
    specs = {name: PartitionSpec(*(axes.get(axis or "") for axis in d.axes)) for name, d in declared.items()}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def named(params) -> dict[str, jax.Array]:
    """The parameters by their names in `declare`."""
    leaves = jax.tree.leaves_with_path(params)
    paths = ((jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves)
    return {path.removesuffix(".value").replace("layers.0.", "layers."): x for path, x in paths}


def main(folder: Path, copy: Path) -> None:
    """Loads the checkpoint in `folder` in two ways and saves it to `copy`."""
    shardings, found = four_devices(folder), {}
    found["read"] = count_reads()
    _, found["loading"] = measured(lambda: weights.load(folder))
    found["read"].clear()
    (config, params), found["loading_sharded"] = measured(lambda: weights.load(folder, shardings=shardings))
    found["read"] = sum(found["read"]) // 2
    assert all(x.sharding == shardings[name] for name, x in named(params).items())
    found["params"] = sum(x.nbytes for x in jax.tree.leaves(params))
    _, found["saving"] = measured(lambda: weights.save_pretrained(copy, config, params, dtype="bfloat16"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
