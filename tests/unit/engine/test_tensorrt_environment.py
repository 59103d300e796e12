"""A start on one node sees no other job's MPI, and shares no name with another engine."""

from __future__ import annotations

from trtx.engine.tensorrt_llm.environment import prepare
from trtx.launch.environment import child_environment

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "PMIX_RANK": "0",
    "PMI_FD": "3",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_ess_base_jobid": "1",
    "ORTE_DAEMON": "1",
    "PRTE_MCA_plm": "slurm",
}
SITE = {"OMPI_MCA_coll_ucc_enable": "0", "OMPI_MCA_btl": "tcp,self", "OPAL_PREFIX": "/opt/hpcx", "PATH": "/bin"}


def test_traces_of_a_job_are_cleared_and_settings_of_a_site_stay() -> None:
    environment = JOB | SITE
    assert prepare(environment) == sorted(JOB)
    assert SITE.items() <= environment.items()
    assert not JOB.keys() & environment.keys()


def test_the_launcher_hands_on_none_of_it_either() -> None:
    assert child_environment(JOB | SITE, {"DYN_NAMESPACE": "mine"}) == SITE | {"DYN_NAMESPACE": "mine"}


def test_what_the_caller_has_set_wins_over_the_recipes() -> None:
    environment = {"TRTLLM_ENABLE_PDL": "0", "TLLM_LOG_LEVEL": "WARNING"}
    prepare(environment)
    assert (environment["TRTLLM_ENABLE_PDL"], environment["TLLM_LOG_LEVEL"]) == ("0", "WARNING")
    assert environment["TRTLLM_WORKER_DISABLE_GC"] == "1"


def test_two_engines_share_no_memory_by_name() -> None:
    names = []
    for _ in range(2):
        environment = {"TRTLLM_EPLB_SHM_NAME": "inherited"}
        prepare(environment)
        names.append(environment["TRTLLM_EPLB_SHM_NAME"])
    assert len({*names, "inherited"}) == 3


def test_ranks_that_a_launcher_started_keep_the_name_that_all_of_them_have() -> None:
    environment = {"TLLM_SPAWN_PROXY_PROCESS": "1", "TRTLLM_EPLB_SHM_NAME": "of-the-job"}
    prepare(environment)
    assert environment["TRTLLM_EPLB_SHM_NAME"] == "of-the-job"
