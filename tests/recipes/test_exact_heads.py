"""Recipes that choose which heads stay softmax, and that train on recall."""

import json
from types import SimpleNamespace

import pytest

from subquad.convert.source import inspect_source
from subquad.errors import ConfigError
from subquad.layers import cache_bytes, converted_layers
from subquad.recipes import runner
from subquad.recipes.actions import plan_recipe
from subquad.recipes.checks import check_recipe_against
from subquad.recipes.exact_heads import count_exact_heads
from subquad.recipes.runner import run_recipe
from subquad.recipes.sections import ExactHeadsSection

TEXT_ONLY = {"recall_tokens": 0, "tokens": 64}
MIXER = {"preset": "2mamba", "window": 8, "sinks": 2}


def hybrid(**budget):
    return {"mixer": MIXER, "exact_heads": {**TEXT_ONLY, **budget}}


def base_plan(recipe):
    return runner._open_workshop(recipe, None).base_plan


def test_a_run_keeps_the_heads_it_chose(make_recipe):
    recipe = make_recipe(convert=hybrid(count=1), stage1={"tokens": 0}, stage2={"tokens": 64})
    results = run_recipe(recipe)
    planned = json.loads((recipe.run_dir / "stages" / "plan.json").read_text())["result"]
    chosen = {int(layer): tuple(heads) for layer, heads in planned["exact_heads"]["exact_kv_heads"].items()}
    assert sum(map(len, chosen.values())) == 1
    first = planned["exact_heads"]["heads"][0]
    assert chosen == {first["layer_idx"]: (first["kv_head"],)}
    model = runner._open_workshop(recipe, None).exported_student()
    assert {layer.layer_idx: layer.split.exact for layer in converted_layers(model) if layer.split.exact} == chosen
    assert sum(results.mixers.values()) == len(planned["layers"])
    assert any("beside 1 softmax key/value head" in label for label in results.mixers)
    # the run goes on from the choice it made, and an exact head costs what the formula says
    assert run_recipe(recipe) == results
    plan = runner._open_workshop(recipe, None).plan
    grows = {n: sum(cache_bytes(m, plan.geometry, 1, n, plan.dtype) for m in plan.mixers.values()) for n in (16, 64)}
    assert {n: results.cache_bytes.student[n] for n in (16, 64)} == grows
    assert grows[64] > grows[16]


def test_a_run_keeps_the_heads_it_is_told(make_recipe):
    recipe = make_recipe(
        convert={"mixer": MIXER, "exact_heads": {"heads": {"1": [0]}}}, stage1={"tokens": 0}, stage2={"tokens": 64}
    )
    planned = plan_recipe(recipe)
    assert [layer.mixer.exact_kv_heads for layer in planned.layers] == [(), (0,)]
    run_recipe(recipe)
    model = runner._open_workshop(recipe, None).exported_student()
    assert {layer.layer_idx: layer.split.exact for layer in converted_layers(model)} == {0: (), 1: (0,)}
    result = json.loads((recipe.run_dir / "stages" / "plan.json").read_text())["result"]
    assert result["exact_heads"] == {"exact_kv_heads": {"1": [0]}}


@pytest.mark.parametrize("heads", [{"2": [0]}, {"1": [2]}, {"0": [0, 1, 5]}])
def test_heads_the_model_does_not_have(make_recipe, heads):
    recipe = make_recipe(convert={"mixer": MIXER, "exact_heads": {"heads": heads}})
    with pytest.raises(ConfigError, match="layers are 0 to 1, key/value heads 0 to 1"):
        plan_recipe(recipe)


@pytest.mark.parametrize("heads", [{}, {"0": []}, {"0": [1, 1]}, {"-1": [0]}])
def test_heads_badly_named(make_recipe, heads):
    with pytest.raises(ConfigError, match=r"exact_heads\.heads"):
        make_recipe(convert={"mixer": MIXER, "exact_heads": {"heads": heads}})


def test_named_heads_leave_nothing_to_choose(make_recipe):
    with pytest.raises(ConfigError, match="so tokens, recall_tokens would have no effect"):
        make_recipe(convert={"mixer": MIXER, "exact_heads": {"heads": {"1": [0]}, "tokens": 64, "recall_tokens": 0}})
    recipe = make_recipe(convert={"mixer": MIXER, "layers": {"1": "softmax"}, "exact_heads": {"heads": {"1": [0]}}})
    with pytest.raises(ConfigError, match="layer 1: the whole layer stays softmax already"):
        plan_recipe(recipe)


def test_recall_reaches_both_stages(make_recipe, text_files):
    recipe = make_recipe(
        convert=hybrid(count=1, recall_tokens=128, tokens=128),
        data={
            "train": {"kind": "text", "paths": [str(text_files["train"])]},
            "eval": {"kind": "text", "paths": [str(text_files["eval"])]},
            "seq_len": 128,
            "recall": {"share": 1.0, "kinds": ["repeat"]},
        },
        calibrate={"tokens": 128},
        stage1={"tokens": 256, "batch_size": 1},
        stage2={"tokens": 256, "batch_size": 1},
        eval={"tokens": 256, "memory_lengths": [16], "generate_tokens": 0},
    )
    run_recipe(recipe)
    shop = runner._open_workshop(recipe, None)
    for stage in ("stage1", "stage2"):
        rows = shop.rows(stage, 256)
        assert "loss_weights" in rows.column_names
        assert all((row["loss_weights"] == 10).sum() > 4 for row in rows)
    assert "loss_weights" not in shop.rows("calibrate", 128).column_names
    ranked = shop.folder.result("plan")["exact_heads"]
    assert ranked["recall_gap"] > 0


