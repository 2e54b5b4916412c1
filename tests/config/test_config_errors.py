"""Tests that every bad input ends in one ConfigError whose line names the key and its allowed values, and that the
schema documents itself: every field has a description, and its bounds can be put in words."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from omni_async.config import Config
from omni_async.config.describe import annotation_at, describe, description, fields_of, struct_of, walk
from tests.config.recipe import MINIMAL, complaint, complaint_about, load_text, with_key
from tests.support.effort import require_lines

NAME = "letters, digits, '.', '_' and '-', at most 80 and beginning with a letter, a digit or '_'"
PLAIN = "1 to 4096 characters, no line ends or control codes"
FIELDS = {path: (annotation, default) for path, annotation, default in walk(Config)}


# ---- every field, by its type ----------------------------------------------------------------------------------------


def leaves(annotation: Any, metas: tuple[msgspec.Meta, ...] = ()) -> Iterator[tuple[Any, tuple[msgspec.Meta, ...]]]:
    """Returns the types that a field may hold, at any depth, each with the bounds around it."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from leaves(inner, (*metas, *(m for m in more if isinstance(m, msgspec.Meta))))
    elif get_origin(annotation) in (Union, types.UnionType, tuple):
        for inner in get_args(annotation):
            yield from leaves(inner, metas)
    else:
        yield annotation, metas


def wrong(annotation: Any) -> Iterator[str]:
    """Returns values, in YAML, that the field does not take: of another type, below its bound, absurdly large."""
    for leaf, metas in leaves(annotation):
        if leaf in (int, float):
            yield from ("1e300", str(2**62), ".nan", "true", "'12'")
            yield from (str(m.gt if m.gt is not None else m.ge - 1) for m in metas if (m.gt, m.ge) != (None, None))
        elif leaf is bool or get_origin(leaf) is Literal:
            yield from ("perhaps", "-7")
        elif struct_of(leaf) is not None:
            yield from ("tiny", "[1]")


def in_context(path: str) -> tuple[str, list[str]]:
    """Returns the key of a field of the schema, and the overrides without which it is nowhere."""
    section, list_, _ = path.partition("[]")
    needed = {
        "validation": ["validation.prompts=p.txt"],
        "emulation": ["emulation.profile=p.json"],
        "rollout.buckets": ["rollout.buckets=[{}]"],
        "roles": ["roles=[{name: judge}]"],
        "reward.pools": ["reward.pools=[{name: judges}]"],
        "reward.servers": ["reward.servers=[{name: judge, model: judge}]"],
    }
    return path.replace("[]", ".0"), needed.get(section if list_ else section.partition(".")[0], [])


def test_every_number_has_an_upper_bound() -> None:
    numbers = [(p, metas) for p, (a, _) in FIELDS.items() for leaf, metas in leaves(a) if leaf in (int, float)]
    assert [path for path, metas in numbers if all(m.le is None and m.lt is None for m in metas)] == []
    assert len(numbers) > 90


@pytest.mark.sliced(floor=80)
@pytest.mark.parametrize("path", [path for path, (annotation, _) in FIELDS.items() if any(wrong(annotation))])
def test_wrong_values_of_every_field(path: str) -> None:
    annotation, default = FIELDS[path]
    key, needed = in_context(path)
    pair = key.endswith((".band", ".k1")) or (isinstance(default, tuple) and struct_of(annotation) is None)
    for value in wrong(annotation):
        message = complaint(MINIMAL, *needed, f"{key}={f'[{value}, {value}]' if pair else value}")
        assert key in message and "expected " in message
        if value in ("perhaps", "tiny"):
            assert f"{key}: expected {describe(annotation_at(Config, key.split('.')))}, got " in message


