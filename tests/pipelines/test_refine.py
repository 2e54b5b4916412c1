"""Tests the program that draws, has a scorer judge and edits: what it says to the model, and what it refuses."""

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace
from omni_async_pipelines.refine import REFINE, Refine, build

from omni_async.aio.clock import WallClock
from omni_async.config import Config, ConfigError
from omni_async.config.schema import Reward, Scorer
from omni_async.data.image_files import read_prompt_image
from omni_async.media import Media
from omni_async.plugins.families import find_family
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.probe import Probe
from omni_async.roles.producer import Producer
from omni_async.runtime.preflight import scorers
from omni_async.runtime.preflight.check import preflight
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score, WeightReport
from tests.config.recipe import MINIMAL, complaint, load_text
from tests.runtime.runtime_world import write_world
from tests.support.images import as_media
from tests.support.patience import PATIENCE

PROGRAM = "rollout.program={name: refine, settings: {judge: {name: jpeg_size}}}"


class Reader:
    """A judge that reads how bright an image is; remembers how many it was given at once."""

    name, accepts = "reader", ("image",)

    def __init__(self) -> None:
        self.batches: list[int] = []

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        assert threading.current_thread() is not threading.main_thread()
        self.batches.append(len(media))
        return [Score(float(one.image.mean()) / 255, text=f"grey {one.image.mean():.0f}") for one in media]


def grey(level: int) -> Media:
    return as_media(np.full((8, 8, 3), level, np.uint8))


def refine(calls: int, edit: str, label: str, judge: Any, reward: Reward | None = None) -> Refine:
    return Refine(calls, edit, Scorer(name=label), judge, reward)


async def test_a_judge_may_be_asynchronous():
    class Remote(Reader):
        async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:  # type: ignore[override]
            await asyncio.sleep(0)
            return await asyncio.to_thread(super().score, media, prompts)

    found = await judged(Remote(), 3)
    assert not any(isinstance(one, Exception) for one in found)


async def test_every_further_call_edits_what_was_judged():
    asked: list[Prompt] = []

    async def draw(prompt: Prompt) -> Media:
        asked.append(prompt)
        return grey(51 * len(asked))

    program = refine(3, "{prompt} to {target}; I read {read}, {score}", "reader", Reader())
    await program(Prompt(4, "write it", target="abc"), draw)
    assert [prompt.text for prompt in asked] == [
        "write it",
        "write it to abc; I read grey 51, 0.2",
        "write it to abc; I read grey 102, 0.4",
    ]
    levels = [[int(read_prompt_image(image).image.mean()) for image in prompt.images] for prompt in asked]
    assert levels == [[], [51], [102]]


async def test_samples_that_wait_for_the_judge_are_judged_together():
    async def draw(prompt: Prompt) -> Media:
        return grey(prompt.index)

    judge = Reader()
    program = refine(2, "{read}", "reader", judge)
    await asyncio.gather(*(program(Prompt(number, "x"), draw) for number in range(5)))
    assert sum(judge.batches) == 5 and len(judge.batches) <= 2


async def test_a_judge_that_gives_no_scores_fails_the_sample_with_its_name():
    class Broken(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Any]:
            return [float("nan")] * len(media)

    async def draw(prompt: Prompt) -> Media:
        return grey(0)

    with pytest.raises(Exception, match=r"scorer 'broken'.*expected a Score"):
        await refine(2, "{read}", "broken", Broken())(Prompt(0, "x"), draw)


async def judged(judge: Reader, number: int) -> list[Any]:
    """Returns what becomes of samples that are drawn at once, each grey by its number."""

    async def draw(prompt: Prompt) -> Media:
        return grey(prompt.index)

    program = refine(2, "{read}", "reader", judge)
    return await asyncio.gather(*(program(Prompt(i, "x"), draw) for i in range(number)), return_exceptions=True)


