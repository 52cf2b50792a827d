"""Test-wide set-up: run-time shape checking, the CPU, no network, and no compilation cache that outlives a test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most of the suite's time is compilation of programs that run once: let LLVM take less care.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

from jaxtyping import install_import_hook

install_import_hook(["jaxgrpo", "envs_jax"], "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go() -> Iterator[None]:
    """Compiled programs are dropped after a module where there are very many.

    Each maps pieces of memory, of which Linux gives a process 65,530; beyond that the compiler dies.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def no_cache_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands called in a test use a compilation cache only where the test's module has set one up.

    Otherwise the first of them would switch it on in the user's home, and for every later test of the process.
    """
    import jax

    from jaxgrpo import commands, trainer

    use = trainer.use_compilation_cache

    def use_if_set() -> None:
        config: Any = jax.config
        if config.jax_compilation_cache_dir:
            use()

    for module in (commands, trainer):
        monkeypatch.setattr(module, "use_compilation_cache", use_if_set)
