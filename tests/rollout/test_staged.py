"""Tests what every engine does with a version that it has taken in."""

import pytest

from omni_async.rollout.base import EngineError, StagedVersion


def test_a_version_is_taken_once_and_by_its_number():
    staged: StagedVersion[str] = StagedVersion("rollout-0")
    with pytest.raises(EngineError, match=r"^rollout-0: asked for version 1, staged is None$"):
        staged.take(1)
    staged.put(1, "first")
    staged.put(2, "second")
    with pytest.raises(EngineError, match=r"^rollout-0: asked for version 1, staged is 2$"):
        staged.take(1)
    assert staged.take(2) == "second", "a wrong question takes nothing"
    with pytest.raises(EngineError, match="staged is None"):
        staged.take(2)
