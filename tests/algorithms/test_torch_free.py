"""Tests that what is asked before a run starts imports no torch."""

import subprocess
import sys

PROGRAM = """
import sys, msgspec
import omni_async.algorithms.decay, omni_async.algorithms.dealing, omni_async.algorithms.selection
from omni_async.algorithms.registry import objectives
from omni_async.algorithms.trajectory_fields import trajectory_fields
from omni_async.algorithms.validation import problems
from omni_async.config import Config
from omni_async.families import family_names, find_family
for name in ("qwen_image", "stable_diffusion_3", "wan2_2"):
    assert name in family_names() and find_family(name).name == name
raw = {"model": {"path": "m"}, "data": {"prompts": "p"}, "reward": {"scorers": [{"name": "ocr"}]}}
for name, objective in objectives().items():
    config = msgspec.convert({**raw, "algorithm": {"name": name}}, Config)
    list(problems(config)), trajectory_fields(objective, config)
sys.exit("torch" in sys.modules)
"""


def test_objectives_and_families_are_known_and_checked_without_torch():
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0
