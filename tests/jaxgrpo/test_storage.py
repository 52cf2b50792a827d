"""Runs in an object store: against a server that speaks Google's protocol, reached by gcsfs and by tensorstore.

Whole runs are marked slow: the emulator answers one request at a time, and once gave tensorstore a generation that it
could not read, for a reason not found.
"""

import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from etils import epath
from etils.epath.backend import fsspec_backend

from jaxgrpo import commands, storage, trainer
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError
from jaxgrpo.records import JsonLines, RunFolder, read_rows
from jaxgrpo.report import draw_curve
from jaxgrpo.stopping import Exit
from jaxgrpo.trainer import train
from tests.jaxgrpo.test_trainer import _config, _record, _train
from tests.jaxgrpo.toy import Toy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def endpoint():
    """Sets where gcsfs and tensorstore look for the store, for all tests here."""

    def forget() -> None:
        fsspec_backend._get_filesystem.cache_clear()
        gcsfs.GCSFileSystem.clear_instance_cache()

    def use(address: str) -> None:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        forget()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google what kind of bucket it is
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        gcsfs = pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
        yield use
        forget()


@pytest.fixture(scope="module")
def bucket(endpoint):
    """An empty bucket, gs://bucket."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    endpoint(f"http://127.0.0.1:{port}")
    yield "gs://bucket"
    server.stop()


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The record of the same run in a folder on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.report, "draw_curve", lambda folder: None)
        out = tmp_path_factory.mktemp("on_disk") / "run"
        _train(_config(out))
        return _record(out)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)


@pytest.mark.slow
def test_a_run_in_a_store_is_the_run_on_disk(bucket, on_disk, capsys):
    out = f"{bucket}/whole/run"
    config = _config(out)
    run = train(config, experiment=Toy(config))
    assert (run.exit, run.iteration, str(run.folder)) == (Exit.DONE, 12, out)
    assert f"Files in {out}: metrics.jsonl" in capsys.readouterr().out
    folder = RunFolder.at(out, option="--run")
    assert _record(folder.path) == on_disk
    assert folder.read_config() == config
    draw_curve(folder)
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    names = {"config.json", "manifest.json", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "curve.png"}
    assert {path.name for path in folder.path.iterdir()} == names
    with pytest.raises(ConfigError, match=f"^--out {out}: already holds a run; give --resume"):
        _train(config)


@pytest.mark.slow
def test_stopped_in_a_store_and_resumed_is_as_never_stopped(bucket, on_disk):
    out = f"{bucket}/stopped"
    run = _train(_config(out), signals={7: signal.SIGTERM})
    assert (run.exit, run.iteration) == (Exit.PREEMPTED, 7)
    assert [row["iteration"] for row in read_rows(run.folder / "metrics.jsonl")] == list(range(1, 8))
    assert _train(_config(out, resume=True)).iteration == 12
    assert _record(run.folder) == on_disk


_KILLED = """
import os, signal, sys
from jaxgrpo import trainer
from jaxgrpo.checkpoints import Checkpoints
from tests.jaxgrpo.test_trainer import _config, _train
out, at, whole = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "whole"
save = Checkpoints.save
def saved(self, iteration, state):
    save(self, iteration, state)
    if whole:
        self.wait()
Checkpoints.save = saved
_train(_config(out), signals={at: signal.SIGKILL})
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["whole", "perhaps"])
def test_killed_in_a_store_and_resumed_is_as_never_stopped(bucket, on_disk, whole, capsys):
    """Killed after its first checkpoint is whole, or the moment after that checkpoint was begun."""
    out, at = f"{bucket}/killed-{whole}", 8 if whole == "whole" else 6
    killed = subprocess.run([sys.executable, "-c", _KILLED, out, str(at), whole], cwd=ROOT, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    folder = RunFolder.at(out, option="--run")
    rows = [row["iteration"] for row in read_rows(folder.metrics)]
    assert rows == [1, 2, 3, 4, 5]  # those up to the checkpoint were there before it
    config = _config(out, resume=True)
    train(config, experiment=Toy(config))
    said = capsys.readouterr().out
    resumed = "Resuming after iteration 5" in said
    assert resumed if whole == "whole" else resumed != ("starting it again" in said)
    assert _record(folder.path) == on_disk


@pytest.mark.slow
def test_half_a_checkpoint_in_a_store_does_not_count(bucket):
    out = f"{bucket}/half"
    _train(_config(out, iterations=10))
    folder = RunFolder.at(out, option="--run")
    (folder.checkpoints / "10" / "commit_success.txt").unlink()
    checkpoints = Checkpoints(folder.checkpoints, keep=None)
    assert checkpoints.latest == 5
    checkpoints.close()
    assert (folder.checkpoints / "10" / "default").exists()  # a reader clears nothing
    assert _train(_config(out, iterations=10, resume=True)).iteration == 10
    checkpoints = Checkpoints(folder.checkpoints, keep=None)
    assert checkpoints.latest == 10
    checkpoints.close()


def test_rows_are_stored_at_a_sync_and_now_and_then(bucket, monkeypatch):
    path = epath.Path(f"{bucket}/rows.jsonl")
    log = JsonLines(path)
    log.append({"iteration": 1})
    assert read_rows(path) == []
    log.sync()
    log.append({"iteration": 2})
    assert read_rows(path) == [{"iteration": 1}]
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 0.0)
    log.append({"iteration": 3})
    assert len(read_rows(path)) == 3
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 1e9)
    log.append({"iteration": 4})
    log.close()
    assert [row["iteration"] for row in read_rows(path)] == [1, 2, 3, 4]
    log = JsonLines(path, keep=lambda i: i <= 2)
    assert read_rows(path) == log.rows == [{"iteration": 1}, {"iteration": 2}]


