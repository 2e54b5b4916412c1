"""Tests that every bad input ends in one ConfigError whose line names the key and its allowed values."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recipe import MINIMAL, complaint, complaint_about, load_text, with_key

from omni_async.config import ConfigError

NAME = "letters, digits, '.', '_' and '-', at most 80 and beginning with a letter, a digit or '_'"
PLAIN = "1 to 4096 characters, no line ends or control codes"


def test_the_smallest_recipe_loads_with_defaults_that_work() -> None:
    config = load_text(MINIMAL)
    assert config.trainer.updates == 100 and config.validation is None
    assert config.reward.scorers[0].name == "ocr"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # unknown keys
        ("rollout.gruop_size=3", "~: unknown key; did you mean 'group_size'? allowed: batching, buckets, emulated"),
        ("trianer.updates=3", "trianer: unknown key; did you mean 'trainer'? allowed: algorithm, buffer, checkpoint"),
        ("reward.scorers.0.wieght=3", "~: unknown key; did you mean 'weight'? allowed: name, params, weight"),
        (
            "rollout.sde.window.steps=3",
            "~: unknown key; allowed: at_end, decay_from, decay_rate, range, schedule, size, stride",
        ),
        ("model.lora={rnak: 4}", "~.rnak: unknown key; did you mean 'rank'? allowed: alpha, rank, target_modules"),
        ("checkpoint..every=3", "checkpoint.: unknown key; allowed: every, keep, resume"),
        # missing keys
        ("validation.every=3", "validation.prompts: required, expected str"),
        ("reward.scorers.0={weight: 1}", "~.name: required, expected str"),
        # wrong types
        ("trainer.updates=ten", "~: expected int >= 1, got 'ten'"),
        ("trainer.updates=1.5", "~: expected int >= 1, got 1.5"),
        ("trainer.updates=true", "~: expected int >= 1, got True"),
        ("trainer.updates=", "~: expected int >= 1, got None"),
        ("rollout.timeout_s='60'", "~: expected float > 0, got '60'"),
        ("data.shuffle=yes", "~: expected bool, got 'yes'"),
        ("model.path=[a]", "~: expected str, got ['a']"),
        ("model=tiny", "~: expected mapping, got 'tiny'"),
        ("rollout=[1, 2]", "~: expected mapping, got [1, 2]"),
        ("rollout=", "~: expected mapping, got None"),
        ("reward.scorers=ocr", "~: expected list of mapping, got 'ocr'"),
        ("reward.scorers.0=ocr", "~: expected mapping, got 'ocr'"),
        ("rollout.sde.window.range=[0, five]", "~.1: expected int, got 'five'"),
        ("rollout.sde.window.range=[0]", "~: expected list of 2 int, got [0]"),
        ("model.lora.target_modules=[to_q, 3]", "~.1: expected str, got 3"),
        ("reward.scorers.0.params=7", "~: expected mapping, got 7"),
        # out of range
        ("trainer.updates=0", "~: expected int >= 1, got 0"),
        ("run.seed=-1", "~: expected int >= 0, < 2147483648, got -1"),
        ("run.seed=2147483648", "~: expected int >= 0, < 2147483648, got 2147483648"),
        ("rollout.sampling.height=100", "~: expected int >= 16, multiple of 16, got 100"),
        ("rollout.sampling.heigth=64", "~: unknown key; did you mean 'height'? allowed: height, "),
        ("rollout.sampling=512", "~: expected mapping, got 512"),
        (
            "rollout.buckets=[{sampling: {width: 64}}, {sampling: {height: 100}}]",
            "~.1.sampling.height: expected int >= 16, multiple of 16, got 100",
        ),
        (
            "rollout.buckets=[{sampling: {heigth: 64}}]",
            "~.0.sampling.heigth: unknown key; did you mean 'height'? allowed: height, ",
        ),
        ("rollout.buckets=[{sampling: 512}]", "~.0.sampling: expected mapping, got 512"),
        ("rollout.buckets=[{height: 64}]", "~.0.height: unknown key; did you mean 'weight'? allowed: sampling, weight"),
        ("rollout.buckets=[{sampling: {}, weight: 0}]", "~.0.weight: expected float > 0, got 0"),
        ("rollout.buckets={height: 64}", "~: expected list of mapping, got {'height': 64}"),
        ("rollout.height=64", "~: is called rollout.sampling.height now"),
        (
            "buffer.max_bytes=9GB",
            "~: expected int >= 1 or str of a number from 1 on and KiB, MiB, GiB or TiB, like '8GiB' or null,"
            " got '9GB'",
        ),
        ("buffer.max_bytes=0", "~: expected int >= 1 or str of a number"),
        ("rollout.sde.noise_level=0", "~: expected float > 0, <= 10, got 0"),
        ("trainer.optimizer.betas=[0.9, 1.0]", "~.1: expected float >= 0, < 1, got 1.0"),
        ("trainer.optimizer.max_grad_norm=0", "~: expected float > 0 or null, got 0"),
        ("run.name='a name'", f"run.name: expected str of {NAME}, got 'a name'"),
        ("run.name=" + "x" * 5000, f"expected str of {NAME}, got 'xxx"),
        ('run.name="a\\n"', f"run.name: expected str of {NAME}, got 'a\\n'"),
        ("run.name=.hidden", f"run.name: expected str of {NAME}, got '.hidden'"),
        ("run.name=a/b", f"run.name: expected str of {NAME}, got 'a/b'"),
        ("run.name=''", f"run.name: expected str of {NAME}, got ''"),
        ("run.dir=''", f"run.dir: expected str of {PLAIN}, got ''"),
        ('run.dir="a\\0"', f"run.dir: expected str of {PLAIN}, got 'a\\x00'"),
        ("run.dir=" + "x/" * 2049, f"run.dir: expected str of {PLAIN}, got 'x/x/"),
        ("run.dir=~nobody-of-that-name/runs", "~: expected a path, got '~nobody-of-that-name/runs': "),
        ("weights.payload=half", "~: expected one of 'full', 'lora', got 'half'"),
        ("algorithm.advantage.ddof=2", "~: expected one of 0, 1, got 2"),
        # the algorithm's own sections
        ("algorithm.advantage.std=batch", "~: expected one of 'global', 'group', 'none', got 'batch'"),
        ("algorithm.advantage.eps_form=add", "~: expected one of 'added', 'floor', got 'add'"),
        ("algorithm.advantage.aggregate=sum", "aggregate: expected one of 'rewards', 'advantages', 'gdpo', got 'sum'"),
        ("algorithm.advantage.clip_max=0", "~: expected float > 0, got 0"),
        ("algorithm.advantage.track_prompts=1", "~: expected bool, got 1"),
        ("algorithm.timestep_fraction=0", "~: expected float > 0, <= 1, got 0"),
        ("algorithm.timestep_fraction=1.5", "~: expected float > 0, <= 1, got 1.5"),
        ("algorithm.kl_form=approx", "~: expected one of 'published', 'exact', 'mean', got 'approx'"),
        ("algorithm.name=3", "~: expected str, got 3"),
        (
            "algorithm.correction.mode=is",
            "~: expected one of 'auto', 'none', 'bypass', 'decoupled', 'interpolated', got 'is'",
        ),
        (
            "algorithm.correction.weights=exact",
            "weights: expected one of 'none', 'importance', 'tempered', got 'exact'",
        ),
        ("algorithm.correction.ess_target=1", "~: expected float > 0, < 1, got 1"),
        ("algorithm.correction.ess_target=0", "~: expected float > 0, < 1, got 0"),
        ("algorithm.correction.cap=0", "~: expected float > 0 or null, got 0"),
        ("algorithm.correction.band=0.5", "~: expected list of 2 float > 0 or null, got 0.5"),
        ("algorithm.correction.band=[0.5]", "~: expected list of 2 float > 0 or null, got [0.5]"),
        ("algorithm.correction.k1=[0, 2]", "~.0: expected float > 0, got 0"),
        ("algorithm.correction.kappa_nats=-1", "~: expected float > 0 or null, got -1"),
        (
            "algorithm.correction.reject_level=token",
            "reject_level: expected one of 'step', 'sum', 'mean', 'max', got 'token'",
        ),
        ("algorithm.correction.kapa_nats=1", "~: unknown key; did you mean 'kappa_nats'?"),
        ("algorithm.mix.log_ratio_coef=-1", "~: expected float >= 0, got -1"),
        ("algorithm.guard.scale=step", "~: expected one of 'batch', 'sample', got 'step'"),
        ("algorithm.dppo.kappa_max=0", "~: expected float > 0, got 0"),
        ("algorithm.dppo.kappa_max_nats=0", "~: expected float > 0 or null, got 0"),
        ("algorithm.nft.beta=0", "~: expected float > 0, got 0"),
        ("algorithm.nft.decay=fast", "~: expected one of 'none', 'slow', 'late', got 'fast'"),
        ("algorithm.awm.power=2", "~: expected float > 0, <= 1, got 2"),
        ("algorithm.awm.advantage_max=0", "~: expected float > 0 or null, got 0"),
        ("algorithm.awm.ema_coef_end=-1", "~: expected float >= 0 or null, got -1"),
        ("algorithm.dpo.loss=dpo", "~: expected one of 'sigmoid', 'hinge', 'ipo', got 'dpo'"),
        ("algorithm.forward.draws=0", "~: expected int >= 1 or null, got 0"),
        (
            "algorithm.forward.sigmas=uniform",
            "sigmas: expected one of 'schedule', 'schedule_wo_first', 'logit_normal', got 'uniform'",
        ),
        ("algorithm.nft={betta: 1}", "~.betta: unknown key; did you mean 'beta'? allowed: adv_mode, beta, decay"),
        # windows, staleness and averages
        (
            "rollout.sde.window.schedule=sliding",
            "expected one of 'uniform', 'random', 'progressive', 'decay', 'exp_decay', got 'sliding'",
        ),
        ("rollout.sde.window.stride=0", "~: expected int >= 1, got 0"),
        ("rollout.sde.window.updates_per_position=0", "~: expected int >= 1, got 0"),
        ("rollout.sde.window.at_end=stop", "~: expected one of 'roll_back', 'stay', got 'stop'"),
        ("rollout.sde.window.decay_rate=0", "~: expected float > 0, got 0"),
        ("rollout.sde=[]", "~: expected mapping or null, got []"),
        ("staleness.exact=2", "~: expected bool, got 2"),
        ("trainer.ema.decay=1", "~: expected float >= 0, < 1, got 1"),
        ("trainer.ema.every=0", "~: expected int >= 1, got 0"),
        ("trainer.ema=0.9", "~: expected mapping or null, got 0.9"),
        ("data.preferences=3", "~: expected str or null, got 3"),
        # numbers that are none
        ("rollout.timeout_s=.inf", "~: expected a finite float > 0, got inf"),
        ("rollout.timeout_s=.nan", "~: expected a finite float > 0, got nan"),
        ("reward.scorers.0.weight=-.inf", "~: expected a finite float >= -1000000, got -inf"),
        ("trainer.optimizer.betas=[.nan, 0.9]", "~.0: expected a finite float >= 0, < 1, got nan"),
        ("reward.scorers.0.params={deep: [1, {x: .NaN}]}", "~.deep.1.x: expected a finite number, got nan"),
        ("algorithm.kl_coef=1.0e999", "~: expected a finite float >= 0, got inf"),
        ("trainer.updates=99999999999999999999", "~: expected a number below 2**63, got one of 67 bits"),
        ("run.seed=" + "9" * 5000, "override 'run.seed': not valid YAML: a value does not fit its type"),
        # what YAML can say and no field can mean
        (
            "reward.scorers.0.params.x=!!set {a}",
            "~: expected text, a number, true, false, null, a list or a mapping, got set",
        ),
        (
            "reward.scorers.0.params.x=!!binary aGk=",
            "~: expected text, a number, true, false, null, a list or a mapping, got bytes",
        ),
        ("reward.scorers.0.params=&p {x: *p}", "~: nested too deeply"),
        ("reward.scorers.0.params=" + "{a: " * 60 + "1" + "}" * 60, "reward.scorers.0.params: nested too deeply"),
        ("reward.scorers.0.params" + ".a" * 5000 + "=1", "reward.scorers.0.params: nested too deeply"),
        ("reward.scorers.0.params=" + "[" * 1500 + "]" * 1500, "override 'reward.scorers.0.params': nested too deeply"),
        ("run.seed=!!int ''", "override 'run.seed': not valid YAML: a value does not fit its type: IndexError"),
        (
            "data.shuffle=!!bool perhaps",
            "override 'data.shuffle': not valid YAML: a value does not fit its type: KeyError('perhaps')",
        ),
        ("run.name=!!timestamp today", "override 'run.name': not valid YAML: a value does not fit its type"),
        ("run.seed=0b_", "override 'run.seed': not valid YAML: a value does not fit its type"),
        (
            "run.name=!!python/object:os.system x",
            "override 'run.name':1:1: not valid YAML: could not determine a constructor for the tag",
        ),
        ("run.name=!!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("run=!!python/name:os.system", "could not determine a constructor for the tag"),
        ("run={seed: 1, seed: 2}", "override 'run':1:11: not valid YAML: key 'seed' given twice"),
        ("run={1: 2}", "override 'run':1:2: not valid YAML: keys are names, got 1"),
        ("run={[a]: 2}", "not valid YAML: keys are names, got ['a']"),
        ("run.name=a\x00b", "override 'run.name': not valid YAML: special characters are not allowed"),
        # paths
        ("model.path=~nobody-of-that-name/x", "~: expected a path, got '~nobody-of-that-name/x'"),
        ('model.path="a\\0b"', "~: expected a path, got 'a\\x00b': embedded null byte"),
        ('data.prompts="\\ud800"', "~: expected a path, got '\\ud800'"),
    ],
)
def test_bad_values_are_refused_with_their_path_and_what_is_allowed(override: str, said: str) -> None:
    assert with_key(said, override) in complaint(MINIMAL, override)


@pytest.mark.parametrize(
    "override",
    ["", "=", "=1", " =1", "trainer.updates", "trainer.updates:3", "--updates 3"],
)
def test_an_override_without_a_path_or_a_value_is_explained(override: str) -> None:
    assert f"override {override!r}: expected key.path=value, e.g. trainer.updates=10" in complaint(MINIMAL, override)


@pytest.mark.parametrize("index", ["1", "-1", "x", "²", "٠", "01", "9" * 5000])
def test_an_index_outside_a_list_is_refused(index: str) -> None:
    for override in (f"reward.scorers.{index}.name=x", f"reward.scorers.{index}=x"):
        assert "is not an index of a list of 1" in complaint(MINIMAL, override)


def test_a_value_is_not_a_section() -> None:
    assert "override 'model.path.x=1': 'path' is a value, not a section" in complaint(MINIMAL, "model.path.x=1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a mapping of sections, got NoneType"),
        ("just text", "expected a mapping of sections, got str"),
        ("- a\n- b\n", "expected a mapping of sections, got list"),
        ("{}", "model: required, expected mapping"),
        ("model: {}", "model.path: required, expected str"),
        ("model: [", "recipe.yaml:1:9: not valid YAML"),
        ("model:\n\tpath: x\n", "recipe.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("%", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document"),
        (MINIMAL + "data: {prompts: again.txt}\n", "recipe.yaml:4:1: not valid YAML: key 'data' given twice"),
        (
            MINIMAL + "run:\n  seed: 1\n  name: x\n  seed: 2\n",
            "recipe.yaml:7:3: not valid YAML: key 'seed' given twice",
        ),
        ("!!python/object/apply:os.system ['echo no']", "could not determine a constructor for the tag"),
        ("a: *nothing", "not valid YAML: found undefined alias 'nothing'"),
        (MINIMAL + "run: &r {dir: *r}\n", "run.dir: nested too deeply"),
        ("[" * 1500, "not valid YAML"),
        ("? [a, b]\n: 1\n", "not valid YAML: keys are names"),
        ("2024-13-45: 1", "2024-13-45: unknown key"),
        ("\ud800: 1", "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe_is_explained(text: str, said: str) -> None:
    if text.startswith("[["):
        with pytest.raises(ConfigError):
            load_text(text)
    else:
        assert said in complaint(text)


def test_a_missing_file_a_folder_and_binary_are_explained(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.yaml"
    binary = tmp_path / "image.yaml"
    binary.write_bytes(b"\x89PNG\xff\xfe")
    for path, said in (
        (missing, "no such file"),
        (tmp_path, "cannot be read: it is a folder, not a file"),
        (binary, "cannot be read: 'utf-8' codec"),
    ):
        assert complaint_about(path).startswith(f"{path}: {said}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.sde.window.range=[3, 3]"], "rollout.sde.window.range: expected 0 <= lo < hi, got [3, 3]"),
        (["rollout.sde.window.range=[-1, 3]"], "rollout.sde.window.range: expected 0 <= lo < hi, got [-1, 3]"),
        (["rollout.sde.window.size=6"], "rollout.sde.window.size: 6 steps do not fit into range [0, 5]"),
        (["rollout.num_inference_steps=5"], "hi may be at most num_inference_steps - 1 = 4, got 5"),
        (
            ["weights.publish_every=3", "staleness.max_updates=1"],
            "staleness.max_updates: 1 is smaller than weights.publish_every - 1 = 2",
        ),
        (["weights.payload=lora"], "weights.payload: 'lora' needs model.lora; use 'full' or set model.lora.rank"),
        (
            ["trainer.groups_per_update=4", "trainer.steps_per_update=3"],
            "trainer.steps_per_update: 3 does not divide groups_per_update = 4",
        ),
        (
            ["trainer.backend=plain", "trainer.workers=2"],
            "trainer.backend: 'plain' is one rank, got trainer.workers = 2",
        ),
        (["trainer.backend=fsdp"], "trainer.backend: expected one of ['auto', 'fsdp2', 'plain'], got 'fsdp'"),
        (
            ["trainer.offload=true", "trainer.backend=plain"],
            "trainer.offload: the backend 'plain' leaves weights where they are used; use trainer.backend: fsdp2",
        ),
        (
            ["trainer.offload=true", "run.runtime=ray"],
            "trainer.offload: the backend 'plain', which 'auto' is on one CPU rank, leaves weights where they are used",
        ),
        (
            ["trainer.streaming=off", "buffer.groups=3"],
            "buffer.groups: 3 is less than one update's groups_per_update = 4",
        ),
        (
            ["algorithm.clip_range=1e-4", "algorithm.clip_range_nats=0.2"],
            "give either clip_range or clip_range_nats, not both",
        ),
        (
            ["reward.hedge_s=60"],
            "reward.hedge_s: a call is given up after reward.timeout_s = 60, so expected less, got 60",
        ),
        (["reward.backoff_max_s=0.5"], "reward.backoff_max_s: pauses begin with reward.backoff_s = 1, got 0.5"),
        (["reward.scorers.0.weight=0"], "reward.scorers: every weight is 0, so there is no reward"),
        (["reward.scorers=[]"], "reward.scorers: required, at least one; `omni-async list` shows them"),
        (["reward={}"], "reward.scorers: required, at least one; `omni-async list` shows them"),
        (
            ["data.prompts=null"],
            "data.prompts: required, expected a prompt file (.txt or .jsonl), or data.preferences for offline",
        ),
        (
            ["data={}"],
            "data.prompts: required, expected a prompt file (.txt or .jsonl), or data.preferences for offline",
        ),
        (
            ["staleness={max_updates: 3, exact: true}", "buffer.groups=15"],
            "buffer.groups: staleness.exact waits for all 16 admitted groups, so they must fit; got 15",
        ),
        (
            ["staleness={max_updates: 3, exact: true}", "buffer.max_bytes=8GiB"],
            "buffer.max_bytes: staleness.exact waits for a whole number of updates' groups",
        ),
        (
            ["buffer.max_bytes=24MiB", "rollout.group_size=8", "trainer.groups_per_update=4"],
            (
                "buffer.max_bytes: an update's 32 samples are held together, with 768 KiB of media each and their"
                " trajectories: expected more than 24 MiB, got 24MiB"
            ),
        ),
        (
            ["staleness.exact=true", "weights.publish_every=2"],
            "weights.publish_every: staleness.exact trains on nothing older than S updates",
        ),
        (
            ["rollout.batching=request"],
            "weights.swap: 'step' swaps between two denoising steps, and rollout.batching: request takes all steps of a"
            " batch at once; use swap: request or drain, or batching: step",
        ),
        (
            ["rollout.batching=request", "schedule=async"],
            "weights.swap: 'step' (set by schedule: async) swaps between two denoising steps",
        ),
        (
            ["rollout={batching: request, engine: emulated}", "weights.swap=request"],
            "rollout.batching: 'request' is for the engines vllm_omni and diffusers",
        ),
        (["run.runtime=inprocess"], "run.runtime: 'inprocess' cannot host the vllm_omni engine"),
        (
            ["run.runtime=inprocess", "rollout.engine=emulated", "trainer.workers=2"],
            "run.runtime: 'inprocess' has one trainer rank",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_way_out(overrides: list[str], said: str) -> None:
    assert said in complaint(MINIMAL, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["weights.publish_every=3", "staleness.max_updates=2"],
        ["weights.payload=lora", "model.lora.rank=4"],
        ["rollout.batching=request", "weights.swap=request"],
        ["rollout.batching=request", "weights.swap=drain"],
        ["trainer.streaming=on"],
        ["trainer.streaming=on", "algorithm.advantage.std=group", "algorithm.kl_coef=0.1"],
        ["trainer.streaming=off", "buffer.groups=4"],
        ["trainer.offload=true", "trainer.backend=fsdp2"],
        ["trainer.offload=true", "trainer.workers=2"],
        ["trainer.offload=true", "placement.trainer.gpus=1"],
        ["rollout.num_inference_steps=6"],
        ["run.runtime=inprocess", "rollout.engine=diffusers"],
        ["rollout.sde=null", "rollout.num_inference_steps=2"],
        ["staleness={max_updates: 3, exact: true}", "buffer.groups=16"],
        ["data={preferences: pairs.parquet}", "reward={}"],
        ["data={preferences: pairs.parquet}", "reward={}", "run.runtime=inprocess"],
        ["algorithm.correction.band=[0.5, 2]", "algorithm.correction.cap=null"],
    ],
)
def test_combinations_at_the_edge_are_accepted(overrides: list[str]) -> None:
    load_text(MINIMAL, *overrides)


# ---- recipes made to exhaust their reader: each ends in one line, soon ----

_NESTED = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
_MERGED = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n".join(["a0: &a0 [x]", *_NESTED]), "more than 20000 values, aliases counted wherever they stand"),
        (
            "\n".join(["a0: &a0 {x: 1}", *_MERGED]),
            "could not determine a constructor for the tag 'tag:yaml.org,2002:merge'",
        ),
        ("run: {seed: 1" + ":1" * 120_000 + "}", "a number of 240001 characters"),
        ("run: {seed: 1" + ":1" * 400 + ".5}", "a value does not fit its type: OverflowError"),
        ("a: " + "[" * 200_000, "nested too deeply"),
        ("a: {" * 60_000, "nested too deeply"),
        ("#" * 2**18 + "\n", "larger than 262144 bytes, so no recipe"),
        ("run: " + "ü" * 2**17 + "\n", "larger than 262144 bytes, so no recipe"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("run: !!python/object/new:os.system [ls]", "could not determine a constructor for the tag"),
    ],
    ids=[
        "aliases",
        "merges",
        "base 60",
        "base 60 float",
        "lists",
        "mappings",
        "large",
        "large in bytes",
        "apply",
        "new",
    ],
)
def test_a_recipe_that_would_take_all_time_or_memory_is_refused(text: str, said: str) -> None:
    started = time.process_time()
    assert said in complaint(text)
    assert time.process_time() - started < 10


def test_aliases_in_moderation_are_fine() -> None:
    assert load_text(MINIMAL + "\nrollout: {sampling: {height: &side 64, width: *side}}\n").rollout.sampling.width == 64
