"""Tests how files, overrides and `extends` resolve: values, paths, and a resolved file with the same contents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from omni_async.algorithms.checks import correction_problems
from omni_async.checkpoint.contents import reward_contents
from omni_async.config import ConfigError, check, load, resolved_yaml
from omni_async.config.algorithm import Correction, automatic_correction
from omni_async.config.hub import how_to_get
from omni_async.config.load import family_of, inputs_of
from omni_async.config.redact import is_secret_key
from omni_async.control.reward_formula import labels_of
from omni_async.plugins.families import PipelineFamily, SamplingSpec, family_names, find_family
from tests.config.recipe import MINIMAL, complaint_about, load_text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.optimizer.lr=1e-4", 1e-4),
        ("trainer.optimizer.lr=1", 1.0),
        ("trainer.streaming=on", "on"),
        ("trainer.streaming=off", "off"),
        ("data.shuffle=false", False),
        ("run.name=2024-01-31", "2024-01-31"),
        ("run.name=no", "no"),
        ("model.lora.rank=8", 8),
        ("algorithm.clip_range=null", None),
        ("algorithm.clip_range=", None),
        ("rollout.sampling.negative_prompt=a = b", "a = b"),
        ("rollout.sde.window.range=[1, 4]", (1, 4)),
        ("reward.scorers.0.weight=2.5", 2.5),
        ("algorithm.correction.k1=[0.5, 2]", (0.5, 2.0)),
        ("trainer.ema.every=4", 4),
        (" trainer.updates =7", 7),
    ],
)
def test_overrides_set_one_value(override: str, value: object) -> None:
    here: object = load_text(MINIMAL, override)
    for key in override.split("=")[0].strip().split("."):
        here = here[int(key)] if isinstance(here, tuple) else getattr(here, key)
    assert here == value and type(here) is type(value)


def test_later_overrides_win() -> None:
    two = MINIMAL.replace("[{name: ocr}]", "[{name: ocr}, {name: jpeg_size}]")
    overrides = ("trainer.updates=3", "rollout={group_size: 4}", "rollout.workers=2", "trainer.updates=5")
    lists = ("reward.scorers.1.weight=0.5", "reward.scorers.0={name: http, params: {url: x}}")
    config = load_text(two, *overrides, *lists)
    assert (config.trainer.updates, config.rollout.group_size, config.rollout.workers) == (5, 4, 2)
    found = [(scorer.name, scorer.weight, scorer.params) for scorer in config.reward.scorers]
    assert found == [("http", 1.0, {"url": "x"}), ("jpeg_size", 0.5, {})]


def test_paths_start_at_recipe_or_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    recipe = write(recipes, own=MINIMAL.replace("checkpoints/tiny", "../m") + "validation: {prompts: /abs/v.txt}\n")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(Path("../recipes/own.yaml"))
    assert config.model.path == str(tmp_path / "m")
    assert config.data.prompts == str(recipes / "prompts.txt")
    assert config.validation is not None and config.validation.prompts == "/abs/v.txt"
    assert config.checkpoint.resume is None
    assert config.run.dir == "runs", "where runs go is relative to the working directory, and says so"
    offline = ("data={preferences: pairs.parquet}", "reward={}", "checkpoint.resume=runs/1/checkpoints/3")
    config = load(recipe, ["model={path: mine}", "validation={prompts: v.txt}", *offline])
    assert (config.model.path, config.data.preferences) == (str(elsewhere / "mine"), str(elsewhere / "pairs.parquet"))
    assert config.validation is not None and config.validation.prompts == str(elsewhere / "v.txt")
    assert config.checkpoint.resume == str(elsewhere / "runs/1/checkpoints/3")
    config = load(write(tmp_path / "mine", own="extends: ../recipes/own.yaml\nmodel: {path: m}\n"))
    assert config.model.path == str(tmp_path / "mine" / "m")
    assert config.data.prompts == str(recipes / "prompts.txt"), "from the file that says it"


def test_engine_names() -> None:
    assert load_text(MINIMAL, "rollout.workers=3").engine_names == ("rollout-0", "rollout-1", "rollout-2")
    offline = load_text(MINIMAL, "rollout.workers=3", "data={preferences: pairs.parquet}", "reward={}")
    assert offline.engine_names == ("reader",), "a dataset has one reader, however many engines there might be"


@pytest.mark.parametrize(
    ("settings", "normalises", "masks"),
    [
        ("{}", False, False),
        ("{mode: decoupled, weights: importance}", False, False),
        ("{mode: decoupled, weights: tempered}", True, False),
        ("{mode: decoupled, weights: tempered, normalise: false}", False, False),
        ("{mode: decoupled, weights: importance, normalise: true, band: [0.5, 2]}", True, True),
        *((f"{{mode: decoupled, {rule}: 1}}", False, True) for rule in ("kappa_nats", "m2", "k2", "k3")),
        ("{mode: decoupled, k1: [0.5, 2], k2: 1, reject_level: {k1: sum}}", False, True),
    ],
)
def test_corrections_normalise_and_mask(settings: str, normalises: bool, masks: bool) -> None:
    correction = load_text(MINIMAL, f"algorithm.correction={settings}").algorithm.correction
    assert (correction.normalises, correction.masks) == (normalises, masks)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.lora.rank=4", "weights.payload=lora", "validation={prompts: v.txt, share: 0.25}"],
        ["rollout.sampling.negative_prompt='null'", "run.name='on'"],
        ['rollout.sampling.negative_prompt="  \\n two: lines # no comment \\u2028\\x85 "', "run.name='2024-01-31'"],
        ["reward.scorers.0.params={url: 'http://x', '<<': 1, '=': 2, '1': [null, true, 1.5, {a: ''}]}"],
        ["rollout.sde=null", "algorithm={name: awm, awm: {advantage_max: null}}", "trainer.ema={warmup: linear}"],
        ["algorithm.correction={mode: decoupled, weights: importance, band: [0.5, 2], cap: null, normalise: false}"],
        ["algorithm.correction={mode: bypass, k1: [0.5, 2], k3: 1, reject_level: {k3: max}}"],
        ["data={preferences: pairs.parquet}", "reward={}", "staleness={max_updates: 0, exact: true}"],
    ],
)
def test_resolved_configurations_read_back(overrides: list[str]) -> None:
    config = load_text(MINIMAL, *overrides)
    text = resolved_yaml(config)
    again = load_text(text)
    assert again == config
    assert resolved_yaml(again) == text
    assert list(yaml.safe_load(text))[:4] == ["schedule", "run", "model", "data"], "in the schema's order"


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(max_size=12)
    | st.sampled_from(
        ["1e5", "1_0e3", "-1E-3", ".5", "0x1", "1:30", "yes", "~", "<<", "=", "!x", "&a", "*a", "\x85", "a\u2028b"]
    ),
    number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63) + 1, 2**63 - 1),
)
@example(text="SIG", number=0.0)
def test_any_text_survives_resolving(text: str, number: float) -> None:
    assume(not is_secret_key(text, [text]))  # what such a key holds is masked
    config = load_text(MINIMAL)
    scorer = {"name": "x", "params": {text: [text, number]}}
    changed = msgspec.convert({**msgspec.to_builtins(config), "reward": {"scorers": [scorer]}}, type(config))
    spec = msgspec.structs.replace(config.rollout.sampling, negative_prompt=text)
    changed = msgspec.structs.replace(changed, rollout=msgspec.structs.replace(changed.rollout, sampling=spec))
    assert load_text(resolved_yaml(changed)) == changed


_TOKENS = "{ } [ ] : , & * ! | > ' \" % @ ` # - ? 0 x 1 model path run << .inf 1e9 ~ *a"
ODD_YAML = st.lists(
    st.sampled_from([*_TOKENS.split(), "\n", "\t", " ", ": ", "\n  ", "- ", "!!int ", "!!set ", "&a "]), max_size=30
).map("".join)
_KEYS = "model path reward scorers 0 1 params rollout sde window range trainer updates"
PATHS = st.lists(st.sampled_from([*_KEYS.split(), ""]) | st.text(max_size=3), max_size=5).map(".".join)


@settings(max_examples=400, deadline=None)
@given(
    text=st.just(MINIMAL) | st.text() | ODD_YAML | ODD_YAML.map(lambda t: MINIMAL + t),
    overrides=st.lists(st.builds("{}={}".format, PATHS, st.text() | ODD_YAML) | st.text(), max_size=3),
)
def test_any_text_loads_or_is_refused(text: str, overrides: list[str]) -> None:
    try:
        config = load_text(text, *overrides)
    except ConfigError as error:
        assert str(error)
    else:
        assert check(config) is None and load_text(resolved_yaml(config)) == config


def test_buckets() -> None:
    config = load_text(
        MINIMAL,
        "rollout.sampling={height: 64, width: 32, true_cfg_scale: 2}",
        "rollout.buckets=[{sampling: {}}, {sampling: {height: 96}, weight: 3}]",
    )
    assert config.rollout.specs == (
        config.rollout.sampling,
        msgspec.structs.replace(config.rollout.sampling, height=96),
    )
    again = load_text(resolved_yaml(config))
    assert again.rollout == config.rollout
    assert load_text(MINIMAL).rollout.specs == (load_text(MINIMAL).rollout.sampling,)


# ---- mode `auto` of the off-policy correction ----


def test_auto_correction() -> None:
    for updates in (0, 8):
        assert load_text(MINIMAL, f"staleness.max_updates={updates}").correction == Correction(mode="bypass")
    for reason in ("rounding", "drift"):
        c = automatic_correction(reason)
        assert (c.mode, c.weights) == ("decoupled", "none" if reason == "rounding" else "tempered")
        assert c.kappa_nats is None, "engines were not asked for means"
        assert list(correction_problems(c)) == []
    chosen = load_text(MINIMAL, "staleness.max_updates=8", "algorithm.correction={mode: bypass, k3: 1.0}")
    assert chosen.correction == Correction(mode="bypass", k3=1.0), "an explicit mode is taken as it is"


# ---- the model family of a checkpoint: a recipe need not name it ----


def checkpoint(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    return folder


def recipe_of(folder: Path, path: str) -> Path:
    """Writes a recipe that does not name the family of its model."""
    return write(folder, own=MINIMAL.replace("pipeline: qwen_image, path: checkpoints/tiny", f"path: {path}"))


@pytest.mark.parametrize("family", ["qwen_image", "stable_diffusion_3", "wan2_2"])
def test_family_of_a_checkpoint(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "model", json.dumps({"_class_name": find_family(family).model_index_class}))
    config = load(recipe_of(tmp_path, "model"), ["rollout.sampling.height=32"])
    assert family_of(folder) == config.model.pipeline == family
    assert config.rollout.sampling.height == 32


def cached_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """Makes the empty snapshot of a model in a hub's cache."""
    snapshot = folder / "hub" / f"models--{name}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    return snapshot


