"""Copies host memory into the tensors of an engine, on its accelerator or on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Pinned memory of one buffer: large enough that a transfer hides the call that starts it.
_BUFFER_BYTES = 64 * 2**20

Wait = Callable[[], None]


class Upload:
    """Copies host memory into tensors of a device, each byte once on the host.

    A CPU's tensors are written directly. On an accelerator the host fills one of two pinned buffers while the device
    reads the other: it reads pinned memory several times as fast as other memory."""

    def __init__(self, device: torch.device | str, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.device = torch.device(device)
        self._buffer_bytes = buffer_bytes
        self._buffers: list[torch.Tensor] = []
        self._waits: list[Wait] = []
        self._next = 0

    @torch.no_grad()
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, in host memory, into `target`, converting the dtype if necessary.

        Args:
            target: contiguous, of any shape, on the device.
            source: contiguous, with as many elements."""
        if self.device.type == "cpu":
            target.view(-1).copy_(source.view(-1))
            return
        if not self._buffers:
            self._buffers = [self._allocate() for _ in range(2)]
            self._waits = [_nothing] * len(self._buffers)
        at = self._buffer_bytes // target.element_size()
        for into, part in zip(target.view(-1).split(at), source.view(-1).split(at), strict=True):
            number, self._next = self._next, (self._next + 1) % len(self._buffers)
            self._waits[number]()
            filled = self._buffers[number][: into.nbytes].view(into.dtype)
            filled.copy_(part)
            self._waits[number] = self._transfer(into, filled)

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device: the same memory if it is there, a copy otherwise."""
        tensor = tensor.detach()
        if tensor.device.type == self.device.type:
            return tensor
        loaded = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self.copy(loaded, tensor.contiguous())
        return loaded

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True)

    def _transfer(self, into: torch.Tensor, filled: torch.Tensor) -> Wait:
        """Start the copy of a buffer to the device. Return a call that waits until the device has read it."""
        into.copy_(filled, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return event.synchronize


def _nothing() -> None:
    """Wait for nothing: the buffer was never used."""
