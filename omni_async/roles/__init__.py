"""Runs the roles of a job, each as a class; what one calls of another over Ray is a Protocol of `api`.

`producer.Producer` drives an engine, `rewarder.Rewarder` scores, `preferences.PreferenceReader` stands for both where
the samples are a dataset's. `trainer.Trainer` makes updates on `rank.Rank`s, by an `UpdateRule` as `plan.plan_updates`
decides, and has them saved and published. `service.ServiceHost` holds a role of another package.
"""
