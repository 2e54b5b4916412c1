"""Saves and loads as the trainer's role does: values other than tensors lie beside the tensors."""

import json
from pathlib import Path

from omni_async.training.engine import TrainEngine


def save(engine: TrainEngine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writing, state = engine.begin_save(folder)
    writing.result()
    if engine.layout.rank == 0:
        (folder / "engine.json").write_text(json.dumps(state))


def load(engine: TrainEngine, folder: Path) -> None:
    engine.load(folder, json.loads((folder / "engine.json").read_text()))
