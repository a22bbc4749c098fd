"""Every call that depends on the device: clocks, memory, and whether the device still answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Call = Callable[[], Any]

_MIN_FLUSH_BYTES = 256 * 2**20
_CALIBRATION_CYCLES = 20_000_000
# The most a measured call may be kept waiting so that its launches are queued before the first one starts.
_MAX_HEAD_START_MS = 25.0


class Sample(NamedTuple):
    """One timed call.

    Attributes:
        ms: Time on the device (on the CPU: wall clock).
        enqueue_ms: Time until the call returned, which is what the launches cost the host.
    """

    ms: float
    enqueue_ms: float


class Hardware(Protocol):
    """What the measurements need of a device."""

    device: torch.device

    def time_once(self, call: Call, head_start_ms: float) -> Sample:
        """Time one call, caches emptied; `head_start_ms` is how long its launches may take to be queued."""

    def synchronize(self) -> None:
        """Wait until the device is idle; raises what went wrong on it."""

    def free_bytes(self) -> int:
        """Return the memory a case may use."""

    def peak_bytes(self, call: Call) -> int | None:
        """Return how much memory a call takes at its peak beyond what was taken before; None where unknown."""

    def reset(self) -> None:
        """Give cached memory back."""

    def problem(self) -> str | None:
        """Return why the device cannot be used any more in this process, or None."""


class CpuHardware:
    """The CPU, for runs at toy size: wall clock, no memory figures."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def time_once(self, call: Call, head_start_ms: float) -> Sample:
        """Time one call by the wall clock; there is nothing to queue."""
        began = time.perf_counter()
        call()
        ms = (time.perf_counter() - began) * 1e3
        return Sample(ms, ms)

    def synchronize(self) -> None:
        """Do nothing: a call has ended when it returns."""

    def free_bytes(self) -> int:
        """Return a size that every toy case stays below."""
        return 2**30

    def peak_bytes(self, call: Call) -> int | None:
        """Run the call; PyTorch does not count memory on the CPU."""
        call()
        return None

    def reset(self) -> None:
        """Do nothing: memory goes back by itself."""

    def problem(self) -> str | None:
        """Return None: the CPU always answers."""
        return None


class CudaHardware:
    """An NVIDIA GPU, timed with CUDA events.

    Before each timed call the L2 cache is overwritten, and the GPU spins until the call's launches are in its queue:
    the events then enclose the work alone, not the time the host takes to issue it.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate what empties the cache, and learn how fast the GPU spins.

        Args:
            device: The GPU, with its index.
        """
        self.device = device
        cache_bytes = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
        flush_bytes = max(4 * cache_bytes, _MIN_FLUSH_BYTES)
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device=self.device)
        self._cycles_per_ms = self._calibrate()

    def _calibrate(self) -> float:
        """Return how many cycles of the spinning kernel make a millisecond at the clocks of a busy GPU."""
        for _ in range(2):  # the first one wakes the GPU up
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            end.record()
            end.synchronize()
        return _CALIBRATION_CYCLES / start.elapsed_time(end)

    def time_once(self, call: Call, head_start_ms: float) -> Sample:
        """Time one call with two events on the current stream."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(int(min(head_start_ms, _MAX_HEAD_START_MS) * self._cycles_per_ms))
        start.record()
        began = time.perf_counter()
        call()
        enqueue_ms = (time.perf_counter() - began) * 1e3
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end), enqueue_ms)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Return what the driver has free plus what PyTorch holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held

    def peak_bytes(self, call: Call) -> int | None:
        """Run the call and return its peak of allocated memory above the start."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def reset(self) -> None:
        """Give PyTorch's cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def problem(self) -> str | None:
        """Return the GPU's error: after an illegal access every later call in the process fails."""
        try:
            torch.zeros(1, device=self.device).add_(1).item()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


def open_hardware(device: torch.device) -> Hardware:
    """Return the hardware behind a device, `cpu` or `cuda`."""
    if device.type != "cuda":
        return CpuHardware()
    return CudaHardware(torch.device("cuda", torch.cuda.current_device()))
