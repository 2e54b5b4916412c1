import pytest
import torch
from transition_steps import inputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(1, 1)}, r"log_prob must have shape \(R,\), got \(1, 1\)"),
        ({"old_log_prob": torch.zeros(2)}, r"old_log_prob must have shape \(1,\).*got \(2,\)"),
        ({"nats_per_log_prob": torch.zeros(3)}, r"nats_per_log_prob must have shape \(1,\).*got \(3,\)"),
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
