"""Pictures of what really ran: who sent to whom, who got which samples, gradients, waiting.

    message_diagram([(0, 1, "42"), (0, 2, "42")])       # sender, receiver, label
    sampler_plot([[[0, 2], [1, 3]], [[3, 0], [2, 1]]])  # epochs -> ranks -> samples
    gradients_plot(engines.pull("before"), engines.pull("after")[0])
    placement_plot(read_results("results"))
    job_plot("torchrun train.py", read_results("results"), "loss")
    timeline_plot([(0, 0.0, 0.4, "batch 1"), (1, 0.0, 2.4, "batch 1")])

Each returns its figure, closed, so that a notebook shows it once: as the last line of a cell.
Every rank has the same colour and hatching in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Okabe and Ito's colours: people who see red and green alike can tell them apart. The hatching
# does the same in print.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_BEHIND = {"boxstyle": "round,pad=0.12", "facecolor": "white", "linewidth": 0, "alpha": 0.85}
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "oo")


def message_diagram(
    messages: Sequence[tuple[int, int, Any]], world_size: int | None = None
) -> Figure:
    """Draw an arrow for each (sender, receiver, label), the first message on top.

    Each rank is a vertical line, and time goes down. world_size: also draw ranks that took no part.
    """
    ranks = [rank for sender, receiver, _ in messages for rank in (sender, receiver)]
    count = world_size or max(ranks, default=0) + 1
    height = 1.2 + 0.55 * len(messages)
    figure, axes = plt.subplots(figsize=(1.8 * max(count, 2) + 1, height), layout="constrained")
    for rank in range(count):
        axes.axvline(rank, color=_colour(rank), linewidth=3, zorder=1)
    for step, (sender, receiver, label) in enumerate(messages, start=1):
        axes.annotate(
            "",
            xy=(receiver, step),
            xytext=(sender, step),
            arrowprops={"arrowstyle": "-|>", "linewidth": 1.6, "color": "black"},
            zorder=3,
        )
        place = ((sender + receiver) / 2, step - 0.14)
        axes.text(*place, str(label), ha="center", va="bottom", bbox=_BEHIND, zorder=2)
    axes.set_xticks(range(count), [f"rank {rank}" for rank in range(count)])
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.5, count - 0.5), ylim=(len(messages) + 0.6, 0.2))
    steps = range(1, len(messages) + 1)
    axes.set_yticks(steps, [f"message {step}" for step in steps])
    return _finished(figure, axes)


def sampler_plot(epochs: Sequence[Sequence[Sequence[int]]]) -> Figure:
    """Draw which samples each rank reads: one row per rank in each epoch, in the order of reading.

    epochs[e][r] lists the indices that rank r reads in epoch e. A sample that occurs twice in
    an epoch, as padding does, has a thick frame where it occurs again.
    """
    rows = [(e, r, samples) for e, ranks in enumerate(epochs) for r, samples in enumerate(ranks)]
    longest = max((len(samples) for _, _, samples in rows), default=1)
    size = (min(max(2 + 0.55 * longest, 5), 14), 0.8 + 0.42 * len(rows) + 0.15 * len(epochs))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    seen: set[tuple[int, int]] = set()
    ticks = []
    for row, (epoch, rank, samples) in enumerate(rows):
        y = row + 0.4 * epoch  # a gap between epochs
        ticks.append((y, f"epoch {epoch}, rank {rank}"))
        for step, sample in enumerate(samples):
            again = (epoch, sample) in seen
            seen.add((epoch, sample))
            _box(axes, step, y, rank, str(sample), frame=3.0 if again else 0.8)
    axes.set(xlim=(-0.6, longest - 0.4), ylim=(rows and ticks[-1][0] + 0.6 or 1, -0.6))
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axes.set_xticks(range(longest))
    axes.set_xlabel("step (in the box: the sample's index)")
    return _finished(figure, axes)


def gradients_plot(before: Sequence[Sequence[float]], after: Sequence[float]) -> Figure:
    """Draw each rank's own gradient, and the average that all ranks have after all-reduce.

    before[r] holds rank r's values, one for each parameter; after holds the averages.
    """
    before = [_numbers(one) for one in before]
    after = _numbers(after)
    width = 0.8 / len(before)
    size = (min(3.6 + 1.1 * len(after), 14), 3.4)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for rank, values in enumerate(before):
        places = [i - 0.4 + width * (rank + 0.5) for i in range(len(values))]
        axes.bar(places, values, width, label=f"rank {rank}", **_style(rank))
    for i, value in enumerate(after):
        label = "average:\nafter all-reduce,\non every rank" if i == 0 else None
        axes.hlines(value, i - 0.45, i + 0.45, color="black", linewidth=2.5, label=label)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(after)))
    axes.set(xlabel="parameter", ylabel="gradient")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("average"))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside right upper",
        frameon=False,
    )
    return _finished(figure, axes)


def placement_plot(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw on which host each rank ran, and its local rank there, for each launcher in results.

    results: dicts with rank, local_rank, host and, where several launchers are compared, launcher.
    """
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        rows.setdefault((str(result.get("launcher", "")), result["host"]), []).append(result)
    widest = max((one["local_rank"] for one in results), default=0) + 1
    size = (3.2 + 1.5 * widest, 0.9 + 0.75 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for y, ranks in enumerate(rows.values()):
        for one in ranks:
            _box(axes, one["local_rank"], y, one["rank"], f"rank {one['rank']}", 0.8, width=0.9)
    names = ["\n".join(filter(None, name)) for name in rows]
    axes.set(xlim=(-0.6, widest - 0.4), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), names)
    axes.set_xticks(range(widest))
    axes.set_xlabel("local rank")
    return _finished(figure, axes)


