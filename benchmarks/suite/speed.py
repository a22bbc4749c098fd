"""The timing cases: passes over a sequence, decoding, chunk sizes, the switch to the quadratic kernel, the window."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.suite import work
from benchmarks.suite.cases import Case, Session
from benchmarks.suite.contenders import (
    PASSES,
    SDPA_CUDNN,
    SDPA_FLASH,
    Pass,
    Sizes,
    Tensors,
    call_for_pass,
    decode_step,
    draw_tensors,
    public_kernels,
    random_state,
    sdpa_forward,
    subquad_forward,
)
from benchmarks.suite.hardware import Call
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Mode, Settings
from benchmarks.suite.timing import Timing, measure
from subquad.kernels import window_attention
from subquad.kernels.state import Coefs, active_orders
from subquad.kernels.window import WindowBackend

SQUARE: Coefs = (0.0, 0.0, 1.0)
SCORES: Mapping[str, Coefs] = {"square": SQUARE, "linear": (0.0, 1.0), "taylor": (1.0, 1.0, 0.5)}
SUBQUAD = "subquad"
STEP, BUFFERED = "subquad_step", "subquad_buffered"
MATMUL, COPY = "matmul", "copy"

_CASE_SECONDS = 40.0
_WINDOW = 64
# Beyond q, k, v of the inputs: outputs, gradients, PyTorch's float32 gradient of q and repeated keys; and workspaces.
_MEMORY_FACTOR = {"forward": 3, "prefill": 3, "forward_backward": 8}
_WORKSPACE_BYTES = {True: 2**20, False: 3 * 2**30}
_CACHE_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a mode measures.

    Attributes:
        configs: (head_dim, groups), the most important first.
        num_compared: How many of them are compared with the other scores and public kernels too.
        lengths: Tokens of the passes.
        prefill_lengths: Tokens of the forward pass that also returns the state.
        sweep_tokens: Tokens at which chunk sizes, scores and public kernels are compared.
        chunk_sizes: Chunk sizes compared.
        switch_lengths: Tokens at which one chunk is compared with many.
        batches: Sequences decoded at once.
        cache_lengths: Tokens in the key/value cache that decoding is compared with.
        pending: Keys that wait in a buffered decode.
        kv_heads: Key/value heads.
        matmul_size: Rows and columns of the matrices of the matmul peak.
        copy_bytes: Size of the copy.
    """

    configs: tuple[tuple[int, int], ...]
    num_compared: int
    lengths: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    sweep_tokens: int
    chunk_sizes: tuple[int, ...] = (128, 256, 512, 1024)
    switch_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    cache_lengths: tuple[int, ...]
    pending: int = 32
    kv_heads: int = 8
    matmul_size: int = 8192
    copy_bytes: int = 2**31