@pytest.mark.slow
def test_results_are_written_to_a_store(bucket, monkeypatch, capsys):
    results = {"scenarios": {}}
    monkeypatch.setattr(commands, "evaluate_scenarios", lambda *args, **options: results)
    assert main(["eval", "--model", "tiny", "--json", f"{bucket}/results/r.json"]) == Exit.DONE
    folder = epath.Path(f"{bucket}/results")
    assert [path.name for path in folder.iterdir()] == ["r.json"]
    assert json.loads((folder / "r.json").read_bytes()) == results


def _refused(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(words.split()) == Exit.USER_ERROR
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"jaxgrpo: {line}"), printed.err


def test_what_a_store_does_not_hold_is_one_line(bucket, capsys):
    _refused("train --out gs://no-bucket/run", "--out gs://no-bucket/run: cannot be written (", capsys)
    _refused("eval --run gs://bucket/none", "--run gs://bucket/none: holds no run;", capsys)
    _refused("train --init-from gs://bucket/none", "--init-from gs://bucket/none: holds no run;", capsys)
    _refused("train --out gs://bucket/none --resume", "--resume: there is no run in gs://bucket/none;", capsys)
    _refused("eval --model tiny --json gs://no/r.json", "--json gs://no: cannot be written (", capsys)


class _ReadOnly(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self._answer(404, "not here")

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(403, "the account may not create objects")

    def _answer(self, code: int, message: str) -> None:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def test_a_bucket_that_may_only_be_read_is_one_line(endpoint, capsys):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ReadOnly) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint(f"http://127.0.0.1:{server.server_port}")
        line = "--out gs://bucket/run: cannot be written (Forbidden"
        _refused("train --out gs://bucket/run", line, capsys)
        server.shutdown()
        thread.join()


def test_a_store_that_does_not_answer_is_one_line(monkeypatch, capsys):
    """A client that goes on trying: no package for the store is needed, for nothing is asked of it."""
    answered = threading.Event()
    monkeypatch.setattr(storage, "_BACKENDS", ("json",))
    monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(type(epath.Path("gs://bucket/run")), "exists", lambda path: answered.wait())
    line = "(no answer within 0.05 s); check the bucket, the network and your credentials."
    for words in ("train --out", "train --resume --out", "train --init-from", "eval --run", "eval --model tiny --json"):
        option = words.split()[-1]
        _refused(f"{words} gs://bucket/run", f"{option} gs://bucket/run: cannot be reached {line}", capsys)
    answered.set()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("s3://bucket/run", r"--out s3://bucket/run: s3:// is not supported; give a folder on this machine or gs://"),
        ("gs://bucket", r"--out gs://bucket: give a folder in a bucket, as in gs://BUCKET/FOLDER"),
        ("gs:///run", r"--out gs:///run: give a folder in a bucket"),
        ("gs://bucket/run", r"--out gs://bucket/run: gs:// needs the extra gcs; pip install 'jaxgrpo\[gcs\]'"),
    ],
)
def test_places_that_are_none(text, line, monkeypatch):
    monkeypatch.setattr(storage, "_BACKENDS", ("no_such_package",))
    with pytest.raises(ConfigError, match=f"^{line}"):
        storage.open_path(text, option="--out")


def test_local_paths_stay_local(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.open_path("~/run", option="--out") == Path(tmp_path) / "run"
    assert not storage.is_stored(storage.open_path("a:b/run", option="--out"))
