"""--split and blends of datasets: valid forms, and the message for each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.base.errors import UserError
from megatron.config.data import DataConfig, DatasetBlend, check_data, check_data_given, parse_blend, parse_split


@pytest.mark.parametrize(
    ("text", "shares"),
    [("7,3,0", (7, 3, 0)), ("1", (1, 0, 0)), ("98/2", (98, 2, 0)), (" 0,1e-3,.5", (0, 0.001, 0.5))],
)
def test_a_split_is_up_to_three_shares(text: str, shares: tuple[float, float, float]) -> None:
    assert parse_split(text) == shares
    assert DataConfig(split=text).shares == shares


@pytest.mark.parametrize(
    "text", ["", "a,b", "1,2,3,4", "-1,1,1", "inf,1", "nan,1", "1;2", "1,,2", "1e-13", "1e13", "\u0661,1"]
)
def test_a_split_of_a_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_split(text)
    assert str(caught.value) == (f"--split {text}: expected up to three shares such as 969,30,1, none of them negative")


def test_a_split_of_zeros_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        parse_split("0,0,0")
    assert str(caught.value) == "--split 0,0,0: the shares sum to 0; give at least one that is positive"


@pytest.mark.parametrize(
    ("words", "paths", "weights"),
    [
        (["a"], ("a",), None),
        (["2023"], ("2023",), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["a", "0.5"], ("a", "0.5"), None),
        (["1", "a"], ("a",), (1.0,)),
        (["0.3", "a", "7e-1", "b"], ("a", "b"), (0.3, 0.7)),
    ],
)
def test_a_blend_is_paths_or_pairs(words: list[str], paths: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    assert parse_blend(words, "--data-path") == DatasetBlend(paths, weights)
    assert parse_blend([], "--data-path") is None


_HOW = "give one path, several, or a weight before each (0.3 A 0.7 B)"
_RANGE = "must be a positive number from 1e-12 to 1e+12; leave a path out to drop it"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0.3 a b", f"3 words are not pairs of a weight and a path; {_HOW}"),
        ("0.3 a 0.7", f"3 words are not pairs of a weight and a path; {_HOW}"),
        ("0.3 a b c", f"'b' is not a weight; {_HOW}"),
        ("a x 1 b", f"'a' is not a weight; {_HOW}"),
        ("0 a", f"the weight 0 of a {_RANGE}"),
        ("1 a -1 b", f"the weight -1 of b {_RANGE}"),
        ("nan a", f"the weight nan of a {_RANGE}"),
        ("1e13 a 1 b", f"the weight 1e13 of a {_RANGE}"),
    ],
)
def test_a_blend_of_a_wrong_form_is_refused_by_its_flag(line: str, message: str) -> None:
    words = line.split()
    for flag, data in (
        ("--data-path", DataConfig(data_path=words)),
        ("--valid-data-path", DataConfig(valid_data_path=words)),
    ):
        with pytest.raises(UserError) as caught:
            check_data(data, skip_train=True)
        assert str(caught.value) == f"{flag}: {message}"


def test_separately_reported_validation_sets_take_no_weights() -> None:
    apart = DataConfig(train_data_path=["1", "a", "2", "b"], multiple_validation_sets=True)
    check_data(replace(apart, valid_data_path=["a", "b"]), skip_train=False)
    with pytest.raises(
        UserError, match=r"^--multiple-validation-sets reads each dataset of --valid-data-path separately"
    ):
        check_data(replace(apart, valid_data_path=["1", "a", "2", "b"]), skip_train=False)
    with pytest.raises(UserError, match=r"give --train-data-path and --valid-data-path, the latter without weights$"):
        check_data(replace(apart, train_data_path=[], data_path=["1", "a", "2", "b"]), skip_train=False)


def test_contradictory_dataset_flags_are_refused() -> None:
    single, separate = DataConfig(data_path=["a"]), DataConfig(valid_data_path=["b"])
    check_data(single, skip_train=False)
    check_data(separate, skip_train=True)
    with pytest.raises(UserError, match=r"^--data-path and --valid-data-path exclude each other; leave one of them"):
        check_data(replace(single, valid_data_path=["b"]), skip_train=False)
    with pytest.raises(UserError, match=r"^--valid-data-path without --train-data-path leaves nothing to train on"):
        check_data(separate, skip_train=False)
    with pytest.raises(UserError, match=r"^no dataset: give its prefix"):
        check_data_given(DataConfig())