def test_models_of_a_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_snapshot(tmp_path, monkeypatch, "owner--some.model")
    (snapshot / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    recipe = recipe_of(tmp_path, "owner/some.model")
    config = load(recipe)
    assert Path(config.model.path).resolve() == snapshot.resolve() and config.model.pipeline == "stable_diffusion_3"
    assert load(recipe, ["model.path=/owner/some.model"]).model.path == "/owner/some.model"
    other = load(recipe, ["model.path=owner/other"]).model.path
    with pytest.raises(ValueError, match=r"there is no folder .*/owner/other; .*`hf download OWNER/NAME`"):
        family_of(Path(other))


def test_how_to_get_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the recipe's folder, and no owner that the recipe does not name."""
    folder = tmp_path / "my models" / "Net"
    said = how_to_get(folder)
    assert said.startswith(f"there is no folder {folder}; ") and f"OWNER/NAME --local-dir '{folder}'`" in said
    assert "download my models" not in said
    monkeypatch.chdir(tmp_path)
    assert "where `hf download owner/Net` puts one" in how_to_get(Path("owner/Net"))
    (tmp_path / "models").mkdir()
    assert "OWNER/NAME --local-dir models/Net`" in how_to_get(Path("models/Net"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"_class_name": "UnheardPipeline"}', "model.path: .* is a UnheardPipeline checkpoint, and none of"),
        ('{"_class_name"', "is cut off or no JSON"),
        ("[]", "expected a JSON obj"),
        ("{}", "names no pip"),
        ('{"_class_name": "TwicePipeline"}', "is a TwicePipeline checkpoint, and .* all take it: name one"),
    ],
)
def test_checkpoints_without_one_family(tmp_path: Path, monkeypatch, text: str, said: str) -> None:
    def find(name: str) -> PipelineFamily:
        if name == family_names()[-1]:
            raise ValueError("model.pipeline: its package is broken")
        return PipelineFamily(name, policy="", model_index_class="TwicePipeline", sampling=SamplingSpec)

    monkeypatch.setattr(sys.modules["omni_async.config.load"], "find_family", find)
    with pytest.raises(ValueError, match=said):
        family_of(checkpoint(tmp_path / "model", text))
    with pytest.raises(ValueError, match=r"it has no model_index\.json"):
        family_of(tmp_path)


