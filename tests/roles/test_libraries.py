"""Tests that the libraries of models do not import packages that no role uses."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from omni_async.plugins.hidden import hidden
from omni_async.roles.libraries import look_without_unused

# colorsys: of the standard library, and used by nothing here
_LOAD = f"""
import sys
from {look_without_unused.__module__} import look_without_unused
look_without_unused()
from diffusers.models.transformers import QwenImageTransformer2DModel
from transformers import GenerationMixin
print(*sorted({{"pandas", "scipy", "sklearn"}} & {{*sys.modules}}))
import scipy.stats, sklearn
"""


def test_a_hidden_package_is_absent_until_the_end():
    sys.modules.pop("colorsys", None)
    with hidden(["colorsys", "pytest"]):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        assert importlib.util.find_spec("pytest") is not None  # imported already
    assert importlib.import_module("colorsys").rgb_to_hsv(1, 0, 0) == (0, 1, 1)


@pytest.mark.slow
@pytest.mark.thorough
def test_models_are_loaded_without_unused_packages():
    loaded = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
