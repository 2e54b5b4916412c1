from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.config import ConfigError, schema
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.registry import enabled, open_sinks, require_usable
from omni_async.records.write.sinks.tensorboard_sink import TensorboardSink
from tests.records.write.sinks.sink_world import about
from tests.support.configs import build


def config(**sections: Any) -> schema.Config:
    off = {"mlflow": {"enabled": False}}
    return build({"tracking": off | {name: {"enabled": True, **keys} for name, keys in sections.items()}})


def test_a_package_that_is_missing_and_a_secret_that_is_not_set_are_said_before_anything_starts(monkeypatch):
    missing = "tracking.wandb.enabled: the package wandb is not installed; pip install 'omni-async[sinks]'"
    with pytest.raises(ConfigError) as refused:
        require_usable(config(tensorboard={}, wandb={}), installed=lambda name: None if name == "wandb" else name)
    assert str(refused.value) == missing
    require_usable(config(tensorboard={}, prometheus={}, mlflow={}))
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^tracking\.wandb\.?.*'env:MY_KEY' names an environment variable that"):
        require_usable(config(wandb={"api_key": "env:MY_KEY"}))
    assert enabled(schema.Tracking()) == ["mlflow"], "what sends to others is off unless it is switched on"


@pytest.mark.parametrize("name", ["a?b", "50%41", "a\nb", "a\udcffb"])
def test_folder_names_that_trackers_cannot_take_are_refused(tmp_path, name):
    refused = replace(config(mlflow={}), run=schema.Run(dir=str(tmp_path / name)))
    with pytest.raises(ConfigError, match=r"^run\.dir: "):
        require_usable(refused)
    if name.isprintable():
        require_usable(replace(refused, tracking=config(tensorboard={}).tracking))


def test_folder_names_that_trackers_can_take(tmp_path):
    run = tmp_path / "sp ace" / "ha#sh" / "apo'strophe" / "üñ" / "semi;colon" / "back\\slash" / "run"
    require_usable(replace(config(mlflow={}, tensorboard={}), run=schema.Run(dir=str(run.parent))))
    open_sinks(config(tensorboard={}).tracking, about(run), 0).finish("done")
    assert [*(run / "tensorboard").iterdir()]


def test_a_sink_that_cannot_be_used_costs_the_run_that_was_opened_in_another(tmp_path, monkeypatch, caplog):
    sinks = open_sinks(config(tensorboard={}, prometheus={"port": 0}).tracking, about(tmp_path / "run-1"), 0)
    sinks.finish("done")
    assert [label for label, _ in sinks.where] == ["TensorBoard"]
    both = config(tensorboard={}, prometheus={"host": "203.0.113.1"}).tracking
    with pytest.raises(SinkUnusableError, match="cannot listen at 203"):
        open_sinks(both, about(tmp_path / "run-2"), 0)
    assert not (tmp_path / "run-2" / "tensorboard").exists()

    def refuse(sink: TensorboardSink, status: str | None) -> None:
        raise OSError("https://me:hunter2@h is gone")

    monkeypatch.setattr(TensorboardSink, "finish", refuse)
    with pytest.raises(SinkUnusableError, match="cannot listen at 203"):
        open_sinks(both, about(tmp_path / "run-3"), 0)
    assert caplog.messages == ["the run in TensorBoard could not be ended: OSError: https://***@h is gone"]
