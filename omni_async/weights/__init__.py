"""Carries weights from the trainer's ranks to the engines.

`snapshot.Snapshot` is a version as ranks copied it into `buckets.BucketSet`s, each rank its `SharedRows`;
`transport.build_sender` and `build_receiver` make what carries it; `digest.verify` proves that it arrived, or raises a
`WeightError`; `lora.merged_weights` merges adapters.
"""
