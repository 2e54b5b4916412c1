"""Computes denoising steps: transitions and their log-probs, sigma schedules, noise.

`transitions` has `transition`, `step_mixed` and `log_prob`, `schedules` has `static_shift` and `scheduler_sigmas`, and
`noise` has `generator_of`, `initial_noise` and `step_noise`. No other package has this arithmetic: engines and the
trainer compute the same numbers from the same functions.
"""
