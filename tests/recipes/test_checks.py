"""What a recipe gets wrong only in view of the model: found before any weight loads, all in one message."""

import logging

import pytest
from transformers import GPT2Config, LlamaConfig

from subquad.errors import ConfigError, SourceError
from subquad.recipes.checks import check_recipe_against
from subquad.recipes.schema import parse_recipe


@pytest.fixture
def hf_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
    )


def recipe(**sections):
    return parse_recipe({"name": "x", "data": {"seq_len": 128}, **sections})


def test_fitting_recipe_passes(hf_config):
    check_recipe_against(recipe(convert={"layers": {"0-1": "softmax", "-1": "taylor"}}), hf_config)


def test_all_misfits_come_in_one_message(hf_config):
    data = {"seq_len": 512, "train": {"kind": "text", "paths": ["no/such/*.txt"]}}
    wrong = recipe(data=data, convert={"layers": {"3-4": "softmax"}})
    with pytest.raises(ConfigError) as caught:
        check_recipe_against(wrong, hf_config)
    message = str(caught.value)
    assert "data.seq_len is 512, beyond the model's context of 256" in message
    assert "eval.seq_len is 512, beyond" in message
    assert "data.train.paths: no file matches 'no/such/*.txt'" in message
    assert "'3-4' is outside the model, whose layers are 0 to 3" in message


