import pytest

from omni_async.algorithms.correction.validation import problems
from omni_async.config.algorithm import Correction

K = {"k1": (0.5, 2.0), "k2": 1.0, "k3": 1.0}


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"mode": "none"},
        {"mode": "bypass", **K, "reject_level": "max"},
        {"mode": "bypass", "denominator": "all"},
        {"mode": "decoupled", "weights": "tempered", "normalise": True, "kappa_nats": 0.5, "m2": 0.1, **K},
        {"mode": "decoupled", "weights": "importance", "band": (0.5, 2.0), "level": "trajectory", "log_ratio": "mean"},
        {"mode": "interpolated", "weights": "tempered", "m2": 0.1, **K},
        {"mode": "decoupled", "weights": "importance", "level": "sequence", "log_ratio": "mean"},
        {"mode": "decoupled", "weights": "tempered", "level": "sequence", "log_ratio": "mean"},
    ],
)
def test_combinations_that_work_have_no_problem(fine):
    assert list(problems(Correction(**fine))) == []


@pytest.mark.parametrize(
    ("wrong", "key", "reason", "instead"),
    [
        ({"mode": "bypass", "weights": "importance"}, "weights", "count twice", "decoupled"),
        ({"mode": "bypass", "weights": "tempered"}, "weights", "count twice", "decoupled"),
        ({"mode": "bypass", "kappa_nats": 0.5}, "kappa_nats", "knows no proximal policy", "k1, k2 or k3"),
        ({"mode": "bypass", "m2": 0.1}, "m2", "knows no proximal policy", "k1, k2 or k3"),
        ({"mode": "none", "weights": "tempered"}, "weights", "as if they were fresh", "decoupled"),
        ({"mode": "none", "kappa_nats": 0.5}, "kappa_nats", "masks nothing", "null"),
        ({"mode": "none", "m2": 0.5}, "m2", "masks nothing", "null"),
        ({"mode": "none", "k1": (0.5, 2.0)}, "k1", "masks nothing", "null"),
        ({"mode": "none", "k2": 0.5}, "k2", "masks nothing", "null"),
        ({"mode": "none", "k3": 0.5}, "k3", "masks nothing", "null"),
        ({"mode": "interpolated", "kappa_nats": 0.5}, "kappa_nats", "no proximal mean", "decoupled"),
        ({"k1": (0.5, 2.0)}, "k1", "mode auto decides", "decoupled"),
        ({"weights": "importance"}, "weights", "mode auto decides", "decoupled"),
        ({"mode": "bypass", "k1": (2.0, 0.5)}, "k1", r"\[2.0, 0.5\] is no interval", "lo < hi"),
        ({"mode": "bypass", "k1": (1.0, 1.0)}, "k1", r"\[1.0, 1.0\] is no interval", "lo < hi"),
        ({"mode": "decoupled", "weights": "importance", "band": (2.0, 0.5)}, "band", "is no interval", "lo < hi"),
        ({"mode": "decoupled", "weights": "tempered", "band": (0.5, 2.0)}, "band", "bounds the spread", "cap"),
        ({"mode": "decoupled", "band": (0.5, 2.0)}, "band", "weights is none", "importance"),
        (
            {"mode": "decoupled", "weights": "importance", "level": "sequence"},
            "level",
            "per element, and log_ratio is sum",
            "trajectory",
        ),
        ({"mode": "decoupled", "normalise": True}, "normalise", "nothing to normalise", "kept"),
    ],
)
def test_a_combination_that_cannot_work_has_one_message_with_key_reason_and_remedy(wrong, key, reason, instead):
    (message,) = problems(Correction(**wrong))
    with pytest.raises(ValueError, match=rf"^algorithm\.correction\.{key}: .*{reason}.*; use .*{instead}"):
        raise ValueError(message)


def test_every_problem_is_reported():
    wrong = Correction(mode="bypass", weights="tempered", kappa_nats=0.5, m2=0.1, band=(2.0, 0.5), k1=(3.0, 1.0))
    keys = [message.split(":")[0].rsplit(".", 1)[1] for message in problems(wrong)]
    assert keys == ["weights", "kappa_nats", "m2", "band", "k1", "band"]
