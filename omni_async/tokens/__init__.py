"""Policies that draw tokens: their contract, packed rows, and log-probs without whole logits.

`policy` is the contract of a model family, as `omni_async.diffusion.policy` is for latents. `packing` puts answers of
several lengths into rows. `head` computes log-probs from hidden states in chunks.
"""
