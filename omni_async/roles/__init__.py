"""Runs the roles of a job, each as a class; calls between roles over Ray go through a Protocol of `api`.

`producer.Producer` drives an engine and `rewarder.Rewarder` scores. `preferences.PreferenceReader` replaces both if the
samples are a dataset's. `trainer.Trainer` makes updates on `rank.Rank`s, by an `UpdateRule` that follows
`plan.plan_updates`, and starts publishes and checkpoints. `builders.ServiceHost` holds a role of another package.
"""