PATHS = (
    *("run.dir", "run.ray_address", "model.path", "data.prompts", "data.preferences", "validation.prompts"),
    *("checkpoint.resume", "emulation.profile", "tracking.mlflow.tracking_uri", "tracking.mlflow.experiment"),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", ['"a\\0b"', '"a\\nb"', '"a\\eb"', "x" * 5000, "''"])
def test_wrong_paths(path: str, value: str) -> None:
    if value == "''" and path.startswith(("model", "data", "validation", "checkpoint")):
        return  # the recipe's folder, which its reader refuses
    message = complaint(MINIMAL, *in_context(path)[1], f"{path}={value}")
    assert f"{path}: expected " in message and "\0" not in message


# ---- one value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # unknown keys, and missing ones
        ("rollout.gruop_size=3", "~: unknown key; did you mean 'group_size'? allowed: attention_backend, batching, "),
        ("trianer.updates=3", "trianer: unknown key; did you mean 'trainer'? allowed: algorithm, buffer, checkpoint"),
        ("model.lora={rnak: 4}", "~.rnak: unknown key; did you mean 'rank'? allowed: alpha, rank, target_modules"),
        ("checkpoint..every=3", "checkpoint.: unknown key; allowed: every, keep, keep_best, resume"),
        ("rollout.buckets=[{sampling: {heigth: 64}}]", "~.0.sampling.heigth: unknown key; did you mean 'height'?"),
        ("algorithm.teacher={path: t, sampling: {scale: 4}}", "~.sampling.scale: unknown key; allowed: height"),
        ("algorithm.teacher={path: t, sampling: {height: 64}}", "~.sampling: a teacher computes the policy's samples"),
        (
            "algorithm.teacher={path: t, sampling: {negative_prompt: dull}}",
            "~.sampling.negative_prompt: a teacher reads prompts as they are encoded for the policy; remove it, or set",
        ),
        ("rollout.buckets=[{height: 64}]", "~.0.height: unknown key; did you mean 'weight'? allowed: sampling, weight"),
        ("rollout.height=64", "~: is called rollout.sampling.height now"),
        ("validation.every=3", "validation.prompts: required, expected a table of prompts, or validation.split"),
        ("reward.scorers.0={weight: 1}", "~.name: required, expected str"),
        # wrong types and values of every kind
        ("trainer.updates=ten", "~: expected int >= 1, got 'ten'"),
        ("model.path=[a]", "~: expected str, got ['a']"),
        ("reward.scorers=ocr", "~: expected list of mapping, got 'ocr'; write reward.scorers=[{name: ocr}]"),
        ("reward.scorers=[ocr]", "~.0: expected mapping, got 'ocr'; write {name: ocr}"),
        ("reward.scorers={name: ocr}", "got {'name': 'ocr'}; write reward.scorers=[{...}]"),
        ("reward.scorers=env:KEY 1", "; write reward.scorers=[{name: VALUE}]"),
        ("algorithm=gspo", "~: expected mapping, got 'gspo'; write algorithm={name: gspo}"),
        ("model.lora.target_modules=to_q", "got 'to_q'; write model.lora.target_modules=[to_q]"),
        ("reward.scorers.0.params=5", "~: expected mapping, got 5; write reward.scorers.0.params={KEY: VALUE}"),
        ("trainer=5", "~: expected mapping, got 5; set its keys, such as "),
        ("rollout.buckets=[{sampling: 512}]", "~.0.sampling: expected mapping, got 512"),
        ("rollout.sde.window.range=[0, five]", "~.1: expected int, got 'five'"),
        ("model.lora.target_modules=[to_q, 3]", "~.1: expected str, got 3"),
        ("rollout.sampling.height=100", "~: expected int >= 16, multiple of 16, got 100"),
        ("trainer.optimizer.betas=[0.9, 1.0]", "~.1: expected float >= 0, < 1, got 1.0"),
        ("algorithm.correction.band=0.5", "~: expected list of 2 float > 0 or null, got 0.5"),
        ("algorithm.clip_range=[0.2]", "~: expected float > 0 or list of 2 float > 0 or null, got [0.2]"),
        ("algorithm.clip_range_nats=[0.2, 0.3, 0.4]", "~: expected float > 0 or list of 2 float > 0 or null, got [0.2"),
        ("algorithm.clip_range=[0.2, -1]", "~.1: expected float > 0, got -1"),
        ("algorithm.clip_range=-1", "~: expected float > 0 or list of 2 float > 0 or null, got -1"),
        ("algorithm.dual_clip=1", "~: expected float > 1 or null, got 1"),
        ("schedule=asnyc", "one_step_off', 'async' or null, got 'asnyc'; did you mean 'async'?"),
        ("buffer.max_bytes=9GB", "str of a number from 1 on and KiB, MiB, GiB or TiB, like '8GiB' or null, got '9GB'"),
        # values above a bound are told the bound and its reason
        (
            "staleness.max_updates=1000000",
            "~: expected int >= 0, <= 1000 (S + 1 updates' groups may be admitted at once,",
        ),
        ("rollout.num_inference_steps=5000", "<= 1000 (the schedulers of diffusion models know 1000 timesteps), got"),
        ("placement.trainer.gpus=1.5", "placement.trainer.gpus: Ray divides one accelerator, but no more than one: "),
        ("placement.reward.gpus=0.00001", "~: Ray counts in ten-thousandths, expected at least 0.0001, got 1e-05"),
        # names and paths
        *((f"run.name={name}", f"~: expected str of {NAME}, got ") for name in ("'a b'", '"a\\n"', ".a", "a/b", "''")),
        ("run.name=" + "x" * 5000, f"~: expected str of {NAME}, got 'xxx"),
        ("run.dir=''", f"~: expected str of {PLAIN}, got ''"),
        ('run.dir="a\\0"', f"~: expected str of {PLAIN}, got 'a\\x00'"),
        ("run.dir=~nobody-of-that-name/runs", "run.dir: expected a path, got '~nobody-of-that-name/runs': "),
        ('model.path="a\\0b"', "~: expected a path, got 'a\\x00b': embedded null byte"),
        ('data.prompts="\\ud800"', "~: expected a path, got '\\ud800'"),
        # numbers that are none
        ("trainer.optimizer.betas=[.nan, 0.9]", "~.0: expected a finite float >= 0, < 1, got nan"),
        ("reward.scorers.0.params={deep: [1, {x: .NaN}]}", "~.deep.1.x: expected a finite number, got nan"),
        ("trainer.updates=99999999999999999999", "~: expected a number below 2**63, got one of 67 bits"),
        ("run.seed=" + "9" * 5000, "override 'run.seed': not valid YAML: a value does not fit its type"),
        # what YAML can say and no field can mean
        ("reward.scorers.0.params.x=!!set {a}", "expected text, a number, true, false, null, a list or a mapping, got"),
        ("reward.scorers.0.params.x=!!binary aGk=", "true, false, null, a list or a mapping, got bytes"),
        *(
            (f"reward.scorers.0.params={text}", "half a surrogate pair is no character, got ")
            for text in ('"a \\ud800"', '{a: ["\\udfff"]}', '{"\\ud800": 1}')
        ),
        ("reward.scorers.0.params=&p {x: *p}", "override 'reward.scorers.0.params': not valid YAML: a value holds its"),
        ("reward.scorers.0.params=" + "{a: " * 60 + "1" + "}" * 60, "reward.scorers.0.params: nested too deeply"),
        ("reward.scorers.0.params" + ".a" * 5000 + "=1", "reward.scorers.0.params: nested too deeply"),
        ("reward.scorers.0.params=" + "[" * 1500 + "]" * 1500, "override 'reward.scorers.0.params': nested too deeply"),
        ("run.seed=!!int ''", "override 'run.seed': not valid YAML: a value does not fit its type: IndexError"),
        ("run.name=!!timestamp today", "override 'run.name': not valid YAML: a value does not fit its type"),
        ("run.name=!!python/object:os.system x", "override 'run.name':1:1: not valid YAML: could not determine a cons"),
        ("run.name=!!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("run={seed: 1, seed: 2}", "override 'run':1:11: not valid YAML: key 'seed' given twice"),
        ("run={1: 2}", "override 'run':1:2: not valid YAML: keys are names, got 1"),
        ("run.name=a\x00b", "override 'run.name': not valid YAML: special characters are not allowed"),
        # what other programs replace
        (
            "data.prompts=${env:DATA}/p.txt",
            "~: ${env:DATA} is not replaced here; for a credential write env:DATA, for any",
        ),
        (
            "reward.scorers.0.params.key=${oc.env:KEY,none}",
            'other value reward.scorers.0.params.key="$KEY" on the command line',
        ),
        # overrides that are none
        *(
            (text, f"override {text!r}: expected key.path=value, e.g. trainer.updates=10")
            for text in ("", "=", "=1", " =1", "trainer.updates", "trainer.updates:3", "--updates 3")
        ),
        *(
            (f"reward.scorers.{index}{below}=x", "is not an index of a list of 1")
            for index in ("1", "-1", "x", "²", "٠", "01", "9" * 5000)
            for below in ("", ".name")
        ),
        ("model.path.x=1", "override 'model.path.x=1': 'path' is a value, not a section"),
    ],
)
def test_wrong_overrides(override: str, said: str) -> None:
    assert with_key(said, override) in complaint(MINIMAL, override)


