"""Tests that every benchmark refuses wrong usage with exit code 2 and a word on what is wrong, and starts nothing."""

from __future__ import annotations

import shlex
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("buffer_bytes --trajectory 12KiB --media 4KiB --updates 8 --max-bytes 127KiB", "128 KiB: expected at least"),
        ("data_plane --repeats 0", "expected"),
        ("data_plane --samples 100", "expected"),
        ("data_plane --sizes 3", "expected"),
        ("encoder_cache --hidden 40", "--hidden: expected a multiple of 16"),
        ("encoder_cache --group-size 0", "--group-size: expected at least 1"),
        ("gpu_probe --only steps,nothing", "--only: no section is called 'nothing'; there are machine, attention,"),
        ("gpu_probe --layers 0", "--layers: expected at least 1, got 0"),
        ("gpu_probe --out nowhere/probe.json", "--out: there is no folder nowhere"),
        ("gpu_probe --small --out probe.md", "--out: expected a name that ends in .json, got probe.md"),
        ("gpu_probe --small --out notes.json", "notes.md would be replaced by the table of readings"),
        ("gpu_probe", "sees no accelerator here; --small --device cpu runs the code at test size"),
        ("load_peak --ranks 1", "expected --layers >= 1 and --ranks >= 2"),
        ("lora_rollout nowhere", "no family is called 'nowhere'; there are qwen_image,"),
        ("lora_rollout --engine vllm_omni", "expected one family"),
        ("lora_rollout --width 100", "--width: expected a multiple of 96"),
        ("overlap_profiles nowhere", "no emulated recipe is called 'nowhere'; there are qwen_image_full_h100_64,"),
        ("overlap_profiles --steps 0", "expected at least 1"),
        ("overlap_simulated nowhere", "no emulated recipe is called 'nowhere'"),
        ("overlap_simulated --seeds 0", "at least 1"),
        ("precision --updates 0", "--updates and --seeds: expected at least 1"),
        ("publish_loss --family qwen_image --sampling '[{height: 50}]'", "$.height"),
        ("stage_profile --out out --model tiny --repeats 1 --batches 0", "--batches"),
        ("stage_profile --out out --model tiny --repeats 1 --rest no_such", "no_such"),
        ("stage_profile --out out --model tiny --repeats 1 --pixels 40", "rollout.sampling.height"),
        ("stage_profile --out out --model tiny --repeats 1 --steps 1", "num_inference_steps"),
        ("swap --repeats 0", "expected numbers of at least 1"),
        ("trainer_exchange --ranks 3", "--ranks: expected 2 or 4, which divide a group of 4, got 3"),
        ("weights --sizes 0", "--sizes"),
        ("weights --window -1", "--window"),
        ("weights --transports pigeon", "--transports"),
        ("weights --every x", "--every"),
        ("weights --recipe nowhere/none.yaml", "none.yaml"),
        ("what_if nowhere", "no emulated recipe is called 'nowhere'"),
    ],
)
def test_wrong_usage_starts_nothing(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    (tmp_path / "notes.md").write_text("My notes\n")
    name, *arguments = shlex.split(command)
    try:
        code = import_module(f"benchmarks.{name}").main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    shown = capsys.readouterr()
    assert said in " ".join((shown.out + shown.err).split())
    assert not list(tmp_path.rglob("*.json"))
