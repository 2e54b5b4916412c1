"""Tests answers of tokens in profiles: their lengths, their law, and simulated engines against emulated ones."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from omni_async import cli
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import ConfigError, resolved_yaml
from omni_async.performance.measure import measure
from omni_async.performance.profile import Profile, ServiceTime, TokenTimes, load_profile, require_times, write_profile
from omni_async.rollout.emulated import EmulatedEngine, RandomPayload, TokenByToken
from omni_async.simulation import what_if
from omni_async.simulation.simulate import simulate
from omni_async.simulation.simulated_answers import SimulatedAnswers
from omni_async.simulation.world import Meters, World
from omni_async.types import SampleRequest, SampleResult
from tests.rollout.conftest import make_request, publish
from tests.simulation.simulation_world import make_config, make_profile
from tests.simulation.test_real_roles import UPDATES, played, step_s
from tests.support.job_world import Emulated
from tests.support.token_family import FAMILY, AnswerSampling, token_family

TOKENS = TokenTimes(ServiceTime(0.02, 0.001), (20, 30, 50, 80, 320), ServiceTime(unit_s=0.01))
PROFILE = replace(
    make_profile(score=(0.5, 0.2), train=(0.1, 0.25), step=0.5, export=0.2, publish=1.5, swap=0.3, switch=1.0),
    generate=TOKENS.in_batches,
    tokens=TOKENS,
)
JOB: dict[str, Any] = {
    **{"rollout.engine": "transformers", "rollout.sde": None, "rollout.sampling": AnswerSampling(max_tokens=320)},
    **{"rollout.workers": 2, "rollout.max_batch": 8, "rollout.max_inflight": 16, "algorithm.name": "token_gspo"},
}


def test_a_length_is_its_seed_s_and_the_mean_time_is_that_of_full_engines() -> None:
    drawn = [TOKENS.length_of(seed) for seed in range(2000)]
    assert drawn == [TOKENS.length_of(seed) for seed in range(2000)]
    assert statistics.fmean(drawn) == pytest.approx(TOKENS.mean_length, rel=0.1)
    longest = statistics.fmean(max(drawn[first : first + 8]) for first in range(0, 2000, 8))
    assert TOKENS.longest(8) == pytest.approx(longest, rel=0.05)
    assert TOKENS.longest(1) == TOKENS.mean_length == 100
    assert TOKENS.in_batches.mean(8) == pytest.approx(100 * 0.028 + 0.08)


def test_profiles_of_tokens_are_read_scaled_and_checked(tmp_path: Path) -> None:
    write_profile(path := tmp_path / "profile.json", PROFILE)
    assert load_profile(str(path)) == PROFILE
    assert PROFILE.scaled(2).stages()["token"] == ServiceTime(0.04, 0.002)
    for lengths, expected in ([], "lengths: expected at least one"), ([7], r"generate\.fixed_s: by `tokens` it should"):
        content = msgspec.to_builtins(PROFILE)
        content["tokens"]["lengths"] = lengths
        path.write_bytes(msgspec.json.encode(content))
        with pytest.raises(ConfigError, match=expected):
            load_profile(str(path))


def test_a_profile_has_the_times_of_what_the_model_draws() -> None:
    latents = make_profile(generate=1.0)
    with pytest.raises(ConfigError, match="made has no times of tokens, and the recipe's model draws tokens"):
        require_times(make_config(**JOB), latents)
    with pytest.raises(ConfigError, match="made has times of tokens alone, and the recipe's model draws latents"):
        require_times(make_config(), PROFILE)
    with pytest.raises(ConfigError, match="longest answer of profile made has 320 tokens, and the most are 319"):
        require_times(make_config(**JOB | {"rollout.sampling": AnswerSampling(max_tokens=319)}), PROFILE)


@pytest.mark.virtual_time
async def test_answers_join_and_end_at_any_token_and_new_weights_come_between_two() -> None:
    one_by_one = replace(TOKENS, token=ServiceTime(1.0), prefill=ServiceTime(unit_s=2.0))
    profile = replace(PROFILE, tokens=one_by_one, generate=one_by_one.in_batches, swap=ServiceTime(0.5))
    times = TokenByToken("rollout-0", profile, 1, one_by_one, max_batch=2)
    engine = EmulatedEngine("rollout-0", times, RandomPayload(profile.payload, 1), max_batch=2)
    requests = [make_request(number, seed=number) for number in range(3)]
    lengths = [one_by_one.length_of(request.seed) for request in requests]
    await engine.start()
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(engine.generate(requests[0]))
    await asyncio.sleep(6.5)  # 2 s of the prompt, and token 5 of the answer is being drawn
    second = asyncio.create_task(engine.generate(requests[1]))
    await asyncio.sleep(2.0)  # joined after token 5, and its prompt is read until 9 s
    await engine.stage(*publish(3, {"bucket": torch.zeros(25)}))
    staged = loop.time()
    await engine.swap(3)
    swapped, made = loop.time(), await asyncio.gather(first, second)
    await engine.close()
    tokens = round(swapped - 0.5 - 9.0)
    assert staged <= swapped - 0.5 < staged + 1
    assert [one.versions.spans for one in made] == [
        ((0, before), (3, length - before)) for before, length in ((5 + tokens, lengths[0]), (tokens, lengths[1]))
    ]
    assert loop.time() == pytest.approx(9.5 + max(lengths[0] - 5, lengths[1]))


class Desk:
    """Hands requests to an engine once, as a coordinator does, and notes when answers end."""

    ledger, versions = SimpleNamespace(admitted=0), SimpleNamespace(held=0)

    def __init__(self, *given: list[SampleRequest]) -> None:
        self._given = iter(given)
        self.ended: list[tuple[float, tuple[tuple[int, int], ...]]] = []

    async def next_samples(self, *_: Any) -> list[SampleRequest]:
        return next(self._given, [])

    async def samples_done(self, _: str, results: list[SampleResult]) -> None:
        self.ended += [(one.finished, one.step_versions.spans) for one in results]


@pytest.mark.virtual_time
async def test_new_weights_after_the_last_token_of_an_answer_pause_the_others() -> None:
    tokens = TokenTimes(ServiceTime(1.0), (2, 4))
    seeds = [next(seed for seed in range(99) if tokens.length_of(seed) == length) for length in tokens.lengths]
    profile = replace(PROFILE, tokens=tokens, generate=tokens.in_batches, swap=ServiceTime(0.5))
    desk = Desk([make_request(number, seed=seed) for number, seed in enumerate(seeds)])
    loop = asyncio.get_running_loop()
    meters = Meters(loop.time, {"rollout": 1}, dict.fromkeys(("slots", "trajectories", "replay"), 8))
    parts: Any = {"plan": None, "coordinator": desk, "loop": loop, "meters": meters, "shared": None, "outage": None}
    world = World(config=make_config(**JOB), profile=profile, seed=0, bundle=1, rejected=0.0, **parts)
    engine = SimulatedAnswers("rollout-0", world, lambda: None, tokens)
    assert engine.stage(0) == 0.5
    await engine.lease()
    await asyncio.sleep(2.0)  # in the second token of both
    assert engine.stage(1) == 3.0
    await asyncio.sleep(9.0)
    assert desk.ended == [(2.5, ((0, 2),)), (5.0, ((0, 2), (1, 2)))]


def own_profile(made: Emulated) -> Profile:
    per_rank = samples_per_rank(made.config)
    return measure(made.spans, made.config, samples_per_rank=per_rank, name="run", source="a test")


def own_prediction(made: Emulated) -> float:
    """Returns the seconds of an update in a simulation with the times and lengths that the run shows."""
    return simulate(made.config, own_profile(made), updates=UPDATES, seed=made.config.run.seed).step_s


@pytest.mark.parametrize(
    ("swap", "schedule"), [("step", None), ("request", None), ("drain", None), ("step", "sync_colocated")]
)
def test_the_simulator_takes_the_time_of_the_real_roles(swap: str, schedule: str | None, tmp_path: Path) -> None:
    made = played(tmp_path, PROFILE, schedule, **JOB | {"weights.swap": swap})
    assert own_prediction(made) == pytest.approx(step_s(made), rel=0.04)
    staleness = [age for update in made.updates for age in update["staleness"]]
    found = simulate(made.config, PROFILE, updates=UPDATES, seed=made.config.run.seed)
    assert found.step_s == pytest.approx(step_s(made), rel=0.02)
    assert found.staleness_mean == pytest.approx(statistics.fmean(staleness), abs=0.1)
    if swap == "step" and schedule is None:  # otherwise engines wait for their longest answers
        assert found.bound_fraction == pytest.approx(1, abs=0.05)


def test_the_folder_of_a_run_of_answers_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(what_if, "changes", lambda config, profile: [])
    made = played(tmp_path, PROFILE, **JOB | {"trainer.updates": 12})
    run = tmp_path / "made-20260101-120000"
    run.mkdir()
    named = replace(made.config, model=replace(made.config.model, pipeline=FAMILY.name))
    (run / "config.yaml").write_text(resolved_yaml(named))
    lines = [{"update": update["version"], "finished": update["finished"]} for update in made.updates]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    measured = own_profile(made)
    with token_family(tmp_path / "package"):
        write_profile(run / "profile.json", measured)
        assert cli.main(["simulate", str(run), "--json", str(tmp_path / "found.json")]) == 0
        assert "answers/s" in capsys.readouterr().out
        assert abs(json.loads((tmp_path / "found.json").read_text())["model_error"]) < 0.05
        write_profile(run / "profile.json", replace(measured, tokens=UNSET))
        assert cli.main(["simulate", str(run)]) == 2
    assert "its profile has no times of tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("workers", "batch", "close"), [(1, 32, True), (1, 8, False), (2, 32, False)])
def test_in_step_groups_with_the_longest_answers_are_trained_last(workers: int, batch: int, close: bool) -> None:
    """Holds the law to be a bound, and a close one where an engine draws all of its answers at once."""
    engines = {"rollout.workers": workers, "rollout.max_batch": batch, "rollout.max_inflight": batch}
    config = make_config(**JOB | engines | {"staleness.max_updates": 0, "buffer.window": 4})
    profile = replace(PROFILE, train=ServiceTime(unit_s=0.4), score=ServiceTime(unit_s=0.02))
    found = simulate(config, profile, updates=40)
    assert found.bound_fraction <= 1.01
    if close:
        assert found.bound_fraction > 0.95
