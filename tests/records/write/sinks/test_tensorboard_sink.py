"""Tests of the event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer import event_file_writer

from omni_async.config import schema
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.tensorboard_sink import TensorboardSink
from tests.records.write.sinks.sink_world import LEFT_OUT, RED, about, tell


def opened(folder: Path, goes_on: bool = False) -> tuple[TensorboardSink, Sinks]:
    sink = TensorboardSink(schema.Tensorboard(enabled=True), about(folder, goes_on))
    return sink, Sinks([sink])


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in events.Scalars(name)]


def test_numbers_are_at_their_versions_in_groups_with_images_and_charts_of_what_belongs_together(tmp_path):
    sink, sinks = opened(tmp_path)
    sinks.begin(0)
    tell(sinks)
    sinks.finish("done")
    events = read(tmp_path)
    assert scalars(events, "goal/reward") == [(1, 0.25), (2, 0.5)]
    assert scalars(events, "goal/validation_reward") == [(1, 0.75)]
    assert [one.step for one in events.Images("goal/validation")] == [1]
    picture = Image.open(io.BytesIO(events.Images("goal/validation")[0].encoded_image_string))
    assert picture.size == (40, 30) and picture.getpixel((5, 5)) == RED
    assert scalars(events, "goal/not_scored") == [(1, 1.0)] and scalars(events, "goal/validation_gain") == [(1, 0.5)]
    assert events.Tensors("goal/not_scored/text_summary")[0].tensor_proto.string_val[0] == LEFT_OUT.encode()
    assert b"omni-async report" in events.Tensors("about/text_summary")[0].tensor_proto.string_val[0]
    [layout] = events.Tensors("custom_scalars__config__")
    charts = {
        chart.title: chart.multiline.tag[0]
        for category in Layout.FromString(layout.tensor_proto.string_val[0]).category
        for chart in category.chart
    }
    assert re.match(charts["busy/<role>"], "waiting/busy_trainer")
    assert re.match(charts["ess/step_<step>"], "off_policy_by_step/ess_step_03")
    assert not re.match(charts["ess/step_<step>"], "off_policy_by_step/masked_step_03")
    program, _, folder = sink.where.partition(" --logdir ")
    assert shutil.which(program) and folder == str(tmp_path / "tensorboard")


def test_a_run_that_goes_back_has_every_version_once_and_one_that_did_not_begin_leaves_nothing(tmp_path, monkeypatch):
    # Files of one second are read in the order of this number's digits: the tenth of a process before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    _, sinks = opened(tmp_path)
    sinks.begin(0)
    for step in (1, 2, 3, 4):
        sinks.metrics({"reward": 0.1}, step)
    sinks.metrics({"validation/reward": 0.5}, 2)
    sinks.begin(2)  # a part was lost, and the run goes on from its checkpoint
    sinks.metrics({"reward": 0.2}, 3)
    sinks.finish("interrupted")
    before = {path.name for path in (tmp_path / "tensorboard").iterdir()}
    sink, unused = opened(tmp_path, goes_on=True)
    unused.finish("failed")
    assert sink.where == "" and {path.name for path in (tmp_path / "tensorboard").iterdir()} == before
    _, sinks = opened(tmp_path, goes_on=True)
    sinks.begin(3)
    sinks.metrics({"reward": 0.3}, 4)
    sinks.finish("done")
    events = read(tmp_path)
    assert [step for step, _ in scalars(events, "goal/reward")] == [1, 2, 3, 4]
    assert [round(value, 3) for _, value in scalars(events, "goal/reward")] == [0.1, 0.1, 0.2, 0.3]
    assert scalars(events, "goal/validation_reward") == [(2, 0.5)]
