import subprocess
import sys

from omni_async.control.signal import has_signal


def test_equal_rewards_carry_no_signal():
    assert not has_signal([0.1, 0.1, 0.1])
    assert not has_signal([0.5])
    assert not has_signal([])


def test_any_difference_is_signal():
    assert has_signal([0.1, 0.1, 0.10000001])


def test_it_needs_no_torch():
    code = "import sys, omni_async.control.signal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
