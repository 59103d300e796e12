"""The load of experts: what routers send, without padding, read by the host at most once a second."""

from __future__ import annotations

import torch

from trtx.checkpoint.experts import ExpertConfig
from trtx.torch_engine.runner.expert_load import ExpertLoad

CPU = torch.device("cpu")
PADDING = 7


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def new_load(clock: Clock, *, expert_ranks: int = 1) -> ExpertLoad:
    experts = ExpertConfig(count=4, per_token=2, intermediate_size=8, normalizes=True, sparse=(False, True, True))
    return ExpertLoad(experts, CPU, padding_slot=PADDING, expert_ranks=expert_ranks, clock=clock)


def read(load: ExpertLoad, clock: Clock) -> None:
    clock.seconds += 2.0
    update = load.read()
    assert update is not None
    update()


def test_the_imbalance_is_the_busiest_by_the_mean_of_each_layer() -> None:
    clock = Clock()
    load = new_load(clock, expert_ranks=2)
    load.begin(torch.tensor([0, 1, PADDING], dtype=torch.int32))
    load.layer(1).count(torch.tensor([[0, 1], [0, 1], [3, 2]]))  # 2, 2, 0, 0
    load.layer(2).count(torch.tensor([[0, 2], [1, 3], [3, 2]]))  # 1, 1, 1, 1
    read(load, clock)
    assert load.balance is not None
    assert load.balance.tokens == 8
    assert load.balance.busiest_expert == (2.0 + 1.0) / 2
    assert load.balance.busiest_rank == (2.0 + 1.0) / 2


def test_a_balance_covers_the_tokens_since_the_last_one_and_layers_that_had_some() -> None:
    clock = Clock()
    load = new_load(clock)
    load.begin(torch.tensor([0, 1], dtype=torch.int32))
    load.layer(1).count(torch.tensor([[0, 1], [0, 1]]))
    read(load, clock)
    load.select(torch.tensor([1]))
    load.layer(2).count(torch.tensor([[2, 3]]))
    read(load, clock)
    assert load.balance is not None
    assert (load.balance.tokens, load.balance.busiest_expert, load.balance.busiest_rank) == (6, 2.0, None)
    before = load.balance
    read(load, clock)
    assert load.balance is before  # no token came


def test_counters_may_wrap_around() -> None:
    clock = Clock()
    load = new_load(clock)
    tokens = load.layer(1).tokens
    tokens.fill_(2**31 - 1)
    read(load, clock)
    load.begin(torch.tensor([0], dtype=torch.int32))
    load.layer(1).count(torch.tensor([[0, 1]]))
    read(load, clock)
    assert load.balance is not None
    assert load.balance.tokens == 4 * (2**31 - 1) + 2


def test_the_host_reads_at_most_once_a_second() -> None:
    clock = Clock()
    load = new_load(clock)
    assert load.read() is None
    clock.seconds = 1.5
    assert load.read() is not None
    assert load.read() is None
