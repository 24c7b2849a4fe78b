"""Connectomes of ABIDE's time series, and what becomes of files that do not suit."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "launch"))

import pictures

from fedjax_bn.data.sets import abide
from fedjax_bn.data.source import check_source

SUBJECTS = {  # FILE_ID -> site, DX_GROUP, frames
    "NYU_1": ("NYU", 1, 40),
    "NYU_2": ("NYU", 2, 36),
    "UM_1_3": ("UM_1", 2, 33),
    "UM_1_4": ("UM_1", 1, 50),
}
REGIONS = 5


def series_of(name: str) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(sum(name.encode())))
    noise = rng.standard_normal((SUBJECTS[name][2], REGIONS)) * 50
    return np.round(noise @ rng.standard_normal((REGIONS, REGIONS)) + 900, 4)


def write_series(path, series) -> None:
    header = "\t".join(f"#{i + 1}" for i in range(np.shape(series)[1]))
    rows = ["\t".join(map(str, row)) for row in series]
    path.write_text("\n".join([header, *rows]) + "\n")


def write_table(folder, rows) -> None:
    with open(folder / "phenotypic.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP"), *rows])


@pytest.fixture
def folder(tmp_path):
    """Four subjects of two sites."""
    (tmp_path / "rois_ho").mkdir()
    for name in SUBJECTS:
        write_series(tmp_path / "rois_ho" / f"{name}_rois_ho.1D", series_of(name))
    write_table(tmp_path, rows_of())
    return tmp_path


def file_of(folder, name):
    return folder / "rois_ho" / f"{name}_rois_ho.1D"


def reference(window: np.ndarray) -> np.ndarray:
    """Upper triangle of NumPy's correlation matrix in float64."""
    return np.corrcoef(window.T)[np.triu_indices(window.shape[1], 1)]


def test_every_window_is_the_upper_triangle_of_its_correlation_matrix(folder):
    source = check_source(abide.load_abide(folder))
    assert [pool.name for pool in source.pools] == ["NYU", "UM_1"]
    assert source.classes == ("control", "patient")
    for pool, names in zip(source.pools, (("NYU_1", "NYU_2"), ("UM_1_3", "UM_1_4")), strict=True):
        expected = [
            reference(series_of(name)[start : start + 32])
            for name in names
            for start in range(SUBJECTS[name][2] - 31)
        ]
        assert pool.images.dtype == np.float32
        assert pool.names.tolist() == [n for n in names for _ in range(SUBJECTS[n][2] - 31)]
        assert pool.labels.tolist() == [SUBJECTS[name][1] % 2 for name in pool.names]
        np.testing.assert_allclose(pool.images, expected, atol=2e-6)


def test_a_whole_series_is_one_sample_where_window_is_0_and_stride_chooses_windows(folder):
    nyu = abide.load_abide(folder, window=0).pools[0]
    expected = [reference(series_of(name)) for name in ("NYU_1", "NYU_2")]
    np.testing.assert_allclose(nyu.images, expected, atol=2e-6)
    every = abide.load_abide(folder).pools[0].images
    strided = abide.load_abide(folder, stride=4).pools[0]
    np.testing.assert_array_equal(strided.images, every[[0, 4, 8, 9, 13]])
    assert strided.names.tolist() == ["NYU_1"] * 3 + ["NYU_2"] * 2


@pytest.mark.parametrize("value", [0.0, -1e6 / 3])
def test_a_region_that_does_not_vary_correlates_0(folder, value):
    series = series_of("UM_1_4")
    series[:, 2] = value
    write_series(file_of(folder, "UM_1_4"), series)
    source = abide.load_abide(folder)
    images = source.pools[1].images[2:]
    pairs = np.array(np.triu_indices(REGIONS, 1))
    touched = (pairs == 2).any(0)
    assert (images[:, touched] == 0).all()
    assert (images[:, ~touched] != 0).all()


def test_a_cache_gives_the_same_samples_and_is_reused(folder, tmp_path):
    plain, made, again = (
        abide.load_abide(folder, cache=c) for c in (None, *[tmp_path / "cache"] * 2)
    )
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2
    for source in (made, again):
        assert source.key == plain.key
        for a, b in zip(source.pools, plain.pools, strict=True):
            assert isinstance(a.images, np.memmap)
            np.testing.assert_array_equal(a.images, b.images)
    abide.load_abide(folder, cache=tmp_path / "cache", stride=2)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 4


def test_the_key_depends_on_content_and_options_alone(folder):
    first = abide.load_abide(folder).key
    file_of(folder, "NYU_1").rename(folder / "NYU_1_rois_ho.1D")
    assert abide.load_abide(folder).key == first
    assert abide.load_abide(folder, stride=2).key != first
    write_series(folder / "NYU_1_rois_ho.1D", series_of("NYU_1") + 1e-4)
    assert abide.load_abide(folder).key != first


