"""What is cited for methods, adaptations and data sets, and that it is BibTeX."""

import functools
import re

import pytest

import fedjax_bn as fb
import runs
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.run.experiment.datasets import DATASETS
from fedjax_bn.run.experiment.method import METHODS, WEIGHING

UNCITED = {"boxes", "folders", "masks", "npz", "tfds", "ensemble"}  # anybody's data, and our own


def keys_in(text):
    return re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)


def test_every_method_adaptation_weight_and_data_set_is_cited_as_bibtex():
    for name in {*METHODS, *ADAPTATIONS, *WEIGHING, *DATASETS} - UNCITED:
        assert ("mcmahan2017fedavg" in keys_in(fb.cite(f"{name}:option=1"))) >= (name in METHODS)
    assert fb.cite(fb.methods.fedbn) == fb.cite("fedbn")
    entries, keys = fb.cite().split("\n\n"), keys_in(fb.cite())
    assert len({*keys}) == len(keys) == len(entries)
    for entry in entries:
        fields = {*re.findall(r"^  (\w+) = \{.+\},?$", entry, re.MULTILINE)}
        assert {"author", "title", "year"} < fields
        assert not fields & {"pages", "doi", "keywords"}  # what nobody has checked, and our own
        assert entry.count("{") == entry.count("}")


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_a_config_cites_its_method_its_adaptations_and_its_data(name, capsys):
    config = read(name)
    assert runs.command("cite", "--config", name) == 0
    cited = {*keys_in(capsys.readouterr().out)}
    for part in {config.method, config.data.name, *config.adaptations} - UNCITED:
        assert {*keys_in(fb.cite(part))} <= cited
    assert runs.command("cite", "fedbm") == 2
    assert "'fedbn'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="functools"):
        fb.cite(functools.partial(fb.methods.fedbn))


def test_the_table_of_methods_has_the_authors_and_years_of_what_is_cited():
    page = (runs.ROOT / "docs" / "methods.md").read_text()
    cells = re.findall(r"^\| `(?:[\w.]+=)?(\w+)`.*? \| (\w+) .*?(\d{4})", page, re.MULTILINE)
    assert len(cells) > 40
    for name, author, year in cells:
        lines = rf"author = \{{+{author}\b.*\n(.*\n)+?  year = \{{{year}\}}"
        assert re.search(lines, fb.cite(name), re.IGNORECASE), name
