"""A long JSON list is read value by value as the whole file would be."""

import json

import pytest

from fedjax_bn.data.boxes import bdd100k

VALUES = [12345, -0.5, 'a, ] " é', {"a": [1, {"b": None}]}, [], [[2]], True, 1e30, {}, 7]


@pytest.mark.parametrize("chunk", [1, 2, 7, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_values_are_those_of_the_whole_file_however_little_is_read_at_a_time(
    tmp_path, monkeypatch, chunk, indent
):
    monkeypatch.setattr(bdd100k, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    for values in ([], VALUES, VALUES[:1]):
        path.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8-sig")
        assert list(bdd100k._read_rows(path)) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "must be a list"),
        ("", "must be a list"),
        ("[1, 2", "followed by 'nothing'"),
        ("[1 2]", "followed by '2'"),
        ("[1, ]", "Expecting value"),
        ('[1, {"a": ', "Expecting value"),
        ("[1] 2", "something follows its list"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2**20])
def test_a_damaged_list_is_refused_by_name(tmp_path, monkeypatch, text, said, chunk):
    monkeypatch.setattr(bdd100k, "_CHUNK", chunk)
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json cannot be read .*{said}"):
        list(bdd100k._read_rows(path))


def test_a_value_without_end_is_not_read_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(bdd100k, "_CHUNK", 4)
    monkeypatch.setattr(bdd100k, "_LONGEST", 100)
    path = tmp_path / "long.json"
    path.write_text('["' + "a" * 1000 + '"]')
    with pytest.raises(ValueError, match=r"long\.json .* over 100 characters"):
        list(bdd100k._read_rows(path))
