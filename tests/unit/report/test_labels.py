from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trtx.report.labels import Box, PlacedLabel, Point, label_box, place, point_box

POINTS = st.lists(
    st.builds(Point, st.floats(0, 0.95), st.floats(0, 0.95), st.sampled_from(["c1", "c64", "r2.5", "c1024"])),
    max_size=30,
)


def overlap(one: Box, other: Box) -> bool:
    return min(one[2], other[2]) > max(one[0], other[0]) and min(one[3], other[3]) > max(one[1], other[1])


@given(POINTS)
def test_no_label_lies_on_another_or_on_a_point(points: list[Point]) -> None:
    placed = place(points)
    boxes = [label_box(point, at.side) for point, at in zip(points, placed, strict=True) if at.text]
    assert not any(overlap(*pair) for pair in combinations(boxes, 2))
    assert not any(overlap(box, point_box(point)) for box in boxes for point in points)


@given(POINTS)
def test_no_label_is_cut_by_an_edge(points: list[Point]) -> None:
    for point, at in zip(points, place(points), strict=True):
        left, top, right, bottom = label_box(point, at.side)
        assert not at.text or (left >= 0 and top >= 0 and right <= 270 and bottom <= 200)


def test_a_lone_label_lies_up_and_right_where_nothing_of_its_front_is() -> None:
    assert place([Point(0.5, 0.5, "c8")]) == [PlacedLabel("c8", "top right")]


def test_labels_point_away_from_the_edge_next_to_them() -> None:
    assert place([Point(0.99, 0.5, "c1024")])[0].side.endswith("left")
    assert place([Point(0.0, 0.99, "c1024")])[0].side == "bottom right"


def test_a_label_without_room_is_left_out_and_the_others_stay() -> None:
    heap = [Point(0.5, 0.5, "c8") for _ in range(9)]
    texts = [at.text for at in place(heap)]
    assert texts[0] == "c8" and "" in texts


def test_a_label_is_clear_of_a_line_where_a_side_is() -> None:
    rising = [[(0.5, 0.5), (0.9, 0.9)]]
    (placed,) = place([Point(0.5, 0.5, "c8")], rising)
    assert placed.side == "bottom left"
    everywhere = [[(0.0, y / 50), (1.0, y / 50)] for y in range(51)]
    assert place([Point(0.5, 0.5, "c8")], everywhere) == [PlacedLabel("c8", "top right")]
