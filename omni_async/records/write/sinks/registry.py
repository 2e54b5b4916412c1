"""Opens the sinks that a configuration enables, and checks which packages they need. Imports no sink before that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omni_async.config import Config, ConfigError
from omni_async.config.redact import redact_text, with_secrets
from omni_async.config.schema import Tracking
from omni_async.plugins.extras import missing_extra
from omni_async.records.write.sinks.base import About, Ended, Sink, SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.late import LateSink

logger = logging.getLogger(__name__)

# Section of `tracking` -> the sink's class, and the package it requires.
_SINKS = {
    "mlflow": ("mlflow_sink:MlflowSink", "mlflow"),
    "wandb": ("wandb_sink:WandbSink", "wandb"),
    "tensorboard": ("tensorboard_sink:TensorboardSink", "tensorboard"),
    "prometheus": ("prometheus_sink:PrometheusSink", "prometheus_client"),
}


def enabled(tracking: Tracking) -> list[str]:
    """Return the names of the enabled sections."""
    return [name for name in _SINKS if getattr(tracking, name).enabled]


def require_usable(config: Config, installed: Callable[[str], object] = find_spec) -> None:
    """Check the requirements of the enabled sinks.

    Raises ConfigError, one line, for a package that is not installed, a secret that is not set, or a folder whose name
    a tracker cannot take."""
    _check_folder(config)
    for name in enabled(config.tracking):
        package = _SINKS[name][1]
        if installed(package) is None:
            off = f", or set tracking.{name}.enabled=false" if name == "mlflow" else ""
            raise ConfigError(f"tracking.{name}.enabled: {missing_extra(package)}{off}")
        try:
            with_secrets(getattr(config.tracking, name), f"tracking.{name}")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _check_folder(config: Config) -> None:
    folder, mlflow = str(Path(config.run.dir).absolute()), config.tracking.mlflow
    if enabled(config.tracking) and not folder.isprintable():
        raise ConfigError(f"run.dir: trackers cannot take the name of {folder!a}; use printable characters")
    # The database is a URL: SQLAlchemy would parse the rest as options or as a percent escape.
    if mlflow.enabled and mlflow.tracking_uri is None and (wrong := {"?", "%"} & {*folder}):
        raise ConfigError(
            f"run.dir: MLflow's local database cannot be in {folder}, because of {' and '.join(sorted(wrong))}; use"
            " another folder, or set tracking.mlflow.tracking_uri"
        )


def open_sinks(tracking: Tracking, about: About, version: int) -> Sinks:
    """Open the sinks of a run, and begin it there unless it resumes.

    A resumed run does not wait for a tracker that is down: its sink is opened later. Raises SinkUnusableError.

    `version`: the update that the run resumes from."""
    opened: list[Sink] = []
    try:
        for name in enabled(tracking):
            module, _, kind = _SINKS[name][0].partition(":")
            sink: Any = getattr(import_module(f"omni_async.records.write.sinks.{module}"), kind)
            settings = with_secrets(getattr(tracking, name), f"tracking.{name}")
            opened.append(_open(partial(sink, settings, about), sink.label, about.goes_on))
    except BaseException:
        for one in opened:
            _end(one, None if about.goes_on else "failed")
        raise
    sinks = Sinks(opened)
    if not about.goes_on:
        sinks.begin(version)
    return sinks


def _open(construct: Callable[[], Sink], label: str, resumes: bool) -> Sink:
    try:
        return construct()
    except SinkUnusableError as error:
        if not (resumes and error.down):
            raise
        logger.warning("%s; the run resumes without it, and its writes wait", error)
        return LateSink(label, construct)


def _end(sink: Sink, status: Ended | None) -> None:
    """End a sink that was opened before another failed. Only log its errors: the caller raises the other's failure."""
    try:
        sink.finish(status)
    except Exception as error:  # noqa: BLE001 (trackers raise anything)
        logger.warning(
            "the run in %s could not be ended: %s", sink.label, redact_text(f"{type(error).__name__}: {error}")
        )
