"""Sends a run to Weights & Biases, or keeps it in the run folder for `wandb sync`.

The W&B id is the run id, so a resumed run continues the same W&B run. Steps are a separate metric: the library drops
data of an earlier step than the last, such as that of a validation round. Nothing is captured or reported that the run
did not record: no console, machine data, code, or errors of the library.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.config import schema
from omni_async.config.redact import redact_text
from omni_async.records.write.catalogue import chart
from omni_async.records.write.metric import Group
from omni_async.records.write.sinks.base import About, Ended, Numbers, Sink, SinkUnusableError, command_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from wandb import Run

_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # read on import
_STEP = "update"
# The library's own exit codes for these endings: W&B shows an interrupted run as killed.
_EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 255}


class WandbSink(Sink):
    label = "W&B"

    def __init__(self, config: schema.Wandb, about: About) -> None:
        """Start a run unless it continues one. Raises SinkUnusableError if that fails, or there is no account."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._config, self._about = config, about
        self._run: Run | None = None
        if not about.goes_on:
            try:
                self._run = self._open()
            except Exception as error:  # noqa: BLE001  # the library raises anything: it becomes one clear error
                reason = redact_text(str(error)).strip().partition("\n")[0] or type(error).__name__
                raise SinkUnusableError(
                    f"tracking.wandb: cannot start a run: {reason}; set tracking.wandb.mode=offline, or"
                    " tracking.wandb.enabled=false",
                    down=not self.refuses(error),
                ) from None  # the original may quote the key

    def _open(self) -> Run:
        import wandb

        config, about = self._config, self._about
        settings = wandb.Settings(
            **{key: value for key in ("api_key", "base_url") if (value := getattr(config, key)) is not None},
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            dir=about.run.path,
            id=about.run.run_id,
            name=about.run.run_id,
            resume="allow" if config.mode == "online" else None,  # offline, `wandb sync` does that
            reinit="create_new",  # the library's global run is left alone
            tags=[f"S={value}" if name == "S" else value for name, value in about.tags.items()],
            notes=about.description,
            config=about.params,
            settings=settings,
        )
        run.define_metric(_STEP, hidden=True)
        run.define_metric("*", step_metric=_STEP)
        return run

    def begin(self, version: int) -> None:
        """Start or continue the run. Numbers of void updates cannot be retracted: both are shown."""
        self._run = self._run or self._open()

    def metrics(self, rows: Sequence[Numbers]) -> None:
        for numbers, step, _ in rows:
            self._log({chart(name): value for name, value in numbers.items()}, step)

    def image(self, image: Image, kind: str, step: int) -> None:
        from wandb import Image as Logged

        self._log({f"{Group.GOAL}/{kind}": Logged(image)}, step)

    def media(self, path: Path, kind: str, step: int) -> None:
        from wandb import Audio, Video

        shown = Audio(str(path)) if path.suffix == ".wav" else Video(str(path), format="mp4")
        self._log({f"samples/{kind}_{path.stem.rpartition('-')[2]}_{path.suffix[1:]}": shown}, step)

    def remark(self, name: str, text: str, step: int) -> None:
        if self._run is not None:
            self._run.summary[name] = text

    def artifact(self, path: Path) -> None:
        if self._run is not None:
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def refuses(self, error: Exception) -> bool:
        import wandb

        return not isinstance(error, wandb.errors.CommError) and super().refuses(error)

    def finish(self, status: Ended | None) -> None:
        if self._run is not None and status is not None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=_EXIT_CODES[status])

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is not None:
            self._run.log({**values, _STEP: step})

    @property
    def where(self) -> str:
        if self._run is None or self._config.mode == "online":
            return (self._run.url if self._run else None) or ""
        return f"{command_of('wandb')} sync {shlex.quote(str(self._about.run.path))}/wandb/offline-run-*"
