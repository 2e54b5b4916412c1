"""Tests that the spans of a run give back the service times that made them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.config.algorithm import Correction
from omni_async.config.schema import Config, Lora, Model, Placement
from omni_async.performance.emulation import Device
from omni_async.performance.law import unmeasured, with_estimates
from omni_async.performance.measure import measure
from omni_async.performance.profile import NOTHING, Payload, Profile, ScorerTime, ServiceTime, fit, slope_of
from omni_async.performance.scorer_lanes import scorer_lanes
from omni_async.simulation.result import not_measured, times_of
from omni_async.simulation.simulate import simulate
from omni_async.simulation.virtual_time import VirtualTimeLoop
from omni_async.types import Span
from tests.simulation.tune.tune_world import job
from tests.support.configs import build
from tests.support.token_family import AnswerSampling


def config(**rollout: Any) -> Config:
    batches = {"group_size": 8, "max_batch": 4, "num_inference_steps": 10}
    return build({"rollout": batches | rollout, "trainer": {"workers": 2}})


def measured(spans: list[Span], **rollout: Any) -> Profile:
    return measure(spans, config(**rollout), samples_per_rank=4.0, name="run-1", source="a test")


def trained(*ends: float) -> list[Span]:
    """Returns spans with an optimizer step of 0.5 s at the end of every update."""
    return [
        Span("trainer", "train", end - 0.5, end, {"version": version, "step": 0}) for version, end in enumerate(ends)
    ]


def generated(engine: str, begin: float, end: float, samples: int, **args: Any) -> list[Span]:
    return [Span(engine, "generate", begin, end, {"sample": f"g0.s{i}", **args}) for i in range(samples)]


def test_batches_are_found_behind_samples_that_wait_inside_the_engine() -> None:
    """Holds two batches of four in every engine; a sample's span begins when it was handed over."""
    spans: list[Span] = []
    for engine in ("rollout-0", "rollout-1"):
        for end in range(103, 121, 3):
            spans += generated(engine, max(100.0, end - 6.0), float(end), 4)
    assert measured(spans).generate == ServiceTime(unit_s=0.75)


def test_two_sizes_of_batches_tell_fixed_from_unit_time() -> None:
    spans, now = [], 0.0
    for samples in (4, 1, 4, 2, 3, 1) * 3:
        now += 10.0  # idle between batches
        spans += generated("rollout-0", now, now + 2.0 + 0.5 * samples, samples)
        now += 2.0 + 0.5 * samples
    found = measured(spans).generate
    assert (found.fixed_s, found.unit_s) == pytest.approx((2.0, 0.5))


def test_an_engine_that_finishes_samples_one_by_one_keeps_its_throughput() -> None:
    """Batches continuously: four in flight, one done every second. Validation samples take other steps."""
    spans = [Span("rollout-0", "generate", float(i), float(i + 4), {"sample": f"g0.s{i}"}) for i in range(40)]
    spans += [Span("rollout-0", "generate", 50.0, 90.0, {"sample": "v3.p0.s0"})]
    # The first four overlap with nothing before them.
    assert measured(spans).generate.mean(4) == pytest.approx(4.0, rel=0.08)


def test_a_step_of_a_sample_of_several_calls_is_one_of_a_calls() -> None:
    """Samples that end a step apart were not computed together, however many steps all calls have."""
    spans = [Span("rollout-0", "generate", 0.9 * i, 0.9 * i + 18.0) for i in range(16)]
    of_calls = measured(spans, num_inference_steps=10, calls=2, max_batch=8).generate
    assert of_calls == measured(spans, num_inference_steps=20, max_batch=8).generate
    assert of_calls != measured(spans, num_inference_steps=10, max_batch=8).generate


def test_a_pause_for_a_swap_is_no_generation_and_the_wait_for_its_boundary_is_no_pause() -> None:
    spans = [s for job in range(8) for s in generated("rollout-0", 5.0 * job, 5.0 * job + 4.2, 4)]
    # Each job is interrupted for 0.2 s, asked for between 0 and 0.3 s earlier.
    spans += [
        Span("rollout-0", "swap", 5.0 * job + 1.0 - 0.1 * (job % 4), 5.0 * job + 1.2, {"version": job})
        for job in range(8)
    ]
    found = measured(spans)
    assert found.swap.fixed_s == pytest.approx(0.2)
    assert found.generate.mean(4) == pytest.approx(4.0)


def test_the_first_of_four_updates_warms_up_and_does_not_count() -> None:
    def spans(updates: int) -> list[Span]:
        slow = [Span("reward-0", "score", 0.0, 9.0, {"samples": 1})]
        steady = [Span("reward-0", "score", 10.0 + n, 10.5 + n, {"samples": 1}) for n in range(20)]
        return [*slow, *steady, *trained(*(10.0 * (u + 1) for u in range(updates)))]

    assert measured(spans(4)).score.unit_s == pytest.approx(0.5)
    assert measured(spans(3)).score.unit_s == pytest.approx((9.0 + 20 * 0.5) / 21)


