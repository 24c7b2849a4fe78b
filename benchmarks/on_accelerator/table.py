"""The records as Markdown."""

from on_accelerator.jobs import Record
from on_accelerator.peaks import Peak, peak_of

_HEAD = (
    "case",
    "samples/s",
    "round s [least, most]",
    "Tflop/s",
    "of bfloat16 peak",
    "of float32 peak",
    "compile s",
    "peak MB",
    "PyTorch / ours",
)


def markdown(records: Record) -> str:
    """All parts that were begun; an outcome without numbers has its reason."""
    about = records["about"]
    peak = peak_of(about["kind"])
    versions = about["versions"] | {"torch": (about["torch"] or {}).get("version", "none")}
    lines = [
        f"# {about['kind']} ({about['platform']})",
        "",
        "; ".join(f"{name} {value}" for name, value in versions.items()),
        "",
        _peaks(peak),
    ]
    for part, done in records["parts"].items():
        lines += ["", f"## {part}", ""]
        timed = part in ("digit_cnn", "resnet18")
        lines += _times(done, peak) if timed else _outcomes(done)
    return "\n".join(lines) + "\n"


def _peaks(peak: Peak) -> str:
    known = [f"{value:g} Tflop/s in {dtype}" for dtype, value in peak._asdict().items() if value]
    if not known:
        return "The peak of this device is unknown (on_accelerator/peaks.py): no fractions of it."
    source = "on_accelerator/peaks.py says whence; float32 is TF32 where there is one"
    return f"Peak: {', '.join(known)} ({source})."


def _outcomes(done: Record) -> list[str]:
    rows = [
        (name, _outcome(record), f"{record.get('seconds', 0):.0f}") for name, record in done.items()
    ]
    return _rows(("job", "outcome", "seconds"), rows)


def _outcome(record: Record) -> str:
    if record["outcome"] == "done":
        return record.get("shown", "done")
    return f"{record['outcome']}: {record['why']}".replace("|", "/")


def _times(done: Record, peak: Peak) -> list[str]:
    return _rows(_HEAD, [_row(name, record, done, peak) for name, record in done.items()])


def _row(name: str, record: Record, done: Record, peak: Peak) -> tuple[str, ...]:
    if record["outcome"] != "done":
        return (name, _outcome(record), *[""] * (len(_HEAD) - 2))
    least, median, most = (record[f"{kind}_seconds"] for kind in ("least", "round", "most"))
    rate = record.get("teraflops")
    memory = record.get("peak_megabytes") or record.get("planned_megabytes")
    best = f" ({record['best']})" if "best" in record else ""
    return (
        name + best,
        f"{record['samples_per_second']:,.0f}",
        f"{median:.4f} [{least:.4f}, {most:.4f}]",
        _number(rate, ".1f"),
        _number(_share(rate, peak.bfloat16), ".1%"),
        _number(_share(rate, peak.float32), ".1%"),
        _number(record.get("compile_seconds"), ".1f"),
        _number(memory, ",.0f"),
        _number(ratio(name, done), ".2f"),
    )


def ratio(name: str, done: Record) -> float | None:
    """PyTorch's best median over ours, for methods whose work is FedAvg's; None without both."""
    count, method, _, dtype = (*name.split(), "")[:4]
    theirs = done.get(f"{count} PyTorch {dtype}", {})
    if method not in ("fedavg", "fedbn") or theirs.get("outcome") != "done":
        return None
    return theirs["round_seconds"] / done[name]["round_seconds"]


def _share(rate: float | None, peak: float | None) -> float | None:
    return rate / peak if rate and peak else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    marks = ("---", *["---:"] * (len(head) - 1))
    return [f"| {' | '.join(row)} |" for row in (head, marks, *rows)]