_K = 1024
GRIDS: Mapping[Mode, Grid] = {
    "full": Grid(
        configs=((64, 4), (128, 4), (64, 1), (128, 1)),
        num_compared=2,
        lengths=tuple(n * _K for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        prefill_lengths=(8 * _K, 32 * _K, 128 * _K),
        sweep_tokens=32 * _K,
        switch_lengths=tuple(n * _K for n in (1, 2, 4, 8, 16)),
        batches=(32, 1),
        cache_lengths=tuple(n * _K for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    ),
    "quick": Grid(
        configs=((64, 4), (128, 4)),
        num_compared=1,
        lengths=(2 * _K, 8 * _K, 32 * _K, 64 * _K),
        prefill_lengths=(32 * _K,),
        sweep_tokens=16 * _K,
        chunk_sizes=(256, 512),
        switch_lengths=(2 * _K, 4 * _K),
        batches=(32,),
        cache_lengths=(2 * _K, 8 * _K, 32 * _K),
    ),
    "toy": Grid(
        configs=((8, 2),),
        num_compared=1,
        lengths=(32, 64),
        prefill_lengths=(64,),
        sweep_tokens=64,
        chunk_sizes=(16, 32),
        switch_lengths=(32, 64),
        batches=(2,),
        cache_lengths=(32, 64),
        pending=5,
        kv_heads=2,
        matmul_size=64,
        copy_bytes=2**16,
    ),
}


def timing_cases(settings: Settings) -> list[Case]:
    """Return the timing cases of a mode, the most important first; peaks before everything that is compared with them.

    Args:
        settings: The run's settings.

    Returns:
        The cases.
    """
    grid = GRIDS[settings.mode]
    cases = [_case("peaks", measure_peaks)]
    for index, (head_dim, groups) in enumerate(grid.configs):
        label = f"d{head_dim} G{groups}"
        sizes = functools.partial(Sizes, head_dim=head_dim, groups=groups, kv_heads=grid.kv_heads)
        for which in PASSES:
            for tokens in grid.prefill_lengths if which == "prefill" else grid.lengths:
                cases.append(_pass_case(f"{which} {label} T{tokens}", measure_pass, which, sizes(tokens=tokens)))
        for batch in grid.batches:
            cases.append(_case(f"decode {label} B{batch}", measure_decode, sizes(tokens=1, batch=batch)))
        sweep = sizes(tokens=grid.sweep_tokens)
        for which in PASSES[:2]:
            cases.append(_pass_case(f"chunk sizes {which} {label}", measure_chunk_sizes, which, sweep))
            if index < grid.num_compared:
                cases.append(_pass_case(f"others {which} {label}", measure_others, which, sweep))
            for tokens in grid.switch_lengths:
                name = f"switch {which} {label} T{tokens}"
                cases.append(_pass_case(name, measure_switch, which, sizes(tokens=tokens)))
        if index == 0:
            cases.append(_pass_case(f"window {label}", measure_window, "forward_backward", sweep))
    return cases


def _case(name: str, function: Callable[..., list[Row]], *arguments: Any) -> Case:
    return Case("timings", name, functools.partial(function, *arguments), limit_s=_CASE_SECONDS, alone=True)


def _pass_case(name: str, function: Callable[..., list[Row]], which: Pass, sizes: Sizes) -> Case:
    return _case(name, _if_it_fits, function, which, sizes)


def _if_it_fits(function: Callable[..., list[Row]], which: Pass, sizes: Sizes, session: Session) -> list[Row]:
    """Draw the inputs and call the measurement, or say that there is too little memory for it."""
    need = _MEMORY_FACTOR[which] * sizes.qkv_bytes() + _WORKSPACE_BYTES[session.settings.toy]
    free = session.hardware.free_bytes()
    if need > free:
        reason = f"needs about {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        return [Row(what="case", status="skipped", reason=reason, config=asdict(sizes) | {"pass": which})]
    tensors = draw_tensors(sizes, session.hardware.device, grad=which == "forward_backward")
    return function(which, sizes, tensors, session)


def measure_peaks(session: Session) -> list[Row]:
    """Measure the bfloat16 matmul rate and the copy bandwidth: what everything else is a share of."""
    grid, device = GRIDS[session.settings.mode], session.hardware.device
    size = grid.matmul_size
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(grid.copy_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {MATMUL: lambda: a @ b, COPY: lambda: target.copy_(source)}
    flops, num_bytes = {MATMUL: 2 * size**3}, {COPY: 2 * grid.copy_bytes}
    return _timed_rows(session, calls, {"matmul_size": size, "copy_bytes": grid.copy_bytes}, flops, num_bytes)


def measure_pass(which: Pass, sizes: Sizes, tensors: Tensors, session: Session) -> list[Row]:
    """Time the op against PyTorch's flash attention over a sequence."""
    calls = _pass_calls(which, tensors, session.settings)
    orders = active_orders(SQUARE)
    config = asdict(sizes) | {
        "pass": which,
        "score": "square",
        "dtype": "bfloat16",
        "chunk_size": work.chosen_chunk_size(sizes, which, orders),
    }
    flops = {SUBQUAD: work.subquad_flops(sizes, which, orders), SDPA_FLASH: work.softmax_flops(sizes, which)}
    return _timed_rows(session, calls, config, flops)


def _pass_calls(which: Pass, tensors: Tensors, settings: Settings) -> dict[str, Call]:
    ours = subquad_forward(tensors, SQUARE, settings.backend, final_state=which == "prefill")
    theirs = sdpa_forward(tensors, None if settings.toy else SDPBackend.FLASH_ATTENTION)
    leaves = tensors.leaves()
    return {
        SUBQUAD: call_for_pass(ours, tensors, which, leaves),
        SDPA_FLASH: call_for_pass(theirs, tensors, which, leaves[:3]),
    }


def measure_chunk_sizes(which: Pass, sizes: Sizes, tensors: Tensors, session: Session) -> list[Row]:
    """Time the chunked form at several chunk sizes."""
    calls, flops = {}, {}
    for chunk_size in GRIDS[session.settings.mode].chunk_sizes:
        forward = subquad_forward(tensors, SQUARE, session.settings.backend, chunk_size=chunk_size)
        name = f"chunk {chunk_size}"
        calls[name] = call_for_pass(forward, tensors, which, tensors.leaves())
        flops[name] = work.subquad_flops(sizes, which, active_orders(SQUARE), chunk_size)
    return _timed_rows(session, calls, asdict(sizes) | {"pass": which, "score": "square"}, flops)


def measure_switch(which: Pass, sizes: Sizes, tensors: Tensors, session: Session) -> list[Row]:
    """Time one chunk over all tokens (the quadratic kernel) against chunks of the default size."""
    chunk_size = work.default_chunk_size(sizes.head_dim, sizes.groups)
    calls, flops = {}, {}
    for name, size in {"quadratic": sizes.tokens, "chunked": min(chunk_size, sizes.tokens // 2)}.items():
        forward = subquad_forward(tensors, SQUARE, session.settings.backend, chunk_size=size)
        calls[name] = call_for_pass(forward, tensors, which, tensors.leaves())
        flops[name] = work.subquad_flops(sizes, which, active_orders(SQUARE), size)
    return _timed_rows(session, calls, asdict(sizes) | {"pass": which, "chunk_size": chunk_size}, flops)


def measure_others(which: Pass, sizes: Sizes, tensors: Tensors, session: Session) -> list[Row]:
    """Time the other scores, cuDNN's attention and the public linear-time kernels that are installed."""
    settings, device = session.settings, session.hardware.device
    leaves = tensors.leaves()
    calls: dict[str, Call] = {}
    flops: dict[str, int] = {}
    for score, coefs in SCORES.items():
        name = f"{SUBQUAD} {score}"
        calls[name] = call_for_pass(subquad_forward(tensors, coefs, settings.backend), tensors, which, leaves)
        flops[name] = work.subquad_flops(sizes, which, active_orders(coefs))
    theirs, absent = public_kernels(tensors, device)
    calls |= {name: call_for_pass(forward, tensors, which, leaves) for name, forward in theirs.items()}
    if settings.toy:
        absent[SDPA_CUDNN] = "needs a GPU"
    else:
        cudnn = sdpa_forward(tensors, SDPBackend.CUDNN_ATTENTION)
        calls[SDPA_CUDNN] = call_for_pass(cudnn, tensors, which, leaves[:3])
        flops[SDPA_CUDNN] = work.softmax_flops(sizes, which)
    config = asdict(sizes) | {"pass": which}
    rows = _timed_rows(session, calls, config, flops)
    for row in rows:
        # What another project's kernel cannot do is no failure of this one.
        if row.status == "error" and not row.what.startswith(SUBQUAD):
            row.status = "skipped"
    return rows + [Row(what=name, status="skipped", reason=why, config=config) for name, why in absent.items()]


def measure_decode(sizes: Sizes, session: Session) -> list[Row]:
    """Time one decoded token: state read and written, state read with pending keys, and key/value caches."""
    grid, settings, device = GRIDS[session.settings.mode], session.settings, session.hardware.device
    orders = active_orders(SQUARE)
    state = random_state(sizes, SQUARE, device)
    buffered = Sizes(**asdict(sizes) | {"tokens": grid.pending})
    one, several = draw_tensors(sizes, device), draw_tensors(buffered, device, queries=1)
    calls: dict[str, Call] = {
        STEP: decode_step(one, state, SQUARE, settings.backend, update=True),
        BUFFERED: decode_step(several, state, SQUARE, settings.backend, update=False),
    }
    num_bytes = {
        STEP: work.step_bytes(sizes, orders),
        BUFFERED: work.buffered_bytes(sizes, orders, grid.pending),
    }
    tokens = {STEP: 1, BUFFERED: grid.pending}
    skipped, room = [], _CACHE_SHARE * session.hardware.free_bytes()
    for cache_tokens in grid.cache_lengths:
        cached = Sizes(**asdict(sizes) | {"tokens": cache_tokens})
        name = f"{SDPA_FLASH} {cache_tokens}"
        tokens[name] = cache_tokens
        room -= cached.qkv_bytes()
        if room < 0:
            skipped.append(Row(what=SDPA_FLASH, status="skipped", reason="not enough memory", config=asdict(cached)))
            continue
        cache = draw_tensors(cached, device, queries=1)
        kernel = None if settings.toy else SDPBackend.FLASH_ATTENTION
        calls[name] = call_for_pass(sdpa_forward(cache, kernel, causal=False), cache, "forward", [])
        num_bytes[name] = work.cache_bytes(cached)
    rows = _timed_rows(session, calls, asdict(sizes) | {"pass": "decode", "score": "square"}, {}, num_bytes)
    for row in rows:
        row.config["tokens"] = tokens[row.what]
        row.what = row.what.split()[0]
    return rows + skipped


def measure_window(which: Pass, sizes: Sizes, tensors: Tensors, session: Session) -> list[Row]:
    """Time the fused window against the one in PyTorch operations."""
    leaves = tensors.leaves()[:3]
    window = min(_WINDOW, sizes.tokens // 4)

    def forward(backend: WindowBackend) -> torch.Tensor:
        return window_attention(tensors.q, tensors.k, tensors.v, window=window, sinks=4, backend=backend).out

    backends: tuple[WindowBackend, ...] = ("torch",) if session.settings.toy else ("flex", "torch")
    calls = {
        f"window {backend}": call_for_pass(functools.partial(forward, backend), tensors, which, leaves)
        for backend in backends
    }
    return _timed_rows(session, calls, asdict(sizes) | {"pass": which, "window": window}, {})


def _timed_rows(
    session: Session,
    calls: Mapping[str, Call],
    config: dict[str, Any],
    flops: Mapping[str, int],
    num_bytes: Mapping[str, int] | None = None,
) -> list[Row]:
    """Time the calls in turns; one row each, with rates and the speed against flash attention if that is among them."""
    timings, failures = measure(session.hardware, calls, session.settings.measure_ms)
    rows = []
    for name in calls:
        if name in failures:
            rows.append(Row(what=name, status="error", reason=failures[name], config=dict(config)))
            continue
        metrics = timings[name].metrics()
        if name in flops:
            metrics |= {"flops": flops[name], "tflops": flops[name] / timings[name].median_ms / 1e9}
        if num_bytes and name in num_bytes:
            metrics |= {"bytes": num_bytes[name], "gbps": num_bytes[name] / timings[name].median_ms / 1e6}
        metrics |= _speedup(name, timings)
        rows.append(Row(what=name, config=dict(config), metrics=metrics))
    return rows


def _speedup(name: str, timings: Mapping[str, Timing]) -> dict[str, float]:
    if name == SDPA_FLASH or SDPA_FLASH not in timings:
        return {}
    return {"speedup_vs_sdpa": timings[SDPA_FLASH].median_ms / timings[name].median_ms}
