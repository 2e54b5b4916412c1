"""The runs that pages are tested with: an emulated one, whose times are known, and one whose model draws images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from omni_async.simulation import what_if
from recipes.quickstart.build_preferences import render_pairs
from tests.support.browser import in_a_thread
from tests.support.job_world import run, write_emulated, write_recipe


@pytest.fixture(scope="module", autouse=True)
def one_seed() -> Iterator[None]:
    """Simulates each change of a run once, not three times: a page has several, of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "_SEEDS", 1)
        yield


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emulated run of 12 updates; its media are noise, so that it has no samples."""
    recipe = write_emulated(tmp_path_factory.mktemp("emulated"))
    return in_a_thread(lambda: run(recipe, "emulation.time_scale=0.002")).path


@pytest.fixture(scope="session")
def painted(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Path:
    """A run of 12 updates that draws images, with validation rounds of versions 0, 6 and 12."""
    recipe = write_recipe(tmp_path_factory.mktemp("painted"), checkpoint)
    validation = f"validation={{every: 6, prompts: {recipe.parent / 'prompts.txt'}, samples_per_prompt: 2}}"
    return in_a_thread(lambda: run(recipe, "trainer.updates=12", validation)).path


@pytest.fixture(scope="session")
def preferring(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Path:
    """A run of 4 updates on preference pairs: no engines, no scorers, no rewards."""
    folder = tmp_path_factory.mktemp("preferring")
    pairs = folder / "pairs.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(render_pairs(8, seed=0)), pairs)
    offline = ("rollout.group_size=2", "data.prompts=null", "reward.scorers=[]", f"data.preferences={pairs}")
    drawn = ("rollout.sde=null", "algorithm.clip_range_nats=null", "algorithm.forward.draws=2")
    objective = ("algorithm.name=diffusion_dpo", "algorithm.dpo.beta=100", "trainer.updates=4", *drawn)
    return in_a_thread(lambda: run(write_recipe(folder, checkpoint), *objective, *offline)).path
