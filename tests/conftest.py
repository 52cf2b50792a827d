"""Test-wide set-up: run-time shape checking, the CPU, and no network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook(["jaxgrpo", "envs_jax"], "beartype.beartype")
