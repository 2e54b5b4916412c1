"""Tests runs on answers: with `staleness.max_updates: 0` they are a plain loop to the bit, and none of what is wrong is
trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from omni_async_pipelines.qwen_omni.tiny import build
from PIL import Image
from torch import Tensor, nn

from omni_async.cli import main
from omni_async.config import Config, load
from omni_async.control.seeds import PromptStream, derive
from omni_async.data.prompts import load_prompts
from omni_async.media import Media
from omni_async.plugins.families import find_family
from omni_async.records.write.images import write_media
from omni_async.rewards import registry
from omni_async.tokens.packing import Answered, cut, pack
from omni_async.tokens.policy import Prepared, TokenPolicy, load_token_policy
from tests.support.configs import write_recipe_file
from tests.support.job_world import run

Drawn = tuple[list[int], list[float]]  # an answer's tokens, and the log-prob of each
_RECIPE = {
    "run": {"name": "answers", "seed": 3, "runtime": "inprocess"},
    "model": {"pipeline": "qwen_omni", "path": "checkpoint"},
    "data": {"prompts": "prompts.jsonl"},
    "rollout": {
        **{"engine": "transformers", "group_size": 4, "sde": None, "max_inflight": 8, "max_batch": 8},
        "sampling": {"max_tokens": 6, "temperature": 1.3},
    },
    "reward": {"scorers": [{"name": "tests.e2e.scorers:Letters"}]},
    "staleness": {"max_updates": 0},
    "algorithm": {"name": "token_grpo", "answers": {"mean": "sequence"}, "advantage": {"std": "group"}},
    "trainer": {"updates": 3, "groups_per_update": 2, "micro_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
    "tracking": {"mlflow": {"enabled": False}},
}
_PROMPTS = """{"prompt": "the digit 7"}
{"prompt": "read it", "image": "noise.png"}
{"prompt": "a photo of a red circle", "audio": "noise.wav"}
{"prompt": "the digit 7", "video": "noise.mp4"}
"""


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    build(tmp_path / "checkpoint")
    (tmp_path / "prompts.jsonl").write_text(_PROMPTS)
    Image.effect_noise((84, 56), 80).convert("RGB").save(tmp_path / "noise.png")
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 9600), 16_000)
    film = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), np.uint8)
    write_media(Media(video=film, fps=2.0), tmp_path / "noise")
    return write_recipe_file(tmp_path / "recipe.yaml", _RECIPE, {})


def draw(policy: TokenPolicy, model: nn.Module, spec: Any, asked: Sequence[tuple[Prepared, int]]) -> list[Drawn]:
    """Returns tokens and log-probs of answers to prompts of one length, by seed. An ended answer leaves the batch."""
    seeded = [torch.Generator().manual_seed(seed) for _, seed in asked]
    uniform = [torch.rand(spec.max_tokens, dtype=torch.float64, generator=generator) for generator in seeded]
    made: list[Drawn] = [([], []) for _ in asked]
    going, components = [*range(len(asked))], {"thinker": model}
    logits, cache = policy.prefill(components, [prompt for prompt, _ in asked], torch.empty(len(asked), 0).long())
    for step in range(spec.max_tokens):
        log_probs = (logits / spec.temperature).log_softmax(-1)
        summed = log_probs.double().exp().cumsum(-1)
        for row, answer in enumerate(going):
            token = int(torch.searchsorted(summed[row], uniform[answer][step] * summed[row, -1], right=True))
            made[answer][0].append(token)
            made[answer][1].append(log_probs[row, token].item())
        kept = [row for row, answer in enumerate(going) if made[answer][0][-1] not in policy.stop_tokens]
        if step + 1 == spec.max_tokens or not kept:
            break
        if len(kept) < len(going):
            cache.keep(kept)
        going = [going[row] for row in kept]
        tokens = torch.tensor([made[answer][0][-1] for answer in going])
        places = torch.tensor([asked[answer][0].next_position + step for answer in going])
        logits = policy.decode(components, cache, tokens, places)
    return made


def train_synchronously(config: Config) -> dict[str, Tensor]:
    """Returns the trained weights of a plain loop: no engine, no coordinator, no roles; one model draws and learns."""
    r, t, a, spec = config.rollout, config.trainer, config.algorithm.advantage, config.rollout.sampling
    policy = load_token_policy(find_family(config.model.pipeline), config.model.path)
    thinker = policy.load_components(torch.float32)["thinker"]
    trained = {f"thinker.{name}": p for name, p in thinker.named_parameters() if p.requires_grad}
    o = t.optimizer
    optimizer = torch.optim.AdamW(trained.values(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    assert config.data.prompts is not None and o.max_grad_norm is not None
    prompts = PromptStream(load_prompts(config.data.prompts, "data.prompts", 4000), config.run.seed, True)
    reward = registry.build(config.reward.scorers[0])
    for update in range(t.updates):
        groups = range(update * t.groups_per_update, (update + 1) * t.groups_per_update)
        asked = [
            (policy.prepare(prompts[g], spec), derive("sample", config.run.seed, prompts[g].index, g, k))
            for g in groups
            for k in range(r.group_size)
        ]
        made: list[Drawn] = [([], [])] * len(asked)
        for length in dict.fromkeys(len(prompt.ids) for prompt, _ in asked):  # these share forward passes
            batch = [i for i, (prompt, _) in enumerate(asked) if len(prompt.ids) == length]
            for i, drawn in zip(batch, draw(policy, thinker, spec, [asked[i] for i in batch]), strict=True):
                made[i] = drawn
        texts = [Media(text=policy.text(tokens), finish="stop") for tokens, _ in made]
        of_each = [prompts[g] for g in groups for _ in range(r.group_size)]
        rewards = torch.tensor([score.value for score in reward.score(texts, of_each)], dtype=torch.float64)
        table = rewards.view(-1, r.group_size)
        scale = 1 / (table.std(-1, correction=a.ddof, keepdim=True) + a.eps)
        advantages = ((table - table.mean(1, keepdim=True)) * scale).clamp(-a.clip_max, a.clip_max).float().double()

        # The mean over answers of the mean over tokens of max(-A r, -A clip(r)), in packed rows of one group.
        for n in range(len(groups)):
            own = range(n * r.group_size, (n + 1) * r.group_size)
            answered = [Answered(asked[i][0], torch.tensor(made[i][0])) for i in own]
            for row in cut([one.length for one in answered], t.micro_batch_tokens):
                log_probs = thinker(pack([answered[k] for k in row]), spec.temperature).double()
                losses = []
                for k, log_prob in zip(row, log_probs.split([len(answered[k].tokens) for k in row]), strict=True):
                    ratio = (log_prob - torch.tensor(made[own[k]][1], dtype=torch.float64)).exp()
                    loss = torch.maximum(-advantages[n, k] * ratio, -advantages[n, k] * ratio.clamp(0.8, 1.2))
                    losses.append(loss.sum() / len(loss))
                (torch.stack(losses).sum() * (1 / len(asked))).backward()
        grads = [p.grad for p in trained.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        torch._foreach_mul_(grads, min(1.0, o.max_grad_norm / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in trained.items()}


def test_staleness_zero_is_the_plain_loop_on_answers_to_the_bit(answers: Path) -> None:
    made = run(answers).check_every_group_ended_once()
    assert (made.summary.status, made.summary.updates, made.summary.staleness_max) == ("done", 3, 0)
    expected, found = train_synchronously(load(answers)), made.weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    start = load_token_policy(find_family("qwen_omni"), str(answers.parent / "checkpoint"))
    loaded = start.load_components(torch.float32)["thinker"].state_dict()
    moved = [(expected[name] - loaded[name.removeprefix("thinker.")]).abs().max() for name in expected]
    assert max(moved) > 1e-3, "nothing was learnt, so nothing was compared"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p: unknown key"),
        ("rollout.sampling.max_tokens=1024", "max_tokens: prompt and answer share the model's context of 1024 tokens"),
    ],
)
def test_sampling_that_cannot_be_trained_on(answers: Path, override: str, said: str, capfd) -> None:
    assert main(["check", str(answers), override]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


def test_each_group_that_cannot_be_used_has_its_reason_in_the_ledger(answers: Path) -> None:
    """Gives a prompt that its images make longer than the context, and a prompt whose judge fails.

    Answers cut at the limit are counted."""
    Image.new("RGB", (392, 392)).save(answers.parent / "large.png")
    long = {"prompt": "7 " * 460, "images": ["large.png"] * 16}
    rows = [{"prompt": "the digit 7"}, long, {"prompt": "a red circle", "hard": True}]
    (answers.parent / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    few = ("trainer.updates=2", "trainer.groups_per_update=1", "reward.backoff_s=0.01")
    cut = ("rollout.sampling.max_tokens=2", "algorithm.answers.overlong=mask")
    made = run(answers, *few, *cut).check_every_group_ended_once()
    assert made.summary.status == "done" and all(0 < line["overlong"] <= 1 for line in made.metrics)
    reasons = {number: {line["reason"] for line in made.ledger if line["prompt"] == number} for number in range(3)}
    assert None in reasons[0], "trained"
    assert reasons[1] and all("and the model's context has 1024" in reason for reason in reasons[1])
    assert reasons[2] and all("no such word" in reason for reason in reasons[2])


def test_bfloat16_rounds_engine_and_trainer_apart_by_little(answers: Path) -> None:
    made = run(answers, "model.dtype=bfloat16", "trainer.updates=1")
    (line,) = made.metrics
    assert line["fresh_fraction"] == 1 and 0 < line["engine_mismatch_nats"] < 0.05  # .015 here
