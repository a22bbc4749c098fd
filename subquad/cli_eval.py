"""The commands that measure a checkpoint and report it.

torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli_common import CheckpointArgument, JsonOption, OverridesArgument, given_command, long_run
from subquad.errors import ConfigError

if TYPE_CHECKING:
    from subquad.recipes.suite import SuiteResult

eval_app = typer.Typer()


@eval_app.command("eval")
def evaluate(
    checkpoint: CheckpointArgument,
    overrides: OverridesArgument = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file or pattern; default: the embedded held-out messages.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens to measure on; default: 16,384.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=2, help="Tokens per row; default: 512.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", "-t", help="loss, layers, niah, speed, perplexity, glue-finetune, glue, any lm-eval task."
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="A .yaml file with the settings of the tasks.")] = None,
    data_dir: Annotated[
        str | None,
        typer.Option("--data-dir", help="Folder with the files of GLUE and other tasks."),
    ] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", help="The teacher; default: the run's.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="Another checkpoint or run to measure too, as PATH or NAME=PATH."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the records.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a checkpoint: its loss on held-out text or, with `--tasks`, whole tasks beside teacher and control.

    With `--tasks` (or `--config`) the student, its teacher and the window-only control run with the same settings;
    what was measured before with equal settings is kept. KEY=VALUE changes settings: `niah.samples=4`.

    Examples:

        subquad eval runs/demo/student

        subquad eval runs/demo --tasks loss,niah,glue lm_eval.limit=200 niah.lengths=[256,1024]

        subquad eval runs/demo --tasks glue,glue-finetune --data-dir data/glue --against other=runs/other
    """
    if tasks is None and config is None:
        if overrides or data_dir or teacher or against or output:
            raise ConfigError("KEY=VALUE, --data-dir, --teacher, --against, --output go with --tasks or --config")
        _print_loss(checkpoint, text or (), tokens or 16_384, seq_len or 512, as_json)
        return
    from subquad.recipes.suite import evaluate_suite

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise ConfigError("--tasks names no task; give some, such as loss,niah, or leave it out")
    with long_run():
        result = evaluate_suite(
            checkpoint,
            names,
            config=config,
            overrides=_settings({"text": text, "tokens": tokens, "seq_len": seq_len}, data_dir, overrides or ()),
            teacher=teacher,
            others=against or (),
            output=output,
            command=given_command(),
        )
    _print_suite(result, as_json)
    if result.failures:
        raise typer.Exit(1)


def _print_loss(checkpoint: str, text: Sequence[str], tokens: int, seq_len: int, as_json: bool) -> None:
    from subquad.console import open_console
    from subquad.recipes.actions import evaluate_checkpoint

    measured = evaluate_checkpoint(checkpoint, text, tokens=tokens, seq_len=seq_len)
    if as_json:
        typer.echo(json.dumps(measured.to_dict(), indent=2))
    else:
        open_console().print(measured.table())


def _settings(given: Mapping[str, object], data_dir: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the options as settings of the tasks, followed by the settings that were given as such."""
    chosen = [f"loss.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    if data_dir is not None:
        chosen += [f"lm_eval.data_dirs={json.dumps([data_dir])}", f"finetune.data_dir={json.dumps(data_dir)}"]
    twice = {pair.partition("=")[0] for pair in chosen} & {pair.partition("=")[0] for pair in overrides}
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice, as an option and as KEY=VALUE; keep one")
    return [*chosen, *overrides]


def _print_suite(result: SuiteResult, as_json: bool) -> None:
    from subquad.console import open_console
    from subquad.recipes.suite import render_suite

    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    open_console().print(render_suite(result))
    for task, reason in result.unmeasured().items():
        if task not in result.failures:
            typer.echo(f"{task} was not measured: {reason}", err=True)


@eval_app.command()
def report(
    run_folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folder of a run or an evaluation; several are compared on one page."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the report; default: RUN, or `comparison` for several."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run or an evaluation again from its files, or compare several, and print the summary.

    Examples:

        subquad report runs/demo

        subquad report runs/demo runs/other --output runs/compared
    """
    from subquad.eval.report import comparison_to_dict, load_run, report_to_dict, write_comparison, write_report
    from subquad.eval.summary import print_comparison, print_report

    if len(run_folders) > 1:
        paths = write_comparison(run_folders, output or Path("comparison"))
        runs = [load_run(folder) for folder in run_folders]
        if as_json:
            typer.echo(json.dumps(comparison_to_dict(runs), indent=2))
        else:
            print_comparison(runs, paths.html)
        return
    paths = write_report(run_folders[0], output)
    found = load_run(run_folders[0])
    if as_json:
        typer.echo(json.dumps(report_to_dict(found), indent=2))
    else:
        print_report(found, paths.html)
