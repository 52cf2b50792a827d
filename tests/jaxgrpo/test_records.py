import errno
import json
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from flax import struct

from jaxgrpo import records
from jaxgrpo.checkpoints import Checkpoints, bytes_of
from jaxgrpo.config import ConfigError, TrainConfig, resolve
from jaxgrpo.records import JsonLines, RunFolder, digest


class State(struct.PyTreeNode):
    params: Any
    opt_state: Any
    algorithm_state: Any
    key: jax.Array
    iteration: jax.Array


def test_digest_sees_every_bit_and_every_swap():
    tree = {"a": jnp.arange(24, dtype=jnp.float32).reshape(4, 6), "b": jnp.ones(3, jnp.bfloat16)}
    start = int(digest(tree))
    assert int(digest(jax.tree.map(jnp.copy, tree))) == start
    seen = {start}
    for i in range(24):
        bits = tree["a"].view(jnp.uint32).reshape(-1).at[i].add(1).view(jnp.float32).reshape(4, 6)
        seen.add(int(digest(tree | {"a": bits})))
    assert len(seen) == 25
    swapped = tree["a"].at[0, 1].set(2.0).at[0, 2].set(1.0)
    assert int(digest(tree | {"a": swapped})) not in seen
    assert int(digest(tree | {"a": tree["a"].T})) not in seen
    assert int(digest({"a": tree["b"], "b": tree["a"]})) != start


def test_digest_tells_minus_zero_and_any_type():
    assert int(digest(jnp.float32(0.0))) != int(digest(jnp.float32(-0.0)))
    for dtype in (jnp.int8, jnp.uint16, jnp.float16, jnp.int32, jnp.bool_):
        assert int(digest(jnp.array([0, 1], dtype))) != int(digest(jnp.array([1, 0], dtype)))
    assert int(digest(jax.random.key(1))) != int(digest(jax.random.key(2)))


def test_digest_matches_a_plain_oracle():
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = sum(mix(int(b) ^ mix((i + mix(1)) % 2**32)) for i, b in enumerate(values.view(np.uint32).ravel()))
    assert int(digest(jnp.asarray(values))) == expected % 2**32


def test_rows_past_the_checkpoint_and_a_torn_line_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for i in range(1, 6):
        log.append({"iteration": i, "x": i / 10})
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"iteration": 6, "x"')
    log = JsonLines(path, keep=lambda i: i <= 3)
    assert [row["iteration"] for row in log.rows] == [1, 2, 3]
    for i in range(4, 6):
        log.append({"iteration": i, "x": i / 10})
    log.close()
    assert path.read_bytes() == whole


def test_what_is_not_finite_is_null(tmp_path):
    log = JsonLines(tmp_path / "m.jsonl")
    log.append({"iteration": 1, "loss": float("nan"), "ratio_max": float("inf"), "kl": 0.5})
    log.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "iteration": 1,
        "loss": None,
        "ratio_max": None,
        "kl": 0.5,
    }


def test_order_of_keys():
    row = records.ordered_row({"seconds": 1, "zebra": 2, "loss": 3, "iteration": 4, "adder": 5, "tokens_per_s": 6})
    assert list(row) == ["iteration", "loss", "adder", "zebra", "seconds", "tokens_per_s"]
    assert records.without_timings(row) == {"iteration": 4, "loss": 3, "adder": 5, "zebra": 2}


def test_default_folder_is_a_name(tmp_path):
    assert str(RunFolder.of(TrainConfig()).path) == "runs/frozen-lake-tiny-seed0"
    path = RunFolder.of(TrainConfig(model="/models/My model.gguf", seed=3)).path
    assert str(path) == "runs/frozen-lake-My-model-seed3"
    assert RunFolder.of(resolve({"out": "elsewhere/run"})).path == Path("elsewhere/run")


def test_configuration_survives_the_folder(tmp_path):
    config = resolve({"out": str(tmp_path), "model": "smollm2-135m", "learning_rate": 0.1, "max_seconds": 3})
    records.write_config(tmp_path / "config.json", config)
    assert RunFolder(tmp_path).read_config() == config


def test_claim_refuses(tmp_path):
    folder = RunFolder(tmp_path / "run")
    new, resumed = resolve({"seed": 1}), resolve({"seed": 1, "resume": True})
    with pytest.raises(ConfigError, match=r"^--resume: there is no run in \S+/run; check --out"):
        folder.claim(resumed)
    assert not folder.path.exists()
    folder.claim(new)
    assert list(folder.path.iterdir()) == []
    records.write_config(folder.config, new)
    with pytest.raises(ConfigError, match=r"^--out \S+/run: already holds a run; give --resume"):
        folder.claim(new)
    folder.claim(resumed)
    other = resolve({"seed": 1, "resume": True, "model": "smollm2-135m", "preset": "tiny", "learning_rate": 0.5})
    with pytest.raises(ConfigError, match=r"--model tiny \(not smollm2-135m\), --learning-rate 0.001 \(not 0.5\)"):
        folder.claim(other)


@pytest.mark.parametrize("place", ["/proc/jaxgrpo-run", "FILE/run"])
def test_claim_refuses_what_cannot_be_written(tmp_path, place):
    (tmp_path / "FILE").write_text("")
    folder = RunFolder(tmp_path / place)
    with pytest.raises(ConfigError, match=r"^--out \S+run: cannot be written \(.+\); give another folder\.$"):
        folder.claim(resolve({}))


