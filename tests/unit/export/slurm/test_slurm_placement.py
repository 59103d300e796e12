"""Where workers go on the nodes of a job: a pure function, so what always holds is asked of any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.errors import UsageError
from trtx.export.slurm.placement import Place, place_on_nodes


def nodes_of(places: list[Place]) -> list[tuple[int, ...]]:
    return [place.nodes for place in places]


def test_pairs_stay_on_one_node_and_nodes_are_filled_alike() -> None:
    count, places = place_on_nodes([1, 1, 1, 1], gpus_per_node=4, nodes=None)
    assert (count, nodes_of(places)) == (1, [(0,)] * 4)
    count, places = place_on_nodes([1, 1, 1, 1], gpus_per_node=4, nodes=2)
    assert (count, nodes_of(places)) == (2, [(0,), (0,), (1,), (1,)])
    _, places = place_on_nodes([2, 4, 2, 4], gpus_per_node=8, nodes=None)
    assert nodes_of(places) == [(0,), (0,), (1,), (1,)]


def test_without_gpus_workers_are_spread_over_as_many_nodes_as_are_asked_for() -> None:
    assert nodes_of(place_on_nodes([0, 0, 0], gpus_per_node=0, nodes=None)[1]) == [(0,)] * 3
    assert nodes_of(place_on_nodes([0, 0, 0], gpus_per_node=0, nodes=2)[1]) == [(0,), (0,), (1,)]


def test_an_engine_larger_than_a_node_has_its_nodes_to_itself() -> None:
    count, places = place_on_nodes([2, 8, 2], gpus_per_node=4, nodes=None)
    assert count == 3
    assert places == [Place((2,), (0, 1)), Place((0, 1), (0, 1, 2, 3)), Place((2,), (2, 3))]


@pytest.mark.parametrize(
    ("sizes", "nodes", "told"),
    [([1] * 9, 2, "at least 3, and --nodes is 2"), ([1, 1], 3, "more than 2 nodes"), ([8], 1, "at least 2")],
)
def test_what_does_not_fit_is_refused(sizes: list[int], nodes: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        place_on_nodes(sizes, gpus_per_node=4, nodes=nodes)


@given(st.data())
def test_no_gpu_is_given_twice_no_node_is_idle_and_as_few_as_fit_are_taken(data: st.DataObject) -> None:
    gpus = data.draw(st.integers(0, 8), label="gpus_per_node")
    size = st.just(0) if gpus == 0 else st.integers(1, gpus) | st.integers(2, 3).map(lambda nodes: nodes * gpus)
    sizes = data.draw(st.lists(size, min_size=1, max_size=12), label="sizes")
    fewest, _ = place_on_nodes(sizes, gpus_per_node=gpus, nodes=None)
    spans = [one // gpus if gpus and one > gpus else 1 for one in sizes]
    asked = data.draw(st.none() | st.integers(fewest, sum(spans)), label="nodes")
    count, places = place_on_nodes(sizes, gpus_per_node=gpus, nodes=asked)
    assert count == (asked or fewest)
    taken = [(node, gpu) for place in places for node in place.nodes for gpu in place.gpus]
    assert len(taken) == len(set(taken)) == sum(sizes)
    assert {node for place in places for node in place.nodes} == set(range(count))
    assert all(0 <= gpu < gpus for _, gpu in taken)
    assert [len(place.nodes) * len(place.gpus) for place in places] == sizes
    if gpus:
        assert count >= -(-sum(sizes) // gpus)
