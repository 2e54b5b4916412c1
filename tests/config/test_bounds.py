"""Tests that numbers of a recipe so large that they must be typing errors, and names or paths of more than one line,
are refused at once."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest
from recipe import MINIMAL, complaint, load_text, with_key

from omni_async.config import Config, load
from omni_async.config.describe import walk


def numbers_in(
    annotation: Any, metas: tuple[msgspec.Meta, ...] = ()
) -> Iterator[tuple[type, tuple[msgspec.Meta, ...]]]:
    """Returns the number types a field may hold, at any depth, each with the bounds around it."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from numbers_in(inner, (*metas, *(m for m in more if isinstance(m, msgspec.Meta))))
    elif get_origin(annotation) in (Union, types.UnionType, tuple):
        for inner in get_args(annotation):
            yield from numbers_in(inner, metas)
    elif annotation in (int, float):
        yield annotation, metas


NUMERIC = [path for path, annotation, _ in walk(Config) if any(numbers_in(annotation))]
DEFAULTS = {path: default for path, _, default in walk(Config)}
PATHS = (
    "run.dir",
    "run.ray_address",
    "model.path",
    "data.prompts",
    "data.preferences",
    "validation.prompts",
    "checkpoint.resume",
    "emulation.profile",
    "tracking.mlflow.tracking_uri",
    "tracking.mlflow.experiment",
)


def test_every_number_has_an_upper_bound() -> None:
    unbounded = [
        path
        for path, annotation, _ in walk(Config)
        for _, metas in numbers_in(annotation)
        if not any(m.le is not None or m.lt is not None for m in metas)
    ]
    assert unbounded == []
    assert len(NUMERIC) > 90


@pytest.mark.parametrize("path", NUMERIC)
def test_an_absurd_number_is_refused_under_its_key(path: str) -> None:
    key = path.replace("[]", ".0")
    pair = isinstance(DEFAULTS[path], tuple) or key.endswith((".band", ".k1"))
    section, list_, _ = path.partition("[]")
    needed = {
        "validation": "validation.prompts=p.txt",
        "emulation": "emulation.profile=p.json",
        "rollout.buckets": "rollout.buckets=[{}]",
        "roles": "roles=[{name: judge}]",
    }.get(section if list_ else section.partition(".")[0])
    for absurd in ("1e300", str(2**62), ".nan", "true", "'12'"):
        value = f"[{absurd}, {absurd}]" if pair else absurd
        message = complaint(MINIMAL, *([needed] if needed else []), f"{key}={value}")
        assert key in message and "expected" in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "staleness.max_updates=1000000",
            "expected int >= 0, <= 1000 (S + 1 updates' groups are admitted at once, and what a policy made",
        ),
        (
            "rollout.num_inference_steps=5000",
            "expected int >= 2, <= 1000 (the schedulers of diffusion models know 1000 timesteps), got 5000",
        ),
        ("rollout.workers=20000", "~: expected int >= 1, <= 10000 (each is a process), got 20000"),
        ("rollout.timeout_s=1e9", "~: expected float > 0, <= 1000000, got 1000000000.0"),
        ("algorithm.kl_coef=1e13", "~: expected float >= 0, <= 1e12, got 10000000000000.0"),
        ("reward.scorers.0.weight=1e30", "~: expected float >= -1000000, <= 1000000, got 1e+30"),
    ],
)
def test_the_bound_and_its_reason_are_named_for_a_value_above_it(override: str, said: str) -> None:
    assert with_key(said, override) in complaint(MINIMAL, override)


def test_groups_that_may_be_alive_at_once_are_bounded_by_their_product() -> None:
    message = complaint(MINIMAL, "staleness.max_updates=999", "trainer.groups_per_update=200")
    assert (
        "staleness.max_updates: (S + 1) x trainer.groups_per_update = 200000 groups may be alive at once, at most"
        " 100000" in message
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("placement.trainer.gpus=1.5", "placement.trainer.gpus: Ray divides one accelerator, but no more than one: "),
        (
            "placement.reward.gpus=0.00001",
            "placement.reward.gpus: Ray counts in ten-thousandths, expected at least 0.0001, got 1e-05",
        ),
        (
            "placement.rollout.cpus=0.00001",
            "placement.rollout.cpus: Ray counts in ten-thousandths, expected at least 0.0001, got 1e-05",
        ),
    ],
)
def test_parts_of_devices_are_those_that_ray_can_count(override: str, said: str) -> None:
    assert said in complaint(MINIMAL, override)
    assert load_text(MINIMAL, "placement.trainer.gpus=0.5", "placement.reward.gpus=2").placement.reward.gpus == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", ['"a\\0b"', '"a\\nb"', '"a\\eb"', "x" * 5000, "''"])
def test_a_path_is_one_line_that_a_file_can_be_named(path: str, value: str) -> None:
    needed = [f"{key}=p" for key in ("validation.prompts", "emulation.profile") if path.startswith(key[:9])]
    if value == "''" and path.startswith(("model", "data", "validation", "checkpoint")):
        return  # the recipe's folder, which its reader refuses
    message = complaint(MINIMAL, *needed, f"{path}={value}")
    assert f"{path}: expected " in message and "\0" not in message


def test_the_home_folder_is_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_text(MINIMAL, "run.dir=~/runs").run.dir == str(tmp_path / "runs")
    assert load_text(MINIMAL, "model.path=~/models/q").model.path == str(tmp_path / "models/q")
    (tmp_path / "recipe.yaml").write_text(MINIMAL + "run: {dir: ~/runs}\n")
    assert load(tmp_path / "recipe.yaml").run.dir == str(tmp_path / "runs")
    assert load_text(MINIMAL, "run.dir=elsewhere/runs").run.dir == "elsewhere/runs"


@pytest.mark.parametrize(
    "override",
    [
        'rollout.sampling.negative_prompt="a \\ud800"',
        'reward.scorers.0.params={a: ["\\udfff"]}',
        'reward.scorers.0.params={"\\ud800": 1}',
    ],
)
def test_a_text_that_no_file_can_hold_is_refused(override: str) -> None:
    assert "half a surrogate pair is no character, got " in complaint(MINIMAL, override)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 2**33), ("1.5 GiB", 3 * 2**29), ("64MiB", 2**26), ("999999TiB", 999999 * 2**40), ("100000000", 10**8)],
)
def test_a_size_is_a_number_or_a_text(text: str, size: int) -> None:
    assert load_text(MINIMAL, f"buffer.max_bytes={text}").buffer.bound == size
