"""The commands of the theory: train from random weights, compare many arms, measure the memory of every system.

torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli_common import (
    FreshOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    given_command,
    long_run,
)

studies_app = typer.Typer()


@studies_app.command()
def pretrain(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small Llama-shaped model with any mixer from random weights, export it and measure it.

    Examples:

        subquad pretrain tiny-2mamba

        subquad pretrain tiny-2mamba mixer=softmax training.tokens=500000 output_dir=runs/tiny-softmax

        subquad pretrain my.yaml 'mixer={score: taylor, order: 3}' --json
    """
    from subquad.pretrain.run import run_pretrain
    from subquad.pretrain.schema import load_pretrain_recipe
    from subquad.pretrain.summary import summarise

    loaded = load_pretrain_recipe(recipe, overrides or ())
    with long_run():
        results = run_pretrain(loaded, resume=not fresh, command=given_command())
    if results is not None:
        typer.echo(results.model_dump_json(indent=2) if as_json else summarise(results, loaded.run_dir))


@studies_app.command()
def study(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="A packaged study (`subquad recipes list`) or a .yaml file.")
    ],
    overrides: OverridesArgument = None,
    arms: Annotated[str | None, typer.Option("--arms", help="Arms to run, with commas; default: all.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier runs of these arms first.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train every arm of a study with every seed, or what is left of it, and write a table and a plot.

    Started several times at once, the processes share the work.

    Examples:

        subquad study theory-orders

        subquad study theory-components --arms softmax,plain 'seeds=[0]' base.training.tokens=100000

        subquad study my.yaml --json
    """
    from subquad.pretrain.study.run import run_study
    from subquad.pretrain.study.schema import load_study

    loaded = load_study(study, overrides or ())
    names = [name.strip() for name in (arms or "").split(",") if name.strip()]
    with long_run():
        result = run_study(loaded, arms=names, resume=not fresh, command=given_command())
    if result is None:
        return
    if as_json:
        typer.echo(result.results.read_text(encoding="utf-8"))
    else:
        typer.echo(result.table.read_text(encoding="utf-8"))
        typer.echo(f"{result.table} · {result.plot.path} · {result.results}")


@studies_app.command()
def memory(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for memory.md, memory.png, memory.json.")
    ] = Path("memory"),
    head_dims: Annotated[
        list[int] | None, typer.Option("--head-dim", help="Width of a head; default: 64, 128.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of keys and values: bfloat16 or float32.")] = "bfloat16",
    as_json: JsonOption = False,
) -> None:
    """Measure the cache of every system over length against a key/value cache; writes a table and a plot.

    One layer with one head of each runs over random tokens; from which length on it holds less is marked.

    Examples:

        subquad memory

        subquad memory --dtype float32 --head-dim 64 -o memory-64
    """
    from subquad.eval.crossover import HEAD_DIMS
    from subquad.pretrain.systems import report_memory

    report = report_memory(output, head_dims=head_dims or HEAD_DIMS, dtype=dtype)
    if as_json:
        typer.echo(report.json.read_text(encoding="utf-8"))
    else:
        typer.echo(report.table.read_text(encoding="utf-8"))
        typer.echo(f"{report.table} · {report.plot.path} · {report.json}")