def test_claim_refuses_a_full_disk(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        RunFolder(tmp_path).claim(resolve({}))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_recognised_through_other_errors():
    try:
        try:
            raise OSError(errno.ENOSPC, "x")
        except OSError as error:
            raise ValueError("storage failed") from error
    except ValueError as error:
        assert records.disk_is_full(error)
    assert records.disk_is_full(ValueError("RESOURCE: [OS error 28: No space left on device] at /x"))
    assert not records.disk_is_full(ValueError("something else"))


def test_manifest_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="manifest.json: cannot be read"):
        records.read_manifest(tmp_path / "manifest.json")
    records.write_json(tmp_path / "manifest.json", {"schema_version": 99})
    with pytest.raises(ConfigError, match="schema version 99, and this jaxgrpo reads 1"):
        records.read_manifest(tmp_path / "manifest.json")


def test_machine_names_what_results_depend_on(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1")
    found = records.machine()
    assert found["packages"]["jax"] == jax.__version__
    assert found["flags"]["XLA_FLAGS"] == "--xla_foo=1"
    assert re.fullmatch("[0-9a-f]{16}", found["cpu"]["features_sha256"])
    json.dumps(found)


def _state(width: int = 8, seed: int = 0) -> State:
    params = {"w": jax.random.normal(jax.random.key(seed), (width, 3)), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
    return State(
        params=params,
        opt_state=optax.adam(1e-3).init(params),
        algorithm_state=(),
        key=jax.random.key(seed),
        iteration=jnp.int32(seed),
    )


def test_checkpoint_gives_back_every_bit_and_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest is None
    step = jax.jit(lambda s: s.replace(params=jax.tree.map(lambda x: x * 2, s.params)), donate_argnums=0)
    state, digests = _state(seed=5), {}
    for i in (1, 2, 3):
        digests[i] = records.state_digests(state)
        checkpoints.save(i, state)
        state = step(state)  # the buffers that are being saved are written over here
    checkpoints.close()
    reopened = Checkpoints(tmp_path / "c", keep=2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["2", "3"]
    assert reopened.latest == 3
    like = _state(seed=0)
    restored = reopened.restore(3, like)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, like)
    assert records.state_digests(restored) == digests[3]
    assert jax.random.key_impl(restored.key) == jax.random.key_impl(like.key)
    # A step compiled for the fresh state serves the restored one.
    compiled = jax.jit(lambda s: s.iteration + 1)
    _ = compiled(like), compiled(restored)
    assert compiled._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    reopened.close()


def test_half_written_checkpoint_is_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, _state())
    checkpoints.close()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest == 1
    checkpoints.save(2, _state())
    checkpoints.wait()
    assert checkpoints.latest == 2
    checkpoints.close()


def test_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, _state())
    checkpoints.wait()
    with pytest.raises(
        ConfigError, match=r"4: the checkpoint of another model or optimiser: opt_state.*float32\[8, 3\]"
    ):
        checkpoints.restore(4, _state(width=16))
    with pytest.raises(ConfigError, match=r"is absent, and should be float32"):
        checkpoints.restore(4, _state().replace(algorithm_state={"critic": jnp.ones(2)}))
    checkpoints.close()


def test_parameters_alone_are_read(tmp_path):
    """The other arrays, a thousand times as large, are not: the files' own library counts the bytes it reads."""
    params = {"w": jax.random.normal(jax.random.key(0), (8, 8)), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
    moments = jax.random.normal(jax.random.key(1), (400, 400))
    state = _state().replace(params=params, opt_state={"moments": moments})
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state)
    checkpoints.close()
    before = sorted(tmp_path.rglob("*"))

    reader = Checkpoints(tmp_path, keep=None)
    start = _bytes_read()
    restored = reader.restore_params(1, jax.eval_shape(lambda: params))
    assert 8 * 8 * 4 < _bytes_read() - start < 100_000 < moments.nbytes
    chex.assert_trees_all_equal(restored, params)
    chex.assert_trees_all_equal_dtypes(restored, params)
    with pytest.raises(
        ConfigError, match=r"1: the checkpoint of another model or optimiser: params.w is float32\[8, 8\]"
    ):
        reader.restore_params(1, {**params, "w": jax.ShapeDtypeStruct((9, 8), jnp.float32)})
    with pytest.raises(ConfigError, match=r"params.w is float32\[8, 8\], and should be absent; give the model"):
        reader.restore_params(1, {"b": params["b"]})
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before


def _bytes_read() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, _state())
    checkpoints.wait()
    for part in (tmp_path / "1").rglob("d/*"):
        part.unlink()
    for read in (lambda: checkpoints.restore(1, _state()), lambda: checkpoints.restore_params(1, _state().params)):
        with pytest.raises(ConfigError, match=r"/1: the checkpoint cannot be read \(.+\); put its files back, or"):
            read()
    checkpoints.close()


def test_size_of_a_checkpoint():
    state = _state()
    params = 8 * 3 * 4 + 3 * 2
    assert bytes_of(state) == 3 * params + 4 + 8 + 4  # parameters, two moments, count, key, iteration
