"""Carries weights from the trainer's ranks to the engines.

`snapshot.Snapshot` is a version as ranks copied it into `buckets.BucketSet`s, `digest.verify` proves that it arrived,
`lora.merged_weights` merges adapters, and `transport.build_sender` and `build_receiver` make what carries it.
"""
