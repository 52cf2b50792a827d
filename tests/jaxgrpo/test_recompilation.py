"""Warnings of real recompilations, each with its cause."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxgrpo import trainer
from jaxgrpo.config import resolve
from jaxgrpo.recompilation import CompilationWatch
from jaxgrpo.trainer import train
from tests.jaxgrpo.toy import Toy


@contextlib.contextmanager
def _watch() -> Iterator[tuple[CompilationWatch, list[str]]]:
    lines: list[str] = []
    with contextlib.closing(CompilationWatch(lines.append)) as watch:
        yield watch, lines


def _step() -> Callable[..., Any]:
    """A function to compile that no other test has compiled."""

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="power")
    def _advance(state: Any, scale: Any, power: int) -> Any:
        return jax.tree.map(lambda x: scale * x**power, state)

    def step(state: Any, scale: Any, *, power: int = 2) -> Any:
        return _advance(state, scale, power)

    return step


def _state(rows: int = 3, dtype: Any = "float32") -> Any:
    return {"w": jnp.ones((rows, 2), dtype)}


@pytest.mark.parametrize(
    ("arguments", "options", "cause"),
    [
        ((_state(4), jnp.float32(1)), {}, "state.w was float32[3, 2] and is float32[4, 2]"),
        ((_state(dtype="bfloat16"), jnp.float32(1)), {}, "state.w was float32[3, 2] and is bfloat16[3, 2]"),
        ((_state(), jnp.asarray(1.0)), {}, "scale was float32[] and is float32[] (weak type)"),
        ((_state(), jnp.float32(1)), {"power": 3}, "power was absent and is 3"),
        ((_state() | {"b": jnp.ones(2)}, jnp.float32(1)), {}, "state.b was absent and is float32[2]"),
        ((_state(4), jnp.int32(1)), {}, "state.w was float32[3, 2] and is float32[4, 2], and 1 more changed"),
    ],
)
def test_the_cause_is_named(arguments, options, cause):
    step = _step()
    with _watch() as (watch, lines):
        for _ in range(3):
            watch(step, _state(), jnp.float32(1))
        assert lines == []
        watch(step, *arguments, when=" after iteration 7", **options)
    [line] = lines
    assert line.startswith(f"Warning: jit(_advance) of step compiled again after iteration 7: {cause}. It took ")


def test_where_an_argument_lies_is_a_cause():
    step = _step()
    with _watch() as (watch, lines):
        watch(step, _state(), jnp.float32(1))
        watch(step, jax.device_put(_state(), jax.devices()[0]), jnp.float32(1))
    [line] = lines
    assert "state.w was float32[3, 2] and is float32[3, 2] on SingleDeviceSharding(" in line


def test_a_cause_outside_the_arguments_is_called_so():
    sizes = iter([3, 4])
    jitted = jax.jit(jnp.cos)
    with _watch() as (watch, lines):

        def step() -> Any:
            return jitted(jnp.ones(next(sizes)))

        watch(step)
        watch(step)
    [line] = lines
    assert "its arguments are as before, so something else that it depends on has changed" in line


def test_other_threads_and_calls_of_no_one_are_none_of_its_business():
    step = _step()
    with _watch() as (watch, lines):
        watch(step, _state(), jnp.float32(1))
        _step()(_state(5), jnp.float32(1))

        def beside(*args: Any) -> Any:
            thread = threading.Thread(target=lambda: _step()(_state(6), jnp.float32(1)))
            thread.start()
            thread.join()
            return step(*args)

        beside.__name__ = "step"
        watch(beside, _state(), jnp.float32(1))
    assert lines == []


def test_nothing_is_heard_after_the_end():
    from jax._src import monitoring

    before = monitoring.get_event_duration_listeners()
    with _watch():
        assert len(monitoring.get_event_duration_listeners()) == len(before) + 1
    assert monitoring.get_event_duration_listeners() == before


class _Changing(Toy):
    """Its hyper-parameters change their shape before the fourth iteration."""

    @property
    def hyperparameters(self) -> Any:
        return jnp.ones(1 if self.__dict__.get("done", 0) < 3 else 2)

    @hyperparameters.setter
    def hyperparameters(self, value: Any) -> None: ...

    def step(self, state: Any, hyperparameters: Any, /) -> Any:
        _uses(hyperparameters)
        self.__dict__["done"] = int(state.iteration) + 1
        return super().step(state, None)


@jax.jit
def _uses(x: Any) -> Any:
    return x + 1


def test_a_run_tells_of_it_once_and_of_no_expected_compilation(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)
    config = resolve(
        {"out": str(tmp_path), "iterations": 6, "evaluate_every": 2, "evaluate_episodes": 7, "compilation_cache": False}
    )
    train(config, experiment=_Changing(config))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "Warning" in line]
    assert len(warnings) == 1
    cause = "hyperparameters was float32[1] and is float32[2]"
    assert f"jit(_uses) of step compiled again after iteration 3: {cause}. It took" in warnings[0]
