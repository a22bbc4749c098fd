"""The `subquad` command: each command parses its arguments, calls one function and prints.

Exit codes: 0 done, 1 an error that subquad explains (one message on standard error), 2 wrong usage, 130 interrupted.
torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from subquad import __version__
from subquad.cli_common import (
    CheckpointArgument,
    FreshOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    given_command,
    long_run,
)
from subquad.cli_eval import eval_app
from subquad.cli_studies import studies_app
from subquad.errors import ConfigError, SubquadError

if TYPE_CHECKING:
    from subquad.recipes.fields import Section

logger = logging.getLogger("subquad")


class _Interruptible(TyperGroup):
    """Ends any command on Ctrl-C with one message and code 130, imports and loading included."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # what is on disk is always enough to go on from
            typer.echo(f"\ninterrupted; to continue where it was:\n  {given_command()}", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="subquad",
    cls=_Interruptible,
    help="Turn a pretrained softmax Llama into a linear-time model: convert, distil, evaluate, use.",
    epilog="Start with: subquad run demo",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List, show and copy the recipes that come with subquad.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
# without names: their commands stand beside the others
app.add_typer(eval_app)
app.add_typer(studies_app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="subquad")
    except SubquadError as error:
        if logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"subquad {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors, and more messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    from rich.logging import RichHandler

    from subquad.console import open_console

    handler = RichHandler(console=open_console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe from the teacher to the report, or continue an interrupted run.

    Examples:

        subquad run demo

        subquad run demo output_dir=runs/longer stage1.tokens=100000

        subquad run my.yaml --fresh

        accelerate launch --num_processes 8 -m subquad.cli run llama3.2-1b-2mamba
    """
    from subquad.recipes.loader import load_recipe
    from subquad.recipes.runner import run_recipe

    loaded = load_recipe(recipe, overrides or ())
    with long_run():
        results = run_recipe(loaded, resume=not fresh, command=given_command())
    if results is None:
        return
    if as_json:
        typer.echo(results.model_dump_json(indent=2))
    else:
        _print_summary(loaded.run_dir)


@app.command()
def plan(recipe: RecipeArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """Show what every layer would become; loads no weights and changes nothing.

    Examples:

        subquad plan demo

        subquad plan demo convert.mixer=taylor 'convert.layers={0-3: softmax}'

        subquad plan demo --json
    """
    from subquad.console import open_console
    from subquad.convert.plan_table import render_plan
    from subquad.recipes.actions import plan_recipe
    from subquad.recipes.exact_heads import count_exact_heads
    from subquad.recipes.loader import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    planned = plan_recipe(loaded)
    budget = loaded.convert.exact_heads
    chosen = None if budget is None or budget.heads is not None else count_exact_heads(budget, planned)
    if as_json:
        typer.echo(json.dumps({**planned.to_dict(), "exact_heads": chosen}, indent=2))
    else:
        open_console().print(render_plan(planned))
        if chosen is not None:
            total = len(planned.mixers) * planned.geometry.num_kv_heads
            open_console().print(
                f"{chosen} of the {total} key/value heads will stay softmax; the run chooses which, and its stage "
                "`plan` shows this table with them."
            )


@app.command()
def mixers(
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/mixers.md.")] = False,
) -> None:
    """List every preset: formula, time, forms, what its cache holds at head widths 64 and 128, and source.

    Examples:

        subquad mixers

        subquad mixers --json
    """
    from subquad.console import open_console
    from subquad.layers.listing import list_mixers, markdown_table, render_mixers

    if markdown and as_json:
        raise ConfigError("--json and --markdown are two forms of one list; give one of them")
    if markdown:
        typer.echo(markdown_table())
    elif as_json:
        typer.echo(json.dumps([row.to_dict() for row in list_mixers()], indent=2))
    else:
        open_console().print(render_mixers())


@app.command()
def convert(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new checkpoint.")],
) -> None:
    """Convert and calibrate the teacher, without training, and write the checkpoint.

    Examples:

        subquad convert demo -o converted

        subquad convert demo model.source=model.gguf calibrate.enabled=false -o converted
    """
    from subquad.recipes.loader import load_recipe
    from subquad.recipes.runner import convert_recipe

    loaded = load_recipe(recipe, overrides or ())
    with long_run():
        written = convert_recipe(loaded, output, command=given_command())
    typer.echo(f"Checkpoint: {written}")


@app.command()
def distill(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
) -> None:
    """Run a recipe up to the exported checkpoint, without the final evaluation; `subquad run` then does the rest.

    Examples:

        subquad distill demo

        subquad distill demo stage2.tokens=0 output_dir=runs/stage1-only
    """
    from subquad.recipes.loader import load_recipe
    from subquad.recipes.runner import run_recipe

    loaded = load_recipe(recipe, overrides or ())
    with long_run():
        run_recipe(loaded, resume=not fresh, last_stage="export", command=given_command())
    typer.echo(f"Checkpoint: {loaded.run_dir / 'student'}")


@app.command()
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Most tokens to generate.")] = 40,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt greedily.

    Examples:

        subquad generate runs/demo/student "The state of the Union is"

        subquad generate runs/demo/student "Once upon a time" -n 100 --json
    """
    from subquad.recipes.actions import continue_prompt

    written = continue_prompt(checkpoint, prompt, tokens)
    typer.echo(json.dumps({"prompt": prompt, "text": written}) if as_json else prompt + written)


@app.command()
def doctor(
    device: Annotated[
        str | None, typer.Option("--device", help="Device to check: `cpu`, `cuda`, `cuda:1`, …; default: all.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Time for the checks of a device; those beyond it are left out.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices and what runs on them, and check the numbers of the kernels on this machine.

    Outputs, states and gradients are compared with float64. The exit code is 1 if any is wrong.

    Examples:

        subquad doctor

        subquad doctor --device cuda:0 --seconds 120

        subquad doctor --json > doctor.json
    """
    from subquad.console import open_console
    from subquad.doctor import diagnose, render_diagnosis

    diagnosis = diagnose(device, seconds)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        open_console().print(render_diagnosis(diagnosis))
    if not diagnosis.ok:
        raise typer.Exit(1)


@recipes_app.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """List the packaged recipes.

    Examples:

        subquad recipes list
    """
    from subquad.recipes.library import KINDS, packaged_recipes

    recipes = {kind: packaged_recipes(kind) for kind in KINDS}
    if as_json:
        found = {name: recipe.summary for of_kind in recipes.values() for name, recipe in of_kind.items()}
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(name) for of_kind in recipes.values() for name in of_kind)
    for kind, (_, command) in KINDS.items():
        typer.echo(f"{command} NAME")
        for name, recipe in recipes[kind].items():
            typer.echo(f"  {name:<{width}}  {recipe.summary}")


@recipes_app.command("show")
def show_recipe(
    name: RecipeArgument,
    overrides: OverridesArgument = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Spell out every default.")] = False,
) -> None:
    """Print a recipe as it stands in the package, or with every default spelled out.

    Examples:

        subquad recipes show demo

        subquad recipes show demo --resolved stage1.tokens=50000
    """
    from subquad.recipes.library import packaged_recipe

    if resolved or overrides:
        from subquad.recipes.loader import recipe_to_yaml

        typer.echo(recipe_to_yaml(_load_any(name, overrides or ())), nl=False)
    else:
        typer.echo(packaged_recipe(name).text, nl=False)


def _load_any(source: str, overrides: Sequence[str]) -> Section:
    """Load a recipe of whatever kind; a file of one's own is a conversion unless its keys say otherwise."""
    from subquad.pretrain.schema import load_pretrain_recipe
    from subquad.pretrain.study.schema import load_study
    from subquad.recipes.loader import load_recipe, recipe_kind

    loaders = {"run": load_recipe, "pretrain": load_pretrain_recipe, "study": load_study}
    return loaders[recipe_kind(source)](source, overrides)


@recipes_app.command("copy")
def copy_packaged_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A packaged recipe.")],
    destination: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, or a folder for it.")] = Path(),
) -> None:
    """Copy a packaged recipe to a file, to be edited. A file that exists is left as it is.

    Examples:

        subquad recipes copy demo my.yaml
    """
    from subquad.recipes.library import copy_recipe

    typer.echo(f"Wrote {copy_recipe(name, destination)}")


def _print_summary(run_folder: Path) -> None:
    from subquad.eval.storage import load_results
    from subquad.eval.summary import print_summary

    print_summary(load_results(run_folder), run_folder / "report.html")


if __name__ == "__main__":
    main()
