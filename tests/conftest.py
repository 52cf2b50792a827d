"""Test-wide set-up: run-time shape checking, the CPU, and no network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most of the suite's time is compilation of programs that run once: let LLVM take less care.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

from jaxtyping import install_import_hook

install_import_hook(["jaxgrpo", "envs_jax"], "beartype.beartype")
