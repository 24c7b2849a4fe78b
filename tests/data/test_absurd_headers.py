"""Headers that claim absurd sizes, and files that unpack to them, are refused at once."""

import bz2
import gzip
import io
import pickle
import re
import struct
import zipfile

import numpy as np
import pytest
from fedjax_bn.data.sets.digit_files import _read_idx
from scipy.io import savemat

from fedjax_bn.data.sets import abide, arrays, camelyon17, digit_files, npz
from fedjax_bn.data.sets.cifar10_c import _read_pickled_arrays
from fedjax_bn.data.sets.files import read_list

IMAGES, LABELS = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])


def npy(shape: str, descr: str = "'|u1'", body: bytes = b"", version: int = 1) -> bytes:
    """An array's file whose header says what is given, be it true or not."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def whole_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_zip(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    "images",
    [
        npy("(1000000000000, 4, 4, 3)"),
        npy("(4611686018427387904, 4, 4, 3)"),
        npy(f"({10**30}, 4, 4, 3)"),
        npy(f"(0, {10**30}, 4, 3)"),
        npy("(-2, 4, 4, -3)", body=bytes(96)),
        npy("(2, 4, 4, 3)", body=bytes(95)),
        npy("(2, 4, 4, 3)", body=bytes(97)),
        npy("(1000000000000,)", "'<U0'"),
        npy("(2,)", "'|O'", pickle.dumps([1, 2])),
        npy("(2,)", "[('a', '<f8', (100000, 100000))]"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        b"\x93NUMPY\x09\x00\x04\x00{}\n\n",
        npy("(" * 400),
        b"",
    ],
    ids=range(14),
)
def test_an_absurd_array_of_an_archive_is_refused(tmp_path, images):
    path = write_zip(tmp_path / "own.npz", {"a__images": images, "a__labels": whole_npy(LABELS)})
    with pytest.raises(ValueError, match=r"own\.npz cannot be read") as caught:
        npz.load(path)
    assert len(str(caught.value)) < 500


def test_classes_of_no_letters_are_refused(tmp_path):
    sound = {"a__images": whole_npy(IMAGES), "a__labels": whole_npy(LABELS)}
    path = write_zip(tmp_path / "own.npz", sound | {"classes": npy("(1000000000000,)", "'<U0'")})
    with pytest.raises(ValueError, match="classes claims <U0"):
        npz.load(path)


def test_an_archive_larger_than_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays.os, "sysconf", lambda name: 1000)  # pages, and bytes of a page
    big = np.zeros((2**16, 4, 4, 3), np.uint8)
    sound = {"a__images": whole_npy(big), "a__labels": whole_npy(np.arange(2**16) % 2)}
    path = write_zip(tmp_path / "own.npz", sound, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"own.npz .*more than this machine's 0\.0 GB"):
        npz.load(path)


def test_two_arrays_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("a__images.npy", whole_npy(IMAGES))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a__images.npy", whole_npy(IMAGES))
    with pytest.raises(ValueError, match="has two arrays 'a__images'"):
        npz.load(tmp_path / "own.npz")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_of_more_or_less_than_it_claims_is_refused(tmp_path, pack):
    path = tmp_path / ("images.gz" if pack is gzip.compress else "images")
    header = b"\0\0\x08\x01\0\0\0\x05"
    path.write_bytes(pack(header + bytes(3 * 10**6)))
    with pytest.raises(ValueError, match=r"images.* unpacks to more than the 5 bytes"):
        _read_idx(path, axes=1)
    path.write_bytes(pack(header + bytes(4)))
    with pytest.raises(ValueError, match=r"has 4 values where its header has \(5,\)"):
        _read_idx(path, axes=1)


def test_a_compressed_table_of_absurd_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(digit_files, "_LARGEST_LIBSVM", 10**6)
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(bz2.compress(b"1 1:0.5\n" * 130_000))
    with pytest.raises(ValueError, match=r"usps\.bz2 .*more than the 1,000,000 bytes"):
        digit_files._usps(tmp_path)


def test_a_matlab_file_larger_than_memory_is_refused(tmp_path, monkeypatch):
    savemat(tmp_path / "train_32x32.mat", {"X": np.zeros((32, 32, 3, 9), np.uint8), "y": LABELS})
    (tmp_path / "test_32x32.mat").write_bytes(b"")
    monkeypatch.setattr(arrays.os, "sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"train_32x32\.mat .*more than this machine's"):
        digit_files._svhn(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "FILE_ID,SITE_ID,DX_GROUP\na," + "x" * 10**6 + ",1\n",
        "FILE_ID,SITE_ID,DX_GROUP\n" + '"' + "a\n" * 100_000,
        "y" * 10**6,
        "," * 10**6,
    ],
    ids=["field", "quote", "name", "names"],
)
def test_a_table_of_absurd_fields_is_refused(tmp_path, text):
    (tmp_path / "phenotypic.csv").write_text(text)
    with pytest.raises(ValueError, match=r"phenotypic\.csv") as caught:
        abide._read_table(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, "-1", "1e3", "٣", "1_0", ""])
def test_a_number_of_a_table_has_at_most_nine_digits(tmp_path, number):
    names = camelyon17._COLUMNS
    row = dict.fromkeys(names, "0") | {"x_coord": number}
    (tmp_path / "metadata.csv").write_text(f"{','.join(names)}\n{','.join(row.values())}\n")
    with pytest.raises(ValueError, match=r"metadata\.csv .*line 2: .*is not a number") as caught:
        camelyon17.load(tmp_path, progress=False)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("label", ["9" * 400, "9" * 5000, "٣", str(2**64)])
def test_a_label_of_a_list_has_at_most_nine_digits(tmp_path, label):
    (tmp_path / "list.txt").write_text(f"a/b.jpg {label}\n")
    with pytest.raises(ValueError, match=r"list\.txt: lines must be FILE LABEL"):
        read_list(tmp_path / "list.txt")


class Calls:
    """Asks whoever unpickles it to call something."""

    def __init__(self, function, *given):
        self.asked = function, given

    def __reduce__(self):
        return self.asked


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (Calls(print, "this must never run"), "print"),
        (Calls(eval, "print('this must never run')"), "eval"),
        (Calls(np.load, "x"), "load"),
        ([1], "list, not a dictionary"),
        ({b"data": np.array([1.5])}, "f8"),
        ({b"data": np.array([print], object)}, "print"),
        ({b"data": Calls(np.dtype, "O")}, None),
    ],
    ids=range(7),
)
def test_a_pickle_is_read_without_calling_what_it_names(content, sentence, capsys):
    for protocol in range(2, 5):
        with pytest.raises((ValueError, IndexError), match=sentence and re.escape(sentence)):
            _read_pickled_arrays(pickle.dumps(content, protocol))
    assert not capsys.readouterr().out


def test_a_pickle_cannot_forge_an_array_of_objects():
    reconstruct, *_ = np.zeros(2, np.uint8).__reduce__()
    forged = Calls(reconstruct, np.ndarray, (0,), b"b")
    state = (1, (4,), Calls(np.dtype, "V8", False, True), False, b"\x41" * 32)
    forged.asked = (*forged.asked, state)
    with pytest.raises((ValueError, IndexError)):
        _read_pickled_arrays(pickle.dumps({b"data": forged}, 2))


@pytest.mark.parametrize("number", [b"\xff\xff\xff\xff", b"\0\0\0\x7f"])
def test_a_number_in_a_pickle_takes_no_memory(number):
    put = b"r" + number  # remembers the dictionary as entry 4294967295
    with pytest.raises(ValueError, match=r"remembers object \d{10} after 2 operations"):
        _read_pickled_arrays(b"\x80\x02}" + put + b".")


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<u2"])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickled_arrays_are_what_pickle_itself_gives(dtype, protocol):
    array = np.asfortranarray(np.arange(12).reshape(3, 4).astype(dtype))
    raw = pickle.dumps({b"a": array, b"b": array.T, b"c": [1, 2]}, protocol)
    found, expected = _read_pickled_arrays(raw), pickle.loads(raw, encoding="bytes")
    for name in (b"a", b"b"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert found[b"c"] == [1, 2]
