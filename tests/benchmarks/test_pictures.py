"""Pictures that a reader understands: labels, lines, titles, legends, roofs."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from stretto.benchmarks.pages import drawing, plan_picture, plots

KERNELS = ("all_gather_matmul", "all_reduce")


@pytest.fixture(scope="module")
def drawn(make_results):
    """Every picture of the results of two kernels, by name, laid out."""
    figures = plots.draw(make_results(kernels=KERNELS))
    for figure in figures.values():
        figure.draw_without_rendering()
    return figures


@pytest.fixture(scope="module")
def narrow(make_results):
    """The roofline of a CPU, whose intensities span one decade."""
    figure = plots.draw(make_results(kernels=KERNELS[:1], speed=False))["roofline"]
    figure.axes[0].set_xlim(18, 400)
    figure.draw_without_rendering()
    return {"narrow": figure}


def test_no_two_labels_of_an_axis_overlap(drawn, narrow):
    for name, figure in (drawn | narrow).items():
        (axes,) = figure.axes
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            places = [*axis.get_ticklocs(), *axis.get_ticklocs(minor=True)]
            texts = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
            ticks = sorted(zip(places, texts, strict=True), key=lambda tick: tick[0])
            shown = [text for at, text in ticks if low <= at <= high and text.get_text()]
            if any(text.get_rotation() for text in shown):
                continue  # Boxes of slanted labels overlap where the labels do not.
            boxes = [text.get_window_extent() for text in shown]
            for one, other in itertools.pairwise(boxes):
                assert not one.overlaps(other), (name, axis.axis_name)


def test_rows_of_many_shapes_have_room():
    def draw(figure):
        axes = drawing.rows(figure, [f"{n}x8192x28672" for n in range(30)])
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.get_yticklabels()]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))

    plots.figure(draw)


def test_no_line_joins_unlike_shapes(drawn):
    for name in ("rate-all_gather_matmul", "share-all_gather_matmul", "share-of-floor"):
        (axes,) = drawn[name].axes
        several = [line for line in axes.lines if len(line.get_xdata()) > 2]
        assert several and {line.get_linestyle() for line in several} == {"None"}, name


def test_titles_have_card_devices_and_type(drawn):
    for name, figure in drawn.items():
        (axes,) = figure.axes
        title = axes.get_title(loc="left")
        assert "4 x NVIDIA H100 80GB HBM3, bfloat16" in title, name


def test_legends_are_whole(drawn):
    for name, figure in drawn.items():
        (axes,) = figure.axes
        box = axes.get_legend().get_window_extent()
        assert box.y0 >= 0 and box.x1 <= figure.bbox.x1, name


def test_a_title_counts_devices_as_a_sentence_does(make_results):
    (case, *_) = make_results(kernels=KERNELS[:1]).measurements
    cases = [msgspec.structs.replace(case, devices=devices) for devices in (4, 1, 2)]
    assert drawing.title("Scaling", "H200", cases).startswith("Scaling: 1, 2 and 4 x H200, ")
    assert drawing.title("Scaling", "H200", cases[:1]).startswith("Scaling: 4 x H200, ")


def test_auto_is_seen_around_what_served_it():
    assert drawing.mark("auto")["markerfacecolor"] == "none"
    assert drawing.mark("fused")["marker"] != drawing.mark("xla")["marker"]


def test_every_peer_has_a_look_of_its_own():
    looks = [(drawing.COLOURS[peer], *drawing.mark(peer).values()) for peer in drawing.COLOURS]
    assert len(set(looks)) == len(looks)
    colours = [colour for peer, colour in drawing.COLOURS.items()]
    assert len(set(colours)) == len(colours) and drawing.COLOURS.keys() == drawing.MARKERS.keys()


# Machado, Oliveira and Fernandes (2009), of linear RGB, at full severity.
BLINDNESS = {
    "none": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}


def as_seen(colour: str, blindness: str) -> np.ndarray:
    """The colour in CIE L*a*b*, in which equal distances look about equally far."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ linear
    xyz = xyz / [0.9505, 1.0, 1.0888]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize(
    "palette", [[*drawing.COLOURS.values(), drawing.FLOOR], plan_picture._SHADES]
)
def test_the_colour_blind_tell_colours_apart(palette, blindness):
    """15 is about six times the smallest difference that is seen."""
    for one, other in itertools.combinations(palette, 2):
        distance = np.linalg.norm(as_seen(one, blindness) - as_seen(other, blindness))
        assert distance > 15, (one, other)


def roof_and_points(results):
    """Intensity and height of the roof's ends and knee; the points below it."""
    (axes,) = plots.draw(results)["roofline"].axes
    ends = list(zip(*axes.lines[0].get_data(), strict=True))
    return ends, [point for points in axes.collections for point in points.get_offsets()]


def test_no_point_is_above_the_roof(make_results):
    """Also on a CPU, which has no link: its roof is the highest rate of the run."""
    for speed in (True, False):
        found = make_results(kernels=KERNELS, speed=speed)
        ((left, low), (knee, peak), _), points = roof_and_points(found)
        for x, y in points:
            assert y <= 1.001 * min(peak, peak * x / knee), (speed, x, y)
        assert math.isclose(low / left, peak / knee)


def test_the_roof_is_the_highest_rate_also_if_it_is_our_kernel_s(make_results):
    """Half the time: it is faster than every matmul that was timed."""
    (_, (knee, peak), _), points = roof_and_points(make_results(kernels=KERNELS, slower=0.5))
    level = [y for x, y in points if x >= knee]
    assert level and max(level) <= 1.001 * peak


def test_scaling_shows_all_of_its_points(drawn):
    (axes,) = drawn["scaling-all_gather_matmul"].axes
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    for line in axes.lines[:-1]:
        assert all(low <= y < high for y in line.get_ydata())
        assert all(left < x < right for x in line.get_xdata())
