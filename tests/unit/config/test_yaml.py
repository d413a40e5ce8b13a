"""YAML files: reading, precedence over flags and defaults, and the round trip of a configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, field_options
from megatron.config.flags import parse_args
from megatron.config.run import RunConfig, run_sections
from megatron.config.translate.known import RETIRED_FIELDS

ALL_FIELDS = [field for section, cls in run_sections().items() for field in field_options(section, cls)]


def _write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_may_be_nested_or_flat_in_any_spelling(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        """
model:
  num_layers: 4
  hidden-size: 64
  disable-bias-linear: true
  bias_gelu_fusion: false
num_attention_heads: 8
optimizer: sgd
lr: 1e-4
tensor-model-parallel-size: 2
DDP-impl: torch
batch-size: 3
train_samples: 300_000_000
data_path: [0.5, a, 0.5, b]
split: 7,3,1
progress_bar: off
recompute-activations: true
checkpoint-activations: false
loss_scale: null
num-experts: [1]
fp8-margin: 2
compress: none
""",
    )
    parsed = parse_args(["--config", path])
    config = parsed.config
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (4, 64, 8)
    assert config.model.add_bias_linear is False
    assert config.model.bias_gelu_fusion is False
    assert config.optimizer.optimizer == "sgd"
    assert config.optimizer.lr == 1e-4
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.ddp_impl == "torch"
    assert config.training.micro_batch_size == 3
    assert config.training.train_samples == 300_000_000
    assert config.data.data_path == ["0.5", "a", "0.5", "b"]
    assert config.data.split == "7,3,1"
    assert config.logging.progress_bar == "off"
    assert config.recompute.recompute_granularity == "selective"
    assert config.compression.compress == ["none"]
    assert "precision.loss_scale" not in parsed.explicit
    assert "model.add_bias_linear" in parsed.explicit
    assert [note.split(" ")[0] for note in parsed.notes] == ["--fp8-margin", "--batch-size"]


def test_a_section_may_have_the_name_of_a_field(tmp_path: Path) -> None:
    path = _write(tmp_path, "optimizer:\n  optimizer: sgd\n  lr: 0.5\n")
    config = parse_args(["--config", path]).config
    assert (config.optimizer.optimizer, config.optimizer.lr) == ("sgd", 0.5)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, "seed: 7\nmicro_batch_size: 2\nswiglu: true\nuse_rotary_position_embeddings: true\n")
    parsed = parse_args(["--batch-size", "5", "--config", path, "--swiglu", "false"])
    assert parsed.config.training.micro_batch_size == 5
    assert parsed.config.training.seed == 7
    assert parsed.config.model.swiglu is False
    assert parsed.config.model.position_embedding_type == "rope"
    assert parsed.config.optimizer.clip_grad == 1.0
    assert {"training.seed", "training.micro_batch_size", "model.swiglu"} <= parsed.explicit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_layer: 4", ["unknown key num_layer", "nearest is num_layers"]),
        ("model:\n  hiden_size: 4", ["unknown key model.hiden_size", "nearest is hidden_size"]),
        ("model:\n  lr: 4", ["unknown key model.lr"]),
        ("modell:\n  num_layers: 4", ["unknown section modell", "nearest is model"]),
        ("num_layers: four", ["num_layers", "'four' is not an integer"]),
        ("num_layers: 1.5", ["num_layers", "1.5 is not an integer"]),
        ("num_layers: true", ["num_layers", "true is not an integer"]),
        ("num_layers: [1, 2]", ["num_layers", "not a list"]),
        ("swiglu: 2", ["swiglu", "neither true nor false"]),
        ("lr: .inf", ["lr", "not a finite number"]),
        ("rampup_batch_size: [1, 2]", ["rampup_batch_size", "expected 3 values, got 2"]),
        ("num_layers: 1\nencoder_num_layers: 2", ["num_layers", "encoder_num_layers", "contradict"]),
        ("seed: 1\nseed: 2", ["'seed' is given twice", "line 2"]),
        ("seed: [1", ["not valid YAML"]),
        ("- seed", ["expected names and values"]),
        ("num-experts: [a]", ["num-experts", "is not an integer"]),
        (f"? 0x{'f' * 4000}", ["a number of 4,002 digits"]),
        ("kd: true", ["--kd"]),
        ("x: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        parse_args(["--config", path])
    message = str(caught.value)
    assert "\n" not in message
    refused = any(word.startswith("--") for word in words)
    assert refused or message.startswith(path)
    for word in words:
        assert word in message


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read"):
        parse_args(["--config", missing])
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml: is not UTF-8"):
        parse_args(["--config", str(binary)])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"layers": 3}}, "unknown key model.layers"),
        ({"modle": {}}, "unknown section modle; the nearest is model"),
        ({"model": 3}, "section model must hold"),
        ([], "expected sections"),
        ({"model": {"num_layers": "x"}}, "model.num_layers: 'x' is not an integer"),
    ],
)
def test_from_dict_refuses_unknown_and_invalid_values(values: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig.from_dict(values, location="saved")
    assert str(caught.value).startswith("saved: ")
    assert words in str(caught.value)


def _scalars(field: FieldOption) -> st.SearchStrategy[Any]:
    if field.element is bool:
        return st.booleans()
    if field.choices:
        return st.sampled_from(field.choices)
    if field.element is int:
        return st.integers(0, 2**40)
    if field.element is float:
        return st.floats(0, 1e12, allow_nan=False)
    # Words that a shell could pass; YAML would read some of them as other types.
    odd = st.sampled_from(["off", "null", "1e-4", "12:30", "0x1F", "a b", "ünï", "#x", "k: v", "~", "1_000", "'"])
    return st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(lambda text: "x" + text) | odd


def _values(field: FieldOption) -> st.SearchStrategy[Any]:
    scalars = _scalars(field)
    if field.is_list:
        count = field.option.count
        return st.lists(scalars, min_size=count or 1, max_size=count or 4)
    return scalars


@st.composite
def run_values(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Values of randomly chosen fields, by section."""
    chosen = draw(st.lists(st.sampled_from(ALL_FIELDS), unique_by=lambda field: field.path, max_size=12))
    values: dict[str, dict[str, Any]] = {}
    for field in chosen:
        values.setdefault(field.section, {})[field.name] = draw(_values(field))
    return values


