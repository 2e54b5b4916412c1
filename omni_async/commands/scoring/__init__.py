"""Scores media files with a recipe's reward, for `omni-async score`.

`samples` finds files and their prompts, `scoring` calls the scorers as a run's reward worker does, and `report` shows
and writes the scores.
"""