# ---- extends ---------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> Path:
    """Writes files by stem; returns the path of the one called `own`."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, text in files.items():
        (folder / f"{stem}.yaml").write_text(text)
    return folder / "own.yaml"


def test_sections_are_merged(tmp_path: Path) -> None:
    base = MINIMAL + (
        "rollout: {workers: 3, group_size: 6, sde: {kind: cps, noise_level: 0.8, window: {size: 3, range: [0, 4]}}}\n"
        "trainer: {updates: 7, optimizer: {lr: 0.5, betas: [0.1, 0.2]}}\n"
        "validation: {prompts: held_out.txt}\n"
    )
    own = (
        "extends: base.yaml\n"
        "rollout: {group_size: 4, sde: {noise_level: 0.5, window: {range: [1, 5]}}}\n"
        "trainer: {optimizer: {betas: [0.3, 0.4]}}\n"
        "reward: {scorers: [{name: jpeg_size}]}\n"
        "validation: null\n"
    )
    config = load(write(tmp_path, base=base, own=own))
    assert (config.rollout.workers, config.rollout.group_size) == (3, 4)
    sde = config.rollout.sde
    assert sde is not None and (sde.kind, sde.noise_level, sde.window.size, sde.window.range) == ("cps", 0.5, 3, (1, 5))
    assert (config.trainer.updates, config.trainer.optimizer.lr, config.trainer.optimizer.betas) == (7, 0.5, (0.3, 0.4))
    assert [scorer.name for scorer in config.reward.scorers] == ["jpeg_size"], "a list is one value"
    assert config.validation is None


def test_sections_can_be_removed_and_added(tmp_path: Path) -> None:
    files = {
        "base": MINIMAL + "rollout: {sde: {kind: dance}}\n",
        "without": "extends: base.yaml\nrollout: {sde: null}\n",
        "own": "extends: without.yaml\nrollout: {sde: {noise_level: 0.3}}\n",
    }
    own = write(tmp_path, **files)
    assert load(tmp_path / "without.yaml").rollout.sde is None
    config = load(own, ["run.seed=3"])
    sde = config.rollout.sde
    assert sde is not None and (sde.kind, sde.noise_level) == ("flow", 0.3), "nothing is left of the removed section"
    text = resolved_yaml(config)
    assert "extends" not in text and load(write(tmp_path / "elsewhere", own=text)) == config


def test_chains_of_recipes(tmp_path: Path) -> None:
    links = {f"link{i}": f"extends: link{i + 1}.yaml\nrun: {{seed: {i}}}\n" for i in range(7)}
    own = write(tmp_path, own="extends: link0.yaml\n", **links, link7=MINIMAL + "run: {seed: 99, name: last}\n")
    assert (load(own).run.seed, load(own).run.name, load(own, ["run.seed=3"]).run.seed) == (0, "last", 3)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"own": "extends: own.yaml\n"}, "own.yaml: extends: recipes extend each other in a circle"),
        ({"own": "extends: other.yaml\n", "other": "extends: ./own.yaml\n"}, "extends: recipes extend each other in"),
        ({"own": "extends: nowhere.yaml\n"}, "own.yaml extends it)"),
        ({"own": "extends: [base.yaml]\n"}, "own.yaml: extends: expected the path of a recipe, got ['base.yaml']"),
        ({"own": "extends: .\n"}, "cannot be read: it is a folder, not a file"),
        ({"own": 'extends: "a\\0b"\n'}, "cannot be read: embedded null byte"),
        ({"own": "extends: base.yaml\n", "base": "- a\n"}, "base.yaml: expected a mapping of sections, got list"),
        ({"own": "extends: base.yaml\n", "base": "run: {seed: .inf}\n"}, "base.yaml: run.seed: expected a finite"),
        ({"own": "extends: base.yaml\n", "base": MINIMAL + "trainer: {updtes: 1}\n"}, "trainer.updtes: unknown key"),
        ({"own": "extends: l0.yaml", **{f"l{i}": f"extends: l{i + 1}.yaml\n" for i in range(12)}}, "more than 8 deep"),
    ],
)
def test_unusable_bases(tmp_path: Path, files: dict[str, str], said: str) -> None:
    assert said in complaint_about(write(tmp_path, **files))
    assert "extends: unknown key" in complaint_about(write(tmp_path, own=MINIMAL), "extends=base.yaml"), "no override"


def test_paths_of_scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_snapshot(tmp_path, monkeypatch, "owner--clip")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    scorers = (
        "{name: pick_score, params: {path: clip, processor: owner/clip}}",
        "{name: 'mine:Scorer', params: {path: clip}}",
        "{name: aesthetic, params: {path: /clip, head: 'env:HEAD'}}",
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(MINIMAL.replace("{name: ocr}", ", ".join(scorers)))
    first, own, last = (scorer.params for scorer in load(recipe).reward.scorers)
    assert first == {"path": str(folder / "clip"), "processor": str(snapshot)}
    assert own == {"path": "clip"}, "the parameter of an unregistered scorer need not be a path"
    assert last == {"path": "/clip", "head": "env:HEAD"}
    both = "{name: hps_v3, params: {path: a, weights: b, question: c}}, {name: mine, params: {weights: b}}"
    first, other = (scorer.params for scorer in load(recipe, [f"reward.scorers=[{both}]"]).reward.scorers)
    assert first == {"path": str(tmp_path / "a"), "weights": str(tmp_path / "b"), "question": str(tmp_path / "c")}
    assert other == {"weights": "b"}
    said = "reward.scorers.0.params.path=elsewhere"
    assert load(recipe, [said]).reward.scorers[0].params["path"] == str(tmp_path / "elsewhere")


def test_files_of_scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "recipe.yaml"
    recipe.write_text(MINIMAL.replace("{name: ocr}", "{name: 'own/taste.py:taste'}, {name: 'own.taste:taste'}"))
    names = [scorer.name for scorer in load(recipe).reward.scorers]
    assert names == [f"{tmp_path / 'recipes' / 'own' / 'taste.py'}:taste", "own.taste:taste"]
    assert labels_of(load(recipe).reward.scorers) == ("taste.py:taste", "own.taste:taste")
    other = load(recipe, ["reward.scorers.0.name=taste.py:taste"])
    assert other.reward.scorers[0].name == f"{tmp_path / 'taste.py'}:taste"
    (tmp_path / "taste.py").touch()
    assert inputs_of(recipe, other) == [recipe, tmp_path / "taste.py"]
    before = reward_contents(other)
    (tmp_path / "taste.py").write_text("TASTE = 1\n")
    assert before.keys() == {"reward.scorers.0.file"} and before != reward_contents(other)


def test_recipes_that_are_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(MINIMAL)
    (tmp_path / "recipe.yaml").write_text(MINIMAL)
    assert load(tree) == load(tmp_path / "recipe.yaml") == load({"extends": "recipe.yaml"})
    more = {
        "extends": Path("recipe.yaml"),
        "trainer": {"updates": 3},
        "rollout": {"sde": {"window": {"range": (0, 6)}}},
    }
    found = load(more, ["trainer.updates=4"])
    assert found.trainer.updates == 4 and found.rollout.sde.window.range == (0, 6)
    assert more["trainer"] == {"updates": 3}, "it stays the caller's"
    for wrong, said in (
        ({"trainer": {"updats": 1}}, "the recipe: trainer.updats: unknown key; did you mean 'updates'"),
        ({"trainer": {"updates": {1, 2}}}, "the recipe: a value is of type set; expected texts, numbers"),
        ({"trainer": {"updates": 1j}}, "the recipe: a value is of type complex; expected texts, numbers"),
        ({"extends": "no.yaml"}, f"no.yaml: no such file ({tmp_path}/the recipe extends it)"),
    ):
        assert _refused(tree | wrong).startswith(said)


def _refused(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as refused:
        load(tree)
    return str(refused.value)


@pytest.mark.parametrize("text", ["/" + "rate the picture " * 40, "/proc/1/root/a.json"])
def test_texts_of_scorers_are_no_inputs(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(MINIMAL.replace("{name: ocr}", f"{{name: 'judges:Mine', params: {{question: {text!r}}}}}"))
    assert inputs_of(recipe, load(recipe)) == [recipe]