@pytest.mark.parametrize("section", ["", "checkpoint."])
@pytest.mark.parametrize("key", [" - at `$", " - at `$.x", "`", "a.b"])
def test_keys_that_look_like_msgspecs_places(section: str, key: str) -> None:
    line = f"{json.dumps(key)}: 1\n"
    text = MINIMAL + (f"checkpoint:\n  {line}" if section else line)
    assert f"{section}{key}: unknown key; allowed: " in complaint(text)


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_text(MINIMAL, "run.dir=~/runs").run.dir == str(tmp_path / "runs")
    assert load_text(MINIMAL, "model.path=~/models/q").model.path == str(tmp_path / "models/q")
    assert load_text(MINIMAL + "run: {dir: ~/runs}\n").run.dir == str(tmp_path / "runs")
    assert load_text(MINIMAL, "run.dir=elsewhere/runs").run.dir == "elsewhere/runs"


def test_sizes() -> None:
    sizes = {"8GiB": 2**33, "1.5 GiB": 3 * 2**29, "64MiB": 2**26, "999999TiB": 999999 * 2**40, "100000000": 10**8}
    assert {text: load_text(MINIMAL, f"buffer.max_bytes={text}").buffer.bound for text in sizes} == sizes


# ---- a file ----------------------------------------------------------------------------------------------------------

