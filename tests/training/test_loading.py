"""Tests that a model read from files is the model that the policy loads, bit for bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from omni_async.config.schema import Lora
from omni_async.diffusion.policy import BuildsEmpty
from omni_async.training.auxiliary import add_adapters
from omni_async.training.loading import ShardedModel, WholeModel
from tests.pipelines.families import FAMILIES

CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=8.0, target_modules=("to_q", "to_v"))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns every tensor of a model: parameters, buffers and plain attributes."""
    own = ((path, name, value) for path, part in module.named_modules() for name, value in vars(part).items())
    attributes = {f"{path} {name}": value for path, name, value in own if isinstance(value, Tensor)}
    return {name: p.data for name, p in module.named_parameters()} | dict(module.named_buffers()) | attributes


@pytest.mark.sliced(floor=5)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_files_give_the_bits_of_the_whole_load(family, tmp_path):
    policy = family.policy(family.build(tmp_path))
    assert isinstance(policy, BuildsEmpty)
    for dtype in (torch.float32, torch.bfloat16):
        whole, empty = WholeModel(policy, dtype), ShardedModel(policy, dtype)
        assert all(parameter.is_meta for parameter in empty.components.parameters())
        assert empty.digest(torch.bfloat16) == whole.digest(torch.bfloat16)
        for model in (whole, empty):
            add_adapters(model.components, LORA, seed=3)
            model.fill(CPU)
        found, expected = tensors(empty.components), tensors(whole.components)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        for one, other in zip(empty.components.modules(), whole.components.modules(), strict=True):
            assert one.training == other.training
        for (name, one), other in zip(empty.components.named_parameters(), whole.components.parameters(), strict=True):
            assert one.requires_grad == other.requires_grad == (".lora_" in name)


class Denoiser(nn.Module):
    """A layer, a table in the files, one that is computed, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("computed", torch.arange(3.0), persistent=False)
        self.angles = [torch.arange(2.0)]


class Files:
    """A policy of two components, which are built on the meta device by `build`."""

    components = ("transformer", "transformer_2")

    def __init__(self, path: Path, build: Callable[[], nn.Module]) -> None:
        self.path, self._build = str(path), build

    def build_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        return {name: self._build().to(dtype) for name in self.components}


def parameters_on_meta() -> nn.Module:
    model = Denoiser()
    model.layer.to("meta")
    return model


COMPUTED, ANGLES = {"computed": torch.arange(3.0)}, {"angles": [torch.arange(2.0)]}


def everything_on_meta(**made_again: object) -> nn.Module:
    with torch.device("meta"):
        model = Denoiser()
    for name, value in made_again.items():
        setattr(model, name, value)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Writes two components of float16, the first in two files with an index."""
    for number, name in enumerate(Files.components):
        (tmp_path / name).mkdir()
        torch.manual_seed(number)
        state = {key: value.half() for key, value in Denoiser().state_dict().items()}
        if number == 1:
            save_file(state, tmp_path / name / "model.safetensors")
            continue
        files = {"layer.weight": "a.safetensors", **dict.fromkeys(("layer.bias", "table", "scale"), "b.safetensors")}
        for file in set(files.values()):
            save_file({key: state[key] for key in files if files[key] == file}, tmp_path / name / file)
        index = tmp_path / name / "diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": files}))
        # A variant beside it, of other numbers, is not read.
        save_file({key: value + 1 for key, value in state.items()}, tmp_path / name / "model.fp16.safetensors")
    return tmp_path


@pytest.mark.parametrize("build", [parameters_on_meta, partial(everything_on_meta, **COMPUTED, **ANGLES)])
def test_one_file_or_several_are_read_and_cast(checkpoint, build):
    model = ShardedModel(Files(checkpoint, build), torch.float32)
    model.fill(CPU)
    for number, component in enumerate(model.components.values()):
        torch.manual_seed(number)
        expected = Denoiser()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(component.state_dict()[name], tensor.half().float()), name
        assert torch.equal(component.computed, expected.computed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("table"), r"transformer_2: the files lack table, which Denoiser has$"),
        (lambda state: state.update(other=torch.ones(1), z=torch.ones(1)), r"Denoiser has no other and 1 more$"),
        (lambda state: state.update(table=torch.ones(5)), r"table has the shape \(5,\) in the files, and \(4,\) in"),
    ],
)
def test_files_of_another_model_are_refused_by_name(checkpoint, change, message):
    file = checkpoint / "transformer_2" / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    with pytest.raises(ValueError, match=message):
        ShardedModel(Files(checkpoint, parameters_on_meta), torch.float32)


def test_tensors_without_values_and_missing_and_broken_files_are_one_line(checkpoint):
    for made_again, missing in ((ANGLES, "computed"), (COMPUTED, "angles")):
        with pytest.raises(ValueError, match=rf"^model\.path: transformer\.{missing} is on the meta device and in no"):
            ShardedModel(Files(checkpoint, partial(everything_on_meta, **made_again)), torch.float32)
    file = checkpoint / "transformer_2" / "model.safetensors"
    for content, message in ((b"{}", "cannot be read"), (None, r"has no diffusion_pytorch_model\.safetensors")):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as refused:
            ShardedModel(Files(checkpoint, parameters_on_meta), torch.float32)
        assert "\n" not in str(refused.value)
