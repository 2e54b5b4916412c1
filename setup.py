"""Adds the recipes and the pinned versions to the wheel; `pyproject.toml` has everything else.

An editable install reads both from the repository."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "omni_async")
        shutil.rmtree(package / "recipes", ignore_errors=True)
        shutil.copytree(
            "recipes",
            package / "recipes",
            ignore=shutil.ignore_patterns("__pycache__", "runs", "teacher", "preferences.parquet"),
        )
        shutil.copyfile("constraints.txt", package / "constraints.txt")


setup(cmdclass={"build_py": BuildWithRecipes})