async def test_a_sample_that_cannot_be_judged_fails_alone():
    class Picky(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
            if any(one.image.max() == 2 for one in media):
                raise RuntimeError("I cannot read 2")
            return super().score(media, prompts)

    found = await judged(Picky(), 5)
    assert [i for i, error in enumerate(found) if error is not None] == [2]
    assert str(found[2]).startswith(f"judge 'reader': RuntimeError: I cannot read 2 ({__file__}:")


async def test_a_judge_that_is_down_is_not_asked_for_every_sample_anew():
    class Down(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
            self.batches.append(len(media))
            raise ConnectionRefusedError("nobody is there")

    judge = Down()
    assert all("ConnectionRefusedError: nobody is there" in str(error) for error in await judged(judge, 5))
    assert len(judge.batches) <= 2


class Talkative(Reader):
    """A judge whose errors show its key."""

    def __init__(self, api_key: str = "") -> None:
        super().__init__()
        self.key = api_key

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        raise RuntimeError(f"{self.key} was refused")


async def test_what_a_judge_raises_shows_no_credential():
    judge = f"judge: {{name: '{__name__}:Talkative', params: {{api_key: hunter2222}}}}"
    config = load_text(MINIMAL, "rollout.calls=2", f"rollout.program={{name: refine, settings: {{{judge}}}}}")

    async def draw(prompt: Prompt) -> Media:
        return grey(0)

    with pytest.raises(Exception, match=r"\*\*\* was refused"):
        await build(config)(Prompt(0, "x"), draw)


async def test_a_key_of_the_judge_is_what_the_environment_of_the_engine_holds_and_a_missing_one_is_a_refusal(
    monkeypatch,
):
    judge = f"judge: {{name: '{__name__}:Talkative', params: {{api_key: env:JUDGE_KEY}}}}"
    config = load_text(MINIMAL, "rollout.calls=2", f"rollout.program={{name: refine, settings: {{{judge}}}}}")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    family = replace(find_family("qwen_image"), prompt_images=1)
    (problem,) = REFINE.problems(config, family)
    assert problem.startswith("rollout.program.settings.judge: ") and "not set; set JUDGE_KEY" in problem
    monkeypatch.setenv("JUDGE_KEY", "hunter2222")
    assert not [*REFINE.problems(config, family)]
    assert build(config)._judge.key == "hunter2222"


def probe() -> Probe:
    return Probe([grey(0), grey(9)], [Prompt(0, "x"), Prompt(1, "y")])


async def test_a_judge_is_tried_with_a_synthetic_sample():
    class Broken(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Any]:
            self.batches.append(len(media))
            raise RuntimeError("no licence")

    class Down(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Any]:
            raise ConnectionRefusedError("nobody is there")

    broken = Broken()
    wrong = await refine(2, "{read}", "broken", broken).try_out(probe())
    assert wrong is not None and wrong.startswith("rollout.program.settings.judge: ") and "no licence" in wrong
    assert broken.batches == [2, 2]
    assert await refine(2, "{read}", "down", Down()).try_out(probe()) is None
    assert await refine(2, "{read}", "reader", Reader()).try_out(probe()) is None


async def test_a_judge_that_hangs_at_its_trial_is_reported(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()

    class Hanging(Reader):
        def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
            over.wait(PATIENCE)
            return super().score(media, prompts)

    def built(config: Config | None = None) -> Refine:
        return refine(2, "{read}", "slow", Hanging(), Reward(timeout_s=0.01))

    class Engine:
        async def start(self) -> WeightReport:
            return WeightReport("rollout-0", 0, "")

    class Desk:
        said: ClassVar[list[str]] = []

        async def phase(self, text: str) -> None:
            self.said.append(text)

    why = "a judge could not be tried, it may be down: rollout.program.settings.judge: scorer 'slow': no score within"
    config, engine, desk = load_text(MINIMAL), Engine(), Desk()
    arguments: Any = ("rollout-0", config, engine, desk, LocalStore(), WallClock(), None, built(), probe())
    try:
        await Producer(*arguments).start()
        monkeypatch.setattr(scorers, "built_program", built)
        (note,) = await scorers._try_program(config, probe())
    finally:
        over.set()
    assert desk.said == [f"warning: rollout-0: {why} 0.01 s"] and note == f"warning: {why} 0.01 s"


async def test_check_closes_the_judge_that_it_tried(monkeypatch: pytest.MonkeyPatch):
    """A judge may hold connections or a model, of which the scorers that are tried next would miss the memory."""

    class Held(Reader):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    held = Held()
    monkeypatch.setattr(scorers, "built_program", lambda config: refine(2, "{read}", "held", held))
    await scorers._try_program(load_text(MINIMAL), probe())
    assert held.closed == 1


async def test_a_run_whose_judge_is_wrong_ends_before_a_sample_is_drawn():
    class Wrong:
        async def __call__(self, prompt: Prompt, draw: Any) -> None:
            raise AssertionError("a sample was drawn")

        async def try_out(self, probe: Probe) -> str | None:
            return "the judge has no licence"

    class Desk:
        said: ClassVar[list[str]] = []

        async def scorer_wrong(self, reason: str) -> bool:
            self.said.append(reason)
            return True

    class Engine:
        closed = False

        async def start(self) -> WeightReport:
            return WeightReport("rollout-0", 0, "")

        async def close(self) -> None:
            self.closed = True

    engine: Any = Engine()
    desk: Any = Desk()
    config = load_text(MINIMAL)
    producer = Producer("rollout-0", config, engine, desk, LocalStore(), WallClock(), None, Wrong(), probe())
    with pytest.raises(WrongScorer, match="the judge has no licence"):
        await producer.start()
    assert engine.closed and desk.said == ["the judge has no licence"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.calls=2"], "rollout.program: required where a sample takes several calls, got rollout.calls = 2"),
        ([PROGRAM], "rollout.calls: a program makes several calls, expected at least 2 with 'refine', got 1"),
        (
            ["rollout.calls=2", "rollout.program={name: refien}"],
            "rollout.program.name: expected one of ['refine']",
        ),
        (
            ["rollout.calls=2", "rollout.program={name: refine, settings: {judge: {name: ocr}, edti: x}}"],
            "rollout.program.settings.edti: unknown key; did you mean 'edit'? allowed: edit, judge",
        ),
        (["rollout.calls=2", "rollout.program={name: refine}"], "rollout.program.settings.judge: required"),
    ],
)
def test_wrong_recipes_are_refused_in_one_line(overrides, said):
    assert said in complaint(MINIMAL, *overrides)


def test_what_is_trained_of_all_calls_must_be_steps():
    config = load_text(MINIMAL, "rollout.calls=2", PROGRAM, "algorithm.name=diffusion_nft", "rollout.sde=null")
    with pytest.raises(ConfigError, match=r"rollout.calls: diffusion_nft trains on final latents .* got 2"):
        preflight(config)


def test_a_family_whose_prompts_carry_no_image_cannot_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    import subprocess
    import sys

    code = "import sys, omni_async_pipelines.refine; assert not {'torch', 'ray', 'tensordict'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert REFINE.load() is not None