_NESTED = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
_MERGED = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a mapping of sections, got NoneType"),
        ("- a\n- b\n", "expected a mapping of sections, got list"),
        ("model: {}", "model.path: required, expected str"),
        ("model: [", "recipe.yaml:1:9: not valid YAML"),
        ("model:\n\tpath: x\n", "recipe.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document"),
        (MINIMAL + "run:\n  seed: 1\n  name: x\n  seed: 2\n", "recipe.yaml:7:3: not valid YAML: key 'seed' given twi"),
        ("!!python/object/apply:os.system ['echo no']", "could not determine a constructor for the tag"),
        ("a: *nothing", "not valid YAML: found undefined alias 'nothing'"),
        ("2024-13-45: 1", "2024-13-45: unknown key"),
        ("\ud800: 1", "cannot be read"),
        # made to exhaust the reader
        pytest.param("\n".join(["a0: &a0 [x]", *_NESTED]), "more than 40000 values, aliases counted", id="aliases"),
        pytest.param("\n".join(["a0: &a0 {x: 1}", *_MERGED]), "more than 40000 values", id="merges"),
        pytest.param("run: {seed: 1" + ":1" * 120_000 + "}", "a number of 240001 characters", id="base 60"),
        ("run: {seed: 1" + ":1" * 400 + ".5}", "a value does not fit its type: OverflowError"),
        pytest.param("a: " + "[\n" * 20_000, "nested too deeply", id="lists"),
        pytest.param("a: {" * 60_000, "nested too deeply", id="mappings"),
        pytest.param("#" * 2**18 + "\n", "larger than 262144 bytes, so no recipe", id="large"),
        pytest.param("run: " + "ü" * 2**17 + "\n", "larger than 262144 bytes, so no recipe", id="large in bytes"),
    ],
)
def test_files_that_are_no_recipe(text: str, said: str) -> None:
    # At most 22 lines of Python are run for each character, and 350,000 for the values of a short text.
    assert said in require_lines(500_000 + 50 * len(text), lambda: complaint(text))


