"""Megatron-core: ``session.protect(training=Megatron(chunks, optimizer, scheduler))``. Needs the extra ``megatron``."""

from instep_state_replica.megatron.adapter import Megatron

__all__ = ["Megatron"]
