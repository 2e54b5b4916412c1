"""Tests the work queue against a plain model of it, under arbitrary moves."""

from __future__ import annotations

import math
from typing import Any

from control_world import make_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.leasing import WorkQueue
from omni_async.types import SampleKind, SampleRequest
from pipelines.qwen_image.sampling import QwenImageSampling

ENGINES = ("a", "b", "c")


def request(group: int, sample: int, kind: SampleKind = "train") -> SampleRequest:
    return SampleRequest(
        sample_id=f"{'g' if kind == 'train' else 'v'}{group}.s{sample}",
        kind=kind,
        group=group,
        sample=sample,
        prompt=make_prompts(1)[0],
        seed=0,
        spec=QwenImageSampling(height=32, width=32),
        num_inference_steps=4,
        noise_level=0.7,
        sde_kind="flow",
        window=None,
    )


class Model:
    """A model of what the queue promises, without regard for time."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.training: list[SampleRequest] = []
        self.validation: list[SampleRequest] = []
        self.leases: list[tuple[str, SampleRequest]] = []

    def held(self, engine: str, kind: SampleKind) -> int:
        return sum(owner == engine and leased.kind == kind for owner, leased in self.leases)

    def lease(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        allowed = math.ceil(self.share * capacity) - self.held(engine, "validation") if self.training else free
        chosen = self.validation[: max(0, min(free, allowed))]
        del self.validation[: len(chosen)]
        self.training.sort(key=lambda r: (r.group, r.sample))
        leased = sum(r.kind == "train" for _, r in self.leases)
        even = math.ceil((len(self.training) + leased) / len(ENGINES))
        more = self.training[: min(free - len(chosen), max(1, even - self.held(engine, "train")))]
        del self.training[: len(more)]
        self.leases += [(engine, r) for r in chosen + more]
        return chosen + more


@settings(max_examples=200, deadline=None)
@given(share=st.sampled_from([0.1, 0.5, 1.0]), data=st.data())
def test_it_behaves_like_its_model(share: float, data: Any) -> None:
    queue, model = WorkQueue(share), Model(share)
    dice = data.draw(st.randoms(use_true_random=False))
    group = 0
    for _ in range(dice.randint(1, 60)):
        move = dice.choice(["group", "round", "lease", "lease", "lease", "answer", "answer", "again", "forget"])
        if move == "group":
            for sample in range(dice.randint(1, 4)):
                queue.add(request(group, sample))
                model.training.append(request(group, sample))
            group += 1
        elif move == "round":
            for sample in range(dice.randint(1, 4)):
                queue.add(request(group, sample, "validation"))
                model.validation.append(request(group, sample, "validation"))
            group += 1
        elif move == "lease":
            engine, free = dice.choice(ENGINES), dice.randint(1, 5)
            leased = queue.lease(engine, free, 8, len(ENGINES))
            assert leased == model.lease(engine, free, 8)
            assert leased or not (model.training or model.validation)
        elif move in ("answer", "again") and model.leases:
            owner, one = model.leases.pop(dice.randrange(len(model.leases)))
            stranger = next(name for name in ENGINES if name != owner)
            assert queue.end_lease(stranger, one.sample_id) is None
            assert queue.end_lease(owner, one.sample_id) == one
            assert queue.end_lease(owner, one.sample_id) is None
            if move == "again":
                queue.add(one)
                (model.validation if one.kind == "validation" else model.training).append(one)
        elif move == "forget" and group:
            ended = dice.randrange(group)
            queue.forget(ended)
            model.training = [r for r in model.training if r.group != ended]
        assert queue.waiting == bool(model.training or model.validation)
        assert queue.num_training == len(model.training)
        assert queue.num_training_leases == sum(r.kind == "train" for _, r in model.leases)
        assert all(queue.leased(r.sample_id) for _, r in model.leases)
