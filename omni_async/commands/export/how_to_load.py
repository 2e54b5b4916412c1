"""Describes how to load an export, with diffusers or transformers alone and in other programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers

from omni_async.commands.export.adapter import FILE, OTHER_TOOLS
from omni_async.records.read.chosen import Chosen

_THIS = "path/to/this/folder"
_HUB = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


@dataclass(frozen=True)
class Loading:
    """The kind of an export, and how to load it.

    `what`: in words. `relation`: to the base model, in hubs' words. `lines`: Python, after `imports`. `here`: paths of
    this machine in `lines`, and their replacements for other readers. `notes`: further paragraphs."""

    what: str
    relation: str
    imports: tuple[str, ...]
    lines: tuple[str, ...]
    here: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Return a script for a recipient of the export."""
        script = "\n".join([*self.imports, "", *self.lines])
        for path, said in self.here.items():
            script = script.replace(_quoted(path)[:-1], _quoted(said)[:-1])
        return script


def base_name(folder: Path) -> str:
    """Return `owner/name` of a model in a hub's cache, otherwise the folder's name."""
    match = next((match for part in folder.parts if (match := _HUB.fullmatch(part))), None)
    return f"{match['owner']}/{match['name']}" if match else folder.name


def _quoted(path: str | Path) -> str:
    """Return a path as a Python string literal, with any content."""
    return json.dumps(str(path), ensure_ascii=not str(path).isprintable())


def full_loading(chosen: Chosen, out: Path) -> Loading:
    """Return how to load the whole model in `out`."""
    lines: tuple[str, ...] = (_from_pretrained(chosen, str(out)),)
    notes: tuple[str, ...] = ()
    if chosen.family.layout == "transformers":
        lines += (f"processor = AutoProcessor.from_pretrained({_quoted(out)})",)
        notes = ("Programs that load the base model, such as vLLM, load this folder.",)
    return Loading("weights", "finetune", _imports(chosen), lines, {str(out): _THIS}, notes)


def adapter_loading(chosen: Chosen, components: Sequence[str], out: Path) -> Loading:
    """Return how to load the adapters in `out`.

    Args:
        chosen: the checkpoint.
        components: the components with adapters; the first one's are in `out` itself.
        out: the export's folder."""
    base = base_name(chosen.base)
    lines = [_from_pretrained(chosen, base if "/" in base else str(chosen.base))]
    here = {str(out): _THIS, str(chosen.base): f"path/to/{base}"}
    if chosen.family.layout == "transformers":
        lines.append(f"model.load_adapter({_quoted(out)})")
        return Loading("adapters", "adapter", _imports(chosen), tuple(lines), here)
    pipeline = getattr(diffusers, chosen.family.model_index_class, None)
    if hasattr(pipeline, "load_lora_weights"):
        lines.append(f"pipeline.load_lora_weights({_quoted(out)})")
        lines += [f"pipeline.load_lora_weights({_quoted(out / one)}, load_into_{one}=True)" for one in components[1:]]
    else:  # the pipeline does not support adapters, but its denoiser does
        path = f'{_quoted(out)}, weight_name="{FILE}"'
        lines.append(f'pipeline.{components[0]}.load_lora_adapter({path}, prefix="transformer")')
    notes = (f"ComfyUI's LoRA loader takes the files in `{OTHER_TOOLS}/`.",) if chosen.family.comfyui_layers else ()
    return Loading("adapters", "adapter", _imports(chosen), tuple(lines), here, notes)


def _imports(chosen: Chosen) -> tuple[str, ...]:
    if chosen.family.layout == "transformers":
        return (f"from transformers import AutoProcessor, {_class_of(chosen)}",)
    torch = () if chosen.config.model.dtype == "float32" else ("import torch",)
    return (*torch, "from diffusers import DiffusionPipeline")


def _from_pretrained(chosen: Chosen, path: str) -> str:
    if chosen.family.layout == "transformers":
        return f'model = {_class_of(chosen)}.from_pretrained({_quoted(path)}, dtype="auto")'
    dtype = "" if chosen.config.model.dtype == "float32" else f", torch_dtype=torch.{chosen.config.model.dtype}"
    return f"pipeline = DiffusionPipeline.from_pretrained({_quoted(path)}{dtype})"


def _class_of(chosen: Chosen) -> str:
    """Return the class of transformers that loads the trained component."""
    return chosen.family.component_class or chosen.family.model_index_class
