"""Tests what the documentation prints: commands are accepted, recipes are valid, code runs."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.taste import TasteScorer
from omni_async import cli
from omni_async.config import load, resolved_yaml
from omni_async.config.reward import Reward
from omni_async.diffusion.policy import load_policy
from omni_async.media import Media
from omni_async.plugins.families import find_family
from omni_async.rewards import registry
from omni_async.rewards.base import Outage
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt, Score
from tests.commands.export.export_world import write_checkpoint
from tests.support.images import score_all
from tests.support.places import ROOT
from tests.training.training_world import started

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
EMULATED = "recipes/emulated/qwen_image_lora_h800.yaml"
# What stands for something of the reader's.
STAND_INS = {
    "RECIPE": EMULATED,
    "RUN": EMULATED,
    "P": "qwen_image_lora_h800",
    "N": "5",
    "my_recipe.yaml": "recipes/quickstart/quickstart.yaml",
}
# Recipes that need what is not in the repository: weights, a checkpoint or a data set that is built, accelerators.
NEED_MORE = ("recipes/qwen_image_ocr/", "recipes/tiny/", "diffusion_dpo_offline", "gpus=")
SLOW = ("--updates 1000", "--sweep", "--what-if")


def blocks(page: Path, languages: str) -> Iterator[str]:
    """Yields the fenced code of a page in one of the languages (`|` between them)."""
    # Of every language, or the end of one block would be taken for the start of another.
    fenced = r"^ *```(\w*)\n(.*?)^ *```$"
    for match in re.finditer(fenced, page.read_text(encoding="utf-8"), flags=re.M | re.S):
        if match[1] in languages.split("|"):
            yield textwrap.dedent(match[2])


def commands() -> Iterator[Any]:
    """Yields the words after `omni-async` of every command line, and what the page says that it prints."""
    for page in PAGES:
        for block in blocks(page, "|bash|sh|console"):
            lines = block.replace("\\\n", " ").splitlines()
            for number, line in enumerate(lines):
                if not re.match(r"(\$ )?(\S*/)?omni-async ", line):
                    continue
                words = shlex.split(line.removeprefix("$ "), comments=True)
                shown = lines[number + 1 :] if line.startswith("$") else []
                given = [STAND_INS.get(word, word) for word in words[1:]]
                yield pytest.param(given, shown, id=f"{page.stem}: {' '.join(words[1:])}"[:90])


COMMANDS = list(commands())


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a folder to start commands in, with the repository's recipes and the scorer of the documentation."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "docs").mkdir()
    (tmp_path / "brightness.py").write_text(snippet("# brightness.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("brightness", None)


def snippet(beginning: str) -> str:
    """Finds the Python of the getting-started page that begins so."""
    [found] = [block for block in blocks(ROOT / "docs" / "getting-started.md", "python") if block.startswith(beginning)]
    return found


@pytest.mark.parametrize(("words", "shown"), COMMANDS)
def test_documented_commands_are_valid(words, shown, workplace):
    options = cli._parse(words)
    recipe = None if options.command == "init" else getattr(options, "recipe", None)
    if recipe is not None and not any("expected" in line or line.startswith("omni-async: ") for line in shown):
        load(recipe, options.overrides)


TRAINED = [p for p in COMMANDS if p.values[0][0] in ("train", "check")]
CHECKED = [p for p in TRAINED if not any(needed in " ".join(p.values[0]) for needed in NEED_MORE)]


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "shown"), CHECKED)
def test_documented_recipes_pass_check(words, shown, workplace, capsys):
    code = cli.main(["check", *words[1:]])
    said = capsys.readouterr().err
    if shown:
        assert words[0] == "check" and code == 2
        assert " ".join(said.split()) == " ".join(" ".join(shown).split())
    else:
        assert (code, said) == (0, "")


_SIMULATED = {tuple(p.values[0]) for p in COMMANDS if p.values[0][0] == "simulate"}
_QUICK = sorted(words for words in _SIMULATED if not any(slow in " ".join(words) for slow in SLOW))


@pytest.mark.thorough
@pytest.mark.parametrize("words", _QUICK, ids=" ".join)
def test_documented_simulations(words, workplace, capsys):
    assert cli.main(words) == 0
    assert "images/s" in capsys.readouterr().out


def test_documented_scorer(workplace: Path) -> None:
    config = SimpleNamespace(name="brightness:Brightness", params={"target": 0.2})
    grey = np.full((8, 8, 3), 51, np.uint8)
    [score] = registry.build(config).score([grey], [Prompt(0, "x")])  # type: ignore[arg-type]
    assert score.value == pytest.approx(1.0) and score.parts == {"mean": pytest.approx(0.2)}
    namespace: dict[str, Any] = {}
    exec("class Demanding:\n" + textwrap.indent(snippet("@staticmethod\ndef check_prompt"), "    "), namespace)
    ask = namespace["Demanding"].check_prompt
    assert cli.main(next(p.values[0] for p in COMMANDS if p.values[0][0] == "score")) == 0
    assert ask(Prompt(0, "x"), {}) == 'the prompt has no key "language"'
    assert ask(Prompt(0, "x", metadata={"language": "en"}), {}) is None
    exec(snippet("class Loudness:"), {"Score": Score} | namespace, namespace)
    tone = Media(audio=np.full((2, 10), 0.5, np.float32), sample_rate=8000)
    reward = LoadedReward.of(Reward(), namespace["Loudness"]())
    assert score_all(reward, [tone], [Prompt(0, "x")])[0].value == pytest.approx(0.5)


async def test_documented_service() -> None:
    page = ROOT / "docs" / "rewards" / "own.md"
    [function] = blocks(page, "python")
    namespace: dict[str, Any] = {}
    exec(function, namespace)
    assert namespace["warmth"]([np.array([[[90, 0, 40]]], np.uint8)], [Prompt(0, "x")], scale=0.5) == [25.0]
    assert "(../../examples/taste.py)" in page.read_text(encoding="utf-8")
    answers = [web.json_response({"taste": 0.75}), web.Response(status=503)]

    async def answer(request: web.Request) -> web.Response:
        assert await request.json() == {"style": "ink", "brightness": 51.0}
        return answers.pop(0)

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server:
        scorer = TasteScorer(url=str(server.make_url("/")))
        image, prompt = Media(image=np.full((3, 8, 8), 51, np.uint8)), Prompt(0, "x", metadata={"style": "ink"})
        assert await scorer.score([image], [prompt]) == [Score(0.75, {"brightness": 51.0})]
        with pytest.raises(Outage, match="it is loading"):
            await scorer.score([image], [prompt])
        await scorer.close()


FAMILY = blocks(ROOT / "docs" / "integrate-a-model.md", "python|toml")
EXCERPTS = [block for block in FAMILY if not block.startswith("[project]\n")]  # that is of the reader's own package


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda text: text.splitlines()[0].removeprefix("# "))
def test_code_of_families(excerpt: str) -> None:
    """Checks that its lines are there, in this order; `...` leaves lines out."""
    first, *lines = excerpt.splitlines()
    there = iter((ROOT / first.removeprefix("# ")).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.strip() not in ("", "..."):
            assert any(line.strip() == other.strip() for other in there), line


@pytest.mark.thorough
def test_documented_export(workplace: Path) -> None:
    """Begins with a quickstart run whose weights are those it began with plus one."""
    import torch
    from diffusers import QwenImagePipeline

    words = next(p.values[0] for p in COMMANDS if p.values[0][0] == "export")
    config = load("recipes/quickstart/quickstart.yaml")
    run = Path(words[1])
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(config))
    engine = started(config, load_policy(find_family("qwen_image"), config.model.path))
    with torch.no_grad():
        for parameter in engine._model.trainable.values():
            parameter.add_(1)
    write_checkpoint(run, config, engine)
    assert cli.main(words) == 0
    [program] = blocks(ROOT / "docs" / "export.md", "python")
    made: dict[str, Any] = {}
    exec(program, made)
    assert isinstance(made["pipeline"], QwenImagePipeline)
    trained = engine._model.trainable
    for name, parameter in made["pipeline"].transformer.named_parameters():
        assert torch.equal(parameter, trained[f"transformer.{name}"])
