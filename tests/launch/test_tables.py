"""The command that makes the tables of docs/results/."""

import tables


def test_a_table_is_made_once_and_one_without_data_waits(tmp_path, monkeypatch, capsys):
    count = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.open('a').write('x')"
    made = {
        "a/good": tables.Table(1, (f'-c "{count}" {{workdir}}/runs', "-c 'print(6 * 7)'")),
        "a/bad": tables.Table(2, ("-c 'print(1)'", "-c 'raise SystemExit(5)'")),
        "b/far": tables.Table(3, ("-c 'print(2)' {digits}",)),
    }
    monkeypatch.setattr(tables, "TABLES", made)
    arguments = ["--workdir", str(tmp_path), "--data", str(tmp_path)]
    assert tables.main([*arguments, "--dry-run"]) == 3
    assert not (tmp_path / "tables").exists()
    assert tables.main([*arguments, "--only", "b/*"]) == 3
    assert "waits for DATA/digits.npz" in capsys.readouterr().out
    for _ in range(2):
        assert tables.main(arguments) == 1
    assert (tmp_path / "runs").read_text() == "x"
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"a-good.txt", "a-bad.part"}
    assert (tmp_path / "tables" / "a-good.txt").read_text().splitlines()[-1] == "42"
