"""The parts: which jobs each has, and where their numbers are."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from on_accelerator.jobs import Job, Record
from on_accelerator.work import Case, TorchCase, cases, torch_cases

# The files that compare with independent programs; of them the tests in float64.
PARITY = (
    "parity_small",
    "parity_digits",
    "method_references",
    "models",
    "batch_norm",
    "tsmobn",
    "fedig",
)
TARGETS = ("photo", "art_painting", "cartoon", "sketch")
CASE_SECONDS = {"digit_cnn": 90.0, "resnet18": 150.0}  # start and compilation included
SMALL_SECONDS = 300.0  # on any CPU
TIMED_SECONDS = 5.0  # of repeating a round


def parity(options: argparse.Namespace, about: Record) -> list[Job]:
    """The tests in float64 on this backend, a job a file."""
    files = ("batch_norm",) if options.small else PARITY
    # tests/conftest.py only sets what is not set: CPU, and programs that are hardly optimized.
    where = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} | _on(about)
    if options.shared:
        where["FEDJAX_BN_SHARED"] = str(options.shared.resolve())
    jobs = []
    for file in files:
        report = options.out / f"parity_{file}.xml"
        (path,) = Path("tests").glob(f"*/test_{file}.py")
        command = ["-m", "pytest", "-q", str(path), "-p", "on_accelerator.only_x64"]
        command += ["-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        jobs.append(
            Job(
                file,
                [*command, f"--junitxml={report.resolve()}"],
                lambda _, report=report: _tests(report),
                seconds=300,
                environment=tuple(where.items()),
                accepts=(0, 1),
            )
        )
    return jobs


def _tests(report: Path) -> Record:
    """What a report of pytest says; failures and skipped tests do not count as success."""
    found: dict[str, list[str]] = {"failure": [], "error": [], "skipped": []}
    run = list(ElementTree.parse(report).iter("testcase"))
    for test in run:
        for kind, entries in found.items():
            entries += [
                f"{test.get('name')}: {one.get('message', '')[:200]}" for one in test.iter(kind)
            ]
    wrong = found["failure"] + found["error"]
    passed = len(run) - len(wrong) - len(found["skipped"])
    record: Record = {"passed": passed, "wrong": wrong, "skipped": found["skipped"]}
    record["shown"] = f"{passed} passed, {len(found['skipped'])} skipped"
    if wrong:
        record |= {"outcome": "failed", "why": f"{len(wrong)} tests fail: {wrong[0]}"}
    elif not passed:
        record |= {"outcome": "failed", "why": f"no test was run: {found['skipped'][:1]}"}
    return record


def quickstart(options: argparse.Namespace, about: Record) -> list[Job]:
    """The README's command."""
    folder = options.out / "quickstart"
    small = ["rounds=1", "baselines=", "model=SmallCNN", "adaptations=running"]
    changes = small if options.small else []
    return [_training("quickstart", "quickstart", folder, changes, about)]


def pacs(options: argparse.Namespace, about: Record) -> list[Job]:
    """ResNet18 from random weights on PACS at 128 pixels: each method on each target."""
    rates = ["optimizer.learning_rate=0.03", "optimizer.momentum=0.9"]  # configs/pacs.py: small
    sizes = ["data.image_size=128", f"rounds={options.rounds}", f"local_steps={options.steps}"]
    small = ["model=ResNet10:width=8", "data.image_size=32", "rounds=1", "local_steps=1"]
    small += ["local_selection=0", "batch_size=4"]
    changes = [*rates, "eval_every=5", *(small if options.small else sizes)]
    folders = {"path": options.pacs or Path(), "cache": options.out / "cache"}
    changes += [f"data.{name}={folder.resolve()}" for name, folder in folders.items()]
    absent = "" if options.pacs else "no --pacs FOLDER was given"
    jobs = []
    for target in TARGETS[:1] if options.small else TARGETS:
        for method in ("fedavg",) if options.small else ("fedavg", "fedbn", "fediga"):
            name, own = f"{method} on {target}", [f"method={method}", f"target={target}"]
            if method != "fediga":
                own.append("adaptations=running")
            folder = options.out / "pacs" / f"{method}_{target}"
            job = _training(name, "pacs", folder, [*changes, *own], about)
            jobs.append(job._replace(absent=absent))
    return jobs


