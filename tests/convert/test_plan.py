"""Planning a conversion: layer ranges, checks, and the numbers in the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import LlamaConfig

from subquad.convert.plan import mixer_label, parse_layers, plan_conversion
from subquad.convert.plan_table import render_plan
from subquad.convert.surgery import apply_plan
from subquad.errors import ConfigError, SourceError
from subquad.layers import cache_bytes, resolve_mixer

from .tiny_checkpoints import tiny_config, tiny_model

SMOL = LlamaConfig(
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    num_hidden_layers=30,
    max_position_embeddings=8192,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_hidden_layers=32,
    max_position_embeddings=131072,
)
PURE = resolve_mixer({"preset": "2mamba", "window": 0, "conv_width": 1, "offset": False})


@pytest.mark.parametrize(
    "text, indices",
    [
        ("0-3", [0, 1, 2, 3]),
        ("5,7", [5, 7]),
        (" 0-1 , 9 ", [0, 1, 9]),
        ("4", [4]),
        ("-1", [9]),
        ("-10", [0]),
        ("0,-1", [0, 9]),
        ("9-9", [9]),
    ],
)
def test_layer_ranges(text, indices):
    assert parse_layers(text, 10) == indices


@pytest.mark.parametrize("text", ["", "a", "1-", "-", "0..3", "1,,2", "1.5", "0-3-5", "all"])
def test_malformed_ranges(text):
    with pytest.raises(ConfigError, match=r"not a layer range; write it as '0-3'"):
        parse_layers(text, 10)


@pytest.mark.parametrize("text", ["10", "0-10", "-11", "12-15", "3,10"])
def test_ranges_outside_the_model(text):
    with pytest.raises(ConfigError, match="outside the model, whose layers are 0 to 9"):
        parse_layers(text, 10)


@pytest.mark.parametrize("text", ["5-3", "-3-5"])
def test_ranges_that_do_not_count_upwards(text):
    with pytest.raises(ConfigError, match="does not count upwards"):
        parse_layers(text, 10)


def test_every_layer_gets_its_mixer():
    plan = plan_conversion(SMOL, PURE, {"0-3": resolve_mixer("softmax"), "-1": resolve_mixer("taylor")})
    assert [layer.layer_idx for layer in plan.layers] == list(range(30))
    assert [layer.mixer.score for layer in plan.layers] == ["softmax"] * 4 + ["power"] * 25 + ["taylor"]
    assert sorted(plan.mixers) == list(range(4, 30))
    assert not any(layer.converted for layer in plan.layers[:4])


def test_all_problems_are_in_one_message():
    layers = {
        "0-1": resolve_mixer("softmax"),
        "1,2": resolve_mixer("taylor"),
        "40": resolve_mixer("taylor"),
        "x": resolve_mixer("taylor"),
        "5": resolve_mixer({"preset": "2mamba", "exact_kv_heads": [0, 3]}),
        "6": resolve_mixer({"preset": "2mamba", "exact_kv_heads": [0, 1, 2]}),
        "7": resolve_mixer({"preset": "2mamba", "window": 8193}),
        "8": resolve_mixer({"preset": "based", "feature_dim": 65}),
    }
    with pytest.raises(ConfigError) as caught:
        plan_conversion(SMOL, resolve_mixer({"preset": "taylor", "causal": False}), layers)
    message = str(caught.value)
    for expected in (
        "layer 1 is named twice: by '0-1' and by '1,2'",
        "'40' is outside the model, whose layers are 0 to 29",
        "'x' is not a layer range",
        "5: exact_kv_heads [3] must be between 0 and 2",
        "6: exact_kv_heads names every key/value head",
        "7: window 8193 is longer than the model's context of 8192",
        "8: feature_dim 65 is wider than the model's heads of 64",
        "mixer: causal: false in a LlamaForCausalLM",
    ):
        assert expected in message


def test_window_as_long_as_the_context_is_allowed():
    plan_conversion(SMOL, resolve_mixer({"preset": "2mamba", "window": 8192}))


def test_unsupported_models_are_refused():
    with pytest.raises(SourceError, match="do not divide evenly"):
        plan_conversion(tiny_config(num_attention_heads=4, num_key_value_heads=3), PURE)
    mistral = tiny_config()
    mistral.model_type = "mistral"
    with pytest.raises(SourceError, match=r"mistral.*Supported: LlamaForCausalLM"):
        plan_conversion(mistral, PURE)


def test_planning_changes_nothing():
    config = tiny_config()
    before = config.to_dict()
    plan_conversion(config, PURE, {"0": resolve_mixer("softmax")})
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "mixer",
    [
        "2mamba",
        "mamba2s",
        "taylor",
        {"preset": "taylor", "order": 3},
        {"preset": "2mamba", "window": 0},
        {"preset": "2mamba", "exact_kv_heads": [1]},
        "mamba2",
        "fox-pro",
        "softmax-layer",
        "cottention",
        {"preset": "based", "feature_dim": 4},
    ],
)
def test_added_parameters_are_those_of_the_converted_model(mixer):
    model = tiny_model()
    before = sum(parameter.numel() for parameter in model.parameters())
    plan = plan_conversion(model.config, resolve_mixer(mixer), {"0": resolve_mixer("softmax")})
    converted = apply_plan(model, plan)
    added = sum(parameter.numel() for parameter in converted.parameters()) - before
    assert plan.added_parameters == added > 0
    assert plan.layers[0].added_parameters == 0


def test_state_of_pure_2mamba_is_the_formula_of_the_paper():
    """[C]: d(d+1)/2 rows of d values and one normaliser, per key/value head, in float32."""
    plan = plan_conversion(SMOL, PURE, lengths=(1, 8192))
    rows = 64 * 65 // 2
    assert plan.layers[0].cache_bytes == {1: 4 * 3 * rows * 65, 8192: 4 * 3 * rows * 65}
    assert plan.layers[0].kv_bytes == {1: 2 * 4 * 3 * 64, 8192: 2 * 4 * 3 * 64 * 8192}
    # smaller than the KV cache once N > (d+1)^2 / 4 numbers of each head (the paper counts e = d and no conv here)
    assert plan.layers[0].crossover == 65 * 65 // 4 + 1


def test_dtype_of_the_model_counts_for_keys_and_values_only():
    plans = {dtype: plan_conversion(SMOL, PURE, dtype=dtype).layers[0] for dtype in (torch.float32, torch.bfloat16)}
    assert plans[torch.float32].cache_bytes == plans[torch.bfloat16].cache_bytes
    assert plans[torch.float32].kv_bytes[8192] == 2 * plans[torch.bfloat16].kv_bytes[8192]
    windowed = resolve_mixer("2mamba")
    plan = plan_conversion(SMOL, windowed, dtype=torch.bfloat16)
    assert plan.layers[0].cache_bytes[8192] == cache_bytes(windowed, plan.geometry, 1, 8192, torch.bfloat16)
    assert plan.layers[0].cache_bytes[8192] < plan_conversion(SMOL, windowed).layers[0].cache_bytes[8192]
    config = LlamaConfig(**{**SMOL.to_dict(), "dtype": "bfloat16"})
    assert plan_conversion(config, PURE).dtype == torch.bfloat16


@pytest.mark.parametrize("mixer", ["2mamba", "mamba2s", "taylor", {"preset": "2mamba", "exact_kv_heads": [1]}])
def test_crossover_is_the_first_length_at_which_the_cache_is_smaller(mixer):
    mixer = resolve_mixer(mixer)
    plan = plan_conversion(SMOL, mixer)
    crossover = plan.layers[0].crossover

    def smaller(seq_len: int) -> bool:
        softmax = resolve_mixer("softmax")
        new, old = (cache_bytes(m, plan.geometry, 1, seq_len, plan.dtype) for m in (mixer, softmax))
        return new < old

    assert smaller(crossover)
    assert not any(smaller(seq_len) for seq_len in range(crossover))


CROSSOVERS = ("crossover", "prefill_crossover", "training_crossover", "decode_crossover")


def test_quadratic_and_unchanged_layers_never_cross_over():
    plan = plan_conversion(SMOL, resolve_mixer({"preset": "taylor", "order": 3}), {"0": resolve_mixer("softmax")})
    for layer in plan.layers[:2]:
        assert [getattr(layer, name) for name in CROSSOVERS] == [None] * 4


def test_work_crossovers_follow_from_the_formulas():
    """D = 2,080 rows, G = 3, C = 256: D (1 + 1/G) without end states, and (d + 1)^2 tokens of bfloat16 keys."""
    layer = plan_conversion(SMOL, PURE, dtype=torch.bfloat16).layers[0]
    d, rows, groups, chunk_size = 64, 2080, 3, 256

    def prefill_gain(n: int) -> int:
        # all but C tokens read a state, all are written to it; of the pairs, softmax has N^2 / 2 and a chunk C N / 2
        return 2 * d * n * (n - chunk_size) * groups - 2 * rows * d * ((n - chunk_size) * groups + n)

    assert prefill_gain(layer.prefill_crossover - 1) <= 0 < prefill_gain(layer.prefill_crossover)
    # D e (4 + 6/G) + 2 d^2 e (1 + 1/G) < 7 d N
    needed = rows * d * (4 + 6 / groups) + 2 * d**3 * (1 + 1 / groups)
    assert layer.training_crossover == int(needed / (7 * d)) + 1
    assert layer.decode_crossover == (d + 1) ** 2 + 1


def test_work_crossovers_of_other_dtypes_windows_and_exact_heads():
    def crossovers(mixer, dtype=torch.bfloat16) -> list[int]:
        layer = plan_conversion(SMOL, resolve_mixer(mixer), dtype=dtype).layers[0]
        return [getattr(layer, name) for name in CROSSOVERS[1:]]

    prefill, training, decode = crossovers("taylor")
    assert crossovers("taylor", torch.float32)[:2] == [prefill, training]
    assert crossovers("taylor", torch.float32)[2] < decode
    # 100 keys more that every query sees are, but for the first chunk, 200 more in a causal stretch, and 100 in a cache
    more = crossovers({"preset": "taylor", "window": 164})
    assert 200 < more[0] - prefill < 220
    assert 200 < more[1] - training < 220
    assert more[2] - decode == 100
    assert crossovers({"preset": "taylor", "exact_kv_heads": [1]}) == [prefill, training, decode]
    # Mamba-2S has no sum of weights: 64 rows of 64 float32 numbers, read and written, and 68 exact keys
    assert crossovers("mamba2s")[2] == 2 * 64 * 64 * 4 // (2 * 64 * 2) + 68 + 1


def documented_crossovers() -> list[tuple[LlamaConfig, str, list[int]]]:
    """Return model, mixer and the four lengths of every row in `docs/mixers.md`."""
    text = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*?) ?\| `([^`]+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    models = {"SmolLM2-135M (d = 64, G = 3)": SMOL, "Llama 3.1 8B (d = 128, G = 4)": LLAMA_8B}
    found, config = [], None
    for model, mixer, *lengths in rows:
        config = models[model] if model else config
        found.append((config, mixer, [int(length.replace(",", "")) for length in lengths]))
    return found


def test_documented_crossovers():
    documented = documented_crossovers()
    assert len(documented) == 8
    for config, mixer, lengths in documented:
        layer = plan_conversion(config, resolve_mixer(yaml.safe_load(mixer)), dtype=torch.bfloat16).layers[0]
        assert [getattr(layer, name) for name in CROSSOVERS] == lengths, mixer


def test_default_lengths_end_with_the_context():
    assert plan_conversion(SMOL, PURE).lengths == (1024, 4096, 8192)
    assert plan_conversion(tiny_config(), PURE).lengths == (128,)
    assert plan_conversion(SMOL, PURE, lengths=(10, 20)).lengths == (10, 20)


@pytest.mark.parametrize(
    "mixer, label",
    [
        ("2mamba", "2mamba"),
        ("softmax", "softmax"),
        ({"preset": "taylor", "order": 3}, "taylor (order=3)"),
        ({"preset": "2mamba", "window": 0}, "2mamba (window=0, sinks=0)"),
    ],
)
def test_mixers_are_called_by_their_preset(mixer, label):
    assert mixer_label(resolve_mixer(mixer)) == label


def test_plan_as_json():
    plan = plan_conversion(SMOL, resolve_mixer("2mamba"), {"0": resolve_mixer("softmax")})
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["added_parameters"] == plan.added_parameters
    assert len(values["layers"]) == 30
    layer = values["layers"][1]
    assert (layer["layer_idx"], layer["from"], layer["to"]) == (1, "softmax", "2mamba")
    assert values["chunk_size"] == 256
    assert {name: layer[name] for name in CROSSOVERS} == {name: getattr(plan.layers[1], name) for name in CROSSOVERS}
    assert not {name for name in CROSSOVERS if layer[name] is None}
    assert [values["layers"][0][name] for name in CROSSOVERS] == [None] * 4
    assert layer["cache_bytes"]["8192"] == plan.layers[1].cache_bytes[8192]
    assert resolve_mixer(layer["mixer"]) == resolve_mixer("2mamba")


def test_plan_as_table():
    plan = plan_conversion(
        SMOL,
        resolve_mixer("2mamba"),
        {"0": resolve_mixer("softmax"), "1": resolve_mixer({"preset": "taylor", "order": 3})},
    )
    console = Console(width=140, force_terminal=False)
    with console.capture() as captured:
        console.print(render_plan(plan))
    lines = captured.get().splitlines()
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines) if cells}
    assert set(map(str, range(30))) <= set(rows)
    assert rows["0"][1:3] == ["softmax, unchanged", "0"]
    assert rows["0"][-1] == "-"
    assert rows["1"][1] == "softmax → taylor (order=3)"
    assert rows["1"][-1] == "never"
    layer = plan.layers[2]
    assert rows["2"][2] == f"{layer.added_parameters:,}"
    assert rows["2"][5] == f"{layer.cache_bytes[8192] / 1e6:.2f} / {layer.kv_bytes[8192] / 1e6:.2f}"
    assert rows["2"][-1] == f"{layer.crossover:,}"
    assert rows["all"][1:3] == ["29 converted", f"{plan.added_parameters:,}"]
    lengths = (layer.prefill_crossover, layer.training_crossover, layer.decode_crossover)
    assert rows["2mamba"] == ["2mamba", "28", *(f"{length:,}" for length in lengths)]
    assert rows["taylor (order=3)"] == ["taylor (order=3)", "1", "never", "never", "never"]
    text = " ".join(captured.get().split())
    assert "Counts of the attention itself, not times." in text
    assert "against a key/value cache in float32." in text


def test_a_plan_that_converts_nothing_has_no_crossovers_to_show():
    console = Console(width=140, force_terminal=False)
    with console.capture() as captured:
        console.print(render_plan(plan_conversion(SMOL, resolve_mixer("softmax"))))
    assert "0 converted" in captured.get()
    assert "prefill" not in captured.get()