def test_what_a_run_has_no_spans_of_is_zero_and_named() -> None:
    found = measured([Span("reward-0", "score", 0.0, 1.0, {"samples": 2})])
    assert set(found.stages()) - {"score"} == {stage for stage, service in found.stages().items() if service == NOTHING}
    assert (
        found.assumed
        == "zero because the run shows nothing of it: generate, proximal, train, step, export, publish, swap, switch"
    )
    assert found.name == "run-1" and found.source.startswith("a test")
    assert measured([]).payload == Payload(), "a run that never began has a profile, too"


def answers_measured(spans: list[Span], engine: str = "vllm") -> Profile:
    job = build({}, {"rollout.sampling": AnswerSampling(), "rollout.engine": engine, "rollout.max_batch": 4})
    return measure(spans, job, samples_per_rank=1.0, name="run-1", source="a test")


def answer(begin: float, end: float, tokens: int, sample: str = "g0.s0") -> Span:
    spans = ((3, tokens - 1), (4, 1)) if tokens > 1 else ((3, tokens),)
    return Span("rollout-0", "generate", begin, end, {"sample": sample, "version_steps": spans})


def test_a_token_takes_longer_with_more_answers_in_the_engine() -> None:
    """A token takes 0.1 s and 0.02 s an answer: one after the other, in pairs, and four that a fifth waits for."""
    spans, now = [], 0.0
    for together in (1, 2, 4) * 4:
        token_s = 0.1 + 0.02 * together
        spans += [answer(now, now + 10 * token_s, 10) for _ in range(together)]
        now += 10 * token_s
    spans.append(answer(now - 1.0, now + 5 * 0.12, 5))
    spans.append(answer(now, now + 1000.0, 7, sample="v1.p0.s0"))
    found = answers_measured(spans[:-1]).tokens
    assert (found.token.fixed_s, found.token.unit_s) == pytest.approx((0.1, 0.02))
    assert found.lengths == (5,) * 2 + (10,) * 48, "1 of 29"
    with_validation = answers_measured(spans).tokens
    assert with_validation.lengths == found.lengths


def test_pauses_for_swaps_are_no_tokens() -> None:
    spans = [answer(5.0 * job, 5.0 * job + 4.2, 40) for job in range(8)]
    spans += [Span("rollout-0", "swap", 5.0 * job + 1.0, 5.0 * job + 1.2, {"version": job}) for job in range(8)]
    found = answers_measured(spans)
    assert found.tokens.token == ServiceTime(fixed_s=pytest.approx(0.1))
    assert found.generate == found.tokens.in_batches and "generate" not in found.assumed


def test_answers_in_transformers_wait_for_the_longest_of_their_batch() -> None:
    spans = [answer(0.0, 4.0 * job + 4.0, length) for job in range(4) for length in (2, 3, 5, 8)]
    found = answers_measured(spans, engine="transformers").tokens
    assert found.lengths == (8,) * 50 and found.token.mean(4) == pytest.approx(0.5)
    assert answers_measured([]).generate == NOTHING


def test_variation_is_kept() -> None:
    drawn, service = random.Random(0), ServiceTime(unit_s=2.0, cv=0.3)
    spans = [
        Span("reward-0", "score", 20.0 * i, 20.0 * i + service.sampler(drawn)(4), {"samples": 4}) for i in range(400)
    ]
    found = measured(spans).score
    assert found.mean(4) == pytest.approx(8.0, rel=0.05)
    assert found.variation == pytest.approx(0.3, rel=0.15)


def calls(scorer: str, at_once: int, actor: str = "reward-0") -> list[Span]:
    """Returns three rounds of so many calls of one second side by side."""
    return [
        Span(actor, "score", float(i), i + 1.0, {"samples": 1, "scorer": scorer})
        for i in range(3)
        for _ in range(at_once)
    ]


def test_a_scorer_that_is_alone_keeps_the_calls_that_it_makes_at_once() -> None:
    assert measured(calls("ocr", 1)).scorers == {}, "its time is that of `score`"
    assert measured(calls("ocr", 6)).scorers == {"ocr": ScorerTime(ServiceTime(unit_s=1.0), concurrency=6)}


def test_calls_of_a_pool_are_counted_for_each_of_its_workers() -> None:
    """A reward worker has 12 calls out at three workers of a pool: four at each, which then make twelve again."""
    scorers = [{"name": "ocr"}, {"name": "pick_score", "pool": "judges"}]
    config = build({"reward": {"scorers": scorers, "pools": [{"name": "judges", "workers": 3}]}})
    spans = calls("ocr", 1) + calls("pick_score", 12)
    found = measure(spans, config, samples_per_rank=1.0, name="run-1", source="a test")
    assert {label: one.concurrency for label, one in found.scorers.items()} == {"ocr": 1, "pick_score": 4}
    assert [lane.concurrency for lane in scorer_lanes(config, found)] == [1, 12]


