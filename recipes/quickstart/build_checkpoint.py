"""Rebuilds the quickstart's checkpoint, offline and from nothing: renders digits, trains VAE, pretrains DiT badly.

    python -m recipes.quickstart.build_checkpoint --out recipes/quickstart/checkpoint

Takes about ten minutes on two cores. The result is in diffusers' layout; the prompt files are written beside this
module.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from omni_async_pipelines.qwen_image import tiny  # isort: skip  (before anything imports torchvision)
import numpy as np
import torch

from recipes.quickstart.dit_training import pretrain_dit
from recipes.quickstart.glyphs import render_dataset, scribble_over
from recipes.quickstart.prompts import TRAIN_TEMPLATES, VALIDATION_TEMPLATES, all_prompts, write_jsonl
from recipes.quickstart.vae_training import NUM_HELD_OUT, encode_normalised, train_vae

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint", help="folder of the checkpoint")
    parser.add_argument("--prompts", type=Path, default=HERE, help="folder of the two prompt files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the images")
    parser.add_argument("--num-images", type=int, default=4000, help="rendered digits to train on")
    parser.add_argument("--vae-steps", type=int, default=1000, help="optimizer steps of the VAE")
    parser.add_argument("--vae-batch", type=int, default=16, help="images in a VAE step")
    parser.add_argument("--dit-steps", type=int, default=1300, help="optimizer steps of the DiT")
    parser.add_argument("--dit-batch", type=int, default=64, help="images in a DiT step")
    parser.add_argument(
        "--scribbled", type=float, default=0.6, help="part of the DiT's last images that are scribbled over"
    )
    parser.add_argument("--label-noise", type=float, default=0.1, help="part of the DiT's last labels that are random")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; another number changes the last bits")
    args = parser.parse_args()
    if args.num_images <= NUM_HELD_OUT:
        parser.error(
            f"--num-images: {NUM_HELD_OUT} are held out to measure the VAE, so more are needed; got {args.num_images}"
        )
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # Adam's decayed moments become denormal and slow a CPU down several times
    torch.manual_seed(args.seed)
    started = time.monotonic()

    def log(message: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started:5.0f} s] {message}\n")
        sys.stdout.flush()

    args.prompts.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.prompts / "prompts_train.jsonl", TRAIN_TEMPLATES)
    write_jsonl(args.prompts / "prompts_validation.jsonl", VALIDATION_TEMPLATES)
    images, labels = render_dataset(args.num_images, args.seed + 1)
    rng = random.Random(args.seed + 2)
    spoiled = np.stack([scribble_over(image, rng) for image in images])
    log(f"rendered {len(images)} digits")
    pipeline = tiny.build_components(corpus=all_prompts(), seed=args.seed)
    psnr = train_vae(pipeline.vae, images, num_steps=args.vae_steps, batch_size=args.vae_batch, log=log)
    log(f"VAE done: PSNR {psnr:.1f} dB on held-out digits")
    pretrain_dit(
        pipeline,
        encode_normalised(pipeline.vae, images),
        encode_normalised(pipeline.vae, spoiled),
        labels,
        num_steps=args.dit_steps,
        batch_size=args.dit_batch,
        scribbled=args.scribbled,
        label_noise=args.label_noise,
        log=log,
    )
    pipeline.save_pretrained(args.out)
    log(f"wrote {args.out}")


if __name__ == "__main__":
    main()
