"""Tests the packages that pip gets: an sdist, the wheel that is built from it, and extras that are not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from omni_async import __version__
from omni_async.plugins.extras import EXTRAS
from tests.support.job_world import write_emulated
from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import setuptools.build_meta as backend; print(backend.{}('dist'))"
# Runs a command where no module of an extra can be imported.
BASE = f"""
import sys
sys.modules |= dict.fromkeys({[*EXTRAS]})
from omni_async.cli import main
sys.exit(main(sys.argv[1:]))
"""
UNTRACKED = shutil.ignore_patterns(".*_cache", ".git", ".venv", "__pycache__", "build", "dist", "runs", "*.egg-info")
SMALL = (
    *("run.runtime=inprocess", "tracking.mlflow.enabled=false", "validation=null", "rollout.engine=diffusers"),
    *("trainer.updates=1", "trainer.groups_per_update=1", "rollout.group_size=2", "checkpoint.every=1"),
    "algorithm.advantage.drop_zero_variance=false",
)


def run(*command: str | Path, folder: Path, path: Path | None = None) -> str:
    environment = os.environ | {"PYTHONPATH": str(path or ""), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the wheel, which is built from an unpacked sdist, into a folder of its own."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", ignore=UNTRACKED)
    name = run(sys.executable, "-c", BUILD.format("build_sdist"), folder=folder / "tree").split()[-1]
    with tarfile.open(folder / "tree" / "dist" / name) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    left_out = {".gitignore", ".gitattributes", ""}
    assert not [path for path in tracked if path not in left_out and not (unpacked / path).exists()]
    name = run(sys.executable, "-c", BUILD.format("build_wheel"), folder=unpacked).split()[-1]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder / "site")
    run(*pip, unpacked / "dist" / name, folder=folder)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wheel_alone_trains_the_quickstart(site, tmp_path):
    """Without the repository, from its recipes to an export."""
    omni_async = (sys.executable, "-P", "-m", "omni_async.cli")
    where = run(sys.executable, "-c", "import omni_async; print(omni_async.__file__)", folder=tmp_path, path=site)
    assert Path(where).is_relative_to(site)
    assert "qwen_image_lora_h800.yaml" in run(*omni_async, "list", "recipes", folder=tmp_path, path=site)
    pins = run(*omni_async, "list", "constraints", folder=tmp_path, path=site)
    assert pins == (ROOT / "constraints.txt").read_text()
    wrote = run(*omni_async, "init", "--from", "quickstart", folder=tmp_path, path=site)
    assert "omni-async train recipes/quickstart/quickstart.yaml" in wrote
    run(*omni_async, "train", "recipes/quickstart/quickstart.yaml", *SMALL, folder=tmp_path, path=site)
    (made,) = (tmp_path / "runs").iterdir()
    run(*omni_async, "report", made, folder=tmp_path, path=site)
    run(*omni_async, "export", made, "--out", "exported", folder=tmp_path, path=site)
    assert (tmp_path / "exported" / "model_index.json").is_file()


def test_extras_are_declared():
    declared = PROJECT["optional-dependencies"]
    names = {extra: {re.match(r"[\w-]+", one)[0] for one in packages} for extra, packages in declared.items()}
    packages = {module: {"cv2": "opencv-python", "math_verify": "math-verify"}.get(module, module) for module in EXTRAS}
    assert all(package in names[EXTRAS[module]] for module, package in packages.items())
    base = {re.match(r"[\w-]+", one)[0].lower() for one in PROJECT["dependencies"]}
    assert not base & {*packages.values()}
    (everything,) = declared["all"]
    assert {*re.findall(r"[a-z]+", everything.partition("[")[2])} == {*EXTRAS.values()}


def test_the_citation_names_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_base_package_runs_an_emulated_job_and_names_a_missing_extra(tmp_path):
    recipe = write_emulated(tmp_path, trainer={"updates": 1}, emulation={"profile": "profile.json", "time_scale": 0.01})
    base = (sys.executable, "-c", BASE)
    run(*base, "train", recipe, folder=tmp_path, path=ROOT)
    for arguments, said in (
        (
            ("tracking.mlflow.enabled=true",),
            "tracking.mlflow.enabled: the package mlflow is not installed; pip install",
        ),
        (
            ("emulation=null", "model.pipeline=qwen_image", "rollout.engine=diffusers", "reward.scorers=[{name: ocr}]"),
            "omni-async[ocr]",
        ),
    ):
        done = subprocess.run(
            [*base, "train", recipe, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/pipelines"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
