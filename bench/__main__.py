"""``python -m bench``: measure, judge, and leave table, JSON and plot in build/bench/."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from bench import budgets, parts, plot, plugins, report

OUT = plugins.ROOT / "build/bench"


def main():
    parser = argparse.ArgumentParser(prog="./build.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few turns, at most 1,000 others")
    parser.add_argument("--parts", default=",".join(parts.PARTS), help="%(default)s")
    default = ",".join(p.name for p in plugins.ALL)
    parser.add_argument("--plugins", default=default, help="%(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.exit(2, "the bench makes network namespaces: run it as root\n")
    wanted = arguments.plugins.split(",")
    chosen = [p for p in plugins.ALL if p.name in wanted]
    absent = [reason for p in chosen if (reason := plugins.missing(p))]
    chosen = [p for p in chosen if not plugins.missing(p)]
    for reason in absent:
        _say(f"not measured: {reason}")
    about = report.machine()
    bench = parts.Bench(chosen, arguments.quick, _say)
    begin = time.monotonic()
    for name in arguments.parts.split(","):
        _say(f"{name} ({time.monotonic() - begin:.0f} s)")
        parts.PARTS[name](bench)
    rows = budgets.judge(bench.figures)
    about["took"] = f"{(time.monotonic() - begin) / 60:.0f} min" + (
        " (--quick)" if arguments.quick else ""
    )
    _leave(arguments.out, bench, rows, chosen, absent, about)
    return 0


def _leave(folder, bench, rows, chosen, absent, about):
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "about": about,
        "figures": bench.figures,
        "budgets": [{**vars(row), "holds": row.holds} for row in rows],
    }
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    text = report.text(bench.figures, rows, chosen, absent, about)
    (folder / "RESULTS.md").write_text(text)
    drawing = plot.svg(bench.figures, chosen)
    if drawing:
        (folder / "cost.svg").write_text(drawing)
    print(text)
    _say(f"{folder}: RESULTS.md, results.json, cost.svg")


def _say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
