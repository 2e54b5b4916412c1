"""Implements off-policy correction of the loss.

It is for the distance between the policy that made a sample and the one that trains on it.

`drift` measures that distance, `masks` and `weights` (with `tempering`) act on it, `correct` puts them together as
`algorithm.correction` asks for, `ratio` estimates the proximal policy's log-prob, `validation` rejects settings that
cannot work. All but `validation` import torch.
"""
