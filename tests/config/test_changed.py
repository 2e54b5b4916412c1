from omni_async.config.changed import changed
from tests.support.configs import build


def test_defaults_are_left_out():
    assert not {"staleness", "trainer", "tracking"} & changed(build({})).keys()
    scorers = [{"name": "ocr", "weight": 0.5}, {"name": "jpeg_size"}]
    given = {"staleness": {"max_updates": 7}, "trainer": {"optimizer": {"lr": 0.5}}, "reward": {"scorers": scorers}}
    assert given.items() <= changed(build(given)).items()
