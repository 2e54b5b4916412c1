"""Holds a rank's model: whole (`plain`) or spread over ranks (`fsdp2`), behind `base.TrainBackend`."""
