from omni_async.config.changed import changed
from tests.support.configs import build


def test_only_what_is_not_a_default_is_left_of_a_configuration_also_within_lists():
    assert not {"staleness", "trainer", "tracking"} & changed(build({})).keys()
    scorers = [{"name": "ocr", "weight": 0.5}, {"name": "jpeg_size"}]
    trainer = {"optimizer": {"lr": 0.5}}
    config = build(
        {"staleness": {"max_updates": 7}, "trainer": {"optimizer": {"lr": 0.5}}, "reward": {"scorers": scorers}}
    )
    found = changed(config)
    assert found["staleness"] == {"max_updates": 7} and found["trainer"] == trainer
    assert found["reward"] == {"scorers": [{"name": "ocr", "weight": 0.5}, {"name": "jpeg_size"}]}
    assert changed(build({"staleness": {"max_updates": 1}})).get("staleness", {}) == {"max_updates": 1}
