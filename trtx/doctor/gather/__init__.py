"""Asks NVML, /proc and the package metadata. Every question may go unanswered; none of them is judged here."""

from trtx.doctor.gather.gpus import gather_gpus
from trtx.doctor.gather.hosts import gather_hosts
from trtx.doctor.gather.nvml import open_gpus
from trtx.doctor.gather.software import gather_software
from trtx.doctor.gather.system import gather_system
from trtx.doctor.gather.topologies import gather_topologies

__all__ = ["gather_gpus", "gather_hosts", "gather_software", "gather_system", "gather_topologies", "open_gpus"]
