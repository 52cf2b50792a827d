"""Test-wide set-up: run-time shape checking, the CPU, no network, and no compilation cache that outlives a test."""

import os
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most of the suite's time is compilation of programs that run once: let LLVM take less care.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

from jaxtyping import install_import_hook

install_import_hook(["jaxgrpo", "envs_jax"], "beartype.beartype")


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
