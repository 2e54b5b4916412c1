"""Tests the program that draws, has a scorer judge and edits."""

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from omni_async_pipelines.refine import REFINE, Refine, build

from omni_async.aio.clock import WallClock
from omni_async.config import Config, ConfigError
from omni_async.config.reward import Reward, Scorer
from omni_async.data.image_files import read_prompt_image
from omni_async.media import Media
from omni_async.plugins.families import find_family
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.probe import Probe
from omni_async.roles.producer import Producer
from omni_async.runtime.preflight import scorers
from omni_async.runtime.preflight.check import preflight
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score
from tests.config.recipe import MINIMAL, complaint, load_text
from tests.roles.actor_world import Desk, HandEngine, make_config
from tests.runtime.runtime_world import write_world
from tests.support.images import as_media
from tests.support.patience import PATIENCE

PROGRAM = "rollout.program={name: refine, settings: {judge: {name: jpeg_size}}}"


class Reader:
    """A judge that reads how bright an image is."""

    name, accepts = "reader", ("image",)

    def __init__(self) -> None:
        self.batches: list[int] = []

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        assert threading.current_thread() is not threading.main_thread()
        self.batches.append(len(media))
        return [Score(float(one.image.mean()) / 255, text=f"grey {one.image.mean():.0f}") for one in media]


def grey(level: int) -> Media:
    return as_media(np.full((8, 8, 3), level, np.uint8))


def refine(judge: Any, calls: int = 2, edit: str = "{read}", reward: Reward | None = None) -> Refine:
    return Refine(calls, edit, Scorer(name="reader"), judge, reward)


async def draw(prompt: Prompt) -> Media:
    return grey(prompt.index)


async def judged(judge: Reader) -> list[Any]:
    """Returns the outcomes of five samples that are drawn at once, each grey by its number."""
    program = refine(judge)
    return await asyncio.gather(*(program(Prompt(i, "x"), draw) for i in range(5)), return_exceptions=True)


class Remote(Reader):
    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:  # type: ignore[override]
        return await asyncio.to_thread(super().score, media, prompts)


@pytest.mark.parametrize("judge", [Reader, Remote])
async def test_waiting_samples_are_judged_together(judge):
    made = judge()
    assert await judged(made) == [None] * 5
    assert sum(made.batches) == 5 and len(made.batches) <= 2


async def test_every_further_call_edits_what_was_judged():
    asked: list[Prompt] = []

    async def draw(prompt: Prompt) -> Media:
        asked.append(prompt)
        return grey(51 * len(asked))

    program = refine(Reader(), 3, "{prompt} to {target}; I read {read}, {score}")
    await program(Prompt(4, "write it", target="abc"), draw)
    assert [prompt.text for prompt in asked] == [
        "write it",
        "write it to abc; I read grey 51, 0.2",
        "write it to abc; I read grey 102, 0.4",
    ]
    levels = [[int(read_prompt_image(image).image.mean()) for image in prompt.images] for prompt in asked]
    assert levels == [[], [51], [102]]


class NoNumber(Reader):
    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Any]:
        return [float("nan")] * len(media)


class Picky(Reader):
    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        if any(one.image.max() == 2 for one in media):
            raise RuntimeError("no licence for 2")
        return super().score(media, prompts)


class Down(Reader):
    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        self.batches.append(len(media))
        raise ConnectionRefusedError("nobody is there")


@pytest.mark.parametrize(
    ("judge", "failed", "why"),
    [
        (NoNumber, [0, 1, 2, 3, 4], "scorer 'reader'.*the score is nan, expected a finite number"),
        (Picky, [2], rf"^judge 'reader': RuntimeError: no licence for 2 \({re.escape(__file__)}:"),
        (Down, [0, 1, 2, 3, 4], "ConnectionRefusedError: nobody is there"),
    ],
)
async def test_samples_that_cannot_be_judged(judge, failed, why):
    found = await judged(made := judge())
    assert [i for i, error in enumerate(found) if error is not None] == failed
    assert all(re.search(why, str(found[i])) for i in failed)
    assert judge is not Down or len(made.batches) <= 2, "one that is down is not called for every sample"


class Talkative(Reader):
    """A judge whose errors show its key."""

    def __init__(self, api_key: str = "") -> None:
        super().__init__()
        self.key = api_key

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        raise RuntimeError(f"{self.key} was refused")


async def test_keys_of_judges(monkeypatch: pytest.MonkeyPatch):
    def config_of(key: str) -> Config:
        judge = f"judge: {{name: '{__name__}:Talkative', params: {{api_key: {key}}}}}"
        return load_text(MINIMAL, "rollout.calls=2", f"rollout.program={{name: refine, settings: {{{judge}}}}}")

    with pytest.raises(Exception, match=r"\*\*\* was refused"):
        await build(config_of("hunter2222"))(Prompt(0, "x"), draw)
    config, family = config_of("env:JUDGE_KEY"), replace(find_family("qwen_image"), prompt_images=1)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (problem,) = REFINE.problems(config, family)
    assert problem.startswith("rollout.program.settings.judge: ") and "not set; set JUDGE_KEY" in problem
    monkeypatch.setenv("JUDGE_KEY", "hunter2222")
    assert not [*REFINE.problems(config, family)]
    assert build(config)._judge.key == "hunter2222"