def test_a_few_aliases_are_fine() -> None:
    assert load_text(MINIMAL + "\nrollout: {sampling: {height: &side 64, width: *side}}\n").rollout.sampling.width == 64


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff\xfe")
    for path, said in (("nothing.yaml", "no such file"), ("image.yaml", "cannot be read: 'utf-8' codec")):
        assert complaint_about(tmp_path / path).startswith(f"{tmp_path / path}: {said}")
    assert complaint_about(tmp_path).startswith(f"{tmp_path}: cannot be read: it is a folder, not a file")


# ---- combinations ----------------------------------------------------------------------------------------------------

EXACT = "staleness={max_updates: 3, exact: true}"
OFFLINE = ["data={preferences: pairs.parquet}", "reward={}"]
DIFFUSERS = ["rollout.engine=diffusers"]
VLLM = ["rollout.engine=vllm", "model.pipeline=qwen_omni", "algorithm.name=token_grpo", "rollout.sde=null"]
PREFIX = ["rollout.share_initial_noise=true", "rollout.share_prefix=true"]
EMULATED = ["run.runtime=inprocess", "rollout.engine=emulated"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.sde.window.range=[3, 3]"], "rollout.sde.window.range: expected 0 <= lo < hi, got [3, 3]"),
        (["rollout.sde.window.size=6"], "rollout.sde.window.size: 6 steps do not fit into range [0, 5]"),
        (["rollout.num_inference_steps=5"], "hi may be at most num_inference_steps - 1 = 4, got 5"),
        (["rollout={share_initial_noise: true, sde: null}"], "rollout.share_initial_noise: rollout.sde: null adds no"),
        (["rollout.share_prefix=true"], "rollout.share_prefix: ... set rollout.share_initial_noise: true, or leave it"),
        ([*PREFIX, "rollout.sde.window={size: 3, range: [0, 3]}"], "every window starts at step 0 ... range [0, 3]"),
        ([*PREFIX, "rollout.engine=emulated"], "share_prefix: expected rollout.engine vllm_omni or diffusers, got emu"),
        (["staleness.max_updates=999", "trainer.groups_per_update=200"], "= 200000 groups may be ... at most 100000"),
        (
            ["staleness={max_updates: 2, reserve: 99}", "trainer.groups_per_update=3", "buffer.groups=30"],
            "at most 6 groups",
        ),
        (
            ["staleness={max_updates: 2, reserve: 99}", "trainer.groups_per_update=3", "buffer.groups=5"],
            "at most 5 groups",
        ),
        (["weights.publish_every=3", "staleness.max_updates=1"], "1 is smaller than weights.publish_every - 1 = 2"),
        (["weights.payload=lora"], "weights.payload: 'lora' needs model.lora; use 'full' or set model.lora.rank"),
        (["trainer.steps_per_update=3"], "trainer.steps_per_update: 3 does not divide groups_per_update = 4"),
        (["trainer={steps_per_update: 2, groups_per_micro_batch: 4}"], "micro_batch: 4 does not ... use a divisor"),
        (["trainer.backend=plain", "trainer.workers=2"], "'plain' is one rank, got trainer.workers = 2"),
        (["trainer.backend=fsdp"], "expected one of ['fsdp2', 'plain'] or 'auto', got 'fsdp'; did you mean 'fsdp2'?"),
        (["trainer.offload=true", "trainer.backend=plain"], "'plain' does not offload ... trainer.backend: fsdp2"),
        (["trainer.offload=true", "run.runtime=ray"], "the backend 'plain', which 'auto' is on one CPU rank, does"),
        (["trainer.streaming=off", "buffer.groups=3"], "3 is less than one update's groups_per_update = 4"),
        (["algorithm={clip_range: 1e-4, clip_range_nats: 0.2}"], "give either clip_range or clip_range_nats, not both"),
        (["reward.hedge_s=60"], "a call is given up after reward.timeout_s = 60, so expected less, got 60"),
        (["reward.backoff_max_s=0.5"], "reward.backoff_max_s: pauses begin with reward.backoff_s = 1, got 0.5"),
        (["reward.scorers.0.weight=0"], "reward.scorers: every weight is 0, so there is no reward"),
        (["reward.scorers=[]"], "reward.scorers: required, at least one; `omni-async list` shows them"),
        (["data.prompts=null"], "data.prompts: required, expected a table of prompts (.txt, .jsonl, .csv, "),
        ([EXACT, "buffer.groups=15"], "buffer.groups: staleness.exact waits for all 16 ... so they must fit; got 15"),
        ([EXACT, "buffer.max_bytes=8GiB"], "buffer.max_bytes: staleness.exact waits for a whole number of updates'"),
        (
            ["buffer.max_bytes=24MiB"],
            "32 trajectories ... 32 media of 768 KiB: expected more than 24 MiB, got 24MiB",
        ),
        (["staleness.exact=true", "weights.publish_every=2"], "weights.publish_every: ... nothing older than S update"),
        (["rollout.batching=request"], "weights.swap: 'step' swaps ... use swap: request or drain, or batching: step"),
        (["rollout.batching=request", "schedule=async"], "weights.swap: 'step' (set by schedule: async) swaps between"),
        (["rollout={batching: request, engine: emulated}", "weights.swap=drain"], "engines vllm_omni and diffusers"),
        (["rollout.engine_args={dtype: half}"], "rollout.engine_args.dtype: the run sets it; use model.dtype"),
        (["trainer.gather=step"], "trainer.gather: step: one rank holds all weights ... use layer"),
        (
            ["trainer.optimizer={name: sgd, max_alignment: 0.1}"],
            "trainer.optimizer.max_alignment: sgd without momentum keeps no earlier gradients",
        ),
        (
            ["trainer.optimizer.step_size={by: ess, target: 1.5}"],
            "trainer.optimizer.step_size.target: an effective sample size is at most 1, got 1.5",
        ),
        (["trainer.optimizer={name: sgd, fused: true}"], "trainer.optimizer.fused: only adamw has one kernel, got sgd"),
        (["rollout.engine_args={stage_overrides: {'0': {dtype: bfloat16}}}"], "stage_overrides: ... name them in"),
        (["rollout.attention_backend=SAGE_ATTN"], "rollout.attention_backend: SAGE_ATTN: it approximates ... use auto"),
        (["rollout.engine_args={tensor_parallel_size: 2}"], "tensor_parallel_size: ... use more rollout.workers"),
        (["rollout.engine_args={cache_backend: tea_cache}"], "cache_backend: it approximates ... leave it out"),
        ([*DIFFUSERS, "rollout.compile=on"], "rollout.compile: expected rollout.engine vllm_omni, got diffusers"),
        ([*DIFFUSERS, "rollout.engine_args={vae_use_tiling: true}"], "rollout.engine_args: expected rollout.engine"),
        (
            [*VLLM, "rollout.engine_args={async_scheduling: true}"],
            "engine_args.async_scheduling: the run sets it; leave",
        ),
        ([*VLLM, "rollout.engine_args={max_num_seqs: 4}"], "max_num_seqs: the run sets it; use rollout.max_batch"),
        ([*VLLM, "rollout.engine_args={kv_cache_dtype: fp8}"], "kv_cache_dtype: it approximates the model"),
        (
            [*VLLM, "rollout.attention_backend=FLASH_ATTN"],
            "rollout.attention_backend: expected rollout.engine vllm_omni",
        ),
        ([*VLLM, "rollout.batching=request", "weights.swap=drain"], "engines vllm_omni and diffusers, not for 'vllm'"),
        (["run.runtime=inprocess"], "run.runtime: 'inprocess' cannot host the vllm_omni engine"),
        ([*EMULATED, "trainer.workers=2"], "run.runtime: 'inprocess' has one trainer rank, got trainer.workers = 2"),
        ([*EMULATED, "weights.transport=collective"], "weights.transport: 'collective' needs run.runtime: ray"),
    ],
)
def test_wrong_combinations(overrides: list[str], said: str) -> None:
    message = complaint(MINIMAL, *overrides)
    assert all(part in message for part in said.split(" ... "))


