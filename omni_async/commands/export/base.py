"""Reads a base model's folder: the files that an export copies, and the tensors of trained components."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omni_async.config import ConfigError
from omni_async.config.load import read_model_index
from omni_async.training.loading import WEIGHT_STEMS, open_tensors

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".index.json")
_ROOT = (".json", ".txt", ".py", ".md")
# transformers' models also have templates and tokenizers there, and Qwen2.5-Omni its voices (spk_dict.pt).
_OF_TRANSFORMERS = (*_ROOT, ".jinja", ".model", ".tiktoken", ".pt")
_TEMPLATES = "additional_chat_templates"
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
CARD = "README.md"


@dataclass(frozen=True)
class BaseModel:
    """A model's folder.

    trained: the components whose weights an export replaces. layout: the family's."""

    folder: Path
    trained: tuple[str, ...]
    layout: Literal["diffusers", "transformers"] = "diffusers"

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of the replaced weights; in transformers layout the model's own, which is the empty name."""
        return self.trained if self.layout == "diffusers" else ("",)

    def files(self) -> list[Path]:
        """Return the files to copy, as paths relative to the folder.

        They are the parts that model_index.json lists, without the weights of trained components, and the small files
        next to it. Single-file checkpoints next to it hold the weights before training and are left out, and so is the
        card. A model in transformers layout has its small files and its chat templates."""
        if self.layout == "transformers":
            return self._files_of_transformers()
        parts = [name for name, entry in read_model_index(self.folder).items() if isinstance(entry, list)]
        found = [path for path in self.folder.iterdir() if path.is_file() and _is_small(path)]
        for part in parts:
            for path in sorted((self.folder / part).rglob("*")):
                of_trained = part in self.trained and path.name.lower().endswith(_WEIGHTS)
                if path.is_file() and not of_trained and not _is_hidden(path.relative_to(self.folder)):
                    found.append(path)
        return sorted(path.relative_to(self.folder) for path in found)

    def _files_of_transformers(self) -> list[Path]:
        files = [path for path in self.folder.iterdir() if path.is_file() and _is_small(path, _OF_TRANSFORMERS)]
        files += (self.folder / _TEMPLATES).glob("*.jinja")
        return sorted(path.relative_to(self.folder) for path in files)

    def tensors(self, part: str) -> dict[str, Any]:
        """Open the weights of one of `parts`: each is read by `[...]`. Raises ConfigError, one line."""
        try:
            return open_tensors(self.folder / part)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def stem(self, part: str) -> str:
        """Return the common stem of the weight files of one of `parts`, without their endings."""
        names = [path.name for path in (self.folder / part).iterdir()]
        return next(stem for stem in WEIGHT_STEMS if any(name.startswith(f"{stem}.safetensors") for name in names))


def _is_small(path: Path, endings: tuple[str, ...] = _ROOT) -> bool:
    weights = tuple(ending for ending in _WEIGHTS if ending not in endings)
    if path.name == CARD or path.name.startswith(".") or path.name.lower().endswith(weights):
        return False
    return path.name.endswith(endings) or path.name.upper().startswith(_LEGAL)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
