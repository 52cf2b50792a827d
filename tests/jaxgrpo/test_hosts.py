"""Runs of several processes: real ones, on loopback, each with four devices."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxgrpo import hosts
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError
from jaxgrpo.hosts import LaunchOptions, find_cluster
from jaxgrpo.records import read_rows, without_timings
from jaxgrpo.stopping import Exit

ROOT = Path(__file__).parents[2]
RUN = {
    "groups": 2,
    "group-size": 4,
    "micro-batch": 16,
    "rollout-rows": 0,
    "evaluate-episodes": 8,
    "evaluate-every": 0,
    "checkpoint-every": 2,
}


def command(out: Path, *more: object, devices: int) -> dict[str, Any]:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    given = [f"--{name}={value}" for name, value in RUN.items()] + ["--no-compilation-cache"]
    return {
        "args": [sys.executable, "-m", "jaxgrpo", "train", "--out", str(out), *given, *map(str, more)],
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def start_two(out: Path, *more: object) -> list["subprocess.Popen[str]"]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--heartbeat", 10]
    return [subprocess.Popen(**command(out, *cluster, "--process-id", i, *more, devices=4)) for i in (0, 1)]


def wait_for_rows(out: Path, count: int, processes: list["subprocess.Popen[str]"]) -> None:
    while not (out / "metrics.jsonl").exists() or len(read_rows(out / "metrics.jsonl")) < count:
        if any(process.poll() is not None for process in processes):
            raise AssertionError([process.communicate() for process in processes])
        time.sleep(0.1)


def child_of(parent: "subprocess.Popen[str]") -> int:
    (task,) = Path(f"/proc/{parent.pid}/task").glob(f"{parent.pid}/children")
    return int(task.read_text().split()[0])


def ended(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    outputs = [process.communicate() for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """A run of two processes, the second of which is killed after a few iterations."""
    out = tmp_path_factory.mktemp("hosts") / "run"
    processes = start_two(out, "--iterations", 10_000)
    wait_for_rows(out, 3, processes)
    os.kill(child_of(processes[1]), signal.SIGKILL)
    return out, ended(processes)


def test_a_lost_process_is_one_line_and_a_code(lost: tuple[Path, list[tuple[int, str, str]]]) -> None:
    (first, shown, line), (second, _, other_line) = lost[1]
    assert first == Exit.PEER_LOST
    assert line.startswith("jaxgrpo: another process of the run was lost") and "--resume" in line
    assert line.count("\n") == 1
    assert "iteration 1/10000" in shown
    assert second == 128 + signal.SIGKILL
    assert other_line.startswith("jaxgrpo: this process of the run was ended by SIGKILL")
    assert other_line.count("\n") == 1


def test_two_processes_give_the_losses_of_one_which_can_go_on(
    lost: tuple[Path, list[tuple[int, str, str]]], tmp_path: Path
) -> None:
    out, alone = lost[0], tmp_path / "alone"
    rows = read_rows(out / "metrics.jsonl")
    done = int(max((path.name for path in (out / "checkpoints").glob("[0-9]*")), key=int))
    one = [command(alone, "--iterations", 3, devices=8), command(out, "--resume", "--iterations", done + 2, devices=8)]
    for code, _, error in ended([subprocess.Popen(**options) for options in one]):
        assert (code, error) == (0, "")
    for theirs, ours in zip(rows, read_rows(alone / "metrics.jsonl"), strict=False):
        for name, value in without_timings(ours).items():
            assert theirs[name] == pytest.approx(value, abs=1e-5), name
    # What went on from the checkpoint of two processes is the same run.
    after = read_rows(out / "metrics.jsonl")
    assert [row["iteration"] for row in after] == list(range(1, done + 3))
    assert [without_timings(row) for row in after[:done]] == [without_timings(row) for row in rows[:done]]
    sessions = json.loads((out / "manifest.json").read_text())["sessions"]
    assert [(session["processes"], session["devices"]) for session in sessions] == [(2, 8), (1, 8)]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    processes = start_two(tmp_path / "run", "--iterations", 10_000)
    wait_for_rows(tmp_path / "run", 1, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert [code for code, *_ in ended(processes)] == [Exit.PREEMPTED, Exit.PREEMPTED]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    stopped = manifest["sessions"][-1]["to"]
    assert manifest["sessions"][-1]["ended"] == "preempted"
    assert (tmp_path / "run" / "checkpoints" / str(stopped)).exists()


@pytest.mark.slow
def test_what_one_process_refuses_ends_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (first, _, line), (second, _, other) = ended(start_two(tmp_path / "run"))
    assert (first, second) == (2, 2)
    assert "already holds a run" in line and line.count("\n") == 1
    assert other == "jaxgrpo: process 1: process 0 could not go on, and says why.\n"


# -- Without other processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"coordinator": "a:1"}, "give all three"),
        ({"processes": 2, "process_id": 0}, "give all three"),
        ({"coordinator": "a", "processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "from 0 to 1"),
        ({"heartbeat": 0}, "at least 1"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        find_cluster(LaunchOptions(**given), {})


def test_usual_environments_are_found() -> None:
    assert find_cluster(LaunchOptions(), {}) is None
    assert find_cluster(LaunchOptions(), {"SLURM_STEP_NUM_TASKS": "1"}) is None
    slurm = find_cluster(LaunchOptions(), {"SLURM_STEP_NUM_TASKS": "4"})
    assert slurm is not None and (slurm.kind, slurm.options) == ("SLURM", {})
    tpu = find_cluster(LaunchOptions(heartbeat=30), {"TPU_WORKER_HOSTNAMES": "t0,t1"})
    assert tpu is not None and (tpu.kind, tpu.heartbeat) == ("TPU", 30)
    given = find_cluster(LaunchOptions("h:1", 2, 1), {"SLURM_STEP_NUM_TASKS": "4"})
    assert given is not None and given.options == {
        "coordinator_address": "h:1",
        "num_processes": 2,
        "process_id": 1,
    }


@pytest.mark.parametrize(("certain", "seen"), [(False, 1), (True, 1), (False, 2)])
def test_a_host_that_finds_no_others(certain: bool, seen: int) -> None:
    """One with TPUs, which may be the only one, makes the run alone; one that is told of others, or whose TPUs belong
    to a slice of several hosts, does not."""
    program = (
        "import jax; from jaxgrpo.hosts import Cluster, have_joined, join\n"
        f"jax.process_count = lambda: {seen}\n"
        f"join(Cluster('TPU', 30, {{}}, certain={certain}))\n"
        "print(jax.process_count(), have_joined())"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "JAX_COORDINATOR", "TPU"))}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if certain or seen > 1:
        assert "ConfigError: TPU: the processes of the run do not find each other" in found.stderr
    else:
        assert (found.stdout, found.returncode) == ("1 False\n", 0)
        assert "TPU: no other hosts were found; this one makes the run alone.\n" in found.stderr


def test_a_mistake_in_them_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--processes", "2"]) == 2
    assert capsys.readouterr().err == (
        "jaxgrpo: --coordinator, --processes and --process-id: give all three, or none.\n"
    )


def test_logs_and_dumps_are_held_back() -> None:
    shown, held = io.StringIO(), deque[str]()
    lines = [
        "W1130 15:29:41.366645 24240 spmd.cc:656] slow\n",
        "jaxgrpo: a line\n",
        "[Gloo] Rank 0 is connected to 1 peer ranks.\n",
        "E1130 15:29:41.366645 24240 client.cc:1] lost\n",
        "The tasks have crashed.\n",
        "*** SIGABRT received\n",
        "    @ 0x7f  abort\n",
        "Traceback (most recent call last):\n",
        "  File x\n",
    ]
    hosts._pass_on(io.StringIO("".join(lines)), shown, held)
    assert shown.getvalue() == "".join(lines[i] for i in (1, 7, 8))
    assert list(held) == [lines[i] for i in (0, 2, 3, 4, 5, 6)]


def test_one_process_agrees_with_itself() -> None:
    assert hosts.agree(3) == 3 and hosts.is_first()
    assert hosts.together(lambda: 5) == 5

    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        hosts.together(fail)


def test_only_failures_of_peers_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer\nmore")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert not hosts.tells_of_peers(lost)  # there are none
    monkeypatch.setattr(hosts, "have_joined", lambda: True)
    assert hosts.tells_of_peers(lost) and not hosts.tells_of_peers(full)
    assert "\n" not in hosts.lost_line(lost)