@pytest.mark.parametrize(
    "overrides",
    [
        ["weights={publish_every: 3, payload: lora}", "staleness.max_updates=2", "model.lora.rank=4"],
        *(["rollout.batching=request", f"weights.swap={swap}"] for swap in ("request", "drain")),
        ["trainer.streaming=on", "algorithm.advantage.std=group", "algorithm.kl_coef=0.1"],
        ["trainer.streaming=off", "buffer.groups=4"],
        *(["trainer.offload=true", ranks] for ranks in ("trainer.backend=fsdp2", "trainer.workers=2")),
        ["trainer.offload=true", "placement.trainer.gpus=1"],
        ["placement.trainer.gpus=0.5", "placement.reward.gpus=2", "rollout.num_inference_steps=6"],
        ["run.runtime=inprocess", "rollout.engine=diffusers", "rollout.compile=off"],
        ["rollout.sde=null", "rollout.num_inference_steps=2"],
        [EXACT, "buffer.groups=16"],
        [*PREFIX, "rollout.sde.window={size: 3, range: [0, 4]}"],
        [*PREFIX, "rollout.engine=emulated", "emulation.profile=p.json"],
        [*OFFLINE, "run.runtime=inprocess"],
        ["rollout.engine_args={vae_use_tiling: true}", "rollout.attention_backend=FLASH_ATTN", "rollout.compile=on"],
        ["algorithm.correction.band=[0.5, 2]", "algorithm.correction.cap=null"],
    ],
)
def test_accepted_combinations(overrides: list[str]) -> None:
    config = load_text(MINIMAL, *overrides)
    assert config.trainer.updates == 100 and config.validation is None, "defaults that work"


