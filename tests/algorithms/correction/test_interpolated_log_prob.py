import pytest
import torch

from omni_async.algorithms.correction.ratio import interpolated_log_prob


def test_the_proximal_policy_lies_between_the_other_two_by_version():
    behaviour = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]], dtype=torch.float64)
    current = torch.tensor([[-3.0, -3.0], [1.0, 1.0]], dtype=torch.float64)
    versions = torch.tensor([[6, 5], [4, 3]])  # that took each step, while version 7 is being made from 6
    got = interpolated_log_prob(behaviour, current, 6 - versions)
    for sample in range(2):
        for step in range(2):
            v_b = versions[sample, step].item()
            alpha = (7 - 1 - v_b) / (7 - v_b)
            b, theta = behaviour[sample, step].item(), current[sample, step].item()
            assert got[sample, step].item() == pytest.approx(b + alpha * (theta - b), abs=1e-14)


def test_fresh_steps_get_the_behaviour_policy_exactly_and_old_ones_approach_the_current():
    behaviour, current = torch.tensor([-0.1234567, -0.5]), torch.tensor([-0.2, -0.7])
    assert torch.equal(interpolated_log_prob(behaviour, current, torch.tensor([0, 0])), behaviour)
    old = interpolated_log_prob(behaviour, current, torch.tensor([10**9, 10**9]))
    torch.testing.assert_close(old, current, atol=1e-7, rtol=0)


def test_no_gradient_flows_through_it():
    behaviour, current = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    got = interpolated_log_prob(behaviour, current, torch.tensor([1, 2]))
    assert not got.requires_grad
    torch.testing.assert_close(got, torch.tensor([1 / 2, 2 / 3]))


def test_float32_log_probs_stay_float32_and_are_interpolated_in_float64():
    behaviour = torch.tensor([-1.0, -1.0])
    current = behaviour + torch.tensor([3e-7, -3e-7])
    got = interpolated_log_prob(behaviour, current, torch.tensor([2, 2]))
    assert got.dtype == torch.float32
    expected = (behaviour.double() + 2 / 3 * (current.double() - behaviour.double())).float()
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("current", "staleness", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(2, dtype=torch.int64),
            r"current must have shape \(2,\) like behaviour, got \(3,\)",
        ),
        (
            torch.zeros(2),
            torch.zeros(1, dtype=torch.int64),
            r"staleness must have shape \(2,\) like behaviour, got \(1,\)",
        ),
        (torch.zeros(2), torch.zeros(2), "staleness must be integers, got torch.float32"),
        (torch.zeros(2), torch.tensor([0, -1]), "staleness must be >= 0, got -1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(current, staleness, message):
    with pytest.raises(ValueError, match=message):
        interpolated_log_prob(torch.zeros(2), current, staleness)
