import pytest
import torch
from transition_steps import inputs

from omni_async.algorithms.objectives.base import resolve_clip_range


def test_clip_range_from_nats_scales_with_resolution():
    assert resolve_clip_range(None, None, 65_536) == 1e-4
    assert resolve_clip_range(2e-5, None, 65_536) == 2e-5
    assert resolve_clip_range(None, 0.5, 65_536) == 0.5 / 65_536
    with pytest.raises(ValueError, match=r"not both \(got 0.0001 and 0.5\)"):
        resolve_clip_range(1e-4, 0.5, 65_536)
    with pytest.raises(ValueError, match="num_elements must be >= 1, got 0"):
        resolve_clip_range(None, 0.5, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(1, 1)}, r"log_prob must have shape \(R,\), got \(1, 1\)"),
        ({"old_log_prob": torch.zeros(2)}, r"old_log_prob must have shape \(1,\).*got \(2,\)"),
        ({"weight": torch.zeros(())}, r"weight must have shape \(1,\).*got \(\)"),
        ({"num_elements": 5}, r"1 rows of 5 elements, got shape \(1, 2, 3\)"),
        ({"ref_mean": torch.zeros(1, 6)}, r"ref_mean must have shape \(1, 2, 3\).*got \(1, 6\)"),
        ({"old_mean": torch.zeros(2, 2, 3)}, r"old_mean must have shape \(1, 2, 3\).*got \(2, 2, 3\)"),
        ({"steps_per_sample": 2}, "1 rows are not whole samples of 2 steps"),
        ({"steps_per_sample": 0}, "1 rows are not whole samples of 0 steps"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        inputs([1.0], [1.0], **change)