def job_plot(command: str, results: Sequence[Mapping[str, Any]], field: str) -> Figure:
    """Draw a whole job: one command, a process for each rank, and the file each leaves behind.

    results: what read_results returned; field: which of a result's values is written to its file.
    """
    size = (9, 1.0 + 0.85 * len(results))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    text = {"ha": "center", "va": "center"}
    paper = {"boxstyle": "round,pad=0.5", "facecolor": "white"}
    middle = (len(results) - 1) / 2
    start = axes.text(0, middle, command, family="monospace", bbox=paper, **text)
    for y, one in enumerate(results):
        rank = one["rank"]
        axes.add_patch(Rectangle((1, y - 0.36), 1, 0.72, **_style(rank)))
        numbers = f"local_rank {one['local_rank']}, world_size {one['world_size']}"
        axes.text(1.5, y, f"rank {rank}\n{numbers}", bbox=_BEHIND, **text)
        end = axes.text(2.95, y, f"rank_{rank}.json\n{field}: {one[field]}", bbox=paper, **text)
        arrow = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
        into = {**arrow, "patchA": start.get_bbox_patch()}
        out = {**arrow, "patchB": end.get_bbox_patch()}
        axes.annotate("", (1, y), (0, middle), arrowprops=into)
        axes.annotate("", (2.95, y), (2, y), arrowprops=out)
    heads = {0: "one command", 0.7: "variables", 1.5: f"{len(results)} processes, one script"}
    for x, head in {**heads, 2.31: "results", 2.95: "one file each"}.items():
        axes.text(x, -0.75, head, weight="bold", **text)
    axes.set(xlim=(-0.45, 3.35), ylim=(len(results) - 0.4, -1), xticks=[], yticks=[])
    return _finished(figure, axes)


def timeline_plot(spans: Sequence[tuple[int, float, float, str]]) -> Figure:
    """Draw when each rank was where: a row per rank, a bar per (rank, begin_s, end_s, label)."""
    ranks = sorted({rank for rank, *_ in spans})
    figure, axes = plt.subplots(figsize=(9, 1.0 + 0.6 * len(ranks)), layout="constrained")
    for rank, begin_s, end_s, label in spans:
        y = ranks.index(rank)
        axes.add_patch(Rectangle((begin_s, y - 0.36), end_s - begin_s, 0.72, **_style(rank)))
        middle = (begin_s + end_s) / 2
        axes.text(middle, y, label, ha="center", va="center", bbox=_BEHIND)
    last_s = max((end_s for _, _, end_s, _ in spans), default=1)
    axes.set(xlim=(0, 1.02 * last_s), ylim=(max(len(ranks), 1) - 0.5, -0.5), xlabel="seconds")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    return _finished(figure, axes)


def _box(
    axes: Any, x: float, y: float, rank: int, text: str, frame: float, width: float = 0.86
) -> None:
    corner = (x - width / 2, y - 0.4)
    axes.add_patch(Rectangle(corner, width, 0.8, linewidth=frame, zorder=1 + frame, **_style(rank)))
    axes.text(x, y, text, ha="center", va="center", bbox=_BEHIND, zorder=6)


def _style(rank: int) -> dict[str, Any]:
    hatch = _HATCHES[rank % len(_HATCHES)]
    return {"facecolor": _colour(rank), "edgecolor": "black", "hatch": hatch}


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _numbers(values: Any) -> list[float]:
    return values.flatten().tolist() if hasattr(values, "flatten") else list(values)


def _finished(figure: Figure, axes: Any) -> Figure:
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    plt.close(figure)  # else matplotlib shows it a second time at the end of the cell
    return figure
