"""Off-policy correction: what the distance between the policy that made a sample and the one that trains on it does to
the loss.

`drift` measures it, `masks` and `weights` (with `tempering`) act on it, `correct` puts them together as
`algorithm.correction` asks for, `ratio` estimates the proximal policy's log-prob, `validation` which settings cannot
work. All but `validation` import torch.
"""
