"""Carries weights from the trainer's ranks to the engines.

- `snapshot.Snapshot` is a version as ranks copied it into `buckets.BucketSet`s, each rank its `SharedRows`.
- `transport.build_sender` and `build_receiver` build the two ends of the transport.
- `digest.verify` checks that a version arrived intact, or raises a `WeightError`.
- `lora.merged_weights` merges adapters.
"""
