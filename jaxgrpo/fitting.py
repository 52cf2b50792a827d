"""How many rows fit into a device's memory, found from what the compiler says that a program needs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

SHARES = {"cpu": 0.5}
"""Share of the memory of a device, by platform, that a program may take: of a CPU's, other programs want some too."""
_SHARE = 0.9


class Fit(NamedTuple):
    """A size that fits, the bytes that the program needs then, and those that it may take."""

    size: int
    needed: int
    allowed: int


def try_compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled | str:
    """The compiled program; or why the compiler refused one that can never fit, as those for accelerators do."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return str(error)


def memory_parts(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that a program takes of each device: arguments, temporaries, results that reuse no argument, and code."""
    found: Any = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


def memory_needed(lowered: jax.stages.Lowered) -> int | None:
    """Bytes that a program takes of each device; None where the compiler refused it."""
    compiled = try_compile(lowered)
    return None if isinstance(compiled, str) else sum(memory_parts(compiled).values())


def memory_allowed() -> int | None:
    """Bytes that a program may take of each device of this process; None if unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        found = _available() // jax.local_device_count()
    else:
        found = (device.memory_stats() or {}).get("bytes_limit", 0)
    return int(found * SHARES.get(device.platform, _SHARE)) or None


def _available() -> int:
    """Bytes of this machine that programs can still have (Linux); 0 where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines())
    return int(sizes["MemAvailable"].split()[0]) * 1024


def largest(sizes: Sequence[int], allowed: int, needed: Callable[[int], int | None]) -> Fit | None:
    """The largest of rising sizes whose need is allowed, found by halving; None where not even the first's is.

    Args:
        sizes: one or more; a larger one needs no less.
        allowed: bytes.
        needed: bytes for a size, or None where they are certainly too many.
    """
    low, high, best = 0, len(sizes), None
    while low < high:
        middle = (low + high) // 2
        found = needed(sizes[middle])
        if found is not None and found <= allowed:
            best, low = Fit(sizes[middle], found, allowed), middle + 1
        else:
            high = middle
    return best
