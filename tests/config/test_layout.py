"""Every item is dealt to one data rank, and shares are equal over groups that follow each other."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.config.layout import ParallelLayout


@given(st.integers(1, 20), st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_items_are_dealt_once(data, sequence, groups):
    layouts = [ParallelLayout(rank, data * sequence, sequence) for rank in range(data * sequence)]
    shares, start = Counter(), 0
    for number in groups:
        found = [layout.dealt(number, start) for layout in layouts if layout.leads_sequence]
        assert sorted(i for items in found for i in items) == list(range(number))
        assert max(map(len, found)) == layouts[0].most(number)
        # Ranks that do not lead their sequence return other results, and ranks without an item return anything.
        results = [
            [i if each.leads_sequence else None for i in each.dealt(number, start)] or ["padding"] for each in layouts
        ]
        for layout in layouts:  # ranks of one sequence group take the same
            assert layout.dealt(number, start) == found[layout.data_rank]
            assert layout.in_order(results, number, start) == list(range(number))
        shares.update({rank: len(items) for rank, items in enumerate(found)})
        start += number
    assert max(shares.values()) - min(shares[rank] for rank in range(data)) <= 1


@pytest.mark.parametrize(
    ("world", "sequence", "number", "share"),
    [(1, 1, 16, 16), (17, 1, 16, 1), (3, 1, 4, 2), (6, 2, 8, 1.5), (8, 8, 4, 0.5)],
)
def test_the_slowest_ranks_share(world, sequence, number, share):
    assert ParallelLayout(0, world, sequence).slowest_share(number) == share


def test_groups_of_ranks():
    layouts = [ParallelLayout(rank, 8, 2, 4) for rank in range(8)]
    assert [layout.data_rank for layout in layouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (layouts[0].data_size, layouts[0].shard_size, layouts[0].replicas) == (4, 4, 2)
    assert ParallelLayout(0, 8).shard_size == 8


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((4, None), "trainer.sequence_parallel: 4 ranks share a sequence, and do not divide trainer.workers = 6"),
        ((1, 4), "trainer.shard: 4 ranks share a copy of the weights, and do not divide trainer.workers = 6"),
    ],
)
def test_degrees_that_do_not_divide(degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(0, 6, *degrees)
    with pytest.raises(ValueError, match="zip"):
        ParallelLayout(0, 2).in_order([["first"], []], 2)
