"""`--micro-batch auto`: the largest that fits, found in few compilations, said and kept."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxgrpo import build as build_module
from jaxgrpo.build import Experiment, build
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError, resolve
from jaxgrpo.fitting import Fit, largest, memory_allowed, memory_needed
from jaxgrpo.records import RunFolder
from jaxgrpo.stopping import Exit
from tests.jaxgrpo.experiments import SMALL, small


@pytest.mark.parametrize("fitting", range(9))
def test_the_largest_size_is_found_by_halving(fitting):
    sizes, asked = [2**n for n in range(8)], []

    def needed(size):
        asked.append(size)
        return 100 * size if size < 64 else None  # what is far too large is not even compiled

    allowed = 100 * 2**fitting - 50  # of 50 nothing has room
    expected = Fit(min(2 ** (fitting - 1), 32), 100 * min(2 ** (fitting - 1), 32), allowed) if fitting else None
    assert largest(sizes, allowed, needed) == expected
    assert len(asked) <= 4


def test_the_need_of_a_program_is_what_it_is_given_makes_and_returns():
    """4 MB in and out, a donated argument counted once, and 16 MB between."""
    x = jnp.zeros(2**20)
    assert 8 * 2**20 <= (memory_needed(jax.jit(lambda x: x + 1).lower(x)) or 0) < 9 * 2**20
    assert 4 * 2**20 <= (memory_needed(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x)) or 0) < 5 * 2**20
    between = memory_needed(jax.jit(lambda x: jnp.sort(jnp.sin(x[:, None] + jnp.arange(4.0)), axis=0).sum()).lower(x))
    assert (between or 0) >= 4 * 2**20 + 16 * 2**20


def test_a_share_of_the_memory_is_allowed():
    allowed = memory_allowed()
    assert allowed is not None and 2**20 < allowed < 2**50


def test_the_need_grows_with_the_rows():
    """The step's own program, abstract; more rows than there are need no more."""
    sizes = 1, 8, 512
    needs = [small(group_size=16, micro_batch=size)._memory_of_update() or 0 for size in sizes]
    assert needs[0] < needs[1] < needs[2]


@pytest.fixture
def needs(monkeypatch):
    """In place of compilations: a megabyte a row, of five that are allowed."""
    asked = []

    def megabytes(experiment):
        asked.append(experiment.train_step.config.learn.micro_batch)
        return asked[-1] * 10**6

    monkeypatch.setattr(Experiment, "_memory_of_update", megabytes)
    monkeypatch.setattr(build_module, "memory_allowed", lambda: 5 * 10**6)
    return asked


def test_what_was_chosen_is_said_and_kept(needs, tmp_path, capsys):
    """Of 12 episodes of at most 8 steps; a resumed run goes on with it, whatever would be chosen now."""
    words = ["--groups", "3", "--group-size", "4", "--train-fraction", "1", "--evaluate-episodes", "4"]
    command = ["train", *words, "--out", str(tmp_path / "run"), "--micro-batch", "auto"]
    assert main([*command, "--iterations", "1"]) == Exit.DONE
    assert needs == [16, 4, 8]
    assert "--micro-batch auto: 4 rows, for which learning needs 0.00 GB of the 0.01 GB" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["learn"]["micro_batch"] == 4
    assert main([*command, "--iterations", "1", "--resume"]) == Exit.DONE
    assert len(needs) == 3
    assert RunFolder(tmp_path / "run").read_config().learn.micro_batch == 4


def test_not_even_one_row(needs, monkeypatch):
    config = resolve({**SMALL, "micro_batch": "auto"})
    monkeypatch.setattr(build_module, "memory_allowed", lambda: 10**5)
    with pytest.raises(ConfigError, match=r"^--micro-batch auto: learning with a single row needs 0.00 GB and 0.00 GB"):
        build(config)
    monkeypatch.setattr(build_module, "memory_allowed", lambda: None)
    with pytest.raises(
        ConfigError, match=r"^--micro-batch auto: this device does not say how much memory it has; give"
    ):
        build(config)
    assert dataclasses.asdict(config)["learn"]["micro_batch"] == "auto"
