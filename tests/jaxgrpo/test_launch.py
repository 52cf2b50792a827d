"""Files for launching on many hosts: their syntax, and that the commands in them are ones that `jaxgrpo` knows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxgrpo.cli import TrainOptions, read_options, train_config
from jaxgrpo.hosts import LaunchOptions, find_cluster

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
FILES = [ROOT / "docs" / "launch.md", *SCRIPTS, LAUNCH / "gke_jobset.yaml"]


def commands(text: str) -> list[list[str]]:
    """The words behind `jaxgrpo` of all commands in a text, variables replaced by what they may hold."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = re.search(r"(?:^ *|exec |/bin/| )jaxgrpo (train .*)", line)
        if match and not line.lstrip().startswith("#") and "`jaxgrpo" not in line:
            words = re.sub(r"\"?\$\{?resume(\[@\])?\}?\"?", "--resume", match[1]).removesuffix(" &")
            words = re.sub(r"\"\$(\w+)\"", r"\1", words)
            found.append(shlex.split(words.removesuffix('"')))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", script], check=True)
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "count"), list(zip(FILES, (3, 1, 1, 1), strict=True)), ids=lambda x: getattr(x, "name", "")
)
def test_commands_are_those_of_the_command_line(path, count):
    found = commands(path.read_text())
    assert len(found) == count
    for command, *words in found:
        assert command == "train"
        given = read_options(TrainOptions, words)
        assert given is not None and given["out"]
        launch = {name: given.pop(name) for name in ("coordinator", "processes", "process_id") if name in given}
        assert find_cluster(LaunchOptions(**launch), {}) is not None or not launch
        given.pop("resume", None)  # there is no such run here
        assert train_config(given).model == given.get("model", "tiny")


def test_unknown_options_would_be_found():
    (command,) = commands('  exec jaxgrpo train --modell tiny --out "$OUT" $resume"')
    assert command == ["train", "--modell", "tiny", "--out", "OUT", "--resume"]
    with pytest.raises(ValueError, match=r"unknown option --modell"):
        read_options(TrainOptions, command[1:])


def test_the_jobset_has_what_its_schema_requires():
    """JobSet v1alpha2, the Kubernetes jobs in it, and what GKE asks of pods with TPUs."""
    jobset: Any = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", jobset["metadata"]["name"])
    spec = jobset["spec"]
    assert set(spec) <= {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"}
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = spec["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    # A policy for exit codes, and JobSet's restarts of all, need pods that do not restart by themselves.
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"]["google.com/tpu"] == chips
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert job["completions"] * chips == rows * columns
    script = "\n".join(container["args"])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert {variable["name"] for variable in container["env"]} >= set(re.findall(r"\$([A-Z]+)", script))
