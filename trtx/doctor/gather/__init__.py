"""Gathers facts from NVML, /proc and package metadata. Any fact may be unavailable; this package judges none."""

from trtx.doctor.gather.gpus import gather_gpus
from trtx.doctor.gather.hosts import gather_hosts
from trtx.doctor.gather.nvml import open_gpus
from trtx.doctor.gather.software import gather_software
from trtx.doctor.gather.system import gather_system
from trtx.doctor.gather.topologies import gather_topologies

__all__ = ["gather_gpus", "gather_hosts", "gather_software", "gather_system", "gather_topologies", "open_gpus"]