@pytest.mark.parametrize(
    "content", ["", "#1\t#2\n1\t2\n", "1\t2\n3\t4\n", "#1\t#2\n1\t2\n3\tnan\n"]
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_malformed_series_is_named_whole(folder, content):
    file_of(folder, "UM_1_3").write_text(content)
    with pytest.raises(ValueError, match=str(file_of(folder, "UM_1_3"))):
        abide.load_abide(folder)


def rows_of(**changes):
    """Rows of the table, with the DX_GROUP of some changed; None leaves a row out."""
    groups = {name: group for name, (_, group, _) in SUBJECTS.items()} | changes
    return [(0, SUBJECTS[n][0], n, group) for n, group in groups.items() if group is not None]


def test_all_subjects_and_sites_that_do_not_suit_are_named_at_once(folder):
    with pytest.raises(ValueError, match=r"NYU_2 has 36 frames.*UM_1_3 has 33 frames"):
        abide.load_abide(folder, window=37)
    with pytest.raises(ValueError, match="the site UM"):
        abide.load_abide(folder, sites=("UM", "NYU"))
    write_table(folder, rows_of(NYU_1=None, UM_1_3=0))
    write_series(file_of(folder, "NYU_2"), series_of("NYU_2")[:, :3])
    with pytest.raises(ValueError, match=r"NYU_1 .*, NYU_2 has 3 regions.*, UM_1_3 .*'0'"):
        abide.load_abide(folder)


def test_sites_are_taken_in_the_order_given_and_subjects_without_a_series_left_out(folder):
    write_table(folder, [*rows_of(), (1, "NYU", "no_filename", 1), (2, "NYU", "NYU_9", 2)])
    source = abide.load_abide(folder, sites=("UM_1", "NYU"))
    assert [pool.name for pool in source.pools] == ["UM_1", "NYU"]


def test_a_second_table_or_atlas_and_what_is_missing_are_named(folder, tmp_path):
    (folder / "copy.csv").write_text((folder / "phenotypic.csv").read_text())
    with pytest.raises(FileNotFoundError, match=r"copy\.csv, phenotypic\.csv"):
        abide.load_abide(folder)
    (folder / "copy.csv").write_text("a,b\n")
    write_series(folder / "NYU_1_rois_cc200.1D", series_of("NYU_1"))
    with pytest.raises(ValueError, match="NYU_1_rois_cc200"):
        abide.load_abide(folder)
    assert abide.load_abide(folder, atlas="ho").pools[1].name == "UM_1"
    (folder / "phenotypic.csv").write_text("FILE_ID,SITE_ID\n")
    for place in (tmp_path / "nowhere", folder):
        with pytest.raises(FileNotFoundError, match=rf"{place} .*preprocessed-connectomes"):
            abide.load_abide(place, atlas="ho")


def test_real_series_of_two_sites_agree_with_numpy(shared):
    source = abide.load_abide(shared / "data" / "abide", stride=100, sites=("NYU", "USM"))
    for pool in source.pools:
        assert pool.images.shape[1] == 19900
        assert np.isfinite(pool.images).all()
        assert len(set(pool.names[pool.labels == 1])) == 10
        subject, row = pool.names[-1], pool.names.tolist().index(pool.names[-1])
        path = shared / "data" / "abide" / "rois_cc200" / f"{subject}_rois_cc200.1D"
        with np.errstate(invalid="ignore"):
            expected = reference(np.loadtxt(path, skiprows=1)[:32])
        np.testing.assert_allclose(pool.images[row], np.nan_to_num(expected), atol=5e-6)


def test_the_command_behind_fedbns_table_10_counts_subjects_and_windows(folder, tmp_path, capsys):
    """Subjects by diagnosis, and windows, 31 fewer than the frames of each subject."""
    keys = {"path": folder, "domains": "", "test": 0.5, "cache": ""}
    given = ["--config", "abide", "--workdir", str(tmp_path / "drawn")]
    given += [f"--config.data.{key}={value}" for key, value in keys.items()]
    for window, counts in ((0, ((1, 1), (1, 1))), (32, ((5, 9), (2, 19)))):
        assert pictures.main([*given, f"--config.data.name=abide:window={window}"]) == 0
        said = capsys.readouterr().out
        for site, (controls, patients) in zip(("NYU", "UM_1"), counts, strict=True):
            total = controls + patients
            assert f"{site}: {total} samples: control {controls}, patient {patients}\n" in said
    for name in ("samples", "class_counts"):
        picture = (tmp_path / "drawn/plots" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
