"""Scores media files with a recipe's reward, for `omni-async score`.

`samples` finds files and their prompts, `scoring` asks the scorers as a run's reward worker does, `report` shows and
writes what they said.
"""
