"""Reads and writes checkpoints, so that a run can continue. Only the tensor files need torch.

`newest_first` finds them, `require_whole` checks one, `read_state` reads its `State`. A bad checkpoint raises
`CheckpointError`.

update-000020/
  tensors/          trained parameters, further policies, optimizer: safetensors of torch.distributed.checkpoint
                    (omni_async.training.checkpoint)
  groups/           trajectories of groups that were ready but not trained, a safetensors file each
  state.json        versions, counters, cursors: `State`
  manifest.json     every file's size and digest, written last

A folder is written under a temporary name next to its final path, and renamed when it is complete. It contains no
code: pickle is neither written nor read.
"""

from omni_async.checkpoint.folders import folder_name, require_whole
from omni_async.checkpoint.state import CheckpointError, State, read_state

__all__ = ["CheckpointError", "State", "folder_name", "read_state", "require_whole"]
