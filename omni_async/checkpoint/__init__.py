"""Reads and writes checkpoints: what a run leaves behind to go on from. Torch-free but for the tensors themselves.

`newest_first` finds them, `require_whole` checks one, `read_state` reads its `State`; what is wrong is a
`CheckpointError`.

update-000020/
  tensors/          trained parameters, further policies, optimizer: safetensors of torch.distributed.checkpoint
                    (omni_async.training.checkpoint)
  groups/           trajectories of groups that were ready and not trained, a safetensors file each
  state.json        versions, counters, cursors: `State`
  manifest.json     every file's size and digest, written last

A folder is written beside its final path and renamed when it is whole. Nothing in it is code: no pickle, neither
written nor read.
"""

from omni_async.checkpoint.folders import folder_name, require_whole
from omni_async.checkpoint.state import CheckpointError, State, read_state

__all__ = ["CheckpointError", "State", "folder_name", "read_state", "require_whole"]