@pytest.mark.parametrize(
    "convert, message",
    [
        ({"mixer": {"preset": "2mamba", "exact_kv_heads": [2]}}, "exact_kv_heads"),
        ({"mixer": {"preset": "taylor", "causal": False}}, "causal: false in a LlamaForCausalLM"),
        ({"layers": {"first": "softmax"}}, "'first' is not a layer range"),
        ({"layers": {"0-1": "softmax", "1": "taylor"}}, "layer 1 is named twice"),
    ],
)
def test_mixers_that_do_not_fit(hf_config, convert, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe_against(recipe(convert=convert), hf_config)


def test_other_architectures_are_refused():
    with pytest.raises(SourceError, match="gpt2"):
        check_recipe_against(recipe(), GPT2Config())


def test_rows_of_one_stage_beyond_the_context(hf_config):
    with pytest.raises(ConfigError, match=r"stage2\.seq_len is 512, beyond the model's context of 256"):
        check_recipe_against(recipe(stage2={"seq_len": 512}), hf_config)


def test_nothing_to_train_without_adapters_and_mixer_parameters(hf_config):
    plain = {"mixer": {"score": "power", "order": 2}}
    check_recipe_against(recipe(convert=plain, stage1={"tokens": 0}), hf_config)
    with pytest.raises(ConfigError, match=r"stage2\.lora is null, but this mixer has no parameters of its own"):
        check_recipe_against(recipe(convert=plain, stage1={"tokens": 0}, stage2={"lora": None}), hf_config)


def test_window_over_whole_rows_warns(hf_config, caplog):
    with caplog.at_level(logging.WARNING):
        check_recipe_against(recipe(convert={"mixer": {"preset": "2mamba", "window": 126}}), hf_config)
    assert "130 tokens, cover whole rows (data.seq_len is 128)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stage1 = {"seq_len": 32, "tokens": 32}
        check_recipe_against(recipe(convert={"mixer": {"preset": "2mamba", "window": 30}}, stage1=stage1), hf_config)
    assert "34 tokens, cover whole rows (stage1.seq_len is 32)" in caplog.text


@pytest.mark.parametrize(
    "sections, message",
    [
        ({}, "stage1 trains the mixers on rows of 128 tokens, which do not leave the window of 128"),
        ({"stage1": {"tokens": 0}, "stage2": {"lora": None}}, "stage2 trains the mixers on rows of 128 tokens"),
    ],
)
def test_mixers_have_nothing_to_learn_within_their_window(hf_config, sections, message):
    convert = {"mixer": {"preset": "2mamba", "window": 128}}
    with pytest.raises(ConfigError, match=message):
        check_recipe_against(recipe(convert=convert, **sections), hf_config)
    check_recipe_against(recipe(convert=convert, stage1={"tokens": 0}), hf_config)


CENTRED = {"preset": "2mamba", "window": 8, "center_keys": True}
NARROW = {"preset": "2mamba", "window": 8, "qk_maps": False, "feature_map": "learned", "feature_dim": 4}


@pytest.mark.parametrize(
    "mixer, calibrate, message",
    [
        (CENTRED, {"enabled": False}, "center_keys: true with calibrate.enabled: false"),
        (CENTRED, {"fit_maps": True}, "no layer has a learned feature map to fit"),
        (NARROW, {"fit_maps": True, "enabled": False}, "calibrate.fit_maps: true with calibrate.enabled: false"),
    ],
)
def test_what_calibration_would_not_set_is_refused(hf_config, mixer, calibrate, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe_against(recipe(convert={"mixer": mixer}, calibrate=calibrate), hf_config)
    check_recipe_against(recipe(convert={"mixer": CENTRED}), hf_config)
    check_recipe_against(recipe(convert={"mixer": NARROW}, calibrate={"fit_maps": True}), hf_config)


KEEPING = {"preset": "2mamba", "window": 8, "kept_keys": 8}


@pytest.mark.parametrize(
    "seq_len, calibrate, message",
    [
        (128, {"key_tokens": 64}, "calibrate.key_tokens is 64, less than one row of 128 tokens"),
        (64, {}, "data.seq_len 64 is too short for the recall rows that kept keys are fitted on"),
        (44, {"key_recall": 0}, "in rows of more than 44 tokens"),
    ],
)
def test_rows_that_no_score_of_kept_keys_can_be_fitted_on(hf_config, seq_len, calibrate, message):
    def check(convert, **changes):
        check_recipe_against(
            recipe(convert=convert, calibrate={**calibrate, **changes}, data={"seq_len": seq_len}), hf_config
        )

    with pytest.raises(ConfigError, match=message):
        check({"mixer": KEEPING})
    check({"mixer": KEEPING}, enabled=False)
    # no layer keeps keys in the end
    check({"mixer": KEEPING, "layers": {"0-3": {"preset": "2mamba", "window": 8}}})


def test_files_that_exist_pass(hf_config, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = {"seq_len": 128, "train": {"kind": "text", "paths": [str(tmp_path / "*.txt")]}}
    check_recipe_against(recipe(data=data), hf_config)


@pytest.mark.parametrize(
    "train, held_out, shared",
    [
        ({"paths": ["a.txt"]}, {"paths": ["./a.txt"]}, True),
        ({"paths": ["a.txt"], "streaming": True}, {"paths": ["a.txt"], "part": "eval"}, True),
        ({"paths": ["*.txt"]}, {"paths": ["a.txt"], "part": "all"}, True),
        ({"paths": ["a.txt", "b.txt"], "part": "train"}, {"paths": ["b.txt"], "part": "all"}, True),
        ({"paths": ["a.txt", "b.txt"], "part": "train"}, {"paths": ["b.txt"], "part": "eval"}, False),
        ({"paths": ["a.txt"]}, {"paths": ["b.txt"]}, False),
    ],
)
def test_text_that_is_trained_on_is_not_measured_on(hf_config, tmp_path, monkeypatch, train, held_out, shared):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    data = {"seq_len": 128, "train": {"kind": "text", **train}, "eval": {"kind": "text", **held_out}}
    if not shared:
        check_recipe_against(recipe(data=data), hf_config)
        return
    with pytest.raises(ConfigError, match=r"trained on and measured on|overlap"):
        check_recipe_against(recipe(data=data), hf_config)


def test_stage_1_needs_parameters_of_the_mixer(hf_config):
    with pytest.raises(ConfigError, match=r"set stage1\.tokens=0"):
        check_recipe_against(recipe(convert={"mixer": "linear-relu"}), hf_config)
    check_recipe_against(recipe(convert={"mixer": "linear-relu"}, stage1={"tokens": 0}), hf_config)
