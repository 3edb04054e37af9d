"""NCCL process groups without a store and without a single root: computed unique ids, one mini root a rank."""

from instep_init_nccl.plugin import InitNccl

__all__ = ["InitNccl"]
