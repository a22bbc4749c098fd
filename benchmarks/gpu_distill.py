"""Distil a model on one GPU in minutes, on a machine without network: prepare, carry, run.

    python -m benchmarks.gpu_distill prepare --text a.txt.gz b.jsonl   # with the libraries: runs/gpu_distill/load-N
    python -m benchmarks.gpu_distill run --output OUT                  # on the GPU, with the loads in the same place
    python -m benchmarks.gpu_distill export --result OUT --output DIR  # with the libraries: a checkpoint

`prepare` writes teacher, packed rows and needle prompts into folders `load-1`, `load-2`, … of a limited size; `run`
joins and checks them, trains within `--seconds`, and writes one row, `gpu_distill.json`; `export` makes a checkpoint of
what `run` handed back. `run` imports neither `datasets` nor `lm_eval`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from pydantic import ValidationError

from benchmarks.distillation.run import RunOptions, run
from subquad.errors import SubquadError
from subquad.eval.niah.settings import NiahSettings

_OUTPUT_HELP = "folder for the result; on a machine that hands files back, the folder it hands back"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_distill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="write what a run needs into loads")
    make.add_argument("--model", default="smollm2-135m", help="the teacher: a name, a folder or a .gguf file")
    make.add_argument("--text", type=Path, nargs="*", default=[], help="text files (.gz too) or .jsonl; none: embedded")
    make.add_argument(
        "--held-out", type=Path, nargs="*", default=[], help="files; none: one document in ten of the texts"
    )
    make.add_argument("--output", type=Path, default=Path("runs/gpu_distill"), help="folder of the loads")
    make.add_argument("--seq-len", type=int, default=1024, help="tokens per row")
    make.add_argument("--tokens", type=int, default=30_000_000, help="most training tokens")
    make.add_argument("--held-out-tokens", type=int, default=131_072, help="most tokens to measure on")
    make.add_argument("--recall", type=float, default=0.0, help="share of the rows that ask for recall")
    make.add_argument("--needle-lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens of prompts")
    make.add_argument("--needle-samples", type=int, default=10, help="prompts per length and depth (five depths)")
    make.add_argument("--load-mib", type=float, default=56.0, help="most MiB of a load")
    make.add_argument("--seed", type=int, default=0, help="of rows, recall and needles")
    go = commands.add_parser("run", help="distil and measure")
    go.add_argument("--data", type=Path, default=Path("runs/gpu_distill"), help="folder of the loads")
    go.add_argument("--output", type=Path, required=True, help=_OUTPUT_HELP)
    go.add_argument("--seconds", type=float, default=420.0, help="how long it may take, all in all")
    go.add_argument("--tokens", type=int, default=30_000_000, help="training tokens, a third of them for stage 1")
    go.add_argument("--recipe", default="smollm2-2mamba", help="a packaged recipe's name or a file")
    go.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value in the recipe")
    go.add_argument("--commit", help="the commit, where the checkout cannot tell, as in an exported tree")
    out = commands.add_parser("export", help="make a checkpoint of what a run handed back")
    out.add_argument("--data", type=Path, default=Path("runs/gpu_distill"), help="folder of the loads")
    out.add_argument("--result", type=Path, required=True, help="folder that `run` wrote")
    out.add_argument("--output", type=Path, required=True, help="the checkpoint's folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and do what it asks for."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    command = shlex.join(["python", "-m", "benchmarks.gpu_distill", *given])
    try:
        {"prepare": _prepare, "run": _run, "export": _export}[options.command](options, command)
    except (SubquadError, ValidationError) as error:
        raise SystemExit(f"error: {error}") from error


def _prepare(options: argparse.Namespace, command: str) -> None:
    # text is read with `datasets`, which the machine with the GPU need not have
    from benchmarks.distillation.prepare import PrepareOptions, prepare

    needle = NiahSettings(
        lengths=tuple(sorted(options.needle_lengths)), depths=5, samples=options.needle_samples, seed=options.seed
    )
    chosen = PrepareOptions(
        model=options.model,
        texts=tuple(options.text),
        held_out=tuple(options.held_out),
        seq_len=options.seq_len,
        tokens=options.tokens,
        held_out_tokens=options.held_out_tokens,
        recall=options.recall,
        needle=needle,
        load_mib=options.load_mib,
        seed=options.seed,
    )
    for load in prepare(chosen, options.output):
        size = sum(path.stat().st_size for path in load.iterdir())
        print(f"{load}: {size / 2**20:.1f} MiB")


def _run(options: argparse.Namespace, command: str) -> None:
    row = run(
        RunOptions(
            data=options.data,
            output=options.output,
            seconds=options.seconds,
            tokens=options.tokens,
            recipe=options.recipe,
            overrides=tuple(options.set),
            commit=options.commit,
            command=command,
        )
    )
    print(f"{row['seconds']:.0f} s of {row['seconds_limit']:.0f} s; {options.output / 'gpu_distill.json'}")


def _export(options: argparse.Namespace, command: str) -> None:
    from benchmarks.distillation.export import export

    print(export(options.data, options.result, options.output))


if __name__ == "__main__":
    main()
