"""Runs the roles of a job, each as a class whose calls are the Protocols of `api`.

`producer.Producer` drives an engine, `rewarder.Rewarder` scores, `preferences.PreferenceReader` stands for both where
the samples are a dataset's. `trainer.Trainer` makes updates by an `UpdateRule` (`update.PolicyGradient`, as
`plan.plan_updates` decides) on `rank.Rank`s, and has a `checkpointer.Checkpointer` and a `publisher.WeightPublisher`
beside it. `service.ServiceHost` holds a role of another package.
"""
