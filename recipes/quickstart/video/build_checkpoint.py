"""Rebuilds the checkpoint and the prompts of this recipe, offline: draws clips, trains VAE and experts.

    python -m recipes.quickstart.video.build_checkpoint --out recipes/quickstart/video/checkpoint

Takes some minutes on one core. The clips show a lamp whose light grows or fades. The experts learn to draw both, and
a third of their prompts says the opposite of what is seen: the base model draws what it was asked for too seldom.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_async_pipelines.wan2_2 import tiny  # isort: skip  (before anything imports torchvision)
import torch
import torch.nn.functional as F

from omni_async.config.writing import write_atomic

HERE = Path(__file__).parent
FRAMES, SIDE, TOKENS = 9, 16, 32
WORDINGS = (  # brighter and darker, one after the other: an update asks for both
    ("gets brighter", "gets darker"),
    ("brightens", "darkens"),
    ("lights up", "fades out"),
)
TRAIN_SUBJECTS = ("a lamp", "the lantern", "one candle", "the moon")
HELD_OUT_SUBJECTS = ("the lamp", "a star", "one light")


def prompts(subjects: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns every subject with every wording, and what is asked for as `target`."""
    return [
        {"prompt": f"{subject} {words}", "target": target}
        for subject in subjects
        for pair in WORDINGS
        for words, target in zip(pair, ("brighter", "darker"), strict=True)
    ]


def draw_clips(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws discs whose light grows or fades evenly, half of them each.

    Returns (count, 3, 9, 16, 16) in [-1, 1], and which of them fade."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator)

    rows, columns = torch.arange(SIDE).view(1, 1, SIDE, 1), torch.arange(SIDE).view(1, 1, 1, SIDE)
    centre_y, centre_x = uniform(5.5, 9.5), uniform(5.5, 9.5)
    distance = ((rows - centre_y) ** 2 + (columns - centre_x) ** 2).sqrt()
    disc = torch.sigmoid(uniform(3, 5) - distance)
    dim, bright = uniform(0.1, 0.35), uniform(0.6, 1.0)
    times = torch.linspace(0, 1, FRAMES).view(1, FRAMES, 1, 1)
    fading = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    level = torch.lerp(dim, bright, torch.where(fading, 1 - times, times))
    return (2 * level * disc - 1)[:, None].expand(-1, 3, -1, -1, -1), fading.flatten()


def train_vae(vae: Any, num_steps: int, batch: int, log: Callable[[str], None]) -> None:
    """Trains the VAE in place."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.15)
    generator = torch.Generator().manual_seed(0)
    vae.train()
    for step in range(num_steps):
        clips, _ = draw_clips(batch, generator)
        posterior = vae.encode(clips).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample
        loss = F.mse_loss(decoded, clips) + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 25 == 0:
            log(f"vae step {step + 1}/{num_steps}: loss {loss.item():.4f}")
    vae.eval()


@torch.no_grad()
def encode_clips(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes clips and writes the statistics of their latents into the VAE's config.

    Returns normalised latents (2048, 16, 3, 2, 2), and which of the clips fade."""
    generator = torch.Generator().manual_seed(1)
    clips, fading = zip(*(draw_clips(64, generator) for _ in range(32)), strict=True)
    latents = torch.cat([vae.encode(some).latent_dist.mode() for some in clips])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1), torch.cat(fading)


def train_experts(
    pipeline: Any,
    latents: torch.Tensor,
    fading: torch.Tensor,
    *,
    num_steps: int,
    right: float,
    log: Callable[[str], None],
) -> None:
    """Trains both experts in place to predict the velocity noise - latent, each for its sigmas.

    `right`: the part of the clips whose prompt says what they show; the others' says the opposite."""
    texts = [row["prompt"] for row in prompts(TRAIN_SUBJECTS + HELD_OUT_SUBJECTS)]  # brighter and darker in turn
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(texts, None, False, max_sequence_length=TOKENS)
    shift, boundary = pipeline.scheduler.config.flow_shift, pipeline.config.boundary_ratio
    generator = torch.Generator().manual_seed(1)
    for expert, low, high in ((pipeline.transformer, boundary, 1.0), (pipeline.transformer_2, 0.0, boundary)):
        expert.train()
        optimizer = torch.optim.AdamW(expert.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, num_steps, pct_start=0.05)
        total = 0.0
        for step in range(num_steps):
            index = torch.randint(len(latents), (64,), generator=generator)
            wrong = torch.rand(64, generator=generator) >= right
            pair = torch.randint(len(texts) // 2, (64,), generator=generator)
            clean, text = latents[index], embeds[2 * pair + (fading[index] ^ wrong)]
            noise = torch.randn(clean.shape, generator=generator)
            # uniform in the schedule's own time, whose sigma is shift t / (1 + (shift - 1) t)
            times = [edge / (shift - (shift - 1) * edge) for edge in (low, high)]
            time_ = times[0] + (times[1] - times[0]) * torch.rand(64, generator=generator)
            sigma = (shift * time_ / (1 + (shift - 1) * time_)).view(-1, 1, 1, 1, 1)
            velocity = expert(torch.lerp(clean, noise, sigma), 1000 * sigma.flatten(), text, return_dict=False)[0]
            loss = F.mse_loss(velocity, noise - clean)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
            if (step + 1) % 100 == 0:
                log(f"expert of sigma {low:g} to {high:g}, step {step + 1}/{num_steps}: loss {total / 100:.3f}")
                total = 0.0
        expert.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint", help="folder of the checkpoint")
    parser.add_argument("--prompts", type=Path, default=HERE, help="folder of the two prompt files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--vae-steps", type=int, default=300, help="optimizer steps of the VAE")
    parser.add_argument("--vae-batch", type=int, default=8, help="clips in a VAE step")
    parser.add_argument("--expert-steps", type=int, default=600, help="optimizer steps of each expert")
    parser.add_argument("--right", type=float, default=0.65, help="part of the clips that their prompt describes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another number changes the last bits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # Adam's decayed moments become denormal and slow a CPU down several times
    torch.manual_seed(args.seed)
    started = time.monotonic()

    def log(message: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started:5.0f} s] {message}\n")
        sys.stdout.flush()

    train, held_out = prompts(TRAIN_SUBJECTS), [row | {"held_out": True} for row in prompts(HELD_OUT_SUBJECTS)]
    for name, rows in (("train", train), ("validation", held_out)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomic(args.prompts / f"prompts_{name}.jsonl", lines.encode())
    corpus = [row["prompt"] for row in (*train, *held_out)]
    pipeline = tiny.build_components(layers=2, heads=4, corpus=corpus, seed=args.seed)
    train_vae(pipeline.vae, args.vae_steps, args.vae_batch, log)
    latents, fading = encode_clips(pipeline.vae)
    train_experts(pipeline, latents, fading, num_steps=args.expert_steps, right=args.right, log=log)
    pipeline.save_pretrained(args.out)
    log(f"wrote {args.out}")


if __name__ == "__main__":
    main()
