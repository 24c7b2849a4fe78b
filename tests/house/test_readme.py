"""README's example prints the table that README and the documentation's first pages show."""

import re

import jax
import pytest

import runs

README = (runs.ROOT / "README.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHOWN = re.search(rf"{re.escape(EXAMPLE)}```\n\n```\n(.*?)```", README, re.DOTALL)[1]


def test_its_example_prints_a_table_of_the_form_that_is_shown(capsys):
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # what a reader's own code has
        exec(compile(EXAMPLE.replace("rounds=20", "rounds=1"), "README.md", "exec"), names)
    printed, shown = capsys.readouterr().out.splitlines(), SHOWN.splitlines()
    assert printed[:2] == shown[:2]
    assert len(printed) == len(shown) == 3
    accuracy = names["result"].accuracy
    assert list(accuracy["unseen"]["fax"]) == ["running", "tsmobn"]
    numbers = [*accuracy["internal"].values(), *accuracy["unseen"]["fax"].values()]
    assert printed[2].split()[1:] == [f"{number:.1f}" for number in numbers]
    images, labels = names["clients"]["flatbed"]["test"]
    right = 100 * (names["result"].predict(images, client="flatbed").argmax(1) == labels).mean()
    assert right == pytest.approx(accuracy["internal"]["flatbed"])


@pytest.mark.parametrize("page", ["docs/index.md", "docs/tutorial.md"])
def test_the_first_pages_of_the_documentation_show_the_same_example(page):
    text = (runs.ROOT / page).read_text()
    assert f"```python\n{EXAMPLE}```" in text
    assert f"```\n{SHOWN}```" in text