@pytest.mark.parametrize(("budget", "expected"), [({"count": 3}, 3), ({"share": 0.5}, 2), ({"share": 0.01}, 1)])
def test_budgets_in_heads(make_recipe, budget, expected):
    plan = base_plan(make_recipe())
    assert len(plan.mixers) * plan.geometry.num_kv_heads == 4
    assert count_exact_heads(ExactHeadsSection(**budget), plan) == expected


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_budget_in_bytes_is_kept_and_used(make_recipe, heads):
    plan = base_plan(make_recipe())
    length = 60_000
    mixer = next(iter(plan.mixers.values()))
    sizes = [
        cache_bytes(mixer.model_copy(update={"exact_kv_heads": kept}), plan.geometry, 1, length, plan.dtype)
        for kept in ((), (0,))
    ]
    total = len(plan.mixers) * sizes[0] + heads * (sizes[1] - sizes[0])
    exactly = ExactHeadsSection(cache_mib=total / 2**20, at_length=length)
    assert count_exact_heads(exactly, plan) == heads
    if heads > 1:
        below = ExactHeadsSection(cache_mib=(total - 1) / 2**20, at_length=length)
        assert count_exact_heads(below, plan) == heads - 1


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (hybrid(count=4), r"count 4 keeps 4 of 4 key/value heads softmax; give a budget for at least 1 and at most 3"),
        (hybrid(cache_mib=1e-6, at_length=60_000), r"cache_mib 1e-06 keeps -\d+ of 4"),
        (hybrid(cache_mib=1.0, at_length=8), r"at 8 tokens an exact head takes no more bytes than a converted one"),
    ],
)
def test_budgets_that_cannot_be_are_named_before_anything_is_written(make_recipe, convert, message):
    recipe = make_recipe(convert=convert)
    with pytest.raises(ConfigError, match=message):
        check_recipe_against(recipe, inspect_source(recipe.model.source).hf_config)
    with pytest.raises(ConfigError, match=message):
        run_recipe(recipe)
    assert not (recipe.run_dir / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convert": {"exact_heads": {}}}, "give one of heads, count, share and cache_mib (got none)"),
        ({"convert": {"exact_heads": {"count": 1, "share": 0.1}}}, "(got count, share)"),
        ({"convert": {"exact_heads": {"share": 1.0}}}, "convert.exact_heads.share"),
        (
            {"convert": {"mixer": {**MIXER, "exact_kv_heads": [0]}, "exact_heads": {"count": 1}}},
            "remove one of the two",
        ),
        ({"convert": {"exact_heads": {"count": 1, "tokens": 64}}}, "data.seq_len 32 is too short for the recall rows"),
        ({"convert": {"exact_heads": {"count": 1, "tokens": 8, "recall_tokens": 0}}}, "exact_heads.tokens is 8"),
        ({"data": {"seq_len": 64, "recall": {}}}, "seq_len 64 is too short for recall, which needs rows of 128"),
        ({"data": {"recall": {"share": 0}}}, "data.recall.share"),
        ({"data": {"recall": {"kinds": ["riddle"]}}}, "data.recall.kinds"),
    ],
)
def test_wrong_sections(make_recipe, changes, message):
    with pytest.raises(ConfigError) as caught:
        make_recipe(**changes)
    assert message in str(caught.value)


def test_a_layer_all_of_whose_heads_stay_is_left_alone(make_recipe):
    shop = runner._open_workshop(make_recipe(), None)
    plan = shop.plan_with({0: (0, 1), 1: (1,)})
    assert [layer.mixer.score for layer in plan.layers] == ["softmax", "power"]
    assert plan.layers[1].mixer.exact_kv_heads == (1,)


def test_the_choice_is_made_by_one_process(make_recipe, monkeypatch):
    from subquad.recipes import steps

    assert "plan" in steps.MAIN_PROCESS_STEPS
    recipe = make_recipe(convert=hybrid(count=2))
    shop = runner._open_workshop(recipe, None)
    shop.folder = SimpleNamespace(result=lambda stage: {"exact_heads": {"exact_kv_heads": {"1": [0]}}})
    assert shop.plan.layers[1].mixer.exact_kv_heads == (0,)


def test_weights_of_far_tokens_need_a_window(make_recipe):
    recipe = make_recipe(convert={"mixer": {"preset": "2mamba", "window": 0}}, stage2={"tokens": 64, "far_weight": 1.0})
    with pytest.raises(ConfigError, match=r"stage2.far_weight is 1\.0, but a mixer has window: 0"):
        run_recipe(recipe)
    with pytest.raises(ConfigError, match="set far_weight: 0 or full: false"):
        make_recipe(stage2={"tokens": 64, "far_weight": 1.0, "full": True})
