"""Draws samples: engines behind the Protocol `base.RolloutEngine`, which `factory.build_engine` makes of a recipe."""
