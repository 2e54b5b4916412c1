"""The trainer: what it publishes and keeps, and how it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from actor_world import AccountingRank, Desk, failure_of, make_config, make_group, make_manifest, play, settle

from omni_async.actors.trainer import Trainer
from omni_async.control.clock import ManualClock
from omni_async.types import WeightManifest


class Publications:
    def __init__(self, log: list[str]) -> None:
        self.versions: list[int] = []
        self._log = log

    async def publish(self, manifest: WeightManifest, buckets: list[Any]) -> None:
        assert manifest == make_manifest(manifest.version)
        self.versions.append(manifest.version)
        self._log.append(f"publish {manifest.version}")


class Stage:
    """A trainer with a model-free rank; `groups` lie ready for it, and the run ends when they are used up."""

    def __init__(self, folder: Path, groups: int, *, ranks: int = 1, extra: dict[str, Any] | None = None, **changes: Any) -> None:
        self.desk, self.folder = Desk(), folder
        self.publications = Publications(self.desk.log)
        self.ranks = [AccountingRank(self.desk.log if i == 0 else None, extra) for i in range(ranks)]
        for rank in self.ranks[1:]:
            rank.writes = False
        self.trainer = Trainer(
            make_config(**changes, **{"trainer.workers": ranks}), self.ranks, self.desk, self.publications, str(folder), ManualClock()
        )
        self.desk.offer(*(make_group(i, [0.0, 1.0, 2.0, 3.0]) for i in range(groups)))

    async def main(self) -> None:
        await self.trainer.start()
        run = asyncio.create_task(self.trainer.run())
        while not run.done() and self.desk.groups:
            await settle()
        await settle()
        self.desk.close()
        await run

    def play(self) -> Stage:
        play(self.main())
        return self

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def extra(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "state.json").read_text())["extra"]


def test_version_0_is_published_before_anything_is_trained(tmp_path):
    stage = Stage(tmp_path, 0).play()
    assert stage.publications.versions == [0]
    assert stage.desk.log[:2] == ["export 0", "publish 0"]
    assert not stage.desk.updates


@pytest.mark.parametrize(("every", "published"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_it_publishes_every_k_updates_and_at_the_end(tmp_path, every, published):
    stage = Stage(tmp_path, 8, **{"weights.publish_every": every}).play()
    assert stage.publications.versions == published
    assert [report.version for report in stage.desk.updates] == [1, 2, 3, 4]


def test_an_update_is_reported_before_its_version_is_published_and_published_before_it_is_saved(tmp_path):
    log = Stage(tmp_path, 2, **{"trainer.updates": 1}).play().desk.log
    assert log == ["export 0", "publish 0", "accumulate", "accumulate", "step", "update 1", "export 1", "publish 1", "save update-000001"]


def test_an_update_says_which_groups_it_was_made_of(tmp_path):
    stage = Stage(tmp_path, 8).play()
    assert [report.groups for report in stage.desk.updates] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "loss" in stage.desk.updates[0].metrics


def test_it_saves_every_k_updates_and_keeps_the_newest(tmp_path):
    stage = Stage(tmp_path, 14, **{"trainer.updates": 7, "checkpoint.every": 2, "checkpoint.keep": 2}).play()
    saved = [line for line in stage.desk.log if line.startswith("save")]
    assert saved == [f"save update-{version:06d}" for version in (2, 4, 6, 7)]
    assert stage.kept == ["update-000006", "update-000007"]
    assert stage.extra("update-000007") == {"version": 7, "next_group": 77}


def test_the_last_update_is_not_saved_twice(tmp_path):
    stage = Stage(tmp_path, 8, **{"checkpoint.every": 4}).play()
    assert [line for line in stage.desk.log if line.startswith("save")] == ["save update-000004"]


def test_an_early_end_stops_it_and_leaves_a_checkpoint_of_the_last_whole_update(tmp_path):
    stage = Stage(tmp_path, 5).play()  # the third update gets one group of two
    assert [report.version for report in stage.desk.updates] == [1, 2]
    assert stage.publications.versions == [0, 1, 2]
    assert stage.kept == ["update-000002"]
    assert stage.ranks[0].step_weights == pytest.approx([1.0, 1.0])


def test_a_resumed_trainer_continues_with_the_checkpoints_version(tmp_path):
    stage = Stage(tmp_path, 4, extra={"version": 2, "next_group": 4}, **{"checkpoint.resume": "somewhere"}).play()
    assert stage.ranks[0].setup_calls == [("somewhere", None)]
    assert stage.publications.versions == [2, 3, 4]
    assert [report.version for report in stage.desk.updates] == [3, 4]


def test_it_says_what_it_needs_of_a_sample_and_how_it_streams(tmp_path):
    stage = Stage(tmp_path, 0).play()
    assert {"latents", "log_probs", "conditioning", "means"} <= set(stage.desk.fields)
    assert len(set(stage.desk.fields)) == len(stage.desk.fields)
    assert stage.desk.phases[0].startswith("training streams: unscaled (")


def test_several_ranks_meet_at_one_address(tmp_path):
    stage = Stage(tmp_path, 2, ranks=2, **{"trainer.updates": 1}).play()
    [(_, first)], [(_, second)] = (rank.setup_calls for rank in stage.ranks)
    assert first == second
    assert first.startswith("tcp://127.0.0.1:")
    assert stage.ranks[0].step_weights == stage.ranks[1].step_weights


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "update-000001").mkdir()  # in the way
    stage = Stage(tmp_path, 2, **{"trainer.updates": 1})

    async def main() -> None:
        assert type(await failure_of(stage.main())) is FileExistsError

    play(main())


def test_waits_for_groups_are_told_apart_from_training(tmp_path):
    stage = Stage(tmp_path, 8).play()
    assert {"export", "train", "checkpoint"} <= {span.kind for span in stage.desk.spans}
