"""Writes a run's numbers and image grids as TensorBoard's event files, into `tensorboard` in the run folder.

TensorBoard stores neither a run's status nor files; videos and sound stay in `samples`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from omni_async.config import schema
from omni_async.records.write.catalogue import chart
from omni_async.records.write.metric import Group
from omni_async.records.write.metrics import METRICS
from omni_async.records.write.sinks.base import About, Ended, Numbers, Sink, command_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_S = 10  # data that a killed run may lose


class TensorboardSink(Sink):
    label = "TensorBoard"

    def __init__(self, config: schema.Tensorboard, about: About) -> None:
        from torch.utils import tensorboard  # imported before the run begins: it takes seconds

        self._new = tensorboard.SummaryWriter
        self._about = about
        self._folder = about.run.path / "tensorboard"
        self._writer: SummaryWriter | None = None

    def begin(self, version: int) -> None:
        """Open a new file; TensorBoard hides data of later updates in earlier files."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._new(str(self._folder), purge_step=version + 1, flush_secs=_FLUSH_S)
        self._writer.add_text("about", self._about.description, version)
        self._writer.add_custom_scalars(_layout())

    def metrics(self, rows: Sequence[Numbers]) -> None:
        if self._writer is not None:
            for numbers, step, seconds in rows:
                for name, value in numbers.items():
                    self._writer.add_scalar(chart(name), value, step, walltime=seconds)

    def image(self, image: Image, kind: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_image(f"{Group.GOAL}/{kind}", np.asarray(image), step, dataformats="HWC")

    def remark(self, name: str, text: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_text(f"{Group.GOAL}/{name}", text, step)

    def finish(self, status: Ended | None) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def where(self) -> str:
        return "" if self._writer is None else f"{command_of('tensorboard')} --logdir {shlex.quote(str(self._folder))}"


def _layout() -> dict[str, dict[str, list[object]]]:
    """Return the custom charts: metrics of one pattern, such as all roles or all denoising steps, share one chart."""
    layout: dict[str, dict[str, list[object]]] = {}
    for metric in METRICS:
        if metric.labels:
            tags = f"^{metric.group}/{metric.pattern.replace('/', '_')}$"
            layout.setdefault(metric.group, {})[metric.name] = ["Multiline", [tags]]
    return layout