# ---- the schema in words ---------------------------------------------------------------------------------------------


def test_every_field_is_described() -> None:
    for path, (annotation, _) in FIELDS.items():
        assert description(annotation).strip() and description(annotation).endswith((".", "?")), path
        text = describe(annotation)
        assert text and not any(word in text for word in ("<class", "typing.", "Annotated")), (path, text)
        assert describe(annotation_at(Config, path.replace("[]", ".0").split("."))) == text


def test_every_section_is_strict() -> None:
    def count(section: type[msgspec.Struct]) -> int:
        assert section.__struct_config__.forbid_unknown_fields and section.__struct_config__.frozen, section
        nested = [struct_of(annotation) for annotation in fields_of(section).values()]
        return len(nested) + sum(count(s) for s in nested if s is not None)

    assert len(FIELDS) == count(Config)
    required = {path for path, (_, default) in FIELDS.items() if default is msgspec.NODEFAULT}
    named = {"model.path", "reward.scorers[].name", "emulation.profile", "roles[].name"}
    named |= {"reward.pools[].name", "reward.servers[].name", "reward.servers[].model"}
    named |= {"rollout.program.name", "algorithm.teacher.path"}
    named |= {"trainer.optimizer.step_size.by", "trainer.optimizer.step_size.target"}
    assert required == {"model", "data", *named}


def test_annotations_of_items() -> None:
    for path in ("algorithm.correction.k1.0", "algorithm.correction.k1.1", "algorithm.correction.band.1"):
        assert describe(annotation_at(Config, path.split("."))) == "float > 0"
    for path in ("nothing", "0", "run.seed.x", "reward.scorers.0.params.x", "model.lora.rank.0"):
        assert annotation_at(Config, path.split(".")) is None
