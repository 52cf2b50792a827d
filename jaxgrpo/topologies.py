"""TPU chips and slices by name: published figures, the cloud's names, and devices to compile for without a TPU."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxgrpo.config import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one chip, as the cloud's documentation publishes them.

    Attributes:
        name: of the generation.
        memory: bytes of HBM that a program may use, as the compiler says; a part of what is published is reserved.
        bandwidth: of HBM, bytes a second.
        flops: bfloat16 operations a second.
        link: what one of its links to another chip sends, bytes a second; two of them serve each axis of the torus.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float


_GIB = 2**30

CHIPS = {
    # 16, 95 and 32 GB of HBM; 1600, 4800 and 3200 Gbit/s over 4, 6 and 4 links.
    "v5e": Chip("v5e", 15.75 * _GIB, 819e9, 197e12, 50e9),
    "v5p": Chip("v5p", 95.74 * _GIB, 2765e9, 459e12, 100e9),
    "v6e": Chip("v6e", 31.25 * _GIB, 1638e9, 918e12, 100e9),
}

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SOLID = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
SHAPES = {"v5e": _FLAT, "v5p": _SOLID, "v6e": _FLAT}
"""Shape of the slices of each generation, by their number of chips."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a TPU.

    Attributes:
        name: `v5e:4x4`.
        chip: what it is made of.
        chips: how many; each is one device.
    """

    name: str
    chip: Chip
    chips: int

    @classmethod
    def find(cls, name: str) -> "Topology":
        """The slice with a name: its shape, `v5e:4x4`, or what the cloud calls it, `v5litepod-16`.

        The cloud counts v5p in cores, two a chip: its v5p-8 has 4 chips.

        Raises:
            ConfigError: there is none.
        """
        known = {f"{kind}:{shape}": (kind, chips) for kind, shapes in SHAPES.items() for chips, shape in shapes.items()}
        names = dict(known)
        for kind, chips in known.values():
            names[f"{kind}-{2 * chips if kind == 'v5p' else chips}"] = kind, chips
            if kind == "v5e":
                names[f"v5litepod-{chips}"] = kind, chips
        if name not in names:
            raise ConfigError(
                f"--topology {name}: unknown; allowed are {', '.join(known)}, and the cloud's names, such as "
                f"v5litepod-16 (16 chips), v6e-8 (8) and v5p-8 (4).{nearest(name, names)}"
            )
        kind, chips = names[name]
        return cls(f"{kind}:{SHAPES[kind][chips]}", CHIPS[kind], chips)

    def devices(self) -> Sequence[Any]:
        """Its devices, which programs can be compiled for but cannot run on here.

        Raises:
            ConfigError: the TPU's compiler is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigError(
                "plan: the compiler for TPUs is not installed (it needs no TPU); run: pip install 'jaxgrpo[tpu]'"
            )
        # Compiling uses no chip: a second process may do so, and a process that trains on this machine goes on.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        # Else it looks for the TPU of this machine, and complains that there is none.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        from jax.experimental import topologies

        # A slice of one chip is not one of whole hosts, which have four.
        options = {} if self.chips > 1 else {"chips_per_host_bounds": (1, 1, 1)}
        return topologies.get_topology_desc(platform="tpu", topology_name=self.name, **options).devices


def memory_in(message: str) -> float | None:
    """Bytes of HBM that a program needs, from the compiler's refusal; None if it does not say."""
    found = re.search(
        r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm|\(([\d.]+)([KMGT]?)\) exceeds available HBM", message
    )
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(number) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit]
