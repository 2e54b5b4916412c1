import subprocess
import sys

from omni_async.control.group_table import has_signal
from omni_async.types import Score


def scores(*values: float) -> list[Score]:
    return [Score(value) for value in values]


def test_equal_rewards_carry_no_signal() -> None:
    assert not has_signal(scores(0.1, 0.1, 0.1))
    assert not has_signal(scores(0.5))
    assert not has_signal([])


def test_any_difference_is_signal() -> None:
    assert has_signal(scores(0.1, 0.1, 0.10000001))
    assert has_signal(scores(0.0, 0.0, 1e-12))


def test_scorers_that_cancel_out_are_signal_where_each_counts() -> None:
    cancelling = [Score(1.0, values=(1.0, 0.0)), Score(1.0, values=(0.0, 1.0))]
    assert not has_signal(cancelling)
    assert has_signal(cancelling, each_scorer=True)


def test_it_needs_no_torch() -> None:
    code = "import sys, omni_async.control.group_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
