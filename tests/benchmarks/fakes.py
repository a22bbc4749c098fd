"""A device whose clock is a list, and a CUDA runtime that only notes what it is asked to do."""

import torch

from benchmarks.suite.hardware import Call, Sample


class FakeHardware:
    """Every call takes the next of the given times; `log` holds what was called."""

    device = torch.device("cpu")

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        self.times = times or {}
        self.log: list[str] = []
        self.head_starts: list[float] = []
        self.resets = 0

    def time_once(self, call: Call, head_start_ms: float) -> Sample:
        self.head_starts.append(head_start_ms)
        call()
        name = self.log[-1]
        times = self.times.get(name, [1.0])
        return Sample(times.pop(0) if len(times) > 1 else times[0], 0.5)

    def call(self, name: str, result=1.0) -> Call:
        def noted():
            self.log.append(name)
            if isinstance(result, Exception):
                raise result
            return torch.tensor(result)

        return noted

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        return 2**40

    def peak_bytes(self, call: Call) -> int:
        call()
        return 123

    def reset(self) -> None:
        self.resets += 1

    def problem(self) -> str | None:
        return None


class FakeCuda:
    """Stands in for the functions of `torch.cuda`; the spinning kernel makes 1000 cycles per millisecond."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms = 0.0
        self.allocated = 100
        self.broken = False

    def install(self, monkeypatch) -> None:
        for name in (
            "get_device_properties",
            "_sleep",
            "synchronize",
            "mem_get_info",
            "memory_reserved",
            "memory_allocated",
            "max_memory_allocated",
            "reset_peak_memory_stats",
            "empty_cache",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.ms = None

            def record(self) -> None:
                cuda.log.append("event")
                self.ms = cuda.now_ms

            def synchronize(self) -> None:
                cuda.log.append("wait")

            def elapsed_time(self, end) -> float:
                return end.ms - self.ms

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def run(self, ms: float) -> None:
        self.log.append("kernel")
        self.now_ms += ms

    def get_device_properties(self, device):
        return type("Properties", (), {"L2_cache_size": 2**10})

    def _sleep(self, cycles: int) -> None:
        assert isinstance(cycles, int)
        self.log.append("spin")
        self.now_ms += cycles / 1000

    def synchronize(self, device=None) -> None:
        self.log.append("synchronize")

    def mem_get_info(self, device):
        return 1000, 5000

    def memory_reserved(self, device):
        return 300

    def memory_allocated(self, device):
        return self.allocated

    def max_memory_allocated(self, device):
        return self.allocated + 50

    def reset_peak_memory_stats(self, device):
        self.log.append("reset peak")

    def empty_cache(self):
        self.log.append("empty cache")
