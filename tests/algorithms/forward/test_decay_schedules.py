import pytest

from omni_async.algorithms.decay import ema_decay, ema_due, linear, nft_decay


@pytest.mark.parametrize(
    ("kind", "update", "expected"),
    [
        ("none", 0, 0.0),
        ("none", 1000, 0.0),
        ("slow", 0, 0.0),
        ("slow", 1, 0.001),
        ("slow", 499, 0.499),
        ("slow", 500, 0.5),
        ("slow", 5000, 0.5),
        ("late", 0, 0.0),
        ("late", 74, 0.0),
        ("late", 75, 0.0),
        ("late", 76, 0.0075),
        ("late", 175, 0.75),
        ("late", 208, 0.9975),
        ("late", 209, 0.999),
        ("late", 9000, 0.999),
    ],
)
def test_nft_decay_by_hand(kind, update, expected):
    assert nft_decay(kind, update) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.1), (1, 2 / 11), (8, 0.5), (79, 80 / 89), (80, 0.9), (81, 0.9), (10_000, 0.9)]
)
def test_ema_decay_warms_up_to_its_value(step, expected):
    assert ema_decay(step, 0.9) == pytest.approx(expected, abs=1e-15)


def test_the_average_is_taken_at_the_end_of_every_interval():
    assert [step for step in range(25) if ema_due(step, 8)] == [7, 15, 23]
    assert all(ema_due(step, 1) for step in range(3))


def test_linear_meets_both_ends_exactly():
    assert linear(1.0, 0.3, 0.0) == 1.0
    assert linear(1.0, 0.3, 1.0) == 0.3
    assert linear(1.0, 0.3, 0.25) == pytest.approx(0.825, abs=1e-15)
    assert linear(0.7, 0.7, 0.5) == pytest.approx(0.7, abs=1e-15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nft_decay("fast", 1), "'none', 'slow' or 'late', got 'fast'"),
        (lambda: nft_decay("slow", -1), "update must be >= 0, got -1"),
        (lambda: ema_decay(-1, 0.9), "step must be >= 0, got -1"),
        (lambda: ema_due(0, 0), "every must be >= 1, got 0"),
        (lambda: linear(1.0, 0.0, 1.5), r"progress must be in \[0, 1\], got 1.5"),
    ],
)
def test_impossible_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
