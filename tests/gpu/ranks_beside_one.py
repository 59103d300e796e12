"""``python ranks_beside_one.py MODEL EXPERT_RANKS READS_PEERS DRAFTS [DEVICE]``: two ranks give the tokens of one.

DRAFTS is ``KIND=MODEL``, or "-" for none: the draft model with which the first rank drafts. Prints a line with the time
after each stage.
"""

from __future__ import annotations

import sys

from engine_player import accepted, assert_equal, served, workload
from rank_script import end, stage

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import create_ranked_runner
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, create_runner

MOST = 3


def main(model: str, expert_ranks: int, *, reads_peers: bool, drafts: str, device: str) -> None:
    kind, _, draft_model = drafts.partition("=")
    # Small limits, so that few CUDA graph buckets are captured.
    args = RunnerArgs(
        model_dir=resolve_checkpoint(model).path, device=device, dtype="float32", tokens_per_block=8, num_blocks=11,
        max_batch_size=5, max_num_tokens=64, reads_peers=reads_peers, moe_expert_parallel_size=expert_ranks,
        max_draft_len=MOST if draft_model else 0, draft=DraftArgs(kind, draft_model) if draft_model else None,
    )  # fmt: skip
    workloads = [workload(seed) for seed in range(2)]
    one = create_runner(args)
    stage("one created")
    expected = [served(one, wishes, overlap=True)[0] for wishes in workloads]
    one.close()
    stage("one served")
    two = create_ranked_runner(args, start_ranks(2, end))
    stage("two created")
    speculation = None
    if draft_model:
        config = SpeculativeConfig(decoding_type=kind, max_draft_len=MOST, draft_len_schedule={5: MOST})
        speculation = create_speculation(config, two, max_num_tokens=64)
    for wishes, answers in zip(workloads, expected, strict=True):
        assert_equal(served(two, wishes, overlap=True, speculation=speculation)[0], answers, wishes)
        stage("two gave the same tokens")
    assert speculation is None or accepted(speculation)
    assert device == "cpu" or two.graph_misses is not None
    two.close()
    stage("two closed")


if __name__ == "__main__":
    on = (sys.argv[5:] or ["auto"])[0]
    main(sys.argv[1], int(sys.argv[2]), reads_peers=sys.argv[3] == "1", drafts=sys.argv[4], device=on)
