"""Tests the share of a group on the rank that all others wait for."""

import pytest
from wrong_combinations import DPO, OFFLINE

from omni_async.algorithms.dealing import samples_per_rank
from tests.config.recipe import MINIMAL, load_text


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("rollout.group_size=8",), 8),
        (("rollout.group_size=8", "trainer.workers=2"), 4),
        (("rollout.group_size=8", "trainer.workers=3"), 3),
        (("rollout.group_size=8", "trainer.workers=9"), 1),
        (("rollout.group_size=8", "trainer.workers=6", "trainer.sequence_parallel=2"), 1.5),
        # Draws of a pair are dealt, not its samples.
        ((*DPO, "rollout.group_size=8", "algorithm.forward.draws=6", "trainer.workers=3"), 8 / 3),
        ((*DPO, "rollout.group_size=8", "algorithm.forward.draws=6", "trainer.workers=4"), 8 * 2 / 6),
        ((*OFFLINE, "algorithm.forward.draws=6", "trainer.workers=12"), 2 / 6),
        ((*OFFLINE, "algorithm.forward.draws=6", "trainer.workers=6", "trainer.sequence_parallel=2"), 2 / 6),
    ],
)
def test_a_group_takes_as_long_as_its_busiest_rank(overrides, share):
    config = load_text(MINIMAL, *overrides)
    assert samples_per_rank(config) == pytest.approx(share, rel=1e-12)


def test_a_group_of_another_size_and_degrees_that_do_not_divide():
    config = load_text(MINIMAL, "trainer.workers=3")
    assert samples_per_rank(config, 10) == 4
    with pytest.raises(ValueError, match=r"trainer\.shard: 2 ranks share"):
        samples_per_rank(load_text(MINIMAL, "trainer.workers=3", "trainer.shard=2"))