class LateLoop(VirtualTimeLoop):
    """An event loop on which every timer fires 30 ms late."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_later(delay + 0.03, callback, *args, context=context)


def test_a_loop_that_wakes_up_late_is_late_once_and_not_at_every_job() -> None:
    async def main() -> float:
        loop, device = asyncio.get_running_loop(), Device()
        for _ in range(10):
            await device.busy(0.1, since=device.now())
        return loop.time()

    with asyncio.Runner(loop_factory=LateLoop) as runner:
        assert runner.run(main()) == pytest.approx(1.03)


SECOND = ServiceTime(fixed_s=1.0)
MEASURED = Profile(
    name="run",
    source="measured",
    generate=ServiceTime(unit_s=1.0),
    score=ServiceTime(unit_s=0.1),
    train=ServiceTime(fixed_s=0.3, unit_s=0.6),
    **dict.fromkeys(("step", "export", "publish", "swap"), SECOND),
)


def recomputing(**trainer: object) -> Config:
    """Recomputes log-probs: the second optimizer step needs those of the policy before the first."""
    return job(algorithm={"correction": Correction(mode="decoupled")}, trainer={"steps_per_update": 2, **trainer})


@pytest.mark.parametrize(
    ("lora", "checkpointing", "passes"),
    [(None, False, 3), (None, True, 4), (Lora(), False, 2), (Lora(), True, 3)],
)
def test_a_forward_pass_is_estimated_from_what_training_does(lora, checkpointing, passes):
    config = replace(recomputing(gradient_checkpointing=checkpointing), model=Model(path="model", lora=lora))
    assert with_estimates(MEASURED, config).proximal.mean(4) == pytest.approx(MEASURED.train.mean(4) / passes)
    assert f"1/{passes} of a group's training" in unmeasured(MEASURED, config, recomputes_proximal=True)[0]


def test_a_job_that_needs_the_pass_pays_for_it_by_the_law_and_in_simulation():
    seconds = 2 * 1.0 + 4 * MEASURED.train.mean(8) * (1 + 1 / 3)
    assert times_of(recomputing(), MEASURED).train == pytest.approx(seconds)
    found = simulate(recomputing(), replace(MEASURED, generate=NOTHING), updates=20)
    assert found.step_s == pytest.approx(seconds + MEASURED.export.mean()), "the trainer is the bottleneck"


def test_what_is_not_measured_is_reported_where_the_job_needs_it():
    [said] = not_measured(recomputing(), MEASURED)
    assert said.startswith(
        "profile run has no time for proximal, the pass that recomputes log-probs for the correction: estimated as 1/3"
    )
    config = recomputing(steps_per_update=1)
    assert not_measured(config, MEASURED) == [] == not_measured(recomputing(), replace(MEASURED, proximal=SECOND))
    several = replace(config, rollout=replace(config.rollout, calls=2), placement=Placement(colocated=True))
    assert not_measured(several, replace(MEASURED, swap=NOTHING)) == [
        "rollout.calls: profile run's times for a sample are taken for its 2 calls together",
        "profile run has no time for swap, switch: counted as 0 s",
    ]


def test_jobs_of_several_sizes_give_the_fixed_part_and_that_of_a_unit() -> None:
    noise = random.Random(0)
    found = fit([(n, (2.0 + 0.5 * n) * noise.uniform(0.95, 1.05)) for n in range(1, 9) for _ in range(20)])
    assert found.fixed_s == pytest.approx(2.0, rel=0.05) and found.unit_s == pytest.approx(0.5, rel=0.05)
    level = fit([(n, 3.0 * noise.uniform(0.95, 1.05)) for n in range(1, 9) for _ in range(20)])
    assert level.mean(4) == pytest.approx(3.0, rel=0.02) and level.mean(1) == pytest.approx(3.0, rel=0.05)


def test_a_few_jobs_of_another_size_do_not_say_that_half_a_batch_takes_as_long() -> None:
    noise = random.Random(1)
    full = [(48.0, 1.13 * noise.uniform(0.8, 1.2)) for _ in range(85)]
    for few in ([], [(35.0, 1.7)], [(35.0, 1.7), (42.0, 1.09), (42.0, 0.81)]):  # the first of them found 0 s for a unit
        found = fit([*full, *few])
        assert found.fixed_s == 0 and found.unit_s == pytest.approx(1.13 / 48, rel=0.05)


@given(x=st.lists(st.floats(1, 50), min_size=3, max_size=30), seed=st.integers(0, 1000))
def test_the_jackknife_is_that_of_leaving_each_point_out(x: list[float], seed: int) -> None:
    noise = random.Random(seed)
    y = [2 + 0.3 * one + noise.gauss(0, 1) for one in x]
    rest = [np.array([one for j, one in enumerate(values) if j != i]) for values in (x, y) for i in range(len(x))]
    x_rest, y_rest = rest[: len(x)], rest[len(x) :]
    assume(min(np.ptp(one) for one in x_rest) > 0.1)
    slopes = np.array([np.polyfit(a, b, 1)[0] for a, b in zip(x_rest, y_rest, strict=True)])
    expected = np.sqrt((len(x) - 1) / len(x) * np.sum((slopes - slopes.mean()) ** 2))
    slope, error = slope_of(np.array(x), np.array(y))
    assert slope == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-6, abs=1e-8)
    assert error == pytest.approx(expected, rel=1e-5, abs=1e-8)
