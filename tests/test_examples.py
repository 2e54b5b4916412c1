"""Tests that the examples run and do what their texts say."""

from __future__ import annotations

import re
from typing import Any

from examples import one_update


async def test_one_update_trains_on_young_groups(capsys: Any) -> None:
    await one_update.main(updates=2)
    rows = re.findall(r"update (\d): reward (\d\.\d+), staleness \[(.+)\]", capsys.readouterr().out)
    assert [number for number, *_ in rows] == ["1", "2"]
    assert all(0 <= int(age) < int(number) for number, _, ages in rows for age in ages.split(", "))
    assert all(0 <= float(reward) <= 1 for _, reward, _ in rows)
