"""Tests the files of examples/ that start a run on a cluster, as far as they can be tested without one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_async.cli import _parse
from omni_async.config.load import load
from omni_async.records.write.metrics import METRICS
from omni_async.records.write.sinks.prometheus_sink import described
from tests.support.patience import PATIENCE, wait_for
from tests.support.places import ROOT
from tests.support.ports import unused_address

EXAMPLES = ROOT / "examples"
RECIPE = ROOT / "recipes" / "quickstart" / "quickstart.yaml"
SCRIPT = EXAMPLES / "slurm" / "train.sbatch"
_NOTE = 'echo "$(basename "$0") $*" >> "$LOG"\n'
# A pretended cluster: srun runs its command here, Ray's daemons sleep, and the run ends at SIGTERM with its own code.
_COMMANDS = {
    "srun": _NOTE + 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "ray": _NOTE + "exec sleep 600\n",
    # As the real program, it waits for Ray's daemons: the first, and with three machines the others.
    "python": 'until [[ $(grep -c "^srun" "$LOG" 2> /dev/null) -ge $(($4 > 1 ? 2 : 1)) ]]; do sleep 0.05; done\n'
    'echo "machines $4" >> "$LOG"\nexit "${MACHINES:-0}"\n',
    "omni-async": _NOTE + "trap 'kill %1; echo checkpoint >> \"$LOG\"; exit 3' TERM\n"
    '[[ -n ${ENDS:-} ]] && exit "$ENDS"\nsleep 600 & wait\n',
}


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield an environment in which the batch script finds the pretended commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in _COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        (commands / name).chmod(stat.S_IRWXU)
    yield {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "OMNI_RUNS": "/shared/runs",
        "SLURM_JOB_NUM_NODES": "3",
    }


def calls(cluster: dict[str, str]) -> list[str]:
    log = Path(cluster["LOG"])
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def submit(cluster: dict[str, str], *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env=cluster | more,
        text=True,
        stderr=subprocess.PIPE,
    )


def test_batch_job_runs_on_every_machine(cluster):
    job = submit(cluster, "my.yaml", "trainer.updates=5", ENDS="0")
    assert job.wait(PATIENCE) == 0
    head = os.uname().nodename
    text = "\n".join(calls(cluster))
    assert f"srun --nodes=1 --ntasks=1 --nodelist={head} ray start --head --port=6379" in text
    assert f"srun --nodes=2 --ntasks=2 --exclude={head} ray start --address={head}:6379 --block" in text
    assert text.index("machines 1") < text.index("--exclude") and text.index("machines 3") < text.index("omni-async")
    [run] = [line for line in calls(cluster) if line.startswith("omni-async")]
    options = _parse(run.split()[1:])
    assert {"run.dir=/shared/runs", "checkpoint.resume=auto", "trainer.updates=5"} <= {*options.overrides}
    load(RECIPE, [one for one in options.overrides if not one.startswith("run.dir")])


def test_time_limit_ends_the_run_with_its_checkpoint(cluster):
    """SLURM signals the batch script alone."""
    job = submit(cluster, "my.yaml")
    wait_for(lambda: any(line.startswith("omni-async") for line in calls(cluster)), "the run starts")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(PATIENCE) == 3, "the code of the run"
    assert "checkpoint" in calls(cluster)


@pytest.mark.parametrize(("more", "code"), [({"ENDS": "2"}, 2), ({"MACHINES": "1"}, 1)])
def test_batch_job_fails_as_its_run_or_its_machines_do(cluster, more, code):
    assert submit(cluster, "my.yaml", **more).wait(PATIENCE) == code
    assert ("MACHINES" in more) == (not any(line.startswith("omni-async") for line in calls(cluster)))


def test_batch_job_needs_a_recipe(cluster):
    job = submit(cluster)
    assert job.wait(PATIENCE) != 0 and job.stderr is not None
    assert "usage: sbatch train.sbatch RECIPE" in job.stderr.read() and calls(cluster) == []


def count(machines: int, port: int, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Wait for two machines with the script's program, for a second, in a pretended Ray that has `machines`."""
    [program] = re.findall(r"<< 'PYTHON'\n(.*?)^PYTHON$", SCRIPT.read_text(encoding="utf-8"), flags=re.M | re.S)
    pretended = f"def init(**_): pass\ndef nodes(): return [{{'Alive': True}}, {{'Alive': {machines > 1}}}]\n"
    (tmp_path / "ray.py").write_text(pretended, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-c", program.replace("monotonic() + 300", "monotonic() + 1"), "127.0.0.1", str(port), "2"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_machines_are_awaited(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert count(2, port, tmp_path).returncode == 0
        few = count(1, port, tmp_path)
    assert few.returncode == 1 and f"Ray at 127.0.0.1:{port}: fewer than 2 machines after" in few.stderr
    with unused_address() as address:
        none = count(2, int(address.partition(":")[2]), tmp_path)
    assert none.returncode == 1 and "nobody listens after" in none.stderr


def test_kubernetes_objects_belong_together():
    [job] = objects(EXAMPLES / "kuberay" / "rayjob.yaml")
    [claim] = objects(EXAMPLES / "kuberay" / "volume.yaml")
    command, *arguments = job["spec"]["entrypoint"].split()
    options = _parse(arguments)
    assert command == "omni-async" and {*options.overrides} >= {"run.ray_address=auto", "checkpoint.resume=auto"}
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        variables = {one["name"] for one in container["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= variables
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        [shared] = [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert shared["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts[shared["name"]] == "/shared" and "/dev/shm" in mounts.values()
        # Kubernetes takes no request above the limit, and requires both to be equal for accelerators.
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_services_of_one_machine_fit_each_other():
    [composed] = objects(EXAMPLES / "compose" / "compose.yaml")
    services = composed["services"]
    for name in ("train", "watch"):
        filled = [re.sub(r"\$\{RECIPE:.*\}", "recipe.yaml", one) for one in services[name]["command"]]
        _parse(filled)
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", []))
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert (EXAMPLES / "compose" / volume.split(":")[0]).exists(), volume
    [scraped] = objects(EXAMPLES / "compose" / "prometheus.yaml")
    [targets] = [one["targets"] for one in scraped["scrape_configs"][0]["static_configs"]]
    prometheus = load(RECIPE, ["tracking.prometheus.enabled=true"]).tracking.prometheus
    assert targets == [f"{prometheus.host}:{prometheus.port}"]


def test_dashboard_shows_metrics_that_the_run_exports():
    dashboard = json.loads((EXAMPLES / "grafana" / "omni_async.json").read_text(encoding="utf-8"))
    exported = {
        re.sub(r"\W+", "_", f"omni_async_{described(metric)[0]}"): {"job", *metric.labels} for metric in METRICS
    }
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(targets) > 15
    for target in targets:
        [(name, selected)] = re.findall(r"^(\w+)\{(.*)\}$", target["expr"])
        assert name in exported, name
        used = {*re.findall(r"(\w+)=", selected), *re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        assert used <= exported[name], target
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
