"""The benchmark: this project against CNI's portmap, interleaved in one run.

    ./build.sh bench [--quick] [--parts calls,burst,...]

Every figure is a ratio of medians measured side by side on one machine; nothing here is a
test, and no absolute time is a promise. Budgets are the project's own (RESULTS.md).
"""
