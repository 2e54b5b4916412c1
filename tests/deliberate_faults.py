"""Breaks the product on purpose, and checks that the tests notice: `python -m tests.deliberate_faults [NUMBER ...]`.

Each fault is one changed line in a copy of the tree. It runs the test files that should catch it and prints the first
test that failed, or MISSED. Run it before and after tests are removed. A fault takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.places import ROOT

_LIMIT_S = 180


@dataclass(frozen=True)
class Fault:
    """A line of `file` that becomes another, and the `tests` (below tests/) that should fail."""

    file: str
    before: str
    after: str
    tests: str


def _of(folder: str, *faults: tuple[str, str, str, str]) -> list[Fault]:
    return [Fault(f"omni_async/{folder}/{file}", *rest) for file, *rest in faults]


FAULTS = [
    *_of("aio",
        ("batches.py", "self.load.items_running -= len(batch)", "pass", "aio/test_batches.py"),
        ("backoff.py", "2.0 ** min(failures - 1, 64)", "2.0 ** min(failures, 64)", "aio/test_backoff.py"),
        ("waiting.py", "if not future.done() or future.cancelled():", "if False:", "aio/test_waiting.py"),
    ),
    *_of("plugins",
        ("entry_points.py", "    if len(found) > 1:", "    if len(found) > 9:",
         "algorithms/test_registry.py runtime/test_services.py"),
        ("families.py", "if text.isascii():", "if True:", "runtime/preflight/test_prompt_limits.py"),
    ),
    *_of("control",
        ("group_table.py", "if staleness > self._budget:", "if staleness > self._budget + 9:",
         "control/test_coordinator_runs.py"),
        ("group_table.py", "num_groups < self._num_slots", "num_groups <= self._num_slots",
         "control/test_tables.py control/test_coordinator_machine.py"),
        ("group_table.py", "if others and due >", "if others and due - 1 >", "control"),
        ("group_table.py", "group.trained_version <= version", "group.trained_version < version",
         "control/test_tables.py"),
        ("sample_table.py", "if sample.state is QUEUED:", "if True:", "control"),
        ("sample_table.py", "max(1, even - self._num_leased_to", "max(9, even - self._num_leased_to", "control"),
        ("versions.py", "if report.digest != expected:", "if False:", "control/test_versions_and_rounds.py"),
        ("seeds.py", "randint(lo, hi - size)", "randint(lo, hi - size - 1)", "control/test_seeds.py"),
        ("reward_formula.py", "if gate is not None and value < gate:", "if gate is not None and value > gate:",
         "control/test_reward_formula.py"),
        ("held_bytes.py", "def has_room(self, bucket: int, count: int, shown: int) -> bool:",
         "def has_room(self, bucket: int, count: int, shown: int) -> bool:\n        return True\n",
         "control/test_held_bytes.py"),
    ),
    *_of("algorithms",
        ("advantages.py", "return values - values.mean()", "return values - values.median()",
         "algorithms/test_advantages.py"),
        ("rejection.py", "keep[order[:count]] = True", "keep[order[: count + 1]] = True",
         "algorithms/test_correction.py"),
        ("correction.py", "weight = weight.clamp(max=settings.cap)", "weight = weight.clamp(max=2 * settings.cap)",
         "algorithms/test_correction.py"),
        ("objectives/transition.py", "loss = -advantage * torch.where(held, bound, ratio)",
         "loss = -advantage * torch.where(held, ratio, bound)", "algorithms/test_transition_losses.py"),
        ("objectives/token.py", "losses = losses / inputs.most_tokens", "losses = losses / lengths",
         "algorithms/test_token_losses.py"),
    ),
    *_of("tokens",
        ("head.py", "logits = logits / temperature", "logits = logits * temperature", "tokens/test_head.py"),
        ("packing.py", "first = start + len(prompt.ids) - 1", "first = start + len(prompt.ids)",
         "tokens/test_packing.py"),
    ),
    *_of("diffusion/sde",
        ("transitions.py", "of_v = (1 + g.square() * (1 - s) / (2 * s)) * dt",
         "of_v = (1 + g.square() * (1 - s) / (3 * s)) * dt", "diffusion/sde/test_transitions.py"),
        ("noise.py", '"step", step)', '"step", 0)', "diffusion/sde/test_noise.py"),
    ),
    *_of("training",
        ("optimizer.py", "max_norm / (norm + 1e-6)", "max_norm / (norm + 1e-2)", "training/test_optimizer.py"),
        ("optimizer.py", "config.lr * (step + 1) / config.warmup_steps", "config.lr * step / config.warmup_steps",
         "training/test_optimizer.py"),
        ("row_loss.py", "if tuple(values.shape) != rows:", "if False:", "training"),
        ("token_loss.py", 'rows.behaviour_log_prob if mode == "bypass"', 'proximal if mode == "bypass"',
         "training/test_token_loss.py"),
    ),
    *_of("rollout",
        ("stepping.py", "self.versions.append(version)", "self.versions.append(0)",
         "rollout/test_stepping.py rollout/test_diffusers_engine.py"),
        ("stepping.py", "self._latents.append(self.latents)", "self._latents.append(latents)",
         "rollout/test_stepping.py rollout/test_diffusers_engine.py"),
        ("prefixes.py", "sample.step < sample.window_start", "True", "rollout/test_prefixes.py"),
        ("transformers_engine.py", "(swapped and self._recompute)", "swapped", "rollout/test_transformers_engine.py"),
    ),
    *_of("rewards",
        ("health.py", "if not self._breaker.given_up:", "if False:", "rewards/test_health.py"),
        ("cache.py", "asked = [identity, digest, prompt.text, prompt.target,",
         "asked = [identity, digest, prompt.text,", "rewards/test_cache.py"),
        ("scorers/ocr.py", "min(1.0, total) ** (1.0 / len(text))", "min(1.0, total)", "rewards/test_ocr_scorer.py"),
    ),
    *_of("weights",
        ("digest.py", "if actual != manifest.digest:", "if False:", "weights"),
        ("buckets.py", "ALIGNMENT = 64", "ALIGNMENT = 1", "weights/test_buckets.py"),
    ),
    *_of("checkpoint",
        ("best.py", "[: config.checkpoint.keep_best]", "[: config.checkpoint.keep_best - 1]",
         "checkpoint/test_best.py"),
        ("folders.py", "def check_manifest(folder: Path) -> None:",
         "def check_manifest(folder: Path) -> None:\n    return\n", "checkpoint/test_folders.py"),
    ),
    *_of("config",
        ("layout.py", "range((self.data_rank - start) % self.data_size", "range(self.data_rank % self.data_size",
         "config/test_layout.py"),
        ("redact.py", "return redact_text(value)", "return value",
         "config/test_redact.py fuzz/test_secrets_stay_secret.py"),
    ),
    *_of("roles",
        ("producer.py", "await self._until(lambda: self._running == 0)", "pass",
         "roles/test_producer.py roles/test_update_weights.py"),
        ("publisher.py", "        self._release_newest()\n        self._newest, self._carried",
         "        self._newest, self._carried", "roles/test_publisher.py"),
        ("update.py", "if number % self._groups_per_step == 0:", "if number == len(self.groups):",
         "roles/test_update.py"),
    ),
    *_of("runtime",
        ("placement.py", "cpus=max(r.cpus for r in wanted)", "cpus=min(r.cpus for r in wanted)",
         "runtime/test_placement.py"),
        ("keeper.py", "if len(when) >= self._most:", "if len(when) > self._most:", "runtime/test_keeper.py"),
    ),
    *_of("records",
        ("read/spans.py", "            if until <= start:", "            if until <= end:",
         "records/read/test_spans.py"),
        ("write/rundir.py", "if not updates and not rounds:", "if True:", "runtime/driver/test_observer.py"),
    ),
    *_of("performance",
        ("law.py", "times.latency / (max_updates + 1)", "times.latency / (max_updates + 2)",
         "performance simulation/test_law_against_simulation.py"),
    ),
    *_of("commands",
        ("evaluation/statistics.py", "clusters / (clusters - 1)", "1", "commands/evaluation/test_statistics.py"),
        ("export/adapter.py", "if new is None:", "if False:", "commands/export/test_export_command.py"),
    ),
]  # fmt: skip


def check(fault: Fault, copy: Path) -> str:
    """Return the first test that fails with the fault in place, or MISSED. ValueError if the line is not there once."""
    path = copy / fault.file
    source = path.read_text()
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.file}: expected {fault.before!r} once, found it {source.count(fault.before)} times")
    path.write_text(source.replace(fault.before, fault.after))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--durations=0"]
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'pipelines'}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, *(f"tests/{name}" for name in fault.tests.split())],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LIMIT_S} s"
    finally:
        path.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, flags=re.MULTILINE)
    return failed[1] if failed else "MISSED" if ended.returncode == 0 else f"pytest ended with {ended.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="faults to try, from 1 (default: all)")
    numbers = parser.parse_args().numbers or range(1, len(FAULTS) + 1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(copy)], cwd=ROOT, check=True)
        try:
            for number in numbers:
                fault, began = FAULTS[number - 1], time.monotonic()
                found = check(fault, copy)
                missed += not found.startswith("tests/")
                sys.stdout.write(f"{number:3d} {time.monotonic() - began:4.0f} s  {fault.file}: {found}\n")
                sys.stdout.flush()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)
    sys.stdout.write(f"{len(numbers) - missed} of {len(numbers)} caught\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
