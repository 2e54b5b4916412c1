"""Holds the catalogue to the code that reports metrics, and the pages to the catalogue."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import omni_async
from omni_async.algorithms import objectives
from omni_async.records.write.catalogue import chart, find, markdown
from omni_async.records.write.metric import Group
from omni_async.records.write.metrics import METRICS
from tests.support.places import ROOT

PACKAGE = Path(omni_async.__file__).parent


def recorded(folder: Path) -> Iterator[str]:
    """Yields the names in calls like `record("loss", ...)` and `by_step(f"masked/{rule}", ...)`."""
    for node in nodes(folder.rglob("*.py")):
        match node:
            case ast.Call(func=ast.Name(id="by_step"), args=[ast.Constant() as name, *_]):
                yield f"{text(name)}/step_03"
            case ast.Call(
                func=ast.Name(id="record") | ast.Attribute(attr="record" | "record_by_sample"), args=[name, *_]
            ):
                yield text(name)


def keys(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the keys of dicts that are spelled out, and of those that are set one by one."""
    for node in nodes(paths):
        match node:
            case ast.Dict(keys=names):
                yield from map(text, filter(None, names))
            case ast.DictComp(key=name) | ast.Subscript(slice=name, ctx=ast.Store()):
                yield text(name)


def nodes(paths: Iterable[Path]) -> Iterator[ast.AST]:
    for path in paths:
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def text(name: ast.expr) -> str:
    """Returns a literal's text, with `some` for what it is filled with; an empty one for what is no literal."""
    if isinstance(name, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "some" for part in name.values)
    return str(name.value) if isinstance(name, ast.Constant) else ""


def test_every_metric_that_code_records_is_in_the_catalogue():
    of_trainer = {*recorded(PACKAGE / "training")}
    of_objectives = {*keys(Path(objectives.__path__[0]).glob("*.py"))}
    driver = PACKAGE / "runtime" / "driver"
    of_driver = {*keys([driver / "observer.py", driver / "update_numbers.py"])}
    of_corrections = {name for name in keys([PACKAGE / "algorithms" / "correction.py"]) if "/" in name}
    assert {"loss", "ess/step_03"} <= of_trainer and "masked/some" in of_corrections
    assert {"guard_bias", "accuracy", "approx_kl", "kl_ref", "kl_ema", "dropped", "flow_error"} <= of_objectives
    assert {"busy/some", "buffers/bytes_held/max", "scorer/some/some", "validation/some"} <= of_driver
    others = {"buffers/some", "scorer/some/some"}  # whose names are elsewhere: the run in tests/e2e has them
    names = of_trainer | of_objectives | of_corrections | {name for name in of_driver - others if "/" in name}
    assert [name for name in sorted(names - {""}) if find(name)[0] is None] == []


def test_the_pages_lists_are_the_catalogues():
    page = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    for source in ("run", "objective", "validation"):
        assert markdown(source) in page, (
            f"print(omni_async.records.write.catalogue.markdown({source!r})) is what the page must have"
        )


def test_names_are_found_with_what_their_placeholders_stand_for_and_groups_come_in_order():
    assert find("scorer/my ocr/2/answer_s/p50")[1] == {"scorer": "my ocr/2", "quantile": "p50"}
    assert find("reward/bucket12")[1] == {"n": "12"} and find("reward/bucketed")[1] == {"part": "bucketed"}
    assert find("weight/mean/step_07")[1] == {"step": "07"} and find("mine") == (None, {})
    assert chart("log_ratio_nats/mean") == "off_policy/log_ratio_nats_mean" and chart("mine") == "learning/mine"
    assert [*Group] == sorted(Group), "trackers sort sections by name"
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        example = re.sub(r"<(\w+)>", lambda match: "07" if match[1] in ("n", "step") else "x", metric.name)
        assert find(example)[0] == metric, "no pattern hides another"
