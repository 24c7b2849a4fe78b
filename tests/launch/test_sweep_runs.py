"""A table of a sweep from its commands to its report, on runs that a test can afford."""

import execute
import plan
import pytest
import report
import sweep

import runs

CONFIG = """
from fedjax_bn.run.config import base, override

def get_config(changes=""):
    config = base()
    config.model = "MLP"
    config.rounds = 2
    config.batch_size = 4
    config.eval_every = 2
    config.data.name = "tiny"
    return override(config, changes)
"""
INSIDE = plan.Evaluation("inside", {}, ("--internal",))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep of one method, every step of which was run in this process, and its workdir."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.py").write_text(CONFIG)
    protocol = plan.Protocol(
        "tiny", str(folder / "tiny.py"), plan.left_out({"D": "dog"}), 1, {"data.path": "tiny"}, {}
    )
    training = plan.Training("fedbn", {"method": "fedbn"}, (INSIDE,))
    outside = {"FedBN": plan.Row((training,))}
    inside = {"own": plan.Row((training,), plan.OWN, test=INSIDE.name)}
    clients = {"A": plan.Column(("dog",), "ant"), "mean": plan.Column(("dog",), plan.MEAN)}
    within = protocol._replace(columns=clients)
    one = plan.Sweep(
        "tiny",
        "Tiny",
        (
            plan.table("outside", "Table 1: outside", protocol, outside),
            plan.table("inside", "Table 2: inside", within, inside),
        ),
    )

    def call(processes, command, **options):
        assert command[1:3] == ["-m", "fedjax_bn.main"]
        return runs.command(*command[3:])

    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        patch.setattr(execute.Processes, "call", call)
        arguments = ["--workdir", str(folder / "runs"), "--data.tiny=none"]
        assert sweep.main(one, [*arguments, "--config.rounds=3"]) == 0
        assert sweep.main(one, ["report", *arguments]) == 0
    return one, folder / "runs"


@pytest.mark.slow
def test_the_report_holds_what_runs_and_their_tests_measured_and_what_was_changed(made):
    one, folder = made
    results = report.read_results(folder, one.runs[0])
    outside = results["summary"]["accuracy"]["unseen"]["dog"]["running"]
    own = results["inside"]["internal"]["own"]
    text = (folder / "report.md").read_text()
    assert f"| FedBN | measured, 1 of 1 runs | {outside:.2f} [1] |" in text
    assert f"| own | measured, 1 of 1 runs | {own['ant']:.2f} [1] | {own['mean']:.2f} [1] |" in text
    assert text.count("Differs from the plan: [1] rounds is 3 (planned: 2).") == 2
    assert "[b]" not in text
