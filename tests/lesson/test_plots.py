"""Pictures show what they were given, and are shown once."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex

from ddp_helpers.lesson.plots import (
    gradients_plot,
    job_plot,
    message_diagram,
    placement_plot,
    sampler_plot,
    timeline_plot,
)

PLACES = [
    {"rank": rank, "local_rank": rank % 2, "host": f"node-{rank // 2}", "launcher": "torchrun"}
    for rank in range(4)
]


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def row_names(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_every_message_is_an_arrow_from_sender_to_receiver():
    axes = message_diagram([(0, 1, "42"), (2, 0, "done")], world_size=4).axes[0]
    arrows = [text for text in axes.texts if not text.get_text()]
    assert [(arrow.xyann[0], arrow.xy[0]) for arrow in arrows] == [(0, 1), (2, 0)]
    assert [arrow.xy[1] for arrow in arrows] == [1, 2]  # time goes down
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert words(axes.figure) == ["42", "done"]
    assert len(axes.get_xticklabels()) == 4


def test_every_rank_has_a_row_in_each_epoch_with_its_samples_in_order():
    figure = sampler_plot([[[0, 2], [1, 0]], [[2, 1], [0, 2]]])
    assert row_names(figure) == [
        f"epoch {epoch}, rank {rank}" for epoch in range(2) for rank in range(2)
    ]
    assert words(figure) == ["0", "2", "1", "0", "2", "1", "0", "2"]


def test_a_sample_that_is_read_twice_in_an_epoch_has_a_thick_frame():
    boxes = sampler_plot([[[0, 2], [1, 0]]]).axes[0].patches
    assert [box.get_linewidth() > 2 for box in boxes] == [False, False, False, True]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_gradients_are_bars_and_their_average_a_line(kind):
    axes = gradients_plot([kind([1.0, 2.0]), kind([3.0, -2.0])], kind([2.0, 0.0])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 2.0, 3.0, -2.0]
    lines = [segments.get_segments()[0][0][1] for segments in axes.collections]
    assert lines == [2.0, 0.0]


def test_every_rank_is_placed_on_its_host_at_its_local_rank():
    figure = placement_plot(PLACES)
    assert row_names(figure) == ["torchrun\nnode-0", "torchrun\nnode-1"]
    assert words(figure) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    places = [text.get_position() for text in figure.axes[0].texts]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_rank_has_a_row_with_a_bar_for_each_of_its_spans():
    figure = timeline_plot([(3, 0.5, 2.5, "waits"), (1, 0.0, 0.5, "works"), (1, 0.5, 0.6, "left")])
    assert row_names(figure) == ["rank 1", "rank 3"]
    bars = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in figure.axes[0].patches]
    assert bars == [(0.5, 2.0, 0.64), (0.0, 0.5, -0.36), (0.5, pytest.approx(0.1), -0.36)]
    assert words(figure) == ["waits", "works", "left"]
    assert figure.axes[0].get_ylim() == (1.5, -0.5)  # the first rank on top


def test_a_job_is_one_command_its_ranks_and_the_file_of_each():
    results = [{**place, "world_size": 4, "loss": place["rank"] / 2} for place in PLACES]
    written = words(job_plot("torchrun train.py", results, "loss"))
    assert written[0] == "torchrun train.py"
    assert [text for text in written if text.startswith("rank")] == [
        text
        for rank in range(4)
        for text in (
            f"rank {rank}\nlocal_rank {rank % 2}, world_size 4",
            f"rank_{rank}.json\nloss: {rank / 2}",
        )
    ]
    assert "4 processes, one script" in written


def test_ranks_are_told_apart_by_colour_and_by_hatching():
    boxes = placement_plot(PLACES).axes[0].patches
    assert len({to_hex(box.get_facecolor()) for box in boxes}) == 4
    assert len({box.get_hatch() for box in boxes}) == 4


@pytest.mark.parametrize(
    "draw",
    [
        lambda: message_diagram([]),
        lambda: message_diagram([(0, 1, "")]),
        lambda: sampler_plot([]),
        lambda: sampler_plot([[[0]]]),
        lambda: gradients_plot([[1.0]], [1.0]),
        lambda: placement_plot(PLACES[:1]),
        lambda: job_plot("python", [{"rank": 0, "local_rank": 0, "world_size": 1, "x": 1}], "x"),
        lambda: timeline_plot([]),
        lambda: timeline_plot([(0, 0.0, 1.0, "")]),
    ],
)
def test_the_smallest_pictures_are_drawn_and_no_figure_is_left_open(draw, tmp_path):
    draw().savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert plt.get_fignums() == []