def _training(name: str, config: str, folder: Path, changes: list[str], about: Record) -> Job:
    """A run of the program in a workdir, which continues where it was."""
    command = ["-m", "fedjax_bn.main", "--config", f"configs/{config}.py"]
    command += [f"--config.{change}" for change in changes]
    command += ["--workdir", str(folder.resolve())]
    return Job(name, command, lambda _: _run(folder), 400, tuple(_on(about).items()), resumes=True)


def _run(folder: Path) -> Record:
    """What summary.json says."""
    summary = json.loads((folder / "summary.json").read_text())
    keys = ("rounds", "selected_round", "seconds_per_round", "compile_seconds", "accuracy")
    record = {key: summary[key] for key in keys}
    unseen = [value for by in summary["accuracy"]["unseen"].values() for value in by.values()]
    clients = summary["accuracy"]["internal"]["mean"]
    shown = f"clients {clients:.1f} %, unseen {', '.join(f'{value:.1f} %' for value in unseen)}"
    return {**record, "shown": shown}


def digit_cnn(options: argparse.Namespace, about: Record) -> list[Job]:
    """DigitCNN with 5 and 50 clients."""
    return _timings("digit_cnn", options, about)


def resnet18(options: argparse.Namespace, about: Record) -> list[Job]:
    """ResNet18 on 224x224 pixels with 3 and 30 clients."""
    return _timings("resnet18", options, about)


def _timings(part: str, options: argparse.Namespace, about: Record) -> list[Job]:
    """Our cases; PyTorch's follow those of FedAvg in the same dtype."""
    ours, jobs = cases(part, options.small), []
    theirs = torch_cases(part, options.small)
    for i, case in enumerate(ours):
        jobs.append(_timing("jax_case", case, options, _on(about)))
        following = ours[i + 1 : i + 2]
        if case.method == "fedavg" and [one.method for one in following] != ["fedavg"]:
            same = [one for one in theirs if one.dtype == case.dtype]
            jobs += [
                _timing("torch_case", one, options, {})._replace(absent=_without_torch(about))
                for one in same
            ]
    return jobs


def _timing(
    module: str, case: Case | TorchCase, options: argparse.Namespace, where: dict[str, str]
) -> Job:
    repeated = 0.1 if options.small else TIMED_SECONDS
    command = ["-m", f"on_accelerator.{module}", json.dumps(list(case)), str(repeated)]
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}  # by default it takes three quarters
    variables = tuple((where | memory).items())
    seconds = SMALL_SECONDS if options.small else CASE_SECONDS[case.part]
    return Job(case.name, command, _last_line, seconds, variables)


def _last_line(output: str) -> Record:
    return json.loads(output.splitlines()[-1])


def _without_torch(about: Record) -> str:
    """Why PyTorch has no times here."""
    if about["torch"] is None:
        return "PyTorch is not installed"
    if about["platform"] != "cpu" and not about["torch"]["gpu"]:
        return f"PyTorch {about['torch']['version']} has no device of this kind"
    return ""


def _on(about: Record) -> dict[str, str]:
    """Insists on the backend: without it JAX reports that, and does not take the CPU."""
    where = {"JAX_PLATFORMS": ",".join(dict.fromkeys((about["platform"], "cpu")))}
    if about["sizes"]["small"]:
        where["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # nearly all of the time is compilation
    return where


class Part(NamedTuple):
    """Jobs, and how many seconds they have together."""

    jobs: Callable[[argparse.Namespace, Record], list[Job]]
    seconds: float


# Half an hour in all, none above eight minutes.
PARTS: dict[str, Any] = {
    "parity": Part(parity, 330),
    "quickstart": Part(quickstart, 180),
    "digit_cnn": Part(digit_cnn, 400),
    "resnet18": Part(resnet18, 440),
    "pacs": Part(pacs, 430),
}