def _config(values: dict[str, dict[str, Any]]) -> RunConfig:
    sections = run_sections()
    return RunConfig(**{name: sections[name](**content) for name, content in values.items()})


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(run_values())
def test_config_to_yaml_to_config(values: dict[str, dict[str, Any]]) -> None:
    config = _config(values)
    text = config.to_yaml()
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(yaml.safe_load(text)) == config
    assert RunConfig.from_yaml(text) == config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        assert parse_args(["--config", str(path)]).config == config


@settings(max_examples=40, deadline=None)
@given(run_values())
def test_flags_to_config(values: dict[str, dict[str, Any]]) -> None:
    by_path = {field.path: field for field in ALL_FIELDS}
    argv: list[str] = []
    for section, content in values.items():
        for name, value in content.items():
            argv += _as_flags(by_path[f"{section}.{name}"], value)
    parsed = parse_args(argv)
    assert parsed.config == _config(values)
    assert parsed.explicit == {f"{section}.{name}" for section in values for name in values[section]}


def _as_flags(field: FieldOption, value: Any) -> list[str]:
    flag = f"--{field.flag}"
    if field.is_switch:
        on = not value if field.option.off_switch else value
        return [flag] if on else [flag, "false"]
    if field.option.repeatable:
        return [word for item in value for word in (flag, str(item))]
    if field.is_list:
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def test_describe_shows_every_value_in_its_section() -> None:
    config = parse_args(["--seed", "77", "--data-path", "a"]).config
    lines = config.describe().splitlines()
    assert lines[0] == "model:"
    assert any(line.split() == ["seed", "." * 42, "77"] for line in lines)
    assert any(line.startswith("  data_path ...") and line.endswith(" a") for line in lines)
    assert len(lines) == len(ALL_FIELDS) + len(run_sections())
    names = [line.split()[0] for line in lines[1:]]
    assert names.index("num_layers") < names.index("num_experts")  # fields of the section come first


def test_describe_shows_the_values_that_differ_from_the_defaults() -> None:
    config = parse_args(["--seed", "77", "--data-path", "a", "--num-layers", "4", "--lr-decay-style", "linear"]).config
    lines = [line.split() for line in config.describe(defaults=False).splitlines()]
    assert lines == [
        *(["model:"], ["num_layers", "." * 36, "4"]),
        *(["training:"], ["seed", "." * 42, "77"]),
        *(["data:"], ["data_path", "." * 37, "a"]),
    ]


def test_a_saved_configuration_with_retired_fields_is_read(tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {}
    for path, default in RETIRED_FIELDS.items():
        section, name = path.split(".")
        sections.setdefault(section, {})[name] = default
    assert RunConfig.from_dict(sections) == RunConfig()
    file = tmp_path / "saved.yaml"
    file.write_text(yaml.safe_dump(sections))
    parsed = parse_args(["--config", str(file)])
    assert parsed.config == parse_args([]).config
    assert parsed.notes == []


def test_a_retired_field_with_another_value_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "saved.yaml"
    file.write_text("training: {use_flash_attn: true}\nparallel: {gradient_accumulation_fusion: false}\n")
    assert [note.split(" ")[0] for note in parse_args(["--config", str(file)]).notes] == ["--use-flash-attn"]
