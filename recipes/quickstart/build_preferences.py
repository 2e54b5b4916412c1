"""Writes preference pairs of the quickstart task: a clean digit is chosen over a scribbled or a wrong one.

    python -m recipes.quickstart.build_preferences
    omni-async train recipes/quickstart/algorithms/diffusion_dpo_offline.yaml

The pairs are rendered, so nothing is sampled or judged: offline Diffusion-DPO gets the format of a dataset of human
preferences.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from omni_async.config.writing import replacing
from recipes.quickstart.glyphs import DIGITS, render_digit, scribble_over
from recipes.quickstart.prompts import TRAIN_TEMPLATES

_WRONG_DIGITS = (
    0.2  # as in the base model's failures, most rejected images are scribbled over and a few show another digit
)
_ROWS_PER_GROUP = 100  # a row is reached by decoding its row group from the start


def render_pairs(count: int, seed: int) -> list[dict[str, str | bytes]]:
    """Renders `count` rows of prompt, chosen and rejected (PNG)."""
    rng = random.Random(seed)
    rows: list[dict[str, str | bytes]] = []
    for _ in range(count):
        digit = rng.choice(DIGITS)
        if rng.random() < _WRONG_DIGITS:
            rejected = render_digit(rng.choice(DIGITS.replace(digit, "")), rng)
        else:
            rejected = scribble_over(render_digit(digit, rng), rng)
        prompt = rng.choice(TRAIN_TEMPLATES).format(digit)
        rows.append({"prompt": prompt, "chosen": _png(render_digit(digit, rng)), "rejected": _png(rejected)})
    return rows


def _png(image: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert("RGB").save(file, format="PNG")  # type: ignore[arg-type]
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "preferences.parquet", help="the file to write"
    )
    parser.add_argument("--pairs", type=int, default=600, help="number of pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs: expected at least 1, got {args.pairs}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(render_pairs(args.pairs, args.seed))
    with replacing(args.out) as unfinished:
        pq.write_table(table, unfinished, row_group_size=_ROWS_PER_GROUP)
    sys.stdout.write(f"wrote {args.pairs} pairs to {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)\n")


if __name__ == "__main__":
    main()