def probe() -> Probe:
    return Probe([grey(2), grey(9)], [Prompt(0, "x"), Prompt(1, "y")])


def producer_of(program: Any, engine: HandEngine, desk: Desk) -> Producer:
    return Producer("rollout-0", make_config(), engine, desk, LocalStore(), WallClock(), None, program, probe())


async def test_trials_of_judges():
    wrong = await refine(Picky()).try_out(probe())
    assert wrong is not None and wrong.startswith("rollout.program.settings.judge: ") and "no licence" in wrong
    assert await refine(Down()).try_out(probe()) is None
    assert await refine(Reader()).try_out(probe()) is None
    engine, desk = HandEngine(), Desk()
    with pytest.raises(WrongScorer, match="no licence"):
        await producer_of(refine(Picky()), engine, desk).start()
    assert engine.closed and desk.wrong == [wrong] and not engine.started


async def test_hanging_trials_are_reported_and_tried_judges_closed(monkeypatch: pytest.MonkeyPatch):
    """An open judge may hold connections or memory that the next scorers need."""
    over, closed = threading.Event(), []

    class Hanging(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
            over.wait(PATIENCE)
            return super().score(media, prompts)

        async def close(self) -> None:
            closed.append(self)

    def built(config: Config | None = None) -> Refine:
        return refine(Hanging(), reward=Reward(timeout_s=0.01))

    why = "a judge could not be tried, it may be down: rollout.program.settings.judge: scorer 'reader': no score within"
    desk = Desk()
    try:
        await producer_of(built(), HandEngine(), desk).start()
        monkeypatch.setattr(scorers, "built_program", built)
        (note,) = await scorers._try_program(load_text(MINIMAL), probe())
    finally:
        over.set()
    assert desk.phases[-1] == f"warning: rollout-0: {why} 0.01 s" and note == f"warning: {why} 0.01 s"
    assert len(closed) == 1, "the check's"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.calls=2"], "rollout.program: required where a sample takes several calls, got rollout.calls = 2"),
        ([PROGRAM], "rollout.calls: a program makes several calls, expected at least 2 with 'refine', got 1"),
        (["rollout.calls=2", "rollout.program={name: refien}"], "rollout.program.name: expected one of ['refine']"),
        (
            ["rollout.calls=2", "rollout.program={name: refine, settings: {judge: {name: ocr}, edti: x}}"],
            "rollout.program.settings.edti: unknown key; did you mean 'edit'? allowed: edit, judge",
        ),
        (["rollout.calls=2", "rollout.program={name: refine}"], "rollout.program.settings.judge: required"),
    ],
)
def test_wrong_recipes_are_refused(overrides, said):
    assert said in complaint(MINIMAL, *overrides)


def test_several_calls_train_steps():
    config = load_text(MINIMAL, "rollout.calls=2", PROGRAM, "algorithm.name=diffusion_nft", "rollout.sde=null")
    with pytest.raises(ConfigError, match=r"rollout.calls: diffusion_nft trains on final latents .* got 2"):
        preflight(config)


def test_wrong_edits_and_judges_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(edit: str = "{read}", judge: str = "jpeg_size", images: int = 1) -> str:
        takes = replace(find_family("qwen_image"), prompt_images=images)
        settings = {"judge": {"name": judge}, "edit": edit}
        rollout = {"calls": 2, "program": {"name": "refine", "settings": settings}}
        with monkeypatch.context() as patch:
            patch.setattr("omni_async.runtime.preflight.check.find_family", lambda name: takes)
            with pytest.raises(ConfigError) as caught:
                preflight(write_world(tmp_path, rollout=rollout))
        return str(caught.value)

    assert "edits images, and prompts of model.pipeline 'qwen_image' carry none" in refused(images=0)
    assert "settings.edit: {colour} is not known, expected some of {prompt}, {target}" in refused("{colour}")
    assert "settings.edit: " in refused("{prompt") and "write a brace as {{ or }}" in refused("{prompt")
    assert "settings.edit: " in refused("{score:.2f}") and "what it names are texts" in refused("{score:.2f}")
    assert "settings.judge: scorer 'nobody'" in refused(judge="nobody")
    assert "scorer 'ocr': the prompt has no `target`" in refused(judge="ocr")


def test_the_program_imports_neither_torch_nor_ray():
    code = "import sys, omni_async_pipelines.refine; assert not {'torch', 'ray', 'tensordict'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert REFINE.load() is not None
